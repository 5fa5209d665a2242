// What happened to a run beside its steps: incidents, memberships, checkpoints, evaluations.

import { fill, h, table, words } from "../dom.js";
import { NONE, clock, integer, isNumber, seconds } from "../units.js";

const FEW_ROWS = 12;
const MOST_ROWS = 200;
// In the order in which they are drawn: incidents last, over everything else.
const KINDS = { epochs: "epoch", checkpoints: "checkpoint", evaluations: "evaluation", incidents: "incident" };
const LEGEND = { incident: "incident", epoch: "new membership", checkpoint: "checkpoint", evaluation: "held-out loss" };

const COLUMNS = [
  { head: "What", cell: (row) => [sign(row.kind), row.text, h("span", { class: "hint" }, recovered(row))] },
  { head: "Step", kind: "number", cell: (row) => (isNumber(row.step) ? integer(row.step) : NONE) },
  { head: "When", kind: "number", cell: (row) => clock(row.t) },
];

// All marks in one list, each with its kind.
export function listed(marks) {
  return Object.entries(KINDS).flatMap(([key, kind]) => (marks[key] ?? []).map((mark) => ({ ...mark, kind })));
}

export function legend() {
  const kinds = Object.entries(LEGEND).map(([kind, text]) => h("span", {}, sign(kind), text));
  return h("p", { class: "legend" }, kinds, h("span", {}, "shaded: minimum to maximum; dashed: the plan's prediction"));
}

export class Happened {
  constructor() {
    this.element = h("section", { class: "panel" });
    this.everything = false;
  }

  show(marks) {
    this.marks = marks;
    const all = listed(marks).sort((a, b) => (b.t ?? 0) - (a.t ?? 0));
    const few = all.filter((row, index) => matters(row) || all.findIndex((one) => one.kind === row.kind) === index);
    const rows = this.everything ? all.slice(0, MOST_ROWS) : few.slice(0, FEW_ROWS);
    const text = JSON.stringify([rows, all.length]);
    if (text === this.shown) return;
    this.shown = text;
    const none = words("No checkpoint, evaluation or incident is recorded yet.");
    const rest =
      this.everything && all.length > rows.length ? `The newest ${MOST_ROWS} of ${integer(all.length)}.` : "";
    const more = all.length > Math.min(few.length, FEW_ROWS) ? this.#button(all.length) : null;
    const list = rows.length ? table(COLUMNS, rows, { caption: "What happened, newest first" }) : none;
    fill(
      this.element,
      h("div", { class: "panel-top" }, h("h2", {}, "What happened"), more),
      list,
      h("p", { class: "hint" }, rest),
    );
  }

  #button(count) {
    return h(
      "button",
      { type: "button", onclick: () => this.#toggle() },
      this.everything ? "Fewer" : `All ${integer(count)}`,
    );
  }

  #toggle() {
    this.everything = !this.everything;
    this.show(this.marks);
    this.element.querySelector("button")?.focus();
  }
}

function sign(kind) {
  return h("span", { class: "mark", data: { kind }, "aria-hidden": "true" });
}

// Always worth a line; of the others, the newest is.
function matters(row) {
  return row.kind === "incident" || row.kind === "epoch" || Boolean(row.error);
}

function recovered(row) {
  if (row.kind !== "incident" || row.world === null) return ""; // not known yet
  if (!isNumber(row.recovery_s)) return " – no step since";
  const lost =
    row.lost_steps > 0 ? `, ${integer(row.lost_steps)} ${row.lost_steps === 1 ? "step" : "steps"} repeated` : "";
  return ` – resumed after ${seconds(row.recovery_s)}${row.source ? ` from ${row.source}` : ""}${lost}`;
}
