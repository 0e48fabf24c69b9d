// Conversations, kept in this browser's IndexedDB.
//
// A conversation is a tree: an edited question and another answer are branches, and `head` is the
// message that is shown last. {id, title, updated, head, settings, messages: {id: message}}, a
// message {id, parent, role, content, thoughts?, calls?, call?, stopped?, stats?}: `calls` {id, name,
// arguments} of tools are an answer's, `call` is the id of the one whose result a message is.

import { t } from "./words.js";

const DATABASE = "tinychat";
const SAVE_DEADLINE_MS = 2000;
const STORE = "conversations";
const EARLIER = "tinychat.conversation"; // one conversation, in localStorage
const FORMAT = "tinychat-conversations-1";

function opened() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(DATABASE, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

async function within(mode, act) {
  const database = await opened();
  try {
    const transaction = database.transaction(STORE, mode);
    const request = act(transaction.objectStore(STORE));
    return await new Promise((resolve, reject) => {
      transaction.oncomplete = () => resolve(request?.result);
      transaction.onerror = transaction.onabort = () => reject(transaction.error);
    });
  } finally {
    database.close();
  }
}

// A question waits for it, and a browser's database may not answer.
export function save(conversation) {
  const late = new Promise((_, reject) => {
    setTimeout(reject, SAVE_DEADLINE_MS, new Error(t("the browser's database does not answer")));
  });
  return Promise.race([within("readwrite", (store) => store.put(conversation)), late]);
}
export const remove = (id) => within("readwrite", (store) => store.delete(id));

// The newest first.
export async function all() {
  const found = await within("readonly", (store) => store.getAll());
  return found.sort((one, other) => other.updated - one.updated);
}

export function begun() {
  return {
    id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`,
    title: "",
    updated: Date.now(),
    head: null,
    settings: {},
    messages: {},
  };
}

export function add(conversation, parent, role, content) {
  const message = { id: `m${Object.keys(conversation.messages).length}`, parent, role, content };
  conversation.messages[message.id] = message;
  conversation.head = message.id;
  conversation.updated = Date.now();
  if (!conversation.title && role === "user") conversation.title = titleOf(content);
  return message;
}

function titleOf(text) {
  const line = text.trim().split("\n")[0];
  return line.length > 60 ? `${line.slice(0, 57)}…` : line;
}

// From the first message to the one that is shown last.
export function path(conversation) {
  const found = [];
  for (let id = conversation.head; id !== null; id = conversation.messages[id].parent) {
    found.unshift(conversation.messages[id]);
  }
  return found;
}

// The messages before one, from the first.
export function before(conversation, message) {
  return path({ ...conversation, head: message.parent });
}

// Messages in the same place as this one, in the order they came.
export function siblings(conversation, message) {
  return Object.values(conversation.messages).filter(
    ({ parent, role }) => parent === message.parent && role === message.role,
  );
}

// Show the branch of a message, to where it was followed last.
export function show(conversation, message) {
  let head = message;
  for (;;) {
    const next = Object.values(conversation.messages).filter(({ parent }) => parent === head.id);
    if (!next.length) break;
    head = next.at(-1);
  }
  conversation.head = head.id;
}

export function matching(conversations, words) {
  const wanted = words.trim().toLowerCase();
  if (!wanted) return conversations;
  return conversations.filter(
    ({ title, messages }) =>
      title.toLowerCase().includes(wanted) ||
      Object.values(messages).some(({ content }) => content.toLowerCase().includes(wanted)),
  );
}

export async function exported() {
  return JSON.stringify({ format: FORMAT, conversations: await all() }, null, 1);
}

// Adds what a file of `exported` holds; how many. Throws where it is no such file.
export async function imported(text) {
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    throw new Error("this file is not JSON; expected one that was exported here");
  }
  if (found?.format !== FORMAT || !Array.isArray(found.conversations)) {
    throw new Error(`this file is not of the format ${FORMAT}; expected one exported here`);
  }
  const known = found.conversations.map(checked);
  for (const conversation of known) await save(conversation);
  return known.length;
}

function checked(conversation) {
  const { id, title = "", updated = 0, head = null, settings = {}, messages = {} } = conversation;
  for (const [key, message] of Object.entries(messages)) {
    const { parent, role, content } = message;
    const fits = ["user", "assistant", "tool"].includes(role) && typeof content === "string";
    if (message.id !== key || !fits || (parent !== null && !Object.hasOwn(messages, parent))) {
      throw new Error(`the conversation "${title}" has a damaged message ${key}`);
    }
  }
  if (typeof id !== "string" || (head !== null && !Object.hasOwn(messages, head))) {
    throw new Error(`the conversation "${title}" is damaged`);
  }
  return { id, title: String(title), updated: Number(updated), head, settings, messages };
}

const HEADINGS = { user: "Question", assistant: "Answer", tool: "Result" };

export function asMarkdown(conversation) {
  const said = path(conversation).map(({ role, content, calls = [] }) => {
    const called = calls.map(({ name, arguments: given }) => `\`\`\`json\n${name} ${given}\n\`\`\``);
    return [`## ${HEADINGS[role]}`, content, ...called].filter(Boolean).join("\n\n") + "\n";
  });
  return `# ${conversation.title}\n\n${said.join("\n")}`;
}

// The one conversation that an earlier version kept.
export async function adoptEarlier() {
  const kept = JSON.parse(localStorage.getItem(EARLIER) ?? "[]");
  localStorage.removeItem(EARLIER);
  if (!kept.length) return;
  const conversation = begun();
  for (const { role, content } of kept) add(conversation, conversation.head, role, content);
  await save(conversation);
}
