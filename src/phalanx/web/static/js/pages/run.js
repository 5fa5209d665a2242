// The run over time: curves with what happened on the same axis.

import { get, runPath, settled } from "../api.js";
import { choice, fill, h, pick, say, table } from "../dom.js";
import { calmly } from "../live.js";
import { Axis, X } from "../parts/axis.js";
import { Chart } from "../parts/chart.js";
import { Happened, legend, listed } from "../parts/happened.js";
import { failed, loading } from "../parts/states.js";
import { go, stay } from "../route.js";
import { bytes, count, integer, isNumber, percent, seconds, title, windowName } from "../units.js";

const CURVES_MS = 1500; // while the run grows
const LEDGER_MS = 15000;
const POINTS = 600;
const MAIN = ["loss", "tokens_per_s", "mfu", "noise_scale", "memory_bytes", "grad_norm"];
const MORE = [
  "duration_s",
  "lr",
  "utilization",
  "power_w",
  "memory_pressure",
  "data_s",
  "temperature_c",
  "expert_imbalance",
  "collective_s",
];
const ZERO = new Set([
  "tokens_per_s",
  "mfu",
  "memory_bytes",
  "duration_s",
  "utilization",
  "power_w",
  "memory_pressure",
  "data_s",
  "lr",
  "collective_s",
]);
const PREDICTED = { tokens_per_s: "tokens_per_s", mfu: "mfu", memory_bytes: "memory_bytes", duration_s: "step_s" };

export class RunPage {
  constructor(outlet, name, shell) {
    Object.assign(this, {
      outlet,
      name,
      shell,
      charts: new Map(),
      marks: { incidents: [], checkpoints: [], evaluations: [], epochs: [] },
    });
    this.x = choice("Horizontal axis", X, "step", (key) => this.#change({ x: key }));
    this.rank = h("input", {
      type: "number",
      min: 0,
      value: 0,
      size: 5,
      onchange: () => this.#change({ rank: this.rank.value === "0" ? "" : this.rank.value }),
    });
    this.more = h("input", { type: "checkbox", onchange: () => this.#change({ more: this.more.checked ? "1" : "" }) });
    this.reset = h("button", { type: "button", hidden: true, onclick: () => this.whole() }, "Whole run");
    this.note = h("p", { class: "hint grow", role: "status" });
    this.grid = h("div", { class: "charts" });
    this.list = new Happened();
    this.layouts = h("section", { class: "panel", hidden: true });
    this.wrote = h("section", { class: "panel", hidden: true });
    this.problem = h("div");
    fill(
      outlet,
      h(
        "div",
        { class: "tools" },
        this.x,
        h("label", {}, "Rank", this.rank),
        h("label", {}, this.more, "More series"),
        this.reset,
        this.note,
      ),
      this.problem,
      this.layouts,
      this.grid,
      legend(),
      this.list.element,
      this.wrote,
    );
    this.update = calmly(() => this.#curves(), CURVES_MS);
    this.updateLedger = calmly(() => this.#ledger(), LEDGER_MS);
  }

  show(query) {
    const before = this.query;
    this.query = query;
    pick(this.x, query.x ?? "step");
    this.rank.value = query.rank ?? "0";
    this.more.checked = query.more === "1";
    this.reset.hidden = !(query.first || query.last);
    if (!before) {
      this.#start();
      if (this.shell.info) this.informed(this.shell.info);
    } else if (
      before.x !== query.x &&
      before.rank === query.rank &&
      before.first === query.first &&
      before.last === query.last &&
      before.more === query.more
    )
      this.#draw();
    else this.#curves();
  }

  // The plan's levels come with the header.
  informed({ summary, settled: known }) {
    this.#draw();
    // How an incident ended is known only when the whole run has been walked.
    if (known !== false && this.marks.incidents.some((one) => one.world === null)) this.#loadMarks();
    const texts = (summary?.samples ?? []).filter((text) => typeof text === "string");
    this.#showLayouts(summary?.layouts ?? []);
    this.wrote.hidden = !texts.length;
    fill(
      this.wrote,
      h("h2", {}, "Samples"),
      texts.map((text) => h("blockquote", {}, text)),
    );
  }

  // Of a run that changed its layout: each with its own prediction and its own steps.
  #showLayouts(layouts) {
    this.layouts.hidden = layouts.length < 2;
    const both = (format, pair) => `${format(pair?.predicted)} → ${format(pair?.measured)}`;
    const columns = [
      { head: "Steps", cell: (one) => `${integer(one.first_step + 1)} to ${integer(one.last_step + 1)}` },
      { head: "Ranks", kind: "number", cell: (one) => integer(one.world) },
      { head: "Layout", cell: (one) => (one.planned ? one.layout : `${one.layout}, not planned`) },
      { head: "Step", kind: "number", cell: (one) => both(seconds, one.step_s) },
      { head: "Tokens/s", kind: "number", cell: (one) => both(count, one.tokens_per_s) },
      { head: "MFU", kind: "number", cell: (one) => both(percent, one.mfu) },
      { head: "Memory", kind: "number", cell: (one) => both(bytes, one.memory_bytes) },
    ];
    if (layouts.length > 1)
      fill(
        this.layouts,
        h("h2", {}, "Layouts: predicted → measured"),
        table(columns, layouts, { caption: "Layouts of this run, each over its own steps" }),
      );
  }

  grown() {
    this.update();
    this.updateLedger();
  }

  marked() {
    this.#loadMarks();
  }

  whole() {
    if (this.query.first || this.query.last) go(this.shell.address({ first: "", last: "" }));
  }

  leave() {
    this.gone = true;
    this.update.stop();
    this.updateLedger.stop();
    for (const chart of this.charts.values()) chart.destroy();
  }

  #start() {
    fill(this.grid, loading());
    this.#curves();
    this.#loadMarks();
    this.#ledger();
  }

  #change(query) {
    stay(this.shell.address(query));
    this.show(Object.fromEntries(Object.entries({ ...this.query, ...query }).filter(([, value]) => value !== "")));
  }

  #wanted() {
    return [...MAIN, ...(this.query.more === "1" ? MORE : [])];
  }

  async #curves() {
    const { rank, first, last } = this.query;
    const names = [...this.#wanted(), "tokens"];
    const asked = (this.asked = Symbol("newest question"));
    try {
      const answer = await get(runPath(this.name, "/curves"), {
        names: names.join(","),
        rank: rank ?? 0,
        first,
        last,
        points: POINTS,
      });
      if (this.gone || asked !== this.asked) return;
      this.answer = answer;
      this.shell.damaged(answer);
      fill(this.problem);
    } catch (error) {
      if (!this.gone) failed(this.problem, error);
      return;
    }
    this.#draw();
  }

  async #loadMarks() {
    const asked = (this.askedMarks = Symbol("newest question"));
    try {
      const marks = await get(runPath(this.name, "/marks"));
      if (this.gone || asked !== this.askedMarks) return;
      this.marks = marks;
    } catch {
      return; // the curves say what is wrong with the server
    }
    this.shell.damaged(this.marks);
    this.#draw();
    this.list.show(this.marks);
  }

  async #ledger() {
    try {
      this.effective = (await settled(runPath(this.name, "/ledger"), () => this.gone)).effective;
    } catch {
      return;
    }
    if (!this.gone) this.#draw();
  }

  #draw() {
    if (!this.answer || this.gone) return;
    const curves = this.answer.curves ?? {};
    const axis = new Axis(this.query.x ?? "step", this.answer, this.query);
    this.axis = axis;
    const marks = this.#placed(axis);
    const names = this.#wanted().filter((name) => curves[name]?.step?.length);
    const order = [...names];
    if (this.effective?.t?.length) order.splice(Math.min(3, order.length), 0, "effective"); // beside loss, speed and MFU
    this.#arrange(order);
    for (const name of names) {
      const curve = curves[name];
      const chart = this.charts.get(name);
      const kept = axis.along(curve);
      chart.unit = curve.unit ?? "";
      chart.show({
        x: kept.x,
        xUnit: axis.unit,
        xRange: axis.range,
        marks,
        levels: this.#levels(name),
        lines: [
          {
            label: title(name),
            values: kept.mean,
            low: kept.low,
            high: kept.high,
            hue: name === "loss" ? "blue" : "teal",
          },
        ],
      });
    }
    if (this.charts.has("effective")) this.#drawEffective(axis, marks);
  }

  // Charts appear in order as their series do; those that are there stay, so that nothing flickers.
  #arrange(names) {
    for (const [name, chart] of this.charts)
      if (!names.includes(name)) {
        chart.destroy();
        chart.element.remove();
        this.charts.delete(name);
      }
    names.forEach((name, index) => {
      if (!this.charts.has(name)) this.charts.set(name, this.#chart(name));
      const { element } = this.charts.get(name);
      if (this.grid.children[index] !== element) this.grid.insertBefore(element, this.grid.children[index] ?? null);
    });
    if (!names.length)
      fill(this.grid, h("p", { class: "words" }, "No step is recorded yet. Curves appear here with the first one."));
    else if (this.grid.querySelector(":scope > .words")) this.grid.querySelector(":scope > .words").remove();
  }

  #chart(name) {
    const effective = name === "effective";
    return new Chart({
      title: effective ? "Effective training time" : title(name),
      name: effective ? "cumulative" : name,
      unit: "",
      wide: name === "loss",
      height: name === "loss" ? 280 : 180,
      zero: effective || ZERO.has(name),
      most: effective ? 1 : null,
      sync: `run ${this.name}`,
      onzoom: (from, to) => this.#zoom(from, to),
      onwhole: () => this.whole(),
      onhover: (marks) => this.#hover(marks),
    });
  }

  #levels(name) {
    // Each layout of the run has its own prediction; of one that nobody planned there is none.
    const { layouts = [] } = this.shell.info?.summary ?? {};
    const known = layouts.filter((one) => isNumber(one[PREDICTED[name]]?.predicted) && one[PREDICTED[name]].predicted > 0);
    const where = (one) => (layouts.length > 1 ? `, steps ${integer(one.first_step + 1)}–${integer(one.last_step + 1)}` : "");
    return known.map((one) => ({ value: one[PREDICTED[name]].predicted, text: `predicted${where(one)}` }));
  }

  #drawEffective(axis, marks) {
    const { t = [], cumulative = [], last_hour: hour = [] } = this.effective;
    const kept = axis.alongTime(t, [cumulative, hour]);
    const predicted = this.shell.info?.summary?.effective_time?.predicted;
    const levels = isNumber(predicted) && predicted > 0 ? [{ value: predicted, text: "predicted" }] : [];
    this.charts.get("effective").show({
      x: kept.x,
      xUnit: axis.unit,
      xRange: axis.range,
      marks,
      levels,
      lines: [
        { label: "cumulative", values: kept.values[0], hue: "green" },
        { label: windowName(this.effective.window_s), values: kept.values[1], hue: "orange" },
      ],
    });
  }

  #placed(axis) {
    return listed(this.marks)
      .map((mark) => ({ ...mark, x: axis.place(mark) }))
      .filter((mark) => isNumber(mark.x) && axis.holds(mark.x))
      .map((mark) => ({ ...mark, x: Math.min(mark.x, axis.range?.[1] ?? mark.x) }));
  }

  #zoom(from, to) {
    const [first, last] = this.axis.steps(from, to);
    if (last > first) go(this.shell.address({ first, last }));
  }

  #hover(marks) {
    say(
      this.note,
      marks
        .slice(0, 2)
        .map((mark) => mark.text)
        .join(" · "),
    );
  }
}
