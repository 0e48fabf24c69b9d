// Formulas in Markdown: $x$, $$x$$, \(x\) and \[x\], as MathML, which browsers draw themselves.

import temml from "./vendor/temml.js";
import { escaped } from "./dom.js";

const MAX_LENGTH = 10_000;
const MAX_KEPT = 500;

const OPTIONS = {
  throwOnError: true,
  maxExpand: 500,
  maxSize: [20, 20],
  // A box is a class of ours, as an answer may bring no styles; no other class, link or data.
  macros: { "\\boxed": "\\class{boxed}{#1}" },
  trust: ({ command, class: name }) => command === "\\class" && name === "boxed",
};

// What is written while an answer grows is drawn in every frame.
const kept = new Map();

function drawn({ raw, text, display }) {
  if (!kept.has(raw)) {
    if (kept.size > MAX_KEPT) kept.clear();
    let made = `<code>${escaped(raw.trim())}</code>`; // what cannot be read stays as it was written
    try {
      if (text.length <= MAX_LENGTH) {
        // The page's policy allows no styles; those that matter are classes.
        made = temml
          .renderToString(text, { ...OPTIONS, displayMode: display })
          .replace(/ style="[^"]*"/g, "");
      }
    } catch (error) {
      if (!(error instanceof temml.ParseError)) throw error;
    }
    kept.set(raw, made);
  }
  return kept.get(raw);
}

const token = (type, raw, text, display) => ({ type, raw, text: text.trim(), display });

// A dollar is one of money unless a formula begins and ends right at it, and no digit follows.
const INLINE = new RegExp(
  [
    /^\$\$((?:[^$\\]|\\[^])+?)\$\$/,
    /^\$(?![\s$])((?:[^$\\\n]|\\[^\n])+?)(?<!\s)\$(?!\d)/,
    /^\\\(([^]{1,5000}?)\\\)/,
    /^\\\[([^]{1,5000}?)\\\]/,
  ]
    .map((one) => one.source)
    .join("|"),
);
const BLOCK = /^ {0,3}(?:\$\$((?:[^$\\]|\\[^])+?)\$\$|\\\[([^]{1,5000}?)\\\])[ \t]*(?:\n+|$)/;

// Extensions of marked.
export const math = [
  {
    name: "mathBlock",
    level: "block",
    start: (text) => /(?:^|\n) {0,3}(?:\$\$|\\\[)/.exec(text)?.index,
    tokenizer: (text) => {
      const found = BLOCK.exec(text);
      return found ? token("mathBlock", found[0], found[1] ?? found[2], true) : undefined;
    },
    renderer: (one) => `<p class="math">${drawn(one)}</p>`,
  },
  {
    name: "math",
    level: "inline",
    start: (text) => /\$|\\\(|\\\[/.exec(text)?.index,
    tokenizer: (text) => {
      const found = INLINE.exec(text);
      if (!found) return undefined;
      const [raw, whole, dollars, round, square] = found;
      const display = whole !== undefined || square !== undefined;
      return token("math", raw, whole ?? dollars ?? round ?? square, display);
    },
    renderer: drawn,
  },
];

// What temml writes; DOMPurify knows it all, and drops what is not named.
export const MATH_TAGS = (
  "math menclose merror mfrac mi mmultiscripts mn mo mover mpadded mphantom mprescripts mroot mrow " +
  "ms mspace msqrt mstyle msub msubsup msup mtable mtd mtext mtr munder munderover"
).split(" ");
export const MATH_ATTRIBUTES = (
  "accent accentunder columnalign columnlines columnspacing depth display displaystyle fence form " +
  "height largeop linethickness lspace mathvariant maxsize minsize movablelimits notation rowalign " +
  "rowlines rowspacing rspace scriptlevel separator stretchy symmetric voffset width"
).split(" ");
