// The last minutes as small plots.

import { make, shape } from "./dom.js";
import { t } from "./words.js";

const LASTS_MS = 5 * 60_000;
const WIDTH = 240;
const HEIGHT = 44;

export class History {
  #plots;
  #points = []; // {at, and a number for each plot}

  // `plots` names what each number is and says how it is told: {key: [name, (number) => text]}.
  constructor(plots) {
    this.#plots = plots;
  }

  note(numbers, at = performance.now()) {
    this.#points.push({ at, ...numbers });
    this.#points = this.#points.filter((point) => at - point.at <= LASTS_MS);
  }

  draw() {
    const plots = Object.entries(this.#plots).map(([key, [name, told]]) => this.#plot(key, name, told));
    return make("div", { className: "history" }, ...plots);
  }

  // Each number holds until the next one: a line of steps, from nought.
  #plot(key, name, told) {
    const now = this.#points.at(-1)?.at ?? 0;
    const most = Math.max(...this.#points.map((point) => point[key]), 0);
    const x = (at) => (WIDTH * (1 - (now - at) / LASTS_MS)).toFixed(1);
    const y = (value) => (HEIGHT - 2 - (HEIGHT - 4) * (most ? value / most : 0)).toFixed(1);
    const line = this.#points.map((point, i) => `${i ? `H ${x(point.at)} V` : `M ${x(point.at)}`} ${y(point[key])}`);
    const last = told(this.#points.at(-1)?.[key] ?? 0);
    const facts = { name, last, most: told(most) };
    const words = t("{name}: {last} now, {most} at most in the last five minutes", facts);
    const picture = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", preserveAspectRatio: "none" });
    picture.append(shape("title", {}, words), shape("path", { d: line.join(" ") }));
    const caption = make("figcaption", { textContent: t("{name} · {last} (at most {most})", facts) });
    return make("figure", {}, picture, caption);
  }
}
