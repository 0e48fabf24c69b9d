// What a node does for a model, as a bar with words.

import { make, note } from "./dom.js";
import { t } from "./words.js";

export function size(bytes) {
  if (bytes === null) return "";
  return bytes < 1e9 ? `${Math.round(bytes / 1e6)} MB` : `${(bytes / 1e9).toFixed(bytes < 1e10 ? 1 : 0)} GB`;
}

// (Of a newer node there may be other phases.)
const PHASES = {
  checking: () => t("checking"),
  waiting: () => t("waiting"),
  downloading: () => t("downloading"),
  verifying: () => t("verifying"),
  converting: () => t("converting"),
  loading: () => t("loading"),
  warming: () => t("warming up"),
  ready: () => t("ready"),
  failed: () => t("failed"),
  cancelled: () => t("cancelled"),
};

export function bar({ node_id, phase, done, total, speed, eta_s, warning }) {
  const facts = [
    `${node_id}: ${PHASES[phase]?.() ?? phase}`,
    total ? t("{done} of {total}", { done: size(done), total: size(total) }) : "",
    speed ? `${size(speed)}/s` : "",
    eta_s ? t("{seconds} s left", { seconds: Math.ceil(eta_s) }) : "",
    warning ?? "",
  ];
  const label = make("label", { className: "node" }, note(facts.filter(Boolean).join(" · ")));
  if (phase === "failed") return label;
  const moving = make("progress");
  if (phase === "ready") [moving.max, moving.value] = [1, 1];
  else if (total) [moving.max, moving.value] = [total, done];
  label.append(moving);
  return label;
}
