// Tools that a conversation offers its model. Nothing is run here: what is called is shown, and a
// person says what came of it.

import { make } from "./dom.js";
import { t } from "./words.js";

export const EXAMPLE = '[{"type": "function", "function": {"name": "…", "parameters": {…}}}]';

// Tools as the API takes them, from what was written. Throws an error that says what is wrong.
export function parsed(text) {
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new Error(t("the tools are not JSON: {why}", { why: error.message }));
  }
  const isOne = (tool) => tool?.type === "function" && typeof tool.function?.name === "string";
  if (!Array.isArray(tools) || !tools.every(isOne)) {
    throw new Error(t("expected tools like {example}", { example: EXAMPLE }));
  }
  return tools;
}

// Adds what one event says of calls, {id, name, arguments} each, to what came before.
export function gather(calls, pieces) {
  for (const { index, id, function: called } of pieces) {
    calls[index] ??= { id: "", name: "", arguments: "" };
    const call = calls[index];
    call.id ||= id ?? "";
    call.name ||= called?.name ?? "";
    call.arguments += called?.arguments ?? "";
  }
}

export function shownCall({ name, arguments: given }) {
  const summary = make("summary", { textContent: t("Calls {name}", { name }) });
  const code = make("code", { textContent: readable(given) });
  return make("details", { className: "call", open: true }, summary, make("pre", {}, code));
}

function readable(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // not whole yet, or no JSON at all
  }
}

// Where a person writes what each call gave; `done` gets the texts.
export function resultForm(calls, done) {
  const fields = calls.map(({ name }) => {
    const label = t("What {name} gave", { name });
    return make("textarea", { rows: 2, required: true, placeholder: label, "aria-label": label });
  });
  const send = make("button", { type: "submit", className: "main", textContent: t("Send results") });
  const form = make("form", { className: "results" }, ...fields, send);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    done(fields.map(({ value }) => value));
  });
  return form;
}
