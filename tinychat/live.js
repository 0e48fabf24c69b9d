// What happens in the cluster, as it happens: one stream of events for the whole page, begun again
// when it breaks. Whoever connects hears the state of everything first, so nothing is missed.

import { ask, linesOf } from "./api.js";

const AGAIN_MS = 1000;
const SILENT_MS = 15_000; // the node says something every few seconds

const listeners = { progress: new Set(), cluster: new Set(), lost: new Set() };
const last = { progress: new Map(), cluster: new Map(), lost: new Map() }; // what was told

// `heard` is called with what is known already, and with what comes. Returns how to stop that.
// "progress": what a node does for a model; "cluster": the topology; "lost": no node answers.
export function on(kind, heard) {
  listeners[kind].add(heard);
  for (const item of last[kind].values()) heard(item);
  return () => listeners[kind].delete(heard);
}

function tell(kind, item) {
  if (kind === "cluster") forgetGone(item.nodes);
  if (kind === "lost") last.progress.clear(); // all that is under way is told anew
  else last[kind].set(`${item.node_id} ${item.model}`, item);
  for (const heard of listeners[kind]) heard(item);
}

// What a node was doing when it went away ends with no word.
function forgetGone(nodes) {
  for (const [key, { node_id }] of last.progress) if (!nodes[node_id]) last.progress.delete(key);
}

// Never ends. (A newer node may tell of more kinds.)
export async function listen() {
  for (;;) {
    try {
      await hear();
    } catch {
      // Said below: it is connected again whatever went wrong.
    }
    tell("lost");
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}

async function hear() {
  const silence = new AbortController();
  let timer = 0;
  const alive = () => {
    clearTimeout(timer);
    timer = setTimeout(() => silence.abort(), SILENT_MS);
  };
  alive();
  try {
    const response = await ask("/v1/events", { signal: silence.signal });
    if (!response.ok) return;
    let kind = "";
    for await (const line of linesOf(response)) {
      alive();
      if (line.startsWith("event: ")) kind = line.slice(7);
      else if (line.startsWith("data: ") && listeners[kind]) tell(kind, JSON.parse(line.slice(6)));
    }
  } finally {
    clearTimeout(timer);
  }
}
