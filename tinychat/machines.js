// The cluster's nodes as rows; each opens to a page of its own: how it is reached, what it sends and
// brings, what is on its disk, its log, and a drain.

import { getJson } from "./api.js";
import { button, make, note } from "./dom.js";
import { send } from "./models.js";
import { bar, size } from "./progress.js";
import { colour, linkInWords } from "./ring.js";
import { layersOf, t } from "./words.js";

const LOG_LINES = 50;
const LOOK_MS = 3000;
const FADE_MS = 400;

function facts({ state, capabilities, problem, draining }, places, report) {
  return [
    capabilities && `${capabilities.chip} (${capabilities.accelerator})`,
    capabilities &&
      t("{free} of {total} free", {
        free: size(capabilities.memory_available_bytes),
        total: size(capabilities.memory_total_bytes),
      }),
    report && t("{percent} % busy", { percent: Math.round(100 * report.busy) }),
    report?.slowdown > 2 && t("{count} times slower than usual", { count: Math.round(report.slowdown) }),
    draining && t("drained"),
    ...places.map(({ text }) => text),
    state === "unreachable" ? problem || t("cannot be reached") : "",
  ].filter(Boolean);
}

// A node's parts of rings.
const placesOf = (id, plans) =>
  plans.flatMap((plan) =>
    plan.members.flatMap(({ node_id, shard }, index) =>
      node_id === id ? [{ colour: colour(index), text: layersOf(shard) }] : [],
    ),
  );

export class Machines {
  element = make("ul", {});
  #rows = new Map(); // by the node's id

  // `view` is the topology.
  show(view) {
    for (const [id, row] of this.#rows) {
      if (view.nodes[id]) continue;
      this.#rows.delete(id);
      row.leave();
    }
    for (const node of Object.values(view.nodes)) {
      if (!this.#rows.has(node.node_id)) {
        this.#rows.set(node.node_id, new Row(node.node_id));
        this.element.append(this.#rows.get(node.node_id).element);
      }
      this.#rows.get(node.node_id).show(node, view);
    }
  }
}

class Row {
  #id;
  #dot = make("span", {});
  #name;
  #about = make("span", {});
  #more = null; // what it opens to
  #looks = 0;

  constructor(id) {
    this.#id = id;
    this.#name = button(id, () => this.#turn(), { "aria-expanded": "false" });
    this.element = make("li", { className: "machine" }, this.#dot, this.#name, this.#about);
  }

  show(node, view) {
    const places = placesOf(this.#id, view.plans);
    this.element.className = `machine ${node.state}`;
    this.#dot.className = `dot ${places[0]?.colour ?? ""}`;
    const words = facts(node, places, view.serving[this.#id]).join(" · ");
    if (this.#about.textContent !== words) this.#about.textContent = words;
    this.#shown = [node, view];
    this.#more?.show(node, view);
  }

  #shown = null;

  leave() {
    clearInterval(this.#looks);
    this.element.classList.add("gone");
    setTimeout(() => this.element.remove(), FADE_MS);
  }

  #turn() {
    const opens = !this.#more;
    this.#name.setAttribute("aria-expanded", String(opens));
    clearInterval(this.#looks);
    this.#more?.element.remove();
    this.#more = opens ? new More(this.#id) : null;
    if (!opens) return;
    this.element.append(this.#more.element);
    this.#more.show(...this.#shown);
    this.#more.look();
    this.#looks = setInterval(() => this.#more.look(), LOOK_MS);
  }
}

class More {
  #id;
  #way = make("p", {});
  #work = make("div", {});
  #disk = make("p", { textContent: t("looking at its disk…") });
  #drain;
  #said = make("span", { className: "note" });
  #log = make("pre", { className: "log", tabIndex: 0, role: "log", "aria-label": t("log") });
  #draining = false;
  #isLive = true;

  constructor(id) {
    this.#id = id;
    this.#drain = button("", () => this.#turnDrain());
    const acts = make("p", {}, this.#drain, this.#said);
    this.element = make("div", { className: "more" }, this.#way, this.#work, this.#disk, acts, this.#log);
    this.#lookAtDisk();
  }

  show({ state, address, draining }, { links, self, serving, activity }) {
    const link = links.find((one) => one.source === self && one.target === this.#id);
    const trip = link?.round_trip_ms;
    const way = [
      address,
      link && t("over {interface}", link),
      typeof trip === "number" && t("round trip {ms} ms", { ms: trip.toFixed(trip < 10 ? 1 : 0) }),
      ...(serving[this.#id]?.links ?? []).map((one) => `→ ${one.to} ${linkInWords(one)}`),
    ];
    this.#way.textContent = way.filter(Boolean).join(" · ");
    const brings = activity.filter(({ node_id, phase }) => node_id === this.#id && phase !== "ready");
    this.#work.replaceChildren(...brings.map((one) => make("div", {}, note(one.model), bar(one))));
    [this.#draining, this.#isLive] = [draining, state !== "unreachable"];
    this.#drain.hidden = this.#log.hidden = !this.#isLive;
    this.#drain.textContent = draining ? t("Use again") : t("Drain");
    this.#drain.title = draining ? t("give it layers again") : t("have others take over its layers");
  }

  // Its log as it is now; whoever has scrolled up in it is left there.
  async look() {
    if (!this.#isLive) return;
    try {
      const url = `/v1/nodes/${encodeURIComponent(this.#id)}/log?lines=${LOG_LINES}`;
      const text = (await getJson(url)).lines.join("\n") || t("nothing is in its log");
      if (text === this.#log.textContent) return;
      const below = this.#log.scrollHeight - this.#log.scrollTop - this.#log.clientHeight;
      this.#log.textContent = text;
      if (below < 20) this.#log.scrollTop = this.#log.scrollHeight;
    } catch (error) {
      this.#log.textContent = error.message;
    }
  }

  async #lookAtDisk() {
    try {
      const { data } = await getJson("/v1/cluster/models");
      const held = data.flatMap(({ id, nodes }) =>
        nodes.filter((one) => one.node_id === this.#id).map((one) => `${id} (${size(one.size)})`),
      );
      this.#disk.textContent = held.length ? held.join(", ") : t("no models on its disk");
    } catch (error) {
      this.#disk.textContent = error.message;
    }
  }

  async #turnDrain() {
    const undo = this.#draining;
    try {
      const url = `/v1/nodes/${encodeURIComponent(this.#id)}/drain`;
      const { models, problems } = await send(undo ? "DELETE" : "POST", url);
      const left = models.length ? t("still computes for {models}", { models: models.join(", ") }) : "";
      const text = [left, ...Object.values(problems)].filter(Boolean).join(". ");
      this.#tell(undo ? "" : text || t("computes nothing any more"));
    } catch (error) {
      this.#tell(error.message, "error");
    }
  }

  #tell(text, kind = "") {
    this.#said.textContent = text;
    this.#said.className = `note ${kind}`;
  }
}
