// What a model says, as Markdown: parsed, sanitized, then put into the page as elements.
//
// Everything is data: HTML in an answer is shown as text, pictures are links (a page that loads what a
// model names tells somebody who reads it), and the sanitizer has the last word.

import { Marked } from "./vendor/marked.js";
import DOMPurify from "./vendor/purify.js";
import hljs from "./vendor/highlight.js";
import { copyButton, escaped } from "./dom.js";
import { MATH_ATTRIBUTES, MATH_TAGS, math } from "./math.js";

const TAGS = "p br hr em strong del code pre blockquote ul ol li h1 h2 h3 h4 h5 h6 a table thead tbody tr th td input".split(" ");
const ALLOWED = {
  ALLOWED_TAGS: [...TAGS, ...MATH_TAGS],
  ALLOWED_ATTR: [
    ..."href start align class type checked disabled".split(" "),
    ...MATH_ATTRIBUTES,
  ],
  RETURN_DOM_FRAGMENT: true,
};

const marked = new Marked({
  gfm: true,
  breaks: true,
  extensions: math,
  renderer: {
    html: ({ text }) => escaped(text),
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
  },
});

function fragment(text) {
  const made = DOMPurify.sanitize(marked.parse(text), ALLOWED);
  for (const link of made.querySelectorAll("a")) {
    if (!/^(https?|mailto):/i.test(link.getAttribute("href"))) link.removeAttribute("href");
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const table of made.querySelectorAll("table")) {
    const frame = document.createElement("div");
    frame.className = "table";
    table.replaceWith(frame);
    frame.append(table);
  }
  return made;
}

function colour(block) {
  const code = block.querySelector("code");
  const language = [...(code?.classList ?? [])].find((name) => name.startsWith("language-"))?.slice(9);
  if (!code || !language || !hljs.getLanguage(language) || code.textContent.length > 50_000) return;
  const { value } = hljs.highlight(code.textContent, { language, ignoreIllegals: true });
  const spans = DOMPurify.sanitize(value, {
    ALLOWED_TAGS: ["span"],
    ALLOWED_ATTR: ["class"],
    RETURN_DOM_FRAGMENT: true,
  });
  code.replaceChildren(spans);
}

function finish(block) {
  colour(block);
  const copy = copyButton(() => block.querySelector("code")?.textContent ?? "");
  copy.className = "copy";
  const frame = document.createElement("div");
  frame.className = "code";
  block.replaceWith(frame);
  frame.append(block, copy);
}

export function render(into, text) {
  const made = fragment(text);
  for (const block of made.querySelectorAll("pre")) finish(block);
  into.replaceChildren(made);
}

const FORMULA_ENDS = { "$$": "$$", "\\[": "\\]" };

// Where what is written so far can be cut: after the last empty line that is in no fence or formula and
// before no indented one, so that what comes changes nothing before it.
function settledLength(text) {
  let fence = null;
  let settled = 0;
  let at = 0;
  let wasEmpty = false;
  for (const line of text.split("\n")) {
    if (wasEmpty && !fence && line && !/^[\s>|]/.test(line) && !/^([-*+]|\d+[.)]) /.test(line)) {
      settled = at;
    }
    const mark = /^ {0,3}(```+|~~~+|\$\$|\\\[)/.exec(line)?.[1];
    const closes = FORMULA_ENDS[mark];
    const ended = line.trim() !== mark && line.trimEnd().endsWith(closes);
    if (Object.values(FORMULA_ENDS).includes(fence)) {
      if (line.trimEnd().endsWith(fence)) fence = null;
    } else if (closes && !fence) fence = ended ? null : closes;
    else if (mark && !fence) fence = mark;
    else if (mark && line.trim() === mark && mark.startsWith(fence)) fence = null;
    wasEmpty = line.trim() === "";
    at += line.length + 1;
  }
  return settled;
}

// A text that grows: what is settled is drawn once, the rest once a frame.
export class Growing {
  #settled = document.createElement("div");
  #rest = document.createElement("div");
  #into;
  #drawn = 0;
  #text = "";
  #frame = 0;
  #onDraw;

  constructor(into, onDraw) {
    this.#into = into;
    this.#onDraw = onDraw;
  }

  show(text) {
    this.#text = text;
    this.#frame ||= requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    this.#frame = 0;
    if (!this.#rest.isConnected) this.#into.replaceChildren(this.#settled, this.#rest);
    const settled = this.#drawn + settledLength(this.#text.slice(this.#drawn));
    if (settled > this.#drawn) {
      const part = document.createElement("div");
      render(part, this.#text.slice(this.#drawn, settled));
      this.#settled.append(...part.childNodes);
      this.#drawn = settled;
    }
    this.#rest.replaceChildren(fragment(this.#text.slice(this.#drawn)));
    this.#onDraw();
  }

  finish(text) {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    render(this.#into, text);
  }
}
