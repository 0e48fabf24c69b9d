// The conversations at the side: found, opened, named, saved as text, deleted, brought in and out.

import * as kept from "./conversations.js";
import { button, download, make } from "./dom.js";
import { t } from "./words.js";

export function saveAsText(each) {
  download(`${each.title || "chat"}.md`, kept.asMarkdown(each), "text/markdown");
}

export class ConversationList {
  #page;
  #acts;
  all = [];

  // `page`: {list, search, export, import}. `acts`: {shown, turnTo, begin, say}: the conversation
  // that is shown, to show one, to begin another, and to tell people.
  constructor(page, acts) {
    [this.#page, this.#acts] = [page, acts];
    page.search.addEventListener("input", () => this.draw());
    page.export.addEventListener("click", async () => {
      download("tinychat.json", await kept.exported(), "application/json");
    });
    page.import.addEventListener("change", () => this.#readIn());
  }

  async refresh() {
    this.all = await kept.all();
    this.draw();
  }

  draw() {
    const found = kept.matching(this.all, this.#page.search.value);
    this.#page.list.replaceChildren(...found.map((each) => this.#entry(each)));
  }

  // Saves a conversation, with its name if it is the one that is shown.
  async keep(each) {
    const shown = this.#acts.shown();
    if (each.id === shown.id && each !== shown) shown.title = each.title;
    await kept.save(each);
    await this.refresh();
  }

  #entry(each) {
    const open = button(each.title || t("New chat"), () => this.#acts.turnTo(each), { className: "title" });
    if (each.id === this.#acts.shown().id) open.setAttribute("aria-current", "true");
    const rename = async () => {
      const title = window.prompt(t("Name of this conversation:"), each.title)?.trim();
      if (title) await this.keep({ ...each, title });
    };
    const remove = async () => {
      if (!window.confirm(t('Delete "{title}"?', each))) return;
      await kept.remove(each.id);
      if (each.id === this.#acts.shown().id) this.#acts.begin();
      await this.refresh();
    };
    const acts = make("span", { className: "acts" });
    acts.append(
      button("✎", rename, { "aria-label": t("rename {title}", each), title: t("rename") }),
      button("⤓", () => saveAsText(each), { "aria-label": t("save {title} as Markdown", each), title: t("save as Markdown") }),
      button("×", remove, { "aria-label": t("delete {title}", each), title: t("delete") }),
    );
    return make("li", {}, open, acts);
  }

  async #readIn() {
    try {
      const count = await kept.imported(await this.#page.import.files[0].text());
      await this.refresh();
      this.#acts.say(t("{count} conversations were read", { count }));
    } catch (error) {
      this.#acts.say(error.message, "error");
    } finally {
      this.#page.import.value = "";
    }
  }
}
