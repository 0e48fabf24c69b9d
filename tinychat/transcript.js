// A conversation on the page: its messages, and what can be done with each.

import { folded, inWords, stopped } from "./answer.js";
import { path, siblings } from "./conversations.js";
import { button, copyButton, make, note } from "./dom.js";
import { render } from "./markdown.js";
import { resultForm, shownCall } from "./tools.js";
import { t } from "./words.js";

// So many messages are drawn at once: a conversation of thousands opens as soon as one of few.
const DRAWN = 100;

export class Transcript {
  #scroller;
  #welcome;
  #acts;

  // `acts`: {edit, again, goOn, turnTo, results}, each called with a message, the last also with
  // the text that each of its calls gave.
  constructor(scroller, welcome, acts) {
    [this.#scroller, this.#welcome, this.#acts] = [scroller, welcome, acts];
  }

  show(conversation) {
    for (const old of this.#scroller.querySelectorAll(".message, .earlier")) old.remove();
    const messages = path(conversation);
    this.#welcome.hidden = messages.length > 0;
    this.#scroller.append(this.#drawn(conversation, messages));
    this.#scroller.scrollTop = this.#scroller.scrollHeight;
  }

  // The last of these messages, and a button that draws those before them.
  #drawn(conversation, messages) {
    const drawn = document.createDocumentFragment();
    const earlier = messages.slice(0, -DRAWN);
    if (earlier.length) {
      const more = button(t("Earlier messages ({count})", { count: earlier.length }), () => {
        const fromBottom = this.#scroller.scrollHeight - this.#scroller.scrollTop;
        more.replaceWith(this.#drawn(conversation, earlier));
        this.#scroller.scrollTop = this.#scroller.scrollHeight - fromBottom;
      });
      more.classList.add("earlier");
      drawn.append(more);
    }
    for (const message of messages.slice(-DRAWN)) {
      drawn.append(this.#article(conversation, message).element);
    }
    return drawn;
  }

  // Brings a message into view that is among those shown, or before them.
  reveal(message) {
    const drawn = () => this.#scroller.querySelector(`[data-message="${CSS.escape(message.id)}"]`);
    for (let more; !drawn() && (more = this.#scroller.querySelector(".earlier")); ) more.click();
    drawn()?.scrollIntoView({ block: "start" });
  }

  // Draws a message at the end; where its text goes, and what keeps that in view.
  add(conversation, message) {
    this.#welcome.hidden = true;
    const { element, body } = this.#article(conversation, message);
    const wasDown = this.#isDown();
    this.#scroller.append(element);
    if (wasDown || message.role === "user") this.#scroller.scrollTop = this.#scroller.scrollHeight;
    return { element, body, follow: this.#follower() };
  }

  #article(conversation, message) {
    const body = make("div", { className: "body" });
    const element = make("article", { className: `message ${message.role}` }, body);
    element.dataset.message = message.id;
    if (message.role !== "assistant") body.textContent = message.content;
    else {
      if (message.thoughts) element.prepend(folded(message.thoughts));
      render(body, message.content);
      if (message.stopped) body.append(note(` ${stopped(message)}`));
      if (message.calls) element.append(...this.#calls(conversation, message));
    }
    element.append(this.#foot(conversation, message));
    return { element, body };
  }

  // What was called, and as long as nothing came after it, where its results are written.
  #calls(conversation, message) {
    const shown = message.calls.map(shownCall);
    if (conversation.head !== message.id) return shown;
    return [...shown, resultForm(message.calls, (texts) => this.#acts.results(message, texts))];
  }

  #isDown() {
    const { scrollHeight, scrollTop, clientHeight } = this.#scroller;
    return scrollHeight - scrollTop - clientHeight < 80;
  }

  // Follows what grows until somebody scrolls away from it, and again once they are back.
  #follower() {
    let following = true;
    let height = this.#scroller.scrollHeight;
    return () => {
      const { scrollTop, clientHeight } = this.#scroller;
      following = height - scrollTop - clientHeight < 80;
      height = this.#scroller.scrollHeight;
      if (following) this.#scroller.scrollTop = height;
    };
  }

  #foot(conversation, message) {
    const foot = make("footer", {});
    const same = siblings(conversation, message);
    if (same.length > 1) {
      const at = same.indexOf(message);
      const turn = (by, label, text) =>
        button(text, () => this.#acts.turnTo(same[at + by]), {
          "aria-label": label,
          disabled: !same[at + by],
        });
      foot.append(
        turn(-1, t("earlier branch"), "‹"),
        make("span", { textContent: `${at + 1}/${same.length}` }),
        turn(1, t("later branch"), "›"),
      );
    }
    if (message.role === "user") {
      foot.append(button(t("Edit"), () => this.#acts.edit(message)));
    } else if (message.role === "assistant") {
      const copy = copyButton(() => message.content);
      const again = () => this.#acts.again(message);
      foot.append(copy, button(t("Again"), again, { title: t("another answer") }));
      if (message.stopped && message.content) {
        foot.append(button(t("Go on"), () => this.#acts.goOn(message)));
      }
      if (message.stats) foot.append(make("span", { className: "stats", textContent: inWords(message.stats) }));
    }
    const link = { href: `#${conversation.id}/${message.id}`, title: t("link to this message") };
    foot.append(make("a", { ...link, "aria-label": link.title, textContent: "#" }));
    return foot;
  }
}
