// What the page says, in the language that the browser asks for. The English words are the keys.

const LANGUAGES = ["de", "es", "fr", "ja", "zh"];

let known = {};

// The words for it. {name} in them stands for what `facts` has.
export function t(english, facts = {}) {
  return (known[english] ?? english).replace(/\{(\w+)\}/g, (_, name) => facts[name]);
}

// Of a shard, or a place in a ring that is not made yet.
export const layersOf = ({ start_layer, end_layer }) =>
  t("layers {first} to {last}", { first: start_layer, last: end_layer - 1 });

// Before anything is drawn: the first of the browser's languages that is here, or English.
export async function speak(wanted = navigator.languages) {
  const bases = wanted.map((language) => language.toLowerCase().split("-")[0]);
  const chosen = bases.find((base) => base === "en" || LANGUAGES.includes(base)) ?? "en";
  if (chosen === "en") return;
  try {
    const words = new URL(`languages/${chosen}.json`, import.meta.url); // beside this very file
    known = await (await fetch(words)).json();
  } catch (error) {
    console.warn(`no words in ${chosen}:`, error); // English is understood, too
    return;
  }
  document.documentElement.lang = chosen;
  translate(document.body);
}

// What stands in the page itself.
function translate(root) {
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    const words = node.data.trim();
    if (Object.hasOwn(known, words)) node.data = node.data.replace(words, known[words]);
  }
  for (const name of ["aria-label", "placeholder", "title"]) {
    for (const each of root.querySelectorAll(`[${name}]`)) each.setAttribute(name, t(each.getAttribute(name)));
  }
}
