// How many tokens the conversation has with what is being written, beside how many fit.

import { ask } from "./api.js";
import { t } from "./words.js";

const REST_MS = 400; // after the last key

export class Draft {
  #place;
  #request;
  #timer = 0;
  #asked = 0;

  // `place` shows it; `request` gives what would be sent, with the draft, or null where nothing is
  // to be counted: no draft, or a model that is not loaded, which counting would bring.
  constructor(place, request) {
    [this.#place, this.#request] = [place, request];
  }

  changed() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#count(), REST_MS);
  }

  async #count() {
    const asked = ++this.#asked;
    const wanted = this.#request();
    const counted = wanted && (await this.#counted(wanted));
    if (asked !== this.#asked) return; // another one was begun meanwhile
    this.#place.hidden = !counted;
    if (!counted) return;
    const { count, max_model_len: fits } = counted;
    this.#place.textContent = t("{count} of {fits} tokens", {
      count: count.toLocaleString(document.documentElement.lang),
      fits: fits.toLocaleString(document.documentElement.lang),
    });
    this.#place.classList.toggle("error", count >= fits);
  }

  // Null where it cannot be told: it is a help, and sending says what is wrong.
  async #counted(wanted) {
    try {
      const response = await ask("/tokenize", {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify(wanted),
      });
      return response.ok ? await response.json() : null;
    } catch {
      return null;
    }
  }
}
