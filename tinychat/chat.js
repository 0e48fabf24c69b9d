// The page's whole state: a conversation, kept in this browser, and the answer now streaming in.

const KEPT = "tinychat.conversation";
const CLUSTER_INTERVAL_MS = 2000;

const element = (id) => document.getElementById(id);
const page = {
  model: element("model"),
  cluster: element("cluster"),
  nodes: element("nodes"),
  messages: element("messages"),
  welcome: element("welcome"),
  composer: element("composer"),
  input: element("input"),
  send: element("send"),
  stop: element("stop"),
  clear: element("clear"),
};

let conversation = JSON.parse(localStorage.getItem(KEPT) ?? "[]");
let streaming = null; // AbortController of the answer under way

function keep() {
  localStorage.setItem(KEPT, JSON.stringify(conversation));
}

// ---- the cluster ---------------------------------------------------------------------------

const KEY = "tinychat.key";
let noKey = false; // whoever has none is not asked again and again

// As fetch, with this node's API key where it wants one. (Asked for once, kept in this browser.)
async function ask(url, options = {}) {
  const key = localStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  const response = await fetch(url, { ...options, headers });
  if (response.status !== 401 || noKey) return response;
  if (localStorage.getItem(KEY) === key) {
    const said = window.prompt("This node wants an API key:", "")?.trim();
    noKey = !said;
    if (noKey) return response;
    localStorage.setItem(KEY, said);
  }
  return ask(url, options);
}

async function getJson(url) {
  const response = await ask(url);
  if (!response.ok) throw new Error(`${url}: ${response.status}`);
  return response.json();
}

async function listModels() {
  const { data } = await getJson("/v1/models");
  const chosen = page.model.value || localStorage.getItem("tinychat.model");
  page.model.replaceChildren(
    ...data.map(({ id, name }) => new Option(name === id ? id : `${name}`, id)),
  );
  if (data.some(({ id }) => id === chosen)) page.model.value = chosen;
}

function gigabytes(bytes) {
  return `${(bytes / 1e9).toFixed(0)} GB`;
}

async function watchCluster() {
  try {
    const { nodes, plans } = await getJson("/v1/topology");
    const live = Object.values(nodes).filter(({ state }) => state !== "unreachable");
    const lost = Object.values(nodes).length - live.length;
    const count = `${live.length} ${live.length === 1 ? "node" : "nodes"}`;
    const memory = live.reduce((sum, n) => sum + (n.capabilities?.memory_total_bytes ?? 0), 0);
    const ready = plans.map(({ model_id }) => model_id).join(", ");
    page.cluster.textContent =
      `${count}${lost ? `, ${lost} unreachable` : ""} · ${gigabytes(memory)}` +
      (ready ? ` · ${ready} ready` : "");
    page.nodes.textContent = live.map((n) => n.capabilities?.chip ?? n.node_id).join(" · ");
    if (!page.model.options.length) await listModels();
  } catch {
    page.cluster.textContent = "this node does not answer";
  }
  setTimeout(watchCluster, CLUSTER_INTERVAL_MS);
}

// ---- the conversation ----------------------------------------------------------------------

function nearBottom() {
  const { scrollHeight, scrollTop, clientHeight } = page.messages;
  return scrollHeight - scrollTop - clientHeight < 80;
}

function scrollDown() {
  page.messages.scrollTop = page.messages.scrollHeight;
}

// Fenced code becomes <pre>, everything else stays text: nothing a model says is ever HTML.
function render(into, text) {
  const parts = text.split(/```[\w+-]*\n?/);
  into.replaceChildren(
    ...parts.map((part, index) => {
      const node = document.createElement(index % 2 ? "pre" : "span");
      node.textContent = part;
      return node;
    }),
  );
}

function addMessage(role, text) {
  page.welcome.hidden = true;
  const message = document.createElement("div");
  message.className = `message ${role}`;
  const body = document.createElement("div");
  render(body, text);
  message.append(body);
  page.messages.append(message);
  scrollDown();
  return body;
}

function showConversation() {
  for (const old of page.messages.querySelectorAll(".message")) old.remove();
  page.welcome.hidden = conversation.length > 0;
  for (const { role, content } of conversation) addMessage(role, content);
}

// ---- one answer ----------------------------------------------------------------------------

// Server-sent events: `data:` lines are JSON, lines that begin with a colon say what is waited for.
async function* events(response) {
  const decoder = new TextDecoder();
  let pending = "";
  for await (const bytes of response.body) {
    pending += decoder.decode(bytes, { stream: true });
    const lines = pending.split("\n");
    pending = lines.pop();
    for (const line of lines) {
      if (line.startsWith(":")) yield { waiting: line.slice(1).trim() };
      else if (line.startsWith("data: ") && line !== "data: [DONE]") {
        yield JSON.parse(line.slice(6));
      }
    }
  }
}

// What each node does for a model while its first answer waits: a bar for each.
function watchNodes(model, into) {
  const nodes = new Map();
  const source = new EventSource("/v1/events");
  source.addEventListener("progress", ({ data }) => {
    const event = JSON.parse(data);
    if (event.model !== model) return;
    nodes.set(event.node_id, event);
    into.replaceChildren(...[...nodes.values()].map(nodeBar));
  });
  return source;
}

function nodeBar({ node_id, phase, done, total, speed, eta_s, warning }) {
  const row = document.createElement("label");
  const bar = document.createElement("progress");
  const facts = [
    `${node_id}: ${phase}`,
    total ? `${megabytes(done)} of ${megabytes(total)}` : "",
    speed ? `${megabytes(speed)}/s` : "",
    eta_s ? `${Math.ceil(eta_s)} s left` : "",
    warning ?? "",
  ];
  row.className = "node";
  row.append(note(facts.filter(Boolean).join(" · ")), bar);
  if (total || phase === "ready") {
    bar.max = total || 1;
    bar.value = phase === "ready" ? bar.max : done;
  }
  return row;
}

function megabytes(bytes) {
  return `${(bytes / 1e6).toFixed(0)} MB`;
}

function failure({ message }) {
  return new Error(message);
}

async function answer() {
  const body = addMessage("assistant", "");
  body.append(note("…"));
  streaming = new AbortController();
  setBusy(true);
  const bars = document.createElement("div");
  let watch = null; // EventSource, while the answer waits
  let text = "";
  let thoughts = null; // folded, above the text
  try {
    const response = await ask("/v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ model: page.model.value, messages: conversation, stream: true }),
      signal: streaming.signal,
    });
    if (!response.ok) throw failure((await response.json()).error);
    for await (const event of events(response)) {
      const follow = nearBottom();
      if (event.error) throw failure(event.error);
      if (event.waiting) {
        if (!text) body.replaceChildren(note(event.waiting), bars);
        watch ??= watchNodes(page.model.value, bars);
        continue;
      }
      watch?.close();
      const { content, reasoning_content: thought } = event.choices[0]?.delta ?? {};
      if (thought) {
        if (!thoughts) {
          thoughts = folded("Thinking");
          body.before(thoughts);
          body.replaceChildren();
        }
        thoughts.lastChild.textContent += thought;
      }
      text += content ?? "";
      if (text) render(body, text);
      if (follow) scrollDown();
    }
  } catch (error) {
    if (!text) body.replaceChildren();
    body.append(
      error.name === "AbortError" ? note(" stopped") : note(` ${error.message}`, "error"),
    );
  } finally {
    watch?.close();
    // What was said before a stop or an error stays part of the conversation.
    if (text) conversation.push({ role: "assistant", content: text });
    else conversation.pop();
    keep();
    streaming = null;
    setBusy(false);
  }
}

function folded(title) {
  const details = document.createElement("details");
  details.className = "thoughts";
  const summary = document.createElement("summary");
  summary.textContent = title;
  const inside = document.createElement("p");
  details.append(summary, inside);
  return details;
}

function note(text, kind = "") {
  const span = document.createElement("span");
  span.className = `note ${kind}`;
  span.textContent = text;
  return span;
}

function setBusy(busy) {
  page.send.hidden = busy;
  page.stop.hidden = !busy;
  page.messages.setAttribute("aria-busy", String(busy));
  if (!busy) page.input.focus();
}

// ---- what people do ------------------------------------------------------------------------

page.composer.addEventListener("submit", (event) => {
  event.preventDefault();
  const content = page.input.value.trim();
  if (!content || streaming) return;
  page.input.value = "";
  page.input.style.height = "";
  conversation.push({ role: "user", content });
  keep();
  addMessage("user", content);
  answer();
});

page.input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    page.composer.requestSubmit();
  }
});

page.input.addEventListener("input", () => {
  page.input.style.height = "auto";
  page.input.style.height = `${page.input.scrollHeight + 2}px`;
});

page.stop.addEventListener("click", () => streaming?.abort());

page.clear.addEventListener("click", () => {
  streaming?.abort();
  conversation = [];
  keep();
  showConversation();
  page.input.focus();
});

page.model.addEventListener("change", () => {
  localStorage.setItem("tinychat.model", page.model.value);
});

showConversation();
listModels().catch(() => {});
watchCluster();
