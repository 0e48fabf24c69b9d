// A model's ring as a picture: its members as arcs as long as their share of the layers, the links
// between them, and steps that go around while an answer is written.

import { shape } from "./dom.js";
import { size } from "./progress.js";
import { layersOf, t } from "./words.js";

const [WIDTH, HEIGHT, RADIUS, COLOURS] = [440, 250, 84, 6];
const [FULL, NAMED] = [4, 12]; // with more members only names are written beside arcs, then nothing

export const colour = (index) => `c${index % COLOURS}`;

// A point of a circle, by its share of a turn from the top.
function point(share, radius = RADIUS) {
  const angle = 2 * Math.PI * share - Math.PI / 2;
  return [WIDTH / 2 + radius * Math.cos(angle), HEIGHT / 2 + radius * Math.sin(angle)];
}

function arc(from, to) {
  const gap = to - from < 1 ? 0.006 : 0.0001;
  const [x0, y0] = point(from + gap);
  const [x1, y1] = point(to - gap);
  return `M ${x0} ${y0} A ${RADIUS} ${RADIUS} 0 ${to - from > 0.5 ? 1 : 0} 1 ${x1} ${y1}`;
}

// Lines of text beside the ring, away from it.
class Label {
  constructor(picture, share, kinds) {
    const [x, y] = point(share, RADIUS + 16);
    const side = x - WIDTH / 2;
    const anchor = side > 12 ? "start" : side < -12 ? "end" : "middle";
    const above = y < HEIGHT / 2;
    const first = anchor === "middle" ? (above ? y - 8 - 13 * (kinds.length - 1) : y + 14) : y - 6 * (kinds.length - 1) + 4;
    this.lines = kinds.map((kind, i) => shape("text", { x, y: first + 13 * i, class: `${anchor} ${kind}` }));
    picture.append(...this.lines);
  }

  say(...texts) {
    this.lines.forEach((line, i) => {
      if (line.textContent !== texts[i]) line.textContent = texts[i];
    });
  }
}

const perSecond = (bytes) => (bytes < 1e6 ? `${(bytes / 1e3).toFixed(bytes < 1e4 ? 1 : 0)} KB/s` : `${size(bytes)}/s`);

export const linkInWords = ({ round_trip_ms, bytes_per_s }) =>
  [round_trip_ms ? `${round_trip_ms.toFixed(round_trip_ms < 10 ? 1 : 0)} ms` : "", bytes_per_s ? perSecond(bytes_per_s) : ""]
    .filter(Boolean)
    .join(" · ");

export class Ring {
  #plan;
  #members = [];
  #links = [];
  #middle;
  #steps;
  endedAt = null; // set by who shows it

  constructor(plan) {
    this.#plan = plan;
    this.modelId = plan.model_id;
    const layers = plan.members.at(-1).shard.end_layer;
    const several = plan.members.length > 1;
    this.element = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
    const said = plan.members.map(({ node_id, shard }) => `${node_id}: ${layersOf(shard)}`);
    this.element.append(shape("title", {}, `${plan.model_id}. ${said.join("; ")}`));
    plan.members.forEach(({ shard }, index) => {
      const [from, to] = [shard.start_layer / layers, shard.end_layer / layers];
      this.element.append(shape("path", { d: arc(from, to), class: `arc ${colour(index)}` }));
      if (plan.members.length > NAMED) return;
      const kinds = plan.members.length > FULL ? ["name"] : ["name", ""];
      this.#members.push(new Label(this.element, several ? (from + to) / 2 : 0.25, kinds));
      if (several && plan.members.length <= FULL) this.#links.push(new Label(this.element, to, ["link"]));
    });
    this.#middle = ["name", "", "", ""].map((kind, i) =>
      shape("text", { x: WIDTH / 2, y: 107 + 18 * i, class: `middle ${kind}` }),
    );
    this.#steps = shape("g", { class: "steps" });
    plan.members.forEach((_, index) => {
      const [cx, cy] = point(index / plan.members.length);
      this.#steps.append(shape("circle", { cx, cy, r: 4 }));
    });
    this.element.append(...this.#middle, this.#steps);
  }

  // `serving` is what every node says that it does.
  show(serving) {
    const load = Object.values(serving)
      .flatMap(({ plans }) => plans)
      .find(({ plan_hash }) => plan_hash === this.#plan.hash);
    const name = this.#plan.model_id.split("/").at(-1);
    [
      name.length > 22 ? `${name.slice(0, 21)}…` : name,
      t("{count} layers", { count: this.#plan.members.at(-1).shard.end_layer }),
      load ? t("{rate} tok/s", { rate: load.tokens_per_s.toFixed(0) }) : "",
      load ? t("{running} running, {waiting} waiting", load) : "",
    ].forEach((text, i) => {
      if (this.#middle[i].textContent !== text) this.#middle[i].textContent = text;
    });
    // As many go around as can be on their way at once.
    const moving = load ? Math.min(load.running, this.#plan.members.length) : 0;
    [...this.#steps.children].forEach((step, i) => step.classList.toggle("moving", i < moving));
    this.#plan.members.forEach(({ node_id }, i) => {
      const report = serving[node_id];
      const pages = load?.members[i]?.kv_pages;
      const facts = [
        report && t("{percent} % busy", { percent: Math.round(100 * report.busy) }),
        pages?.pages && t("KV {percent} %", { percent: Math.ceil((100 * pages.used) / pages.pages) }),
      ];
      this.#members[i]?.say(node_id, facts.filter(Boolean).join(" · "));
      const next = this.#plan.members[(i + 1) % this.#plan.members.length].node_id;
      const link = report?.links.find(({ to }) => to === next);
      this.#links[i]?.say(link ? linkInWords(link) : "");
    });
  }
}
