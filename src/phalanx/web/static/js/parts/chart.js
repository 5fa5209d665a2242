// One chart: lines over a band of least and most, levels for predictions, marks for what happened.

import { h, fill, say } from "../dom.js";
import { SERIES, colour, onrepaint, withAlpha } from "../paint.js";
import { isNumber, reading, ticks } from "../units.js";
import { MARKS, isCrowded, stroke } from "./marks.js";

const FONT = "12px system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'Liberation Sans', sans-serif";
const FEW_VALUES = 20;
const NEAR_PX = 6; // a mark this close to the cursor is meant
const CLOCK_STEPS = [
  1e-3, 5e-3, 0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200,
  86400, 172800, 432000, 864000, 1728000, 4320000,
];

export class Chart {
  // zero: the axis begins at 0 · most: and ends at least here · xUnit: "steps", "tokens" or "s"
  constructor({
    title,
    name,
    unit,
    height = 190,
    zero = false,
    most = null,
    xUnit = "steps",
    sync = null,
    wide = false,
    onzoom,
    onwhole,
    onhover,
  }) {
    Object.assign(this, { title, name, unit, height, zero, most, xUnit, sync, onzoom, onwhole, onhover });
    this.value = h("span", { class: "value" });
    this.plot = h("div", {
      class: "plot",
      tabindex: 0,
      role: "application",
      "aria-roledescription": "chart",
      "aria-label": title,
    });
    this.element = h(
      "figure",
      { class: wide ? "panel chart wide" : "panel chart" },
      h("figcaption", {}, h("h2", {}, title), this.value),
      this.plot,
    );
    this.plot.style.minHeight = `${height}px`;
    this.plot.addEventListener("keydown", (event) => this.#key(event));
    this.observer = new ResizeObserver(() => this.#fit());
    this.observer.observe(this.plot);
    this.unlisten = onrepaint(() => this.uplot?.redraw(false));
    this.lines = [];
    this.marks = [];
    this.levels = [];
  }

  // xRange: the same for all charts of a page, whatever each of them has recorded
  // x ascending; lines: {label, values, low?, high?, hue?}; marks: {x, kind, text}; levels: {value, text}
  show({ x, lines, marks = [], levels = [], xUnit = this.xUnit, xRange = null }) {
    const shape = lines.map((line) => [line.label, line.hue, Boolean(line.low)]).join("|") + xUnit;
    Object.assign(this, { x, lines, marks, levels, xUnit, xRange });
    if (!x.length || !lines.some((line) => line.values.some(isNumber))) return this.#empty();
    const data = [x, ...lines.flatMap((line) => (line.low ? [line.low, line.high, line.values] : [line.values]))];
    if (this.uplot && this.shape === shape) this.uplot.setData(data);
    else this.#build(data, shape);
    this.#read(null);
    this.plot.setAttribute("aria-label", this.#inWords());
  }

  destroy() {
    this.unlisten();
    this.observer.disconnect();
    this.uplot?.destroy();
    this.uplot = null;
  }

  #empty() {
    this.uplot?.destroy();
    this.uplot = null;
    fill(this.plot, h("p", { class: "words" }, "Nothing recorded yet."));
    this.plot.setAttribute("aria-label", `${this.title}: nothing recorded yet`);
    say(this.value, "");
  }

  #build(data, shape) {
    this.uplot?.destroy();
    fill(this.plot);
    this.shape = shape;
    this.uplot = new uPlot(this.#options(), data, this.plot);
  }

  #options() {
    const series = [{}];
    const bands = [];
    this.lines.forEach((line, index) => {
      const hue = line.hue ?? SERIES[index % SERIES.length];
      if (line.low) {
        bands.push({ series: [series.length + 1, series.length], fill: () => withAlpha(colour(hue), 0.18) });
        series.push({ points: { show: false }, width: 0 }, { points: { show: false }, width: 0 });
      }
      const paint = () => colour(hue);
      series.push({ stroke: paint, width: 1.5, points: { show: isSparse, size: 5, fill: paint }, spanGaps: false });
    });
    const axis = {
      stroke: () => colour("soft"),
      font: FONT,
      grid: { stroke: () => colour("rule"), width: 1 },
      ticks: { show: false },
      gap: 6,
    };
    return {
      width: Math.max(120, this.plot.clientWidth),
      height: this.height,
      series,
      bands,
      padding: [12, 22, 0, 0],
      legend: { show: false },
      scales: {
        x: { time: false, range: (_, low, high) => this.xRange ?? (low < high ? [low, high] : [low - 0.5, low + 0.5]) },
        y: { range: (_, low, high) => this.#range(low, high) },
      },
      axes: [
        {
          ...axis,
          size: 26,
          space: 80,
          incrs: this.xUnit === "s" ? CLOCK_STEPS : undefined,
          values: (_, values) => ticks(values, this.xUnit),
        },
        { ...axis, size: 62, space: 30, values: (_, values) => ticks(values, this.unit, this.name) },
      ],
      cursor: {
        y: false,
        points: { show: false },
        drag: { x: true, y: false, setScale: false },
        sync: this.sync ? { key: this.sync, setSeries: false } : undefined,
        bind: { dblclick: () => () => this.onwhole?.() },
      },
      hooks: {
        setSelect: [(plot) => this.#select(plot)],
        setCursor: [(plot) => this.#read(plot.cursor.idx)],
        draw: [(plot) => this.#drawLevels(plot), (plot) => this.#drawMarks(plot)],
      },
    };
  }

  #range(low, high) {
    const levels = this.levels.map((level) => level.value);
    let [least, greatest] = [Math.min(low ?? 0, ...levels), Math.max(high ?? 1, ...levels)];
    if (this.most !== null) greatest = Math.max(greatest, this.most);
    if (this.zero) least = Math.min(0, least);
    const room = (greatest - least || Math.abs(greatest) || 1) * 0.06;
    return [this.zero && least === 0 ? 0 : least - room, greatest === this.most ? greatest : greatest + room];
  }

  #select(plot) {
    if (plot.select.width < 4) return;
    const [from, to] = [plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")];
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.onzoom?.(from, to);
  }

  // The caption's values: under the cursor, or the newest.
  #read(index) {
    const at = isNumber(index) ? index : this.x.length - 1;
    const known = this.lines
      .map((line) => ({ ...line, now: lastKnown(line.values, at) }))
      .filter((line) => isNumber(line.now));
    if (!known.length) return fill(this.value);
    const parts =
      this.lines.length > 1 ? known.map((line, order) => this.#named(line, order)) : this.#alone(known[0], at);
    fill(this.value, parts, isNumber(index) ? ` at ${this.#where(this.x[at])}` : "");
    if (isNumber(index)) this.#hover();
  }

  #named({ label, now }, order) {
    return [order ? " · " : "", `${label} `, h("b", {}, this.#words(now))];
  }

  #alone({ now, low, high }, at) {
    const spread = low && isNumber(low[at]) && low[at] !== high[at];
    return [h("b", {}, this.#words(now)), spread ? ` (${this.#words(low[at])} to ${this.#words(high[at])})` : ""];
  }

  #words(value) {
    return reading(value, this.unit, this.name);
  }

  #where(x) {
    const [text] = ticks([x], this.xUnit);
    if (this.xUnit === "steps") return `step ${Math.round(x).toLocaleString("en-US")}`;
    return this.xUnit === "s" ? reading(x, "s") : `${text} tokens`;
  }

  #hover() {
    const left = this.uplot?.cursor.left ?? -1;
    if (left < 0 || !this.onhover) return;
    this.onhover(this.marks.filter((mark) => Math.abs(this.uplot.valToPos(mark.x, "x") - left) <= NEAR_PX));
  }

  #drawLevels(plot) {
    const { ctx, bbox } = plot;
    const ratio = devicePixelRatio;
    const right = bbox.left + bbox.width;
    ctx.save();
    ctx.font = FONT.replace("12px", `${11 * ratio}px`);
    ctx.textAlign = "right";
    for (const level of this.levels) {
      const y = plot.valToPos(level.value, "y", true);
      ctx.strokeStyle = colour("edge");
      ctx.lineWidth = ratio;
      ctx.setLineDash([5 * ratio, 4 * ratio]);
      stroke(ctx, bbox.left, y, right, y);
      const place = [level.text, right - 4 * ratio, y - bbox.top < 16 * ratio ? y + 14 * ratio : y - 5 * ratio];
      ctx.setLineDash([]);
      ctx.strokeStyle = colour("raised"); // a rim, so that it can be read over the curve
      ctx.lineWidth = 4 * ratio;
      ctx.strokeText(...place);
      ctx.fillStyle = colour("soft");
      ctx.fillText(...place);
    }
    ctx.restore();
  }

  #drawMarks(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left - 6, bbox.top, bbox.width + 12, bbox.height);
    ctx.clip();
    const crowded = isCrowded(this.marks);
    for (const mark of this.marks) {
      const x = plot.valToPos(mark.x, "x", true);
      MARKS[mark.kind]?.(ctx, x, bbox, { ...mark, crowded }, plot, this.name);
    }
    ctx.restore();
  }

  #key(event) {
    const plot = this.uplot;
    if (!plot || event.ctrlKey || event.metaKey || event.altKey) return;
    const at = plot.cursor.idx ?? this.x.length - 1;
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -this.x.length, End: this.x.length }[
      event.key
    ];
    const wider = { "+": 0.25, "=": 0.25, "-": 1, _: 1 }[event.key];
    if (move !== undefined) {
      const to = Math.min(this.x.length - 1, Math.max(0, at + move * (event.shiftKey ? 10 : 1)));
      plot.setCursor({ left: plot.valToPos(this.x[to], "x"), top: 10 });
      this.#read(to);
    } else if (wider !== undefined) {
      const reach = (plot.scales.x.max - plot.scales.x.min) * wider;
      this.onzoom?.(this.x[at] - reach, this.x[at] + reach);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  #inWords() {
    const parts = this.lines.map((line) => {
      const numbers = line.values.filter(isNumber);
      return `${this.lines.length > 1 ? `${line.label} ` : ""}from ${reading(numbers[0], this.unit, this.name)} to ${reading(numbers.at(-1), this.unit, this.name)}`;
    });
    return `${this.title}: ${parts.join("; ")}. Arrow keys read values, plus and minus zoom.`;
  }

  #fit() {
    const width = this.plot.clientWidth;
    if (this.uplot && width > 0 && width !== this.uplot.width) this.uplot.setSize({ width, height: this.height });
  }
}

// A value that stands alone has no line: few values are shown as points too.
function isSparse(plot, index) {
  return plot.data[index].filter(isNumber).length <= FEW_VALUES;
}

function lastKnown(values, at) {
  for (let index = at; index >= 0; index -= 1) if (isNumber(values[index])) return values[index];
  return null;
}
