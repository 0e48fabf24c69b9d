// The models to choose from: what is here, what fits, what the hub has; brought, loaded, deleted.

import { ask, getJson } from "./api.js";
import { button, element, make, note } from "./dom.js";
import { bar, size } from "./progress.js";
import { layersOf, t } from "./words.js";

const LOOK_MS = 1500;
const TYPED_MS = 400;

// What a model is for, besides talking.
const KINDS = {
  code: () => t("code"),
  reasoning: () => t("thinks"),
  vision: () => t("sees, here as text"),
};

const FITS = {
  here: () => [t("fits here"), "good"],
  cluster: () => [t("fits the cluster"), "good"],
  part: () => [t("fits in part: slower"), ""],
  no: ({ missing }) => [t("too large by {size}", { size: size(missing) }), "bad"],
};

export async function send(method, url, body) {
  const response = await ask(url, {
    method,
    ...(body && { headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) }),
  });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error.message);
  return answer;
}

const path = (id) => id.split("/").map(encodeURIComponent).join("/");

export class Models {
  #dialog = element("catalog");
  #find = element("find");
  #here = element("here");
  #hub = element("hub");
  #status = element("catalog-said");
  #onChoose;
  #known = []; // of the catalog
  #doing = new Map(); // by model, what nodes do for it
  #busy = new Map(); // by model, what was asked for and is not answered yet
  #said = new Map(); // by model, what came of that
  #timer = null;
  #searched = "";
  #found = []; // on the hub
  #hubSaid = "";
  #typed = null;

  // `onChoose` is called with the id of the model that is to be chatted with.
  constructor(onChoose) {
    this.#onChoose = onChoose;
    element("models").addEventListener("click", () => this.open());
    element("catalog-close").addEventListener("click", () => this.#dialog.close());
    this.#dialog.addEventListener("close", () => clearTimeout(this.#timer));
    this.#find.addEventListener("input", () => {
      this.#draw();
      clearTimeout(this.#typed);
      this.#typed = setTimeout(() => this.#search(), TYPED_MS);
    });
  }

  open() {
    this.#dialog.showModal();
    this.#find.focus();
    this.#look();
  }

  async #look() {
    clearTimeout(this.#timer);
    try {
      const [catalog, progress] = await Promise.all([
        getJson("/v1/catalog"),
        getJson("/v1/download/progress"),
      ]);
      this.#known = catalog.data;
      this.#doing = Map.groupBy
        ? Map.groupBy(progress.data, ({ model }) => model)
        : progress.data.reduce((all, one) => all.set(one.model, [...(all.get(one.model) ?? []), one]), new Map());
      const { here, cluster } = catalog.memory;
      this.#status.textContent = t("{here} free on this node, {cluster} in the cluster", {
        here: size(here),
        cluster: size(cluster),
      });
      this.#draw();
    } catch {
      this.#status.textContent = t("this node does not answer");
    }
    if (this.#dialog.open) this.#timer = setTimeout(() => this.#look(), LOOK_MS);
  }

  async #search() {
    const words = this.#find.value.trim();
    if (words === this.#searched) return;
    this.#searched = words;
    this.#found = [];
    this.#hubSaid = words.length < 2 ? "" : t("asking the hub…");
    this.#draw();
    if (words.length < 2) return;
    let found = [];
    let said = t("nothing else on the hub has such a name");
    try {
      found = (await getJson(`/v1/catalog/search?q=${encodeURIComponent(words)}`)).data;
    } catch {
      said = t("the hub cannot be asked from here");
    }
    if (words !== this.#searched) return;
    this.#found = found.map((each) => ({ nodes: [], ...each }));
    this.#hubSaid = said;
    this.#draw();
  }

  #draw() {
    const words = this.#find.value.trim().toLowerCase().split(/\s+/);
    const matches = ({ id, name }) => words.every((word) => `${id} ${name}`.toLowerCase().includes(word));
    const rank = ({ ready, nodes }) => (ready ? 0 : nodes.length ? 1 : 2);
    const shown = this.#known.filter(matches).sort((a, b) => rank(a) - rank(b) || (a.size ?? 0) - (b.size ?? 0));
    this.#drawInto(this.#here, shown, t("no model here has such a name"));
    const known = new Set(this.#known.flatMap(({ id, repo }) => [id, repo]));
    const others = this.#found.filter(({ id }) => !known.has(id));
    this.#drawInto(this.#hub, others, this.#hubSaid);
  }

  // A row that has the focus, or is read, stays as it is unless it says something else now.
  #drawInto(list, models, otherwise) {
    const before = new Map([...list.children].map((row) => [row.dataset.key, row]));
    const rows = models.map((model) => {
      const { id } = model;
      const key = JSON.stringify([model, this.#doing.get(id), this.#busy.get(id), this.#said.get(id)]);
      return before.get(key) ?? this.#row(model, key);
    });
    if (!rows.length && otherwise) rows.push(before.get(otherwise) ?? make("li", {}, note(otherwise)));
    if (!models.length && rows.length) rows[0].dataset.key = otherwise;
    if (rows.length !== list.children.length || rows.some((row, i) => row !== list.children[i])) {
      list.replaceChildren(...rows);
    }
  }

  #row(model, key) {
    const { id, name, ready, nodes } = model;
    const row = make("li", { className: "choice" });
    row.dataset.key = key;
    row.dataset.model = id;
    const [fits, kind] = FITS[model.fits]?.(model) ?? ["", ""];
    const where = nodes.map(({ node_id, whole, size: bytes }) => (whole ? node_id : `${node_id} (${size(bytes)})`));
    const facts = [
      id === name ? "" : id,
      model.gguf ? t("GGUF, several sizes") : size(model.size),
      model.context ? t("{count}k of context", { count: Math.round(model.context / 1024).toLocaleString() }) : "",
      ...(model.kinds ?? []).map((each) => KINDS[each]?.() ?? ""),
      model.downloads ? t("{count} downloads", { count: model.downloads.toLocaleString() }) : "",
      where.length ? t("on {nodes}", { nodes: where.join(", ") }) : "",
    ];
    const title = make("p", { className: "title" }, make("strong", { textContent: name }));
    if (ready) title.append(note(t("loaded"), "badge good"));
    else if (fits) title.append(note(fits, `badge ${kind}`));
    row.append(title, make("p", { className: "note", textContent: facts.filter(Boolean).join(" · ") }));
    for (const doing of this.#doing.get(id) ?? []) {
      if (!["ready", "cancelled"].includes(doing.phase)) row.append(bar(doing));
    }
    const said = this.#said.get(id);
    if (said) row.append(make("p", { className: `note ${said.kind}`, textContent: said.text }));
    row.append(this.#acts(model));
    return row;
  }

  #acts(model) {
    const { id, ready, nodes, removable } = model;
    const busy = this.#busy.get(id);
    const acts = make("div", { className: "acts" });
    const act = (label, work, properties = {}) =>
      acts.append(button(label, work, { disabled: Boolean(busy), "aria-label": `${label} ${model.name}`, ...properties }));
    const fetching = (this.#doing.get(id) ?? []).some(({ phase }) => ["downloading", "checking", "verifying"].includes(phase));
    act(t("Chat"), () => {
      this.#dialog.close();
      this.#onChoose(id);
    });
    if (ready) act(t("Unload"), () => this.#do(id, t("unloading"), () => send("DELETE", `/v1/load/${path(id)}`), t("its memory is free")));
    else act(t("Load"), () => this.#do(id, t("loading"), () => send("POST", "/v1/load", { model: id }), ""));
    if (fetching) {
      act(t("Cancel"), () => this.#do(id, "", () => send("DELETE", `/v1/download/${path(id)}`), ""), { disabled: false });
    } else if (!nodes.some(({ whole }) => whole)) {
      act(t("Download"), () => this.#do(id, "", () => send("POST", "/v1/download", { model: id }), ""));
    }
    act(t("Where?"), () => this.#do(id, t("asking every node"), () => this.#placement(id), null));
    if (removable && !ready) {
      act(t("Delete"), async () => {
        if (!window.confirm(t("Delete the files of {name} from this machine?", model))) return;
        await this.#do(id, t("deleting"), () => send("DELETE", `/v1/models/${path(id)}`), t("its files are gone"));
      });
    }
    if (busy) acts.append(note(`${busy}…`));
    return acts;
  }

  async #placement(id) {
    const found = await send("GET", `/v1/placement/${path(id)}`);
    const members = found.members.map((member) => `${member.node_id} ${layersOf(member)}`);
    const rate = found.predicted_tokens_per_s;
    return `${members.join(", ")}${rate ? `; ${t("about {rate} tokens a second", { rate })}` : ""}`;
  }

  // Asks for something of a model; what comes of it stands in its row. `done`: null for what `work` gives.
  async #do(id, doing, work, done) {
    if (doing) this.#busy.set(id, doing);
    this.#said.delete(id);
    this.#draw();
    try {
      const answer = await work();
      const text = done ?? answer;
      if (text) this.#said.set(id, { kind: "", text });
    } catch (error) {
      this.#said.set(id, { kind: "bad", text: error.message });
    }
    this.#busy.delete(id);
    await this.#look();
  }
}
