// Several runs on the same axes: by step, by tokens, or by time.

import { get, runPath } from "../api.js";
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
    this.back = h("a", { href: "#/" }, "Select other runs");
    this.reset = h("button", { type: "button", hidden: true, onclick: () => this.whole() }, "Whole runs");
    this.finer = new Map(); // by run: the range that is looked at, with as many points as the whole
    this.body = h("div", {}, loading());
    fill(
      outlet,
      h("div", { class: "top" }, h("h1", {}, "Compare")),
      h(
        "div",
        { class: "tools" },
        h("label", {}, "Series", this.name),
        this.x,
        this.reset,
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
    this.reset.hidden = !this.#zoomed;
    this.finer.clear();
    if (!before || before.runs !== query.runs || before.name !== query.name) return void this.#load();
    this.#draw();
    this.#closer();
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
    if (!names.length) return fill(this.body, words("No runs are selected. Select two or more in the list of runs."));
    try {
      const answer = await get("compare", { runs: names.join(","), name: this.name.value, points: POINTS });
      if (this.gone || answer.name !== this.name.value) return;
      this.answer = { ...answer, runs: Object.values(answer.runs ?? {}) };
    } catch (error) {
      if (!this.gone && !this.answer) failed(this.body, error);
      return;
    }
    this.#draw();
    this.#closer();
  }

  get #zoomed() {
    return Number(this.query.to) > Number(this.query.from);
  }

  // Asks for the range that is looked at, so that it is drawn as sharply as the whole.
  async #closer() {
    const { query, answer } = this;
    if (!this.#zoomed || !answer) return;
    await Promise.all(answer.runs.map((run) => this.#finer(run, query).catch(() => null)));
    if (!this.gone && query === this.query) this.#draw();
  }

  async #finer(run, query) {
    const [first, last] = around(run, xs(run, run, query.x ?? "step"), Number(query.from), Number(query.to));
    if (!(last > first)) return;
    const name = this.name.value;
    const { curves } = await get(runPath(run.run, "/curves"), { names: name, first, last, points: POINTS });
    if (curves?.[name] && query === this.query) this.finer.set(run.run, curves[name]);
  }

  #draw() {
    if (!this.answer || this.gone) return;
    const runs = this.answer.runs.filter((run) => Array.isArray(run.step) && run.step.length);
    const unit = runs[0]?.unit ?? "";
    this.#chart(unit);
    const kind = this.query.x ?? "step";
    const tables = runs.map((run) => {
      const drawn = this.finer.get(run.run) ?? run;
      return cut([xs(drawn, run, kind), drawn.mean], Number(this.query.from), Number(this.query.to));
    });
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

// Places of a curve on the axis; `run` is the whole one, which knows where time and tokens begin.
function xs(curve, run, kind) {
  const start = run.t.find(isNumber);
  if (kind === "time") return curve.t.map((t) => (isNumber(t) ? t - start : null));
  return kind === "tokens" ? curve.step.map((step) => between(run.step, run.tokens ?? [], step)) : curve.step;
}

// The value at a step, on a line between the known ones beside it.
function between(steps, values, step) {
  const after = steps.findIndex((one) => one >= step);
  if (after === 0 || steps[after] === step) return values[after] ?? null;
  const before = (after < 0 ? steps.length : after) - 1;
  const [low, high] = after < 0 ? [before - 1, before] : [before, after];
  const slope = (values[high] - values[low]) / (steps[high] - steps[low]);
  return isNumber(slope) ? values[low] + slope * (step - steps[low]) : null;
}

// The steps within a range of the axis, and one more to either side.
function around(run, places, from, to) {
  const first = places.findIndex((x) => x >= from);
  const last = places.findLastIndex((x) => isNumber(x) && x <= to);
  const end = run.step.length - 1;
  return first < 0 || last < 0 ? [0, 0] : [run.step[Math.max(0, first - 1)], run.step[Math.min(end, last + 1)]];
}

// uPlot wants x ascending and known; a clock that jumped back must not tangle the line.
function cut([x, y], from, to) {
  const kept = [[], []];
  x.forEach((value, index) => {
    const rises = isNumber(value) && (kept[0].length === 0 || value > kept[0].at(-1));
    const inside = !(to > from) || (value >= from && value <= to);
    if (rises && inside) {
      kept[0].push(value);
      kept[1].push(y[index] ?? null);
    }
  });
  return kept;
}
