// The documentation of this version of exo, from its own files: also without a network.

import { Marked } from "./vendor/marked.js";
import DOMPurify from "./vendor/purify.js";

const FOLDER = "/tinychat/guide/";
const PAGES = {
  start: "Start",
  clients: "Use it with",
  cluster: "A cluster at home",
  memory: "Models and memory",
  models: "Formats",
  operations: "Operations",
  packaging: "Packages",
  metrics: "Metrics",
  faq: "Questions",
  architecture: "How it works",
  benchmarks: "Benchmarks",
  comparison: "Beside others",
};

const marked = new Marked({ gfm: true });
const shown = document.getElementById("page");
const links = Object.entries(PAGES).map(([page, title]) => {
  const link = document.createElement("a");
  link.href = `#${page}`;
  link.textContent = title;
  return link;
});
document.getElementById("pages").append(...links);

// What a file of the folder links to stays here; what is elsewhere opens beside.
function lead(link, page) {
  const href = link.getAttribute("href") ?? "";
  if (/^[a-z]+:/i.test(href)) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
    return;
  }
  const { pathname } = new URL(href, `http://here/${page}.md`);
  if (pathname.endsWith(".md")) link.href = `#${pathname.slice(1, -3)}`;
  else link.href = FOLDER + pathname.slice(1);
}

async function show() {
  const page = location.hash.slice(1) || "start";
  for (const link of links) {
    if (link.hash === `#${page}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  try {
    const response = await fetch(`${FOLDER}${encodeURI(page)}.md`);
    if (!response.ok) throw new Error(`there is no page ${page}`);
    const text = marked.parse(await response.text());
    const made = DOMPurify.sanitize(text, { RETURN_DOM_FRAGMENT: true });
    for (const link of made.querySelectorAll("a[href]")) lead(link, page);
    for (const image of made.querySelectorAll("img[src]")) {
      image.src = FOLDER + new URL(image.getAttribute("src"), `http://here/${page}.md`).pathname.slice(1);
    }
    for (const wide of made.querySelectorAll("table, pre")) {
      const frame = document.createElement("div");
      frame.className = "wide";
      frame.tabIndex = 0; // scrolled by keys
      wide.replaceWith(frame);
      frame.append(wide);
    }
    shown.replaceChildren(made);
    document.title = `${shown.querySelector("h1")?.textContent ?? "Guide"} · exo`;
    scrollTo(0, 0);
  } catch (error) {
    shown.textContent = error.message;
  }
}

addEventListener("hashchange", show);
await show();
