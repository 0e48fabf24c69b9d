// What a conversation asks of its model: a system prompt and how to sample; empty is the model's own.

const FIELDS = {
  system: String,
  temperature: Number,
  top_p: Number,
  max_tokens: Number,
};

export class Settings {
  #dialog;
  #form;

  constructor(dialog) {
    this.#dialog = dialog;
    this.#form = dialog.querySelector("form");
    dialog.querySelector("#reset").addEventListener("click", () => {
      for (const name of Object.keys(FIELDS)) this.#form.elements[name].value = "";
    });
  }

  // Resolves once the dialog is closed, with whether something was changed.
  edit(conversation) {
    for (const name of Object.keys(FIELDS)) {
      this.#form.elements[name].value = conversation.settings[name] ?? "";
    }
    this.#dialog.showModal();
    return new Promise((resolve) => {
      this.#dialog.addEventListener(
        "close",
        () => {
          if (this.#dialog.returnValue !== "keep") return resolve(false);
          const said = {};
          for (const [name, kind] of Object.entries(FIELDS)) {
            const { value } = this.#form.elements[name];
            if (value.trim()) said[name] = kind(value);
          }
          conversation.settings = said;
          return resolve(true);
        },
        { once: true },
      );
    });
  }
}

// The fields of a chat request.
export function asRequest({ settings }, messages) {
  const { system, ...sampling } = settings;
  const first = system ? [{ role: "system", content: system }] : [];
  return { ...sampling, messages: [...first, ...messages] };
}
