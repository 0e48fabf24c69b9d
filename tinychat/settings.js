// What a conversation asks of its model: a system prompt, how to sample, tools; empty is the
// model's own.

import { EXAMPLE, parsed } from "./tools.js";

// Of the form: what a field's text means, and the other way round.
const NUMBER = [Number, String];
const FIELDS = {
  system: [String, String],
  temperature: NUMBER,
  top_p: NUMBER,
  max_tokens: NUMBER,
  max_reasoning_tokens: NUMBER,
  tools: [parsed, (tools) => JSON.stringify(tools, null, 1)],
};

export class Settings {
  #dialog;
  #form;

  constructor(dialog) {
    this.#dialog = dialog;
    this.#form = dialog.querySelector("form");
    dialog.querySelector("#reset").addEventListener("click", () => {
      for (const name of Object.keys(FIELDS)) this.#form.elements[name].value = "";
      this.#form.elements.must_call.checked = false;
      this.#check();
    });
    dialog.querySelector("#leave").addEventListener("click", () => dialog.close());
    this.#form.elements.tools.placeholder = EXAMPLE;
    this.#form.elements.tools.addEventListener("input", () => this.#check());
  }

  // Tools that cannot be read are not kept.
  #check() {
    const { tools } = this.#form.elements;
    tools.setCustomValidity("");
    try {
      if (tools.value.trim()) parsed(tools.value);
    } catch (error) {
      tools.setCustomValidity(error.message);
    }
  }

  // Resolves once the dialog is closed, with whether something was changed.
  edit(conversation) {
    const { settings } = conversation;
    for (const [name, [, shown]] of Object.entries(FIELDS)) {
      this.#form.elements[name].value = name in settings ? shown(settings[name]) : "";
    }
    this.#form.elements.must_call.checked = settings.tool_choice === "required";
    this.#check();
    this.#dialog.showModal();
    // At once, not when the dialog says that it is closed: a question may be asked before that.
    let isKept = false;
    const keep = () => {
      conversation.settings = this.#said();
      isKept = true;
    };
    this.#form.addEventListener("submit", keep);
    return new Promise((resolve) => {
      this.#dialog.addEventListener(
        "close",
        () => {
          this.#form.removeEventListener("submit", keep);
          resolve(isKept);
        },
        { once: true },
      );
    });
  }

  #said() {
    const said = {};
    for (const [name, [meant]] of Object.entries(FIELDS)) {
      const { value } = this.#form.elements[name];
      if (value.trim()) said[name] = meant(value);
    }
    if (said.tools && this.#form.elements.must_call.checked) said.tool_choice = "required";
    return said;
  }
}

// The fields of a chat request in which those messages were said.
export function asRequest({ settings }, messages) {
  const { system, ...sampling } = settings;
  const first = system ? [{ role: "system", content: system }] : [];
  return { ...sampling, messages: [...first, ...messages.map(asSaid)] };
}

function asSaid({ role, content, calls, call }) {
  const called = ({ id, name, arguments: given }) => ({
    id,
    type: "function",
    function: { name, arguments: given },
  });
  return {
    role,
    content,
    ...(calls && { tool_calls: calls.map(called) }),
    ...(call && { tool_call_id: call }),
  };
}
