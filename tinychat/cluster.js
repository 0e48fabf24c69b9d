// The cluster: a line of words, and a panel with its rings, its last minutes and its nodes.

import { make } from "./dom.js";
import { History } from "./history.js";
import { on } from "./live.js";
import { Machines } from "./machines.js";
import { size } from "./progress.js";
import { Ring } from "./ring.js";
import { t } from "./words.js";

const NOTED_MS = 2000;
const FADED_MS = 5000; // how long a ring that ended stays in sight

const used = ({ capabilities }) =>
  capabilities ? capabilities.memory_total_bytes - capabilities.memory_available_bytes : 0;

const isLive = ({ state }) => state !== "unreachable";

export class ClusterView {
  #line;
  #panel;
  #onModels;
  #served = null;
  #view = null;
  #rings = new Map(); // by the hash of their plans
  #parts;
  #machines = new Machines();
  #history = new History({
    rate: [t("Speed"), (rate) => t("{rate} tok/s", { rate: rate.toFixed(0) })],
    used: [t("Memory in use"), size],
  });

  // `line` says it in words, `panel` shows it, `onModels` is called when other models are served.
  constructor(line, panel, onModels) {
    [this.#line, this.#panel, this.#onModels] = [line, panel, onModels];
    this.#parts = {
      rings: make("div", { className: "rings" }),
      history: this.#history.draw(),
      reasons: make("div", {}),
    };
    panel.append(this.#parts.rings, this.#parts.history, this.#machines.element, this.#parts.reasons);
  }

  watch() {
    on("cluster", (view) => this.#hear(view));
    on("lost", () => {
      this.#line.textContent = t("this node does not answer");
    });
    setInterval(() => this.#note(), NOTED_MS);
  }

  // The panel was opened or closed.
  turn() {
    this.#panel.hidden = !this.#panel.hidden;
    this.#draw();
    return !this.#panel.hidden;
  }

  async #hear(view) {
    this.#view = view;
    this.#say();
    this.#draw();
    const now = view.plans.map(({ model_id }) => model_id).join();
    if (now === this.#served) return;
    this.#served = now;
    try {
      await this.#onModels(Object.values(view.nodes));
    } catch {
      this.#served = null; // with the next view
    }
  }

  #say() {
    const { nodes, plans } = this.#view;
    const every = Object.values(nodes);
    const live = every.filter(isLive);
    const lost = every.length - live.length;
    const memory = live.reduce((sum, n) => sum + (n.capabilities?.memory_total_bytes ?? 0), 0);
    const ready = plans.map(({ model_id }) => model_id).join(", ");
    const words =
      (live.length === 1 ? t("1 node") : t("{count} nodes", { count: live.length })) +
      `${lost ? `, ${t("{count} unreachable", { count: lost })}` : ""} · ${(memory / 1e9).toFixed(0)} GB` +
      (ready ? ` · ${t("{model} ready", { model: ready })}` : "");
    if (this.#line.textContent !== words) this.#line.textContent = words;
  }

  #note() {
    if (!this.#view) return;
    const loads = Object.values(this.#view.serving).flatMap(({ plans }) => plans);
    this.#history.note({
      rate: loads.reduce((sum, load) => sum + load.tokens_per_s, 0),
      used: Object.values(this.#view.nodes).filter(isLive).reduce((sum, n) => sum + used(n), 0),
    });
    if (this.#panel.hidden) return;
    if (this.#rings.size > this.#view.plans.length) this.#draw();
    const drawn = this.#history.draw();
    this.#parts.history.replaceWith(drawn);
    this.#parts.history = drawn;
  }

  // Where a member is lost the next ring is there in a second or two: until then the last one stays,
  // or all that is below would jump up and down.
  #fade(plans) {
    const now = performance.now();
    for (const [hash, ring] of this.#rings) {
      const goesOn = plans.some((plan) => plan.hash === hash);
      ring.element.classList.toggle("ended", !goesOn);
      if (goesOn) ring.endedAt = null;
      else ring.endedAt ??= now;
      const isFollowed = plans.some(({ model_id }) => model_id === ring.modelId);
      if (goesOn || (now - ring.endedAt < FADED_MS && !isFollowed)) continue;
      ring.element.remove();
      this.#rings.delete(hash);
    }
  }

  #draw() {
    if (this.#panel.hidden || !this.#view) return;
    const { plans, serving } = this.#view;
    this.#fade(plans);
    for (const plan of plans) {
      if (!this.#rings.has(plan.hash)) this.#rings.set(plan.hash, new Ring(plan));
      const ring = this.#rings.get(plan.hash);
      ring.show(serving);
      if (!ring.element.isConnected) this.#parts.rings.append(ring.element);
    }
    const none = this.#parts.rings.querySelector("p");
    if (this.#rings.size) none?.remove();
    else if (!none) this.#parts.rings.append(make("p", { textContent: t("No model is loaded yet.") }));
    this.#machines.show(this.#view);
    const left = plans.flatMap((plan) => plan.left_out);
    const reasons = left.map(([id, why]) =>
      make("p", { className: "note", textContent: t("{node} is left out: {why}", { node: id, why }) }),
    );
    this.#parts.reasons.replaceChildren(...reasons);
  }
}
