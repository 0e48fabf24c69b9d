// The page: which conversation is shown, and what people do.

import { inWords, stream } from "./answer.js";
import { getJson } from "./api.js";
import { ClusterView } from "./cluster.js";
import { Commands } from "./commands.js";
import { Composer } from "./composer.js";
import * as kept from "./conversations.js";
import { element } from "./dom.js";
import { ConversationList, saveAsText } from "./list.js";
import { listen } from "./live.js";
import { Models } from "./models.js";
import { asRequest, Settings } from "./settings.js";
import { Transcript } from "./transcript.js";
import { speak, t } from "./words.js";

await speak();

const MODEL = "tinychat.model";
const SAVE_MS = 150;

const page = Object.fromEntries(
  "model cluster picture nodes messages welcome composer input send stop clear commands list search settings export import attach files aside menu said draft"
    .split(" ")
    .map((id) => [id, element(id)]),
);

let conversation = kept.begun();
let loaded = []; // ids of the models that are
let streaming = null; // AbortController of the answer under way

// For everybody, and read out: what went wrong, or that an answer is there.
function say(text, kind = "") {
  page.said.textContent = text;
  page.said.className = kind;
}

// ---- which conversation --------------------------------------------------------------------

const list = new ConversationList(page, { shown: () => conversation, turnTo, begin, say });
const keep = (each = conversation) => list.keep(each);

// `at`: the message that the address names, too.
function turnTo(each, at = null) {
  streaming?.abort();
  composer.leave();
  conversation = each;
  transcript.show(conversation);
  list.draw();
  document.body.classList.remove("menu");
  location.hash = at ? `${each.id}/${at.id}` : each.id;
}

// #conversation, or #conversation/message.
function openLinked() {
  const [id, at] = location.hash.slice(1).split("/");
  const linked = list.all.find((each) => each.id === id);
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

// What can be done with a message, while none is written.
const acts = {
  turnTo(message) {
    kept.show(conversation, message);
    transcript.show(conversation);
    keep();
  },
  edit: (message) => composer.edit(message),
  again(message) {
    conversation.head = message.parent;
    transcript.show(conversation);
    answer(kept.add(conversation, message.parent, "assistant", ""));
  },
  goOn(message) {
    transcript.show(conversation);
    answer(message, true);
  },
  results({ calls }, texts) {
    for (const [i, text] of texts.entries()) {
      kept.add(conversation, conversation.head, "tool", text).call = calls[i].id;
    }
    transcript.show(conversation);
    answer(kept.add(conversation, conversation.head, "assistant", ""));
  },
};
const whenIdle = (act) => (...said) => {
  if (!streaming) act(...said);
};
const transcript = new Transcript(
  page.messages,
  page.welcome,
  Object.fromEntries(Object.entries(acts).map(([name, act]) => [name, whenIdle(act)])),
);

function ask(content, edited) {
  const parent = edited ? edited.parent : conversation.head;
  const question = kept.add(conversation, parent, "user", content);
  if (edited) transcript.show(conversation);
  else transcript.add(conversation, question);
  location.hash = conversation.id;
  answer(kept.add(conversation, question.id, "assistant", ""));
}

function request(message, goesOn) {
  const messages = kept.path(conversation).filter((each) => goesOn || each !== message);
  const body = { model: page.model.value, ...asRequest(conversation, messages) };
  return goesOn ? { ...body, continue_final_message: true, add_generation_prompt: false } : body;
}

async function answer(message, goesOn = false) {
  const shown = conversation;
  const drawn = [...page.messages.querySelectorAll(".message")].at(-1);
  if (goesOn) drawn.remove();
  const place = transcript.add(shown, message);
  streaming = new AbortController();
  setBusy(true);
  let saved;
  const keepPart = () => {
    saved = performance.now();
    message.stopped = "interrupted"; // until it is whole
    return kept.save(shown).catch(notKept);
  };
  const onPart = () => {
    if (performance.now() - saved >= SAVE_MS) keepPart();
  };
  const body = request(message, goesOn);
  await keepPart(); // the question, before it is asked
  await stream(body, message, place, streaming.signal, onPart);
  streaming = null;
  shown.updated = Date.now();
  const failed = message.stopped && message.stopped !== "stopped" ? message.stopped : "";
  say(failed || t("the answer is there"), failed ? "error" : "hidden"); // seen already
  if (!message.content && !message.thoughts && !message.calls) {
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
  await keep(shown).catch(notKept);
  if (!streaming) setBusy(false); // who reloads now finds it whole
}

const notKept = (error) => say(t("this browser did not keep the conversation: {why}", { why: error.message }), "error");

function setBusy(busy) {
  page.send.hidden = busy;
  page.stop.hidden = !busy;
  page.messages.setAttribute("aria-busy", String(busy));
  if (!busy) page.input.focus();
}

const lastOf = (wanted) => kept.path(conversation).findLast(({ role }) => role === wanted);

const composer = new Composer(page, {
  async send(content, edited) {
    commands.offer();
    if (!(await commands.run(content))) ask(content, edited);
  },
  last: () => lastOf("user"),
  counted(content, edited) {
    if (!loaded.includes(page.model.value)) return null;
    const before = edited ? kept.before(conversation, edited) : kept.path(conversation);
    const { messages, tools } = asRequest(conversation, [...before, { role: "user", content }]);
    return { model: page.model.value, messages, tools };
  },
  isBusy: () => streaming !== null,
  say,
});

page.stop.addEventListener("click", () => streaming?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && streaming) streaming.abort();
});
page.clear.addEventListener("click", begin);

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
      const last = lastOf("assistant");
      if (last) acts.again(last);
      else say(t("there is no answer yet"));
    },
  ],
  file: [t("attach text files"), () => page.files.click()],
  save: [t("save this conversation as Markdown"), () => saveAsText(conversation)],
  load: [t("read conversations from a file"), () => page.import.click()],
  stats: [
    t("how fast the last answer was"),
    () => {
      const last = lastOf("assistant");
      if (last?.stats) say(inWords(last.stats));
      else say(last ? t("the last answer was not measured: it did not come to its end") : t("there is no answer yet"));
    },
  ],
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
await list.refresh();
openLinked();
addEventListener("hashchange", openLinked);
view.watch();
await listen();
