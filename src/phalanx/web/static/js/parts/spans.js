// A timeline of one step: a lane per kind of span, the predicted and the measured on the same scale.

import { h } from "../dom.js";
import { colour, onrepaint } from "../paint.js";
import { isNumber, own, ticks } from "../units.js";

export const KINDS = {
  data: "gold",
  forward: "blue",
  backward: "purple",
  collective: "orange",
  optimizer: "green",
  other: "grey",
};

const LEFT = 92;
const [ROW, PAD, AXIS] = [18, 6, 22];
const MOST_ROWS = 4; // spans of one lane that overlap share at most so many rows

export class Spans {
  constructor({ label, onhover, onview }) {
    Object.assign(this, { onhover, onview });
    this.canvas = h("canvas", {
      tabindex: 0,
      role: "application",
      "aria-roledescription": "timeline",
      "aria-label": label,
    });
    this.element = h("div", { class: "span-plot" }, this.canvas);
    this.focused = -1;
    this.canvas.addEventListener("mousemove", (event) => this.#point(event));
    this.canvas.addEventListener("mousedown", (event) => (this.from = this.#time(event)));
    this.canvas.addEventListener("mouseup", (event) => this.#drop(event));
    this.canvas.addEventListener("mouseleave", () => this.#focus(-1));
    this.canvas.addEventListener("dblclick", () => this.onview(null));
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.element);
    this.unlisten = onrepaint(() => this.draw());
  }

  destroy() {
    this.observer.disconnect();
    this.unlisten();
  }

  show(spans, view) {
    this.spans = spans
      .filter((span) => isNumber(span.start_s) && isNumber(span.duration_s) && span.duration_s >= 0)
      .sort((a, b) => a.start_s - b.start_s);
    this.view = view;
    this.focused = -1;
    this.#pack();
    this.draw();
  }

  // Greedy: a span goes into the first row of its lane that is free.
  #pack() {
    const lanes = new Map(Object.keys(KINDS).map((kind) => [kind, []]));
    for (const span of this.spans) {
      const ends = lanes.get(lanes.has(span.kind) ? span.kind : "other");
      let row = ends.findIndex((end) => end <= span.start_s + 1e-12);
      if (row < 0) row = ends.length < MOST_ROWS ? ends.length : MOST_ROWS - 1;
      ends[row] = span.start_s + span.duration_s;
      span.row = row;
    }
    let top = 0;
    this.lanes = [];
    for (const [kind, ends] of lanes) {
      if (!ends.length) continue;
      this.lanes.push({ kind, top, height: ends.length * ROW + PAD });
      top += ends.length * ROW + PAD;
    }
    this.height = Math.max(top, ROW);
  }

  draw() {
    if (!this.spans || !this.element.clientWidth) return;
    const ratio = devicePixelRatio;
    this.width = this.element.clientWidth - LEFT - 8;
    this.canvas.style.height = `${this.height + AXIS}px`;
    this.canvas.width = Math.round(this.element.clientWidth * ratio);
    this.canvas.height = Math.round((this.height + AXIS) * ratio);
    const ctx = this.canvas.getContext("2d");
    ctx.scale(ratio, ratio);
    ctx.font = "12px system-ui, sans-serif";
    this.#axis(ctx);
    this.#lanes(ctx);
    ctx.save();
    ctx.beginPath();
    ctx.rect(LEFT, 0, this.width, this.height);
    ctx.clip();
    this.spans.forEach((span, index) => this.#span(ctx, span, index));
    ctx.restore();
  }

  #axis(ctx) {
    const values = round(this.view, Math.max(2, this.width / 140));
    ctx.textBaseline = "top";
    ctx.textAlign = "center";
    ticks(values, "s").forEach((text, index) => {
      const x = Math.round(this.#x(values[index]));
      ctx.fillStyle = colour("rule");
      ctx.fillRect(x, 0, 1, this.height);
      ctx.fillStyle = colour("soft");
      if (x < LEFT + this.width - 14) ctx.fillText(text, x, this.height + 6);
    });
  }

  #lanes(ctx) {
    ctx.textBaseline = "middle";
    ctx.textAlign = "left";
    for (const lane of this.lanes) {
      ctx.fillStyle = colour("soft");
      ctx.fillText(lane.kind, 0, lane.top + (lane.height - PAD) / 2 + 1);
    }
  }

  #x(time) {
    return LEFT + ((time - this.view[0]) / (this.view[1] - this.view[0])) * this.width;
  }

  #box(span) {
    const lane = this.lanes.find((one) => one.kind === (Object.hasOwn(KINDS, span.kind) ? span.kind : "other"));
    const [x1, x2] = [this.#x(span.start_s), this.#x(span.start_s + span.duration_s)];
    return [x1, lane.top + span.row * ROW + 1, Math.max(1, x2 - x1 - (x2 - x1 > 4 ? 0.75 : 0)), ROW - 3];
  }

  #span(ctx, span, index) {
    const [x, y, width, height] = this.#box(span);
    if (x > LEFT + this.width || x + width < LEFT) return;
    ctx.fillStyle = colour(own(KINDS, span.kind) ?? "grey");
    ctx.fillRect(x, y, width, height);
    if (index !== this.focused) return;
    ctx.strokeStyle = colour("ink");
    ctx.lineWidth = 2;
    ctx.strokeRect(x, y, width, height);
  }

  #time(event) {
    const x = event.clientX - this.canvas.getBoundingClientRect().left - LEFT;
    return this.view[0] + Math.min(1, Math.max(0, x / this.width)) * (this.view[1] - this.view[0]);
  }

  #point(event) {
    if (!this.spans) return;
    const box = this.canvas.getBoundingClientRect();
    const [px, py] = [event.clientX - box.left, event.clientY - box.top];
    this.#focus(
      this.spans.findLastIndex((span) => {
        const [x, y, width, height] = this.#box(span);
        return px >= x - 1 && px <= x + width + 1 && py >= y && py <= y + height;
      }),
    );
  }

  #drop(event) {
    const to = this.#time(event);
    const [low, high] = [Math.min(this.from, to), Math.max(this.from, to)];
    if (high - low > (this.view[1] - this.view[0]) * 0.01) this.onview([low, high]);
  }

  #focus(index) {
    if (index === this.focused) return;
    this.focused = index;
    this.draw();
    this.onhover(this.spans[index] ?? null);
  }

  #key(event) {
    const move = { ArrowRight: 1, ArrowLeft: -1, PageDown: 10, PageUp: -10, Home: -1e6, End: 1e6 }[event.key];
    if (move === undefined || !this.spans?.length) return;
    this.#focus(Math.min(this.spans.length - 1, Math.max(0, this.focused + move)));
    event.preventDefault();
    event.stopPropagation();
  }
}

// Round times within a view, about `count` of them.
function round([from, to], count) {
  const rough = (to - from) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * power).find((one) => one >= rough * 0.999);
  const first = Math.ceil(from / step - 1e-9);
  return Array.from({ length: Math.floor(to / step + 1e-9) - first + 1 }, (_, index) => (first + index) * step);
}
