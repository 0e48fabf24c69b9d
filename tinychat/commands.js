// Lines that begin with a slash: done by the page, not asked of the model.

import { button } from "./dom.js";

const BEGUN = /^\/[a-z]*$/;
const WHOLE = /^\/([a-z]+)(?:\s+([^]*))?$/;

export class Commands {
  #input;
  #panel;
  #all;

  // `all` is {name: [what it does, (the rest of the line) => …]}. Those that fit what is being
  // written in `input` are offered in `panel`.
  constructor(input, panel, all) {
    [this.#input, this.#panel, this.#all] = [input, panel, all];
    input.addEventListener("input", () => this.offer());
    input.addEventListener("keydown", (event) => {
      const [first] = this.#fitting();
      if (event.key === "Tab" && !event.shiftKey && first && !panel.hidden) {
        event.preventDefault();
        this.#take(first);
      } else if (event.key === "Escape") {
        panel.hidden = true;
      }
    });
  }

  // Whether `text` was a command. Any other line, of a path or a comment, is asked as it is.
  async run(text) {
    const [, name, rest = ""] = WHOLE.exec(text) ?? [];
    if (!Object.hasOwn(this.#all, name ?? "")) return false;
    await this.#all[name][1](rest.trim());
    return true;
  }

  offer() {
    const names = this.#fitting();
    this.#panel.hidden = !names.length;
    this.#panel.replaceChildren(
      ...names.map((name) => button(`/${name} · ${this.#all[name][0]}`, () => this.#take(name))),
    );
  }

  #fitting() {
    const text = this.#input.value;
    return BEGUN.test(text) ? Object.keys(this.#all).filter((name) => `/${name}`.startsWith(text)) : [];
  }

  #take(name) {
    this.#input.value = `/${name} `;
    this.#input.focus();
    this.offer();
  }
}
