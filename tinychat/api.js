// The node's HTTP API.

import { t } from "./words.js";

const KEY = "tinychat.key";
let noKey = false; // whoever has none is not asked again and again

// As fetch, with this node's API key where it wants one. (Asked for once, kept in this browser.)
export async function ask(url, options = {}) {
  const key = localStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  const response = await fetch(url, { ...options, headers });
  if (response.status !== 401 || noKey) return response;
  if (localStorage.getItem(KEY) === key) {
    const said = window.prompt(t("This node wants an API key:"), "")?.trim();
    noKey = !said;
    if (noKey) return response;
    localStorage.setItem(KEY, said);
  }
  return ask(url, options);
}

export async function getJson(url) {
  const response = await ask(url);
  if (!response.ok) throw new Error(`${url}: ${response.status}`);
  return response.json();
}

// An answer's lines, as they come.
export async function* linesOf(response) {
  const decoder = new TextDecoder();
  let pending = "";
  for await (const bytes of response.body) {
    pending += decoder.decode(bytes, { stream: true });
    const lines = pending.split("\n");
    pending = lines.pop();
    yield* lines;
  }
}

// Server-sent events: `data:` lines are JSON, lines that begin with a colon say what is waited for.
export async function* chat(body, signal) {
  const response = await ask("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  for await (const line of linesOf(response)) {
    if (line.startsWith(":")) yield { waiting: line.slice(1).trim() };
    else if (line.startsWith("data: ") && line !== "data: [DONE]") {
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}
