// Small helpers for making elements. Text is always text: nothing here parses HTML.

import { t } from "./words.js";

export const element = (id) => document.getElementById(id);

export function make(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key.startsWith("aria-") || key === "role") made.setAttribute(key, value);
    else made[key] = value;
  }
  made.append(...children);
  return made;
}

// The same of SVG.
export function shape(name, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

export function note(text, kind = "") {
  return make("span", { className: `note ${kind}`, textContent: text });
}

export function button(label, onClick, properties = {}) {
  const made = make("button", { type: "button", textContent: label, ...properties });
  made.addEventListener("click", onClick);
  return made;
}

// Text as it stands in HTML, for libraries that write some.
export const escaped = (text) =>
  text.replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);

// Copies what `textOf` gives when it is pressed, and says so for a moment.
export function copyButton(textOf) {
  const made = button(t("Copy"), async () => {
    await navigator.clipboard.writeText(textOf());
    made.textContent = t("Copied");
    setTimeout(() => (made.textContent = t("Copy")), 1500);
  });
  return made;
}

export function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
