// The cluster: a line of words, and its ring as a picture.

import { getJson } from "./api.js";
import { make } from "./dom.js";

const INTERVAL_MS = 2000;
const SVG = "http://www.w3.org/2000/svg";
const SIZE = 220;
const RADIUS = 84;
const COLOURS = 6;

const gigabytes = (bytes) => `${(bytes / 1e9).toFixed(bytes < 1e10 ? 1 : 0)} GB`;
export const megabytes = (bytes) => `${(bytes / 1e6).toFixed(0)} MB`;

function shape(name, attributes, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

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
    ({ node_id, shard }) => `${node_id}: layers ${shard.start_layer} to ${shard.end_layer - 1}`,
  );
  picture.append(shape("title", {}, `${plan.model_id}. ${said.join("; ")}`));
  plan.members.forEach(({ shard }, index) => {
    const d = arc(shard.start_layer / layers, shard.end_layer / layers);
    picture.append(shape("path", { d, class: `arc c${index % COLOURS}` }));
  });
  const name = plan.model_id.split("/").at(-1);
  const middle = [
    [name.length > 22 ? `${name.slice(0, 21)}…` : name, "name"],
    [`${layers} layers`, ""],
    [load ? `${load.tokens_per_s.toFixed(0)} tok/s` : "", ""],
    [load ? `${load.running} running, ${load.waiting} waiting` : "", ""],
  ];
  middle.forEach(([text, kind], line) =>
    picture.append(shape("text", { x: SIZE / 2, y: 92 + 18 * line, class: kind }, text)),
  );
  return picture;
}

function node({ node_id, state, capabilities, problem }, plans, report) {
  const row = make("li", { className: `machine ${state}` });
  const title = make("strong", { textContent: node_id });
  const places = plans.flatMap((plan) =>
    plan.members.flatMap(({ node_id: id, shard }, index) =>
      id === node_id ? [[index, `layers ${shard.start_layer} to ${shard.end_layer - 1}`]] : [],
    ),
  );
  const facts = [
    capabilities && `${capabilities.chip} (${capabilities.accelerator})`,
    capabilities &&
      `${gigabytes(capabilities.memory_available_bytes)} of ` +
        `${gigabytes(capabilities.memory_total_bytes)} free`,
    report && `${Math.round(100 * report.busy)} % busy`,
    report?.slowdown > 2 && `${Math.round(report.slowdown)} times slower than usual`,
    ...places.map(([, text]) => text),
    state === "unreachable" ? problem || "cannot be reached" : "",
  ];
  const dot = make("span", {
    className: `dot ${places.length ? `c${places[0][0] % COLOURS}` : ""}`,
  });
  const about = make("span", { textContent: facts.filter(Boolean).join(" · ") });
  row.append(dot, title, about);
  return row;
}

export class ClusterView {
  #line;
  #panel;
  #onModels;
  #drawn = "";

  // `line` says it in words, `panel` shows it, `onModels` is called when other models are served.
  constructor(line, panel, onModels) {
    [this.#line, this.#panel, this.#onModels] = [line, panel, onModels];
  }

  async watch() {
    let served = null;
    for (;;) {
      try {
        const view = await getJson("/v1/topology");
        this.#show(view);
        const now = view.plans.map(({ model_id }) => model_id).join();
        if (now !== served) await this.#onModels(Object.values(view.nodes));
        served = now;
      } catch {
        this.#line.textContent = "this node does not answer";
      }
      await new Promise((resolve) => setTimeout(resolve, INTERVAL_MS));
    }
  }

  #show({ nodes, plans, serving }) {
    const every = Object.values(nodes);
    const live = every.filter(({ state }) => state !== "unreachable");
    const lost = every.length - live.length;
    const memory = live.reduce((sum, n) => sum + (n.capabilities?.memory_total_bytes ?? 0), 0);
    const ready = plans.map(({ model_id }) => model_id).join(", ");
    const words =
      `${live.length} ${live.length === 1 ? "node" : "nodes"}` +
      `${lost ? `, ${lost} unreachable` : ""} · ${(memory / 1e9).toFixed(0)} GB` +
      (ready ? ` · ${ready} ready` : "");
    if (this.#line.textContent !== words) this.#line.textContent = words;
    if (this.#panel.hidden) return;
    const loads = Object.values(serving).flatMap((report) => report.plans);
    const drawn = JSON.stringify([every, plans, serving]);
    if (drawn === this.#drawn) return;
    this.#drawn = drawn;
    const rings = make("div", { className: "rings" });
    for (const plan of plans) {
      rings.append(ring(plan, loads.find(({ plan_hash }) => plan_hash === plan.hash)));
    }
    if (!plans.length) rings.append(make("p", { textContent: "No model is loaded yet." }));
    const left = plans.flatMap((plan) => plan.left_out);
    const list = make("ul", {});
    list.append(...every.map((each) => node(each, plans, serving[each.node_id])));
    const reasons = left.map(([id, why]) => make("p", { className: "note", textContent: `${id} is left out: ${why}` }));
    this.#panel.replaceChildren(rings, list, ...reasons);
  }
}
