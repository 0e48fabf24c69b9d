// The cluster: a line of words, and its ring as a picture.

import { getJson } from "./api.js";
import { make, shape } from "./dom.js";
import { History } from "./history.js";
import { Machines } from "./machines.js";
import { size } from "./progress.js";
import { layersOf, t } from "./words.js";

const INTERVAL_MS = 2000;
const SIZE = 220;
const RADIUS = 84;
const COLOURS = 6;

const colour = (index) => `c${index % COLOURS}`;

function point(share, radius = RADIUS) {
  const angle = 2 * Math.PI * share - Math.PI / 2;
  return [SIZE / 2 + radius * Math.cos(angle), SIZE / 2 + radius * Math.sin(angle)];
}

function arc(from, to) {
  const gap = to - from < 1 ? 0.006 : 0.0001;
  const [x0, y0] = point(from + gap);
  const [x1, y1] = point(to - gap);
  return `M ${x0} ${y0} A ${RADIUS} ${RADIUS} 0 ${to - from > 0.5 ? 1 : 0} 1 ${x1} ${y1}`;
}

// A plan's members as arcs, as long as their share of the layers.
function ring(plan, load) {
  const layers = plan.members.at(-1).shard.end_layer;
  const picture = shape("svg", { viewBox: `0 0 ${SIZE} ${SIZE}`, role: "img" });
  const said = plan.members.map(
    ({ node_id, shard }) => `${node_id}: ${layersOf(shard)}`,
  );
  picture.append(shape("title", {}, `${plan.model_id}. ${said.join("; ")}`));
  plan.members.forEach(({ shard }, index) => {
    const d = arc(shard.start_layer / layers, shard.end_layer / layers);
    picture.append(shape("path", { d, class: `arc ${colour(index)}` }));
  });
  const name = plan.model_id.split("/").at(-1);
  const middle = [
    [name.length > 22 ? `${name.slice(0, 21)}…` : name, "name"],
    [t("{count} layers", { count: layers }), ""],
    [load ? t("{rate} tok/s", { rate: load.tokens_per_s.toFixed(0) }) : "", ""],
    [load ? t("{running} running, {waiting} waiting", load) : "", ""],
  ];
  middle.forEach(([text, kind], line) =>
    picture.append(shape("text", { x: SIZE / 2, y: 92 + 18 * line, class: kind }, text)),
  );
  return picture;
}

const loadsOf = (serving) => Object.values(serving).flatMap((report) => report.plans);

// A node's parts of rings.
const placesOf = (id, plans) =>
  plans.flatMap((plan) =>
    plan.members.flatMap(({ node_id, shard }, index) =>
      node_id === id ? [{ colour: colour(index), text: layersOf(shard) }] : [],
    ),
  );

const used = ({ capabilities }) =>
  capabilities ? capabilities.memory_total_bytes - capabilities.memory_available_bytes : 0;

export class ClusterView {
  #line;
  #panel;
  #onModels;
  #drawn = "";
  #view = null;
  #machines = new Machines(() => {
    this.#drawn = "";
    this.#draw();
  });
  #history = new History({
    rate: [t("Speed"), (rate) => t("{rate} tok/s", { rate: rate.toFixed(0) })],
    used: [t("Memory in use"), size],
  });

  // `line` says it in words, `panel` shows it, `onModels` is called when other models are served.
  constructor(line, panel, onModels) {
    [this.#line, this.#panel, this.#onModels] = [line, panel, onModels];
  }

  async watch() {
    let served = null;
    for (;;) {
      try {
        const view = await getJson("/v1/topology");
        this.#view = view;
        this.#say();
        this.#draw();
        const now = view.plans.map(({ model_id }) => model_id).join();
        if (now !== served) await this.#onModels(Object.values(view.nodes));
        served = now;
      } catch {
        this.#line.textContent = t("this node does not answer");
      }
      await new Promise((resolve) => setTimeout(resolve, INTERVAL_MS));
    }
  }

  #say() {
    const { nodes, plans, serving } = this.#view;
    const every = Object.values(nodes);
    const live = every.filter(({ state }) => state !== "unreachable");
    const lost = every.length - live.length;
    const memory = live.reduce((sum, n) => sum + (n.capabilities?.memory_total_bytes ?? 0), 0);
    const ready = plans.map(({ model_id }) => model_id).join(", ");
    const words =
      (live.length === 1 ? t("1 node") : t("{count} nodes", { count: live.length })) +
      `${lost ? `, ${t("{count} unreachable", { count: lost })}` : ""} · ${(memory / 1e9).toFixed(0)} GB` +
      (ready ? ` · ${t("{model} ready", { model: ready })}` : "");
    if (this.#line.textContent !== words) this.#line.textContent = words;
    const loads = loadsOf(serving);
    this.#history.note({
      rate: loads.reduce((sum, load) => sum + load.tokens_per_s, 0),
      used: live.reduce((sum, n) => sum + used(n), 0),
    });
  }

  #draw() {
    if (this.#panel.hidden || !this.#view) return;
    const { nodes, plans, serving, links } = this.#view;
    const drawn = JSON.stringify([nodes, plans, serving, links]);
    if (drawn === this.#drawn) {
      this.#panel.querySelector(".history").replaceWith(this.#history.draw());
      return;
    }
    this.#drawn = drawn;
    const rings = make("div", { className: "rings" });
    for (const plan of plans) {
      rings.append(ring(plan, loadsOf(serving).find(({ plan_hash }) => plan_hash === plan.hash)));
    }
    if (!plans.length) rings.append(make("p", { textContent: t("No model is loaded yet.") }));
    const left = plans.flatMap((plan) => plan.left_out);
    const list = this.#machines.list(this.#view, (id) => placesOf(id, plans));
    const reasons = left.map(([id, why]) => make("p", { className: "note", textContent: t("{node} is left out: {why}", { node: id, why }) }));
    const focused = this.#panel.contains(document.activeElement) && document.activeElement.dataset.key;
    this.#panel.replaceChildren(rings, this.#history.draw(), list, ...reasons);
    if (focused) [...list.querySelectorAll("[data-key]")].find(({ dataset }) => dataset.key === focused)?.focus();
  }
}
