// What is being written: a question or a new branch of one, the files in it, its length in tokens.

import { Draft } from "./draft.js";
import { t } from "./words.js";

const LARGEST_FILE = 512 * 1024;

export class Composer {
  #page;
  #acts;
  #draft;
  #editing = null; // the message whose new branch is written

  // `page`: {composer, input, attach, files, draft}. `acts`: {send, last, counted, isBusy, say}: to
  // send a text, in the place of a message or of null; the question asked last; the request whose
  // tokens a text's are, or null; whether an answer is under way; to tell people.
  constructor(page, acts) {
    [this.#page, this.#acts] = [page, acts];
    this.#draft = new Draft(page.draft, () => {
      const content = page.input.value.trim();
      return content && !content.startsWith("/") ? acts.counted(content, this.#editing) : null;
    });
    page.composer.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    page.input.addEventListener("input", () => this.#fit());
    page.input.addEventListener("keydown", (event) => this.#pressed(event));
    this.#takeFiles();
  }

  // Writes the new branch of a question.
  edit(message) {
    this.#editing = message;
    this.#write(message.content);
    this.#page.input.focus();
  }

  // Nothing is edited any more; what was written stays.
  leave() {
    this.#editing = null;
  }

  #write(text) {
    this.#page.input.value = text;
    this.#fit();
  }

  #send() {
    const content = this.#page.input.value.trim();
    if (!content || this.#acts.isBusy()) return;
    const edited = this.#editing;
    this.#editing = null;
    this.#write("");
    this.#acts.send(content, edited);
  }

  #pressed(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.#page.composer.requestSubmit();
    } else if (event.key === "Escape" && this.#editing) {
      this.#editing = null;
      this.#write("");
    } else if (event.key === "ArrowUp" && !this.#page.input.value && !this.#acts.isBusy()) {
      const last = this.#acts.last();
      if (!last) return;
      this.edit(last);
      event.preventDefault();
    }
  }

  #fit() {
    const { input } = this.#page;
    input.style.height = "auto";
    input.style.height = input.value ? `${input.scrollHeight + 2}px` : "";
    this.#draft.changed();
  }

  #takeFiles() {
    const { attach, files, input } = this.#page;
    attach.addEventListener("click", () => files.click());
    files.addEventListener("change", () => this.#attach(files.files).then(() => (files.value = "")));
    input.addEventListener("paste", (event) => {
      if (!event.clipboardData.files.length) return;
      event.preventDefault();
      this.#attach(event.clipboardData.files);
    });
    document.addEventListener("dragover", (event) => event.preventDefault());
    document.addEventListener("drop", (event) => {
      event.preventDefault();
      this.#attach(event.dataTransfer.files);
    });
  }

  async #attach(files) {
    const { input } = this.#page;
    for (const file of files) {
      const text = file.size <= LARGEST_FILE ? await file.text() : "\0";
      if (text.includes("\0")) {
        this.#acts.say(t("{name} is no text of at most {size} KB", { name: file.name, size: LARGEST_FILE / 1024 }), "error");
        continue;
      }
      const fence = text.includes("```") ? "~~~~" : "```";
      input.value += `${input.value ? "\n\n" : ""}${file.name}:\n${fence}\n${text.trimEnd()}\n${fence}\n`;
    }
    this.#fit();
    input.focus();
  }
}
