// The cluster's nodes as rows; each opens to how it is reached, what is on its disk, and a drain.

import { getJson } from "./api.js";
import { button, make, note } from "./dom.js";
import { send } from "./models.js";
import { size } from "./progress.js";
import { t } from "./words.js";

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

export class Machines {
  #redraw;
  #opened = new Set();
  #disks = new Map(); // by node, what its disk holds, in words
  #said = new Map(); // by node, what came of a drain

  // `redraw` is called when something is to be shown that no new view of the cluster says.
  constructor(redraw) {
    this.#redraw = redraw;
  }

  // `view` is the topology; `placesOf` gives a node's parts of rings: {colour, text}.
  list({ nodes, links, serving, self }, placesOf) {
    const rows = Object.values(nodes).map((node) => {
      const { node_id, state } = node;
      const places = placesOf(node_id);
      const dot = make("span", { className: `dot ${places[0]?.colour ?? ""}` });
      const isOpen = this.#opened.has(node_id);
      const name = button(node_id, () => this.#turn(node_id), { "aria-expanded": String(isOpen) });
      name.dataset.key = node_id;
      const about = make("span", { textContent: facts(node, places, serving[node_id]).join(" · ") });
      const row = make("li", { className: `machine ${state}` }, dot, name, about);
      if (isOpen) row.append(this.#more(node, links.find((link) => link.source === self && link.target === node_id)));
      return row;
    });
    return make("ul", {}, ...rows);
  }

  #more({ node_id, state, address, draining }, link) {
    const trip = link?.round_trip_ms;
    const way = [
      address,
      link && t("over {interface}", link),
      typeof trip === "number" && t("round trip {ms} ms", { ms: trip.toFixed(trip < 10 ? 1 : 0) }),
    ];
    const more = make("div", { className: "more" }, make("p", { textContent: way.filter(Boolean).join(" · ") }));
    more.append(make("p", { textContent: this.#disks.get(node_id) ?? t("looking at its disk…") }));
    if (state !== "unreachable") {
      const act = button(draining ? t("Use again") : t("Drain"), () => this.#drain(node_id, draining), {
        title: draining ? t("give it layers again") : t("have others take over its layers"),
      });
      act.dataset.key = `drain ${node_id}`;
      more.append(act);
    }
    const said = this.#said.get(node_id);
    if (said) more.append(note(said.text, said.kind));
    return more;
  }

  async #turn(node_id) {
    if (this.#opened.delete(node_id)) return this.#redraw();
    this.#opened.add(node_id);
    this.#redraw();
    try {
      const { data } = await getJson("/v1/cluster/models");
      const held = data.flatMap(({ id, nodes }) =>
        nodes.filter((one) => one.node_id === node_id).map((one) => `${id} (${size(one.size)})`),
      );
      this.#disks.set(node_id, held.length ? held.join(", ") : t("no models on its disk"));
    } catch (error) {
      this.#disks.set(node_id, error.message);
    }
    return this.#redraw();
  }

  async #drain(node_id, undo) {
    try {
      const url = `/v1/nodes/${encodeURIComponent(node_id)}/drain`;
      const { models, problems } = await send(undo ? "DELETE" : "POST", url);
      const left = models.length ? t("still computes for {models}", { models: models.join(", ") }) : "";
      const text = [left, ...Object.values(problems)].filter(Boolean).join(". ");
      this.#said.set(node_id, { text: undo ? "" : text || t("computes nothing any more"), kind: "" });
    } catch (error) {
      this.#said.set(node_id, { text: error.message, kind: "error" });
    }
    this.#redraw();
  }
}
