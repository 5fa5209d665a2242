// Money, energy and carbon: so far, and by the end.

import { runPath, settled } from "../api.js";
import { fill, h, words } from "../dom.js";
import { calmly } from "../live.js";
import { failed, loading } from "../parts/states.js";
import { carbon, energy, isNumber, money, own, title } from "../units.js";

const UPDATE_MS = 10000;
const ROWS = [
  ["usd", "Money", money, "no price is known for this cluster"],
  ["energy_j", "Energy", energy, "no rank could measure or estimate it"],
  ["kgco2e", "Carbon, CO2e", carbon, "needs energy and the carbon intensity of the grid"],
];

export class CostPage {
  constructor(outlet, name, shell) {
    Object.assign(this, { outlet, name, shell });
    fill(outlet, loading());
    this.update = calmly(() => this.#load(), UPDATE_MS);
  }

  show() {
    this.update();
  }

  grown() {
    this.update();
  }

  leave() {
    this.gone = true;
    this.update.stop();
  }

  async #load() {
    try {
      const answer = await settled(runPath(this.name, "/cost"), () => this.gone);
      if (this.gone) return;
      this.shell.damaged(answer);
      this.#draw(answer);
    } catch (error) {
      if (!this.gone) failed(this.outlet, error);
    }
  }

  #draw({ so_far: now = {}, projected: end = {}, predicted: plan = {}, sources = {} }) {
    const figures = ROWS.map(([key, name, format, missing]) =>
      figure(name, { now: now?.[key], end: end?.[key], plan: plan?.[key] }, format, missing),
    );
    const lines = Object.entries(sources ?? {})
      .filter(([, text]) => text !== null && text !== "")
      .map(([key, text]) =>
        h(
          "div",
          {},
          h("dt", {}, own(SOURCES, key) ?? title(key)),
          h("dd", {}, typeof text === "object" ? JSON.stringify(text) : String(text)),
        ),
      );
    fill(
      this.outlet,
      h("div", { class: "cost-figures" }, figures),
      h(
        "section",
        { class: "panel" },
        h("h2", {}, "Where these numbers come from"),
        lines.length ? h("dl", { class: "facts" }, lines) : words("No source is recorded."),
      ),
    );
  }
}

const SOURCES = {
  usd: "Money",
  price: "Price",
  energy_j: "Energy",
  energy: "Energy",
  kgco2e: "Carbon",
  grid: "Grid",
  pue: "PUE",
  power: "Power",
  projected: "Projection",
};

function figure(name, { now, end, plan }, format, missing) {
  const lines = [
    isNumber(now) ? "so far" : missing,
    isNumber(end) ? `${format(end)} by the end, at the current rate` : null,
    isNumber(plan) ? `${format(plan)} predicted by the plan` : null,
  ];
  return h(
    "section",
    { class: "panel" },
    h("h2", {}, name),
    h("p", { class: "big" }, isNumber(now) ? format(now) : "not known"),
    lines.filter(Boolean).map((line) => h("p", { class: "hint" }, line)),
  );
}
