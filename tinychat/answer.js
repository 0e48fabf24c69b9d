// One answer: streamed into a message's place on the page, and into its conversation.

import { chat } from "./api.js";
import { make, note } from "./dom.js";
import { on } from "./live.js";
import { Growing } from "./markdown.js";
import { bar } from "./progress.js";
import { gather, shownCall } from "./tools.js";
import { t } from "./words.js";

// What each node does for a model while its first answer waits: a bar for each.
function watchNodes(model, into) {
  const nodes = new Map();
  return on("progress", (event) => {
    if (event.model !== model) return;
    nodes.set(event.node_id, event);
    into.replaceChildren(...[...nodes.values()].map(bar));
  });
}

export function folded(thoughts) {
  const inside = make("p", { textContent: thoughts });
  return make("details", { className: "thoughts" }, make("summary", { textContent: t("Thinking") }), inside);
}

function measured(began, first, usage) {
  const now = performance.now();
  const tokens = usage?.completion_tokens ?? 0;
  return {
    tokens,
    prompt: usage?.prompt_tokens ?? 0,
    cached: usage?.prompt_tokens_details?.cached_tokens ?? 0,
    first_s: (first - began) / 1000,
    rate: tokens > 1 ? (1000 * (tokens - 1)) / (now - first) : 0,
  };
}

// Why an answer did not come to its end. ("stopped" and "interrupted" are kept; the rest is an error's.)
export const stopped = (message) => STOPS[message.stopped]?.() ?? message.stopped;

const STOPS = { stopped: () => t("stopped"), interrupted: () => t("interrupted") };

// The connection's end, a TypeError, has other words in every browser; in some it is also how a page
// that is reloaded hears of it.
function why(error, message) {
  if (error.name === "AbortError") return "stopped";
  if (!(error instanceof TypeError)) return error.message;
  return message.content || message.thoughts ? "interrupted" : t("this node does not answer");
}

export function inWords({ tokens, prompt, cached, first_s, rate }) {
  const facts = [
    tokens ? t("{tokens} tokens", { tokens }) : "",
    rate ? t("{rate} tok/s", { rate: rate.toFixed(rate < 10 ? 1 : 0) }) : "",
    first_s ? t("first after {seconds} s", { seconds: first_s.toFixed(2) }) : "",
    cached ? t("{cached} of {prompt} prompt tokens were cached", { cached, prompt }) : "",
  ];
  return facts.filter(Boolean).join(" · ");
}

// Streams the answer to `body`, a request, into `message` and its `place` on the page: {body,
// follow} are an element and what keeps it in view; `onPart` is called as it grows. What was said
// before a stop or an error stays.
export async function stream(body, message, place, signal, onPart) {
  const began = performance.now();
  const bars = make("div");
  const growing = new Growing(place.body, place.follow);
  let unwatch = null; // while the answer waits
  let thoughts = null;
  let calls = null; // their place, once there are any
  let first = 0;
  let usage = null;
  place.body.replaceChildren(note("…"));
  try {
    for await (const event of chat(body, signal)) {
      if (event.waiting) {
        if (!message.content) place.body.replaceChildren(note(event.waiting), bars);
        unwatch ??= watchNodes(body.model, bars);
        continue;
      }
      unwatch?.();
      usage = event.usage ?? usage;
      const { content, reasoning_content: thought, tool_calls: pieces } = event.choices[0]?.delta ?? {};
      if ((content || thought || pieces) && !first) first = performance.now();
      if (thought) {
        message.thoughts = (message.thoughts ?? "") + thought;
        if (!thoughts) {
          thoughts = folded("");
          place.body.before(thoughts);
          place.body.replaceChildren();
        }
        thoughts.lastChild.textContent += thought;
        onPart();
      }
      if (content) {
        message.content += content;
        growing.show(message.content);
        onPart();
      }
      if (pieces) {
        if (!calls) {
          calls = make("div");
          place.body.after(calls);
          if (!message.content) place.body.replaceChildren();
        }
        gather((message.calls ??= []), pieces);
        calls.replaceChildren(...message.calls.map(shownCall));
      }
    }
    delete message.stopped;
    message.stats = measured(began, first, usage);
    growing.finish(message.content);
  } catch (error) {
    delete message.calls; // half of one is none
    calls?.remove();
    if (message.content) growing.finish(message.content);
    else place.body.replaceChildren();
    message.stopped = why(error, message);
    place.body.append(note(` ${stopped(message)}`, error.name === "AbortError" ? "" : "error"));
  } finally {
    unwatch?.();
  }
}
