// The page: which conversation is shown, and what people do.

import { inWords, stream } from "./answer.js";
import { getJson } from "./api.js";
import { ClusterView } from "./cluster.js";
import { Commands } from "./commands.js";
import * as kept from "./conversations.js";
import { button, download, element, make } from "./dom.js";
import { Draft } from "./draft.js";
import { listen } from "./live.js";
import { Models } from "./models.js";
import { asRequest, Settings } from "./settings.js";
import { Transcript } from "./transcript.js";
import { speak, t } from "./words.js";

await speak();

const MODEL = "tinychat.model";
const SAVE_MS = 150;
const LARGEST_FILE = 512 * 1024;

const page = Object.fromEntries(
  "model cluster picture nodes messages welcome composer input send stop clear commands list search settings export import attach files aside menu said draft"
    .split(" ")
    .map((id) => [id, element(id)]),
);

let conversation = kept.begun();
let conversations = [];
let loaded = []; // ids of the models that are
let streaming = null; // AbortController of the answer under way
let editing = null; // the message whose new branch is written

// For everybody, and read out: what went wrong, or that an answer is there.
function say(text, kind = "") {
  page.said.textContent = text;
  page.said.className = kind;
}

// ---- conversations -------------------------------------------------------------------------

async function listConversations() {
  conversations = await kept.all();
  drawList();
}

function drawList() {
  const found = kept.matching(conversations, page.search.value);
  page.list.replaceChildren(...found.map(entry));
}

function entry(each) {
  const open = button(each.title || t("New chat"), () => turnTo(each), { className: "title" });
  if (each.id === conversation.id) open.setAttribute("aria-current", "true");
  const rename = async () => {
    const title = window.prompt(t("Name of this conversation:"), each.title)?.trim();
    if (title) await keep({ ...each, title });
  };
  const remove = async () => {
    if (!window.confirm(t('Delete "{title}"?', each))) return;
    await kept.remove(each.id);
    if (each.id === conversation.id) begin();
    await listConversations();
  };
  const acts = make("span", { className: "acts" });
  acts.append(
    button("✎", rename, { "aria-label": t("rename {title}", each), title: t("rename") }),
    button("⤓", () => saveAsText(each), { "aria-label": t("save {title} as Markdown", each), title: t("save as Markdown") }),
    button("×", remove, { "aria-label": t("delete {title}", each), title: t("delete") }),
  );
  return make("li", {}, open, acts);
}

function saveAsText(each) {
  download(`${each.title || "chat"}.md`, kept.asMarkdown(each), "text/markdown");
}

// Saves a conversation, the shown one if it is that.
async function keep(each = conversation) {
  if (each.id === conversation.id && each !== conversation) conversation.title = each.title;
  await kept.save(each);
  await listConversations();
}

// `at`: the message that the address names, too.
function turnTo(each, at = null) {
  streaming?.abort();
  editing = null;
  conversation = each;
  transcript.show(conversation);
  drawList();
  document.body.classList.remove("menu");
  location.hash = at ? `${each.id}/${at.id}` : each.id;
}

// #conversation, or #conversation/message.
function openLinked() {
  const [id, at] = location.hash.slice(1).split("/");
  const linked = conversations.find((each) => each.id === id);
  if (!linked) return;
  const message = linked.messages[at];
  if (streaming && linked.id === conversation.id) return; // the answer goes on
  if (message && !kept.path(linked).includes(message)) kept.show(linked, message);
  if (linked.id !== conversation.id || message) turnTo(linked, message);
  if (message) transcript.reveal(message);
}

function begin() {
  turnTo(kept.begun());
  history.replaceState(null, "", location.pathname);
  page.input.focus();
}

// ---- asking --------------------------------------------------------------------------------

const acts = {
  turnTo(message) {
    if (streaming) return;
    kept.show(conversation, message);
    transcript.show(conversation);
    keep();
  },
  edit(message) {
    if (streaming) return;
    editing = message;
    page.input.value = message.content;
    fit();
    page.input.focus();
  },
  again(message) {
    if (streaming) return;
    conversation.head = message.parent;
    transcript.show(conversation);
    answer(kept.add(conversation, message.parent, "assistant", ""));
  },
  goOn(message) {
    if (streaming) return;
    transcript.show(conversation);
    answer(message, true);
  },
};
const transcript = new Transcript(page.messages, page.welcome, acts);

function request(message, goesOn) {
  const messages = kept.path(conversation).filter((each) => goesOn || each !== message);
  const said = messages.map(({ role, content }) => ({ role, content }));
  const body = { model: page.model.value, ...asRequest(conversation, said) };
  return goesOn ? { ...body, continue_final_message: true, add_generation_prompt: false } : body;
}

async function answer(message, goesOn = false) {
  const shown = conversation;
  const drawn = [...page.messages.querySelectorAll(".message")].at(-1);
  if (goesOn) drawn.remove();
  const place = transcript.add(shown, message);
  streaming = new AbortController();
  setBusy(true);
  let saved = performance.now();
  const onPart = () => {
    if (performance.now() - saved < SAVE_MS) return;
    saved = performance.now();
    message.stopped = "interrupted"; // until it is whole
    kept.save(shown);
  };
  await stream(request(message, goesOn), message, place, streaming.signal, onPart);
  streaming = null;
  setBusy(false);
  shown.updated = Date.now();
  const failed = message.stopped && message.stopped !== "stopped" ? message.stopped : "";
  say(failed || t("the answer is there"), failed ? "error" : "hidden"); // seen already
  if (!message.content && !message.thoughts) {
    // Nothing was said: the question can be asked again.
    delete shown.messages[message.id];
    shown.head = message.parent;
  } else if (shown === conversation) {
    const notes = place.body.querySelectorAll(":scope > .note");
    place.element.remove();
    const again = transcript.add(shown, message);
    again.body.querySelector(":scope > .note")?.remove();
    again.body.append(...notes);
  }
  await keep(shown);
}

function setBusy(busy) {
  page.send.hidden = busy;
  page.stop.hidden = !busy;
  page.messages.setAttribute("aria-busy", String(busy));
  if (!busy) page.input.focus();
}

// ---- commands, as in `exo run` ---------------------------------------------------------------

function answerWith(id) {
  page.model.value = id;
  localStorage.setItem(MODEL, id);
}

function chooseModel(name) {
  const every = [...page.model.options];
  const wanted = name.toLowerCase();
  const found = every.filter((one) => [one.text, one.value].some((text) => text.toLowerCase().includes(wanted)));
  const exact = found.find((one) => [one.text.toLowerCase(), one.value.toLowerCase()].includes(wanted));
  const chosen = exact ?? (found.length === 1 ? found[0] : null);
  if (!name || !chosen) {
    const names = (found.length ? found : every).map(({ text }) => text).join(", ");
    const none = name && !found.length;
    return say(none ? t("no model is named {name}; there are: {names}", { name, names }) : t("models: {names}", { names }));
  }
  answerWith(chosen.value);
  return say(t("answers come from {model} now", { model: chosen.text }));
}

const lastAnswer = () => kept.path(conversation).findLast(({ role }) => role === "assistant");

const commands = new Commands(page.input, page.commands, {
  new: [t("begin another conversation"), begin],
  model: [t("which model answers: /model NAME"), chooseModel],
  system: [
    t("the system prompt: /system TEXT, or /system alone for none"),
    async (text) => {
      const { system: _, ...others } = conversation.settings;
      conversation.settings = text ? { ...others, system: text } : others;
      if (conversation.head) await keep();
      say(text ? t("the system prompt is kept for this conversation") : t("there is no system prompt"));
    },
  ],
  regen: [
    t("answer the last question again"),
    () => {
      const last = lastAnswer();
      if (last) acts.again(last);
      else say(t("there is no answer yet"));
    },
  ],
  file: [t("attach text files"), () => page.files.click()],
  save: [
    t("save this conversation as Markdown"),
    () => saveAsText(conversation),
  ],
  load: [t("read conversations from a file"), () => page.import.click()],
  stats: [
    t("how fast the last answer was"),
    () => {
      const last = lastAnswer();
      if (last?.stats) say(inWords(last.stats));
      else say(last ? t("the last answer was not measured: it did not come to its end") : t("there is no answer yet"));
    },
  ],
});

page.composer.addEventListener("submit", async (event) => {
  event.preventDefault();
  const content = page.input.value.trim();
  if (!content || streaming) return;
  page.input.value = "";
  fit();
  commands.offer();
  if (await commands.run(content)) return;
  const parent = editing ? editing.parent : conversation.head;
  const wasEdited = editing !== null;
  editing = null;
  const question = kept.add(conversation, parent, "user", content);
  if (wasEdited) transcript.show(conversation);
  else transcript.add(conversation, question);
  location.hash = conversation.id;
  answer(kept.add(conversation, question.id, "assistant", ""));
});

page.input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    page.composer.requestSubmit();
  } else if (event.key === "Escape" && editing) {
    editing = null;
    page.input.value = "";
    fit();
  } else if (event.key === "ArrowUp" && !page.input.value && !streaming) {
    const last = kept.path(conversation).findLast(({ role }) => role === "user");
    if (last) {
      editing = last;
      page.input.value = last.content;
      fit();
      event.preventDefault();
    }
  }
});

function fit() {
  page.input.style.height = "auto";
  page.input.style.height = page.input.value ? `${page.input.scrollHeight + 2}px` : "";
  draft.changed();
}

const draft = new Draft(page.draft, () => {
  const content = page.input.value.trim();
  if (!content || content.startsWith("/") || !loaded.includes(page.model.value)) return null;
  const before = editing ? kept.before(conversation, editing) : kept.path(conversation);
  const said = [...before, { role: "user", content }].map(({ role, content: text }) => ({ role, content: text }));
  return { model: page.model.value, messages: asRequest(conversation, said).messages };
});

page.input.addEventListener("input", fit);
page.stop.addEventListener("click", () => streaming?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && streaming) streaming.abort();
});
page.clear.addEventListener("click", begin);

// ---- files ---------------------------------------------------------------------------------

async function attach(files) {
  for (const file of files) {
    const text = file.size <= LARGEST_FILE ? await file.text() : "\0";
    if (text.includes("\0")) {
      say(t("{name} is no text of at most {size} KB", { name: file.name, size: LARGEST_FILE / 1024 }), "error");
      continue;
    }
    const fence = text.includes("```") ? "~~~~" : "```";
    page.input.value += `${page.input.value ? "\n\n" : ""}${file.name}:\n${fence}\n${text.trimEnd()}\n${fence}\n`;
  }
  fit();
  page.input.focus();
}

page.attach.addEventListener("click", () => page.files.click());
page.files.addEventListener("change", () => attach(page.files.files).then(() => (page.files.value = "")));
page.input.addEventListener("paste", (event) => {
  if (!event.clipboardData.files.length) return;
  event.preventDefault();
  attach(event.clipboardData.files);
});
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  attach(event.dataTransfer.files);
});

page.export.addEventListener("click", async () => {
  download("tinychat.json", await kept.exported(), "application/json");
});
page.import.addEventListener("change", async () => {
  try {
    const count = await kept.imported(await page.import.files[0].text());
    say(t("{count} conversations were read", { count }));
    await listConversations();
  } catch (error) {
    say(error.message, "error");
  } finally {
    page.import.value = "";
  }
});

// ---- around it -----------------------------------------------------------------------------

async function listModels(nodes) {
  const { data } = await getJson("/v1/models");
  const chosen = page.model.value || localStorage.getItem(MODEL);
  loaded = data.filter(({ ready }) => ready).map(({ id }) => id);
  page.model.replaceChildren(...data.map(({ id, name }) => new Option(name, id)));
  if (data.some(({ id }) => id === chosen)) page.model.value = chosen;
  const chips = nodes.map((n) => n.capabilities?.chip ?? n.node_id);
  page.nodes.textContent = chips.join(" · ");
}

const view = new ClusterView(page.cluster, page.picture, listModels);
page.model.addEventListener("change", () => localStorage.setItem(MODEL, page.model.value));
page.search.addEventListener("input", drawList);
page.cluster.addEventListener("click", () => {
  page.cluster.setAttribute("aria-expanded", String(view.turn()));
});
page.menu.addEventListener("click", () => document.body.classList.toggle("menu"));
const settings = new Settings(element("how"));
new Models((id) => {
  // One of the hub's is in no list yet.
  if (![...page.model.options].some(({ value }) => value === id)) page.model.append(new Option(id, id));
  answerWith(id);
  page.input.focus();
});
page.settings.addEventListener("click", async () => {
  if ((await settings.edit(conversation)) && conversation.head) await keep();
});

await kept.adoptEarlier();
await listConversations();
openLinked();
addEventListener("hashchange", openLinked);
view.watch();
await listen();
