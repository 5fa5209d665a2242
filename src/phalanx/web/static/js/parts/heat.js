// Ranks × time as a heat map on one canvas; the mouse and the arrow keys move over the same cells.

import { h } from "../dom.js";
import { colour, onrepaint, ramp, rampText } from "../paint.js";
import { isNumber } from "../units.js";

const LEFT = 52; // room for the names of ranks
const BOTTOM = 22;
const MOST_HEIGHT = 620;
const [LEAST_CELL, MOST_CELL] = [1, 26];

export class Heat {
  constructor({ label, onmove, onpick }) {
    Object.assign(this, { onmove, onpick });
    this.canvas = h("canvas", {
      tabindex: 0,
      role: "application",
      "aria-roledescription": "heat map",
      "aria-label": label,
    });
    this.element = h("div", { class: "heat" }, this.canvas);
    this.cursor = null; // {row, column}
    this.picked = null; // rank
    this.peers = new Map(); // rank -> colour name
    this.canvas.addEventListener("mousemove", (event) => this.#point(event));
    this.canvas.addEventListener("mouseleave", () => this.#leave());
    this.canvas.addEventListener("click", (event) => this.#click(event));
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.element);
    this.unlisten = onrepaint(() => this.draw());
  }

  destroy() {
    this.observer.disconnect();
    this.unlisten();
  }

  show(mesh) {
    this.mesh = mesh;
    [this.low, this.high] = span(mesh.values);
    if (this.cursor && (this.cursor.row >= mesh.ranks.length || this.cursor.column >= mesh.step.length))
      this.cursor = null;
    this.draw();
  }

  pick(rank, peers = new Map()) {
    this.picked = rank;
    this.peers = peers;
    this.draw();
  }

  draw() {
    if (!this.mesh || !this.element.clientWidth) return;
    const { ranks, step } = this.mesh;
    this.cell = Math.min(MOST_CELL, Math.max(LEAST_CELL, MOST_HEIGHT / Math.max(1, ranks.length)));
    this.width = this.element.clientWidth - LEFT;
    this.height = Math.max(40, Math.ceil(this.cell * ranks.length));
    this.cell = this.height / Math.max(1, ranks.length);
    const ratio = devicePixelRatio;
    this.canvas.style.height = `${this.height + BOTTOM}px`;
    this.canvas.width = Math.round(this.element.clientWidth * ratio);
    this.canvas.height = Math.round((this.height + BOTTOM) * ratio);
    const ctx = this.canvas.getContext("2d");
    ctx.scale(ratio, ratio);
    if (!step.length || !ranks.length) return;
    this.#cells(ctx);
    this.#gaps(ctx);
    this.#names(ctx);
    this.#outline(ctx);
  }

  // One pixel per value, scaled up: 1,000 ranks × 120 columns cost one drawImage.
  #cells(ctx) {
    const { ranks, step, values } = this.mesh;
    const small = new OffscreenCanvas(step.length, ranks.length);
    const image = new ImageData(step.length, ranks.length);
    const none = colour("sunken").match(/\d+/g).map(Number);
    for (let row = 0; row < ranks.length; row += 1)
      for (let column = 0; column < step.length; column += 1) {
        const value = values[row]?.[column];
        const paint = isNumber(value) ? ramp(this.#share(value)) : none;
        image.data.set([paint[0], paint[1], paint[2], 255], 4 * (row * step.length + column));
      }
    small.getContext("2d").putImageData(image, 0, 0);
    ctx.imageSmoothingEnabled = false;
    ctx.drawImage(small, LEFT, 0, this.width, this.height);
  }

  #share(value) {
    return this.high > this.low ? (value - this.low) / (this.high - this.low) : 0.5;
  }

  // Lines between ranks while there is room for them, heavier where a host ends.
  #gaps(ctx) {
    const { ranks, hosts = [] } = this.mesh;
    ctx.fillStyle = colour("raised");
    for (let row = 1; row < ranks.length; row += 1) {
      const ends = hosts[row] !== hosts[row - 1];
      const thick = this.cell >= 8 ? (ends ? 3 : 1) : this.cell >= 3 && ends ? 1 : 0;
      if (thick) ctx.fillRect(LEFT, row * this.cell - thick / 2, this.width, thick);
    }
  }

  #names(ctx) {
    const { ranks, step } = this.mesh;
    ctx.font = "12px system-ui, sans-serif";
    ctx.fillStyle = colour("soft");
    ctx.textBaseline = "middle";
    ctx.textAlign = "right";
    const every = this.cell >= 14 ? 1 : 2 ** Math.ceil(Math.log2(20 / this.cell)); // hosts and axes come in powers of two
    for (let row = 0; row < ranks.length; row += every)
      ctx.fillText(String(ranks[row]), LEFT - 12, Math.max(7, (row + 0.5) * this.cell));
    ctx.textBaseline = "top";
    const count = Math.max(2, Math.min(step.length, Math.floor(this.width / 110)));
    for (let mark = 0; mark < count; mark += 1) {
      const column = Math.round((mark * (step.length - 1)) / Math.max(1, count - 1));
      ctx.textAlign = mark === 0 ? "left" : mark === count - 1 ? "right" : "center";
      const x =
        LEFT + ((mark === 0 ? column : mark === count - 1 ? column + 1 : column + 0.5) * this.width) / step.length;
      ctx.fillText(`${mark === 0 ? "step " : ""}${Number(step[column]).toLocaleString("en-US")}`, x, this.height + 7);
    }
  }

  #outline(ctx) {
    const { ranks, step } = this.mesh;
    ranks.forEach((rank, row) => {
      const hue = rank === this.picked ? "ink" : this.peers.get(rank);
      if (!hue) return;
      ctx.fillStyle = colour(hue);
      ctx.fillRect(LEFT - 7, row * this.cell + 0.5, 4, Math.max(2, this.cell - 1));
    });
    if (this.picked !== null && ranks.includes(this.picked)) {
      ctx.strokeStyle = colour("ink");
      ctx.lineWidth = 1.5;
      ctx.strokeRect(LEFT - 0.5, ranks.indexOf(this.picked) * this.cell, this.width, Math.max(2, this.cell));
    }
    if (this.cursor === null) return;
    const wide = this.width / step.length;
    ctx.strokeStyle = colour("paper");
    ctx.lineWidth = 3;
    const box = [
      LEFT + this.cursor.column * wide,
      this.cursor.row * this.cell,
      Math.max(3, wide),
      Math.max(3, this.cell),
    ];
    ctx.strokeRect(...box);
    ctx.strokeStyle = colour("ink");
    ctx.lineWidth = 1.5;
    ctx.strokeRect(...box);
  }

  #at(event) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left - LEFT, event.clientY - box.top];
    const [row, column] = [Math.floor(y / this.cell), Math.floor((x / this.width) * this.mesh.step.length)];
    const inside = row >= 0 && row < this.mesh.ranks.length && column < this.mesh.step.length;
    return inside ? { row, column: Math.max(0, column) } : null;
  }

  #point(event) {
    if (this.mesh) this.#move(this.#at(event));
  }

  #leave() {
    if (document.activeElement !== this.canvas) this.#move(null);
  }

  #click(event) {
    const cell = this.mesh && this.#at(event);
    if (cell) this.onpick(this.mesh.ranks[cell.row]);
  }

  #move(cell) {
    if (cell?.row === this.cursor?.row && cell?.column === this.cursor?.column) return;
    this.cursor = cell;
    this.draw();
    if (cell === null) return this.onmove(null);
    const { ranks, step, values } = this.mesh;
    this.onmove({
      rank: ranks[cell.row],
      step: step[cell.column],
      value: values[cell.row]?.[cell.column] ?? null,
      row: cell.row,
    });
  }

  #key(event) {
    if (!this.mesh?.ranks.length || event.ctrlKey || event.metaKey || event.altKey) return;
    const by = {
      ArrowLeft: [0, -1],
      ArrowRight: [0, 1],
      ArrowUp: [-1, 0],
      ArrowDown: [1, 0],
      PageUp: [-10, 0],
      PageDown: [10, 0],
      Home: [0, -1e6],
      End: [0, 1e6],
    }[event.key];
    const here = this.cursor ?? {
      row: Math.max(0, this.mesh.ranks.indexOf(this.picked)),
      column: this.mesh.step.length - 1,
    };
    if (by)
      this.#move({
        row: clamp(here.row + by[0], this.mesh.ranks.length),
        column: clamp(here.column + by[1], this.mesh.step.length),
      });
    else if (event.key === "Enter" || event.key === " ") this.onpick(this.mesh.ranks[here.row]);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

const clamp = (value, size) => Math.min(size - 1, Math.max(0, value));

// From the second to the ninety-eighth percentile: one wild value must not bleach the rest. And at least a tenth of the
// median to either side: noise must not look like a finding.
function span(values) {
  const flat = values
    .flat()
    .filter(isNumber)
    .sort((a, b) => a - b);
  if (!flat.length) return [0, 1];
  const at = (share) => flat[Math.round(share * (flat.length - 1))];
  const room = Math.abs(at(0.5)) * 0.1;
  return [Math.min(at(0.02), at(0.5) - room), Math.max(at(0.98), at(0.5) + room)];
}

// The scale beside the map: colours from low to high.
export function rampCanvas() {
  const canvas = h("canvas", { width: 160, height: 8, "aria-hidden": "true" });
  const ctx = canvas.getContext("2d");
  for (let x = 0; x < 160; x += 1) {
    ctx.fillStyle = rampText(x / 159);
    ctx.fillRect(x, 0, 1, 8);
  }
  return canvas;
}
