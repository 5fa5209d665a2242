// Several runs on the same axes: by step, by tokens, or by time.

import { get } from "../api.js";
import { choice, fill, h, pick, table, words } from "../dom.js";
import { SERIES } from "../paint.js";
import { X, X_UNITS } from "../parts/axis.js";
import { Chart } from "../parts/chart.js";
import { failed, loading } from "../parts/states.js";
import { go, link, stay } from "../route.js";
import { NONE, isNumber, reading, seconds, count, integer, title } from "../units.js";

const POINTS = 800;
const AGAIN_MS = 5000;
const NAMES = ["loss", "tokens_per_s", "mfu", "grad_norm", "noise_scale", "duration_s", "memory_bytes"];

export class ComparePage {
  constructor(outlet) {
    this.x = choice("Horizontal axis", X, "step", (key) => this.#change({ x: key }));
    this.name = h(
      "select",
      { onchange: () => this.#change({ name: this.name.value }) },
      NAMES.map((name) => h("option", { value: name }, title(name))),
    );
    this.back = h("a", { href: "#/" }, "Choose other runs");
    this.body = h("div", {}, loading());
    fill(
      outlet,
      h("div", { class: "top" }, h("h1", {}, "Compare")),
      h(
        "div",
        { class: "tools" },
        h("label", {}, "Series", this.name),
        this.x,
        h("span", { class: "grow" }),
        this.back,
      ),
      this.body,
    );
    this.timer = setInterval(() => document.visibilityState === "visible" && this.#load(), AGAIN_MS);
  }

  show(_, query) {
    const before = this.query;
    this.query = query;
    this.back.href = link([], { pick: query.runs });
    pick(this.x, query.x ?? "step");
    this.name.value = NAMES.includes(query.name) ? query.name : "loss";
    if (before && before.runs === query.runs && before.name === query.name) this.#draw();
    else this.#load();
  }

  whole() {
    this.#change({ from: "", to: "" });
  }

  leave() {
    this.gone = true;
    clearInterval(this.timer);
    this.chart?.destroy();
  }

  #change(query, step = false) {
    const wanted = link(["compare"], { ...this.query, from: "", to: "", ...query });
    if (step) return go(wanted);
    stay(wanted);
    this.show(null, Object.fromEntries(new URLSearchParams(wanted.split("?")[1])));
  }

  async #load() {
    const names = (this.query.runs ?? "").split(",").filter(Boolean);
    if (!names.length) return fill(this.body, words("No runs are chosen. Tick two or more in the list of runs."));
    try {
      const answer = await get("compare", { runs: names.join(","), name: this.name.value, points: POINTS });
      if (this.gone) return;
      this.answer = { ...answer, runs: Object.values(answer.runs ?? {}) };
    } catch (error) {
      if (!this.gone && !this.answer) failed(this.body, error);
      return;
    }
    this.#draw();
  }

  #draw() {
    if (!this.answer || this.gone) return;
    const runs = this.answer.runs.filter((run) => Array.isArray(run.step) && run.step.length);
    const unit = runs[0]?.unit ?? "";
    this.#chart(unit);
    const kind = this.query.x ?? "step";
    const tables = runs.map((run) =>
      cut([xs(run, kind), run.mean.map((value) => value ?? null)], Number(this.query.from), Number(this.query.to)),
    );
    const joined = tables.length ? uPlot.join(tables) : [[]];
    this.chart.show({
      x: joined[0],
      xUnit: X_UNITS[kind],
      lines: runs.map((run, index) => ({
        label: run.run,
        values: joined[index + 1],
        hue: SERIES[index % SERIES.length],
      })),
    });
    fill(
      this.legend,
      table(
        this.#columns(unit),
        this.answer.runs.map((run) => ({ ...run, order: runs.indexOf(run) })),
        { caption: "Runs in this chart" },
      ),
      (this.answer.damage ?? []).map((one) => h("p", { class: "hint" }, `${one.where}: ${one.what}`)),
    );
  }

  #chart(unit) {
    const shape = `${this.name.value} ${unit}`;
    if (this.shape === shape) return;
    this.shape = shape;
    this.chart?.destroy();
    this.chart = new Chart({
      title: title(this.name.value),
      name: this.name.value,
      unit,
      height: 380,
      wide: true,
      onzoom: (from, to) => this.#change({ from, to }, true),
      onwhole: () => this.whole(),
    });
    this.chart.value.hidden = true; // ten runs do not fit in a caption: the table below has their values
    this.legend = h("div", { class: "panel" });
    fill(this.body, h("div", {}, this.chart.element), this.legend);
    this.legend.style.marginTop = "1.5rem";
  }

  #columns(unit) {
    const name = this.name.value;
    const last = (run) => (run.mean ?? []).findLast(isNumber);
    const least = (run) => (run.low ?? []).filter(isNumber).reduce((a, b) => Math.min(a, b), Infinity);
    return [
      {
        head: "Run",
        cell: (run) => [run.order >= 0 ? swatch(run.order) : null, h("a", { href: link(["runs", run.run]) }, run.run)],
      },
      { head: "Model", cell: (run) => run.model || NONE },
      { head: "Steps", kind: "number", cell: (run) => integer(run.step?.at(-1)) },
      { head: "Tokens", kind: "number", cell: (run) => count(run.tokens?.at(-1)) },
      { head: "Time", kind: "number", cell: (run) => seconds(run.t?.length ? run.t.at(-1) - run.t[0] : null) },
      { head: "Lowest", kind: "number", cell: (run) => reading(least(run), unit, name) },
      { head: "Last", kind: "number", cell: (run) => (run.missing ? "not recorded" : reading(last(run), unit, name)) },
    ];
  }
}

function swatch(index) {
  return h("span", { class: "swatch", style: { background: `var(--${SERIES[index % SERIES.length]})` } });
}

function xs(run, kind) {
  if (kind === "time") return run.t.map((t) => (isNumber(t) ? t - run.t.find(isNumber) : null));
  return kind === "tokens" ? (run.tokens ?? []) : run.step;
}

// uPlot wants x ascending and known; a clock that jumped back must not tangle the line.
function cut([x, y], from, to) {
  const kept = [[], []];
  x.forEach((value, index) => {
    const rises = isNumber(value) && (kept[0].length === 0 || value > kept[0].at(-1));
    const inside = !(to > from) || (value >= from && value <= to);
    if (rises && inside) {
      kept[0].push(value);
      kept[1].push(y[index]);
    }
  });
  return kept;
}
