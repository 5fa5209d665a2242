// One step, second by second: what the plan predicted above what was measured.

import { get, runPath } from "../api.js";
import { announce, fill, h, say, table, words } from "../dom.js";
import { KINDS, Spans } from "../parts/spans.js";
import { failed, loading } from "../parts/states.js";
import { stay } from "../route.js";
import { NONE, bytes, integer, isNumber, seconds, signed } from "../units.js";

export class StepPage {
  constructor(outlet, name, shell) {
    Object.assign(this, { outlet, name, shell, view: null });
    this.steps = h("select", { onchange: () => this.#change({ step: this.steps.value }) });
    this.rank = h("input", {
      type: "number",
      min: 0,
      value: 0,
      onchange: () => this.#change({ rank: this.rank.value }),
    });
    this.earlier = h("button", { type: "button", "aria-label": "Earlier step", onclick: () => this.#move(-1) }, "←");
    this.later = h("button", { type: "button", "aria-label": "Later step", onclick: () => this.#move(1) }, "→");
    this.reset = h("button", { type: "button", hidden: true, onclick: () => this.#look(null) }, "Whole step");
    this.detail = h("p", { class: "hint grow" });
    this.predicted = this.#spans("Predicted step. Arrow keys move from span to span.");
    this.measured = this.#spans("Measured step. Arrow keys move from span to span.");
    this.body = h("div", {}, loading());
    fill(
      outlet,
      h(
        "div",
        { class: "tools" },
        h("label", {}, "Step", this.steps),
        h("span", {}, this.earlier, " ", this.later),
        h("label", {}, "Rank", this.rank),
        this.reset,
        this.detail,
      ),
      this.body,
    );
  }

  #spans(label) {
    return new Spans({ label, onhover: (span) => this.#tell(span), onview: (view) => this.#look(view) });
  }

  show(query) {
    const before = this.query;
    this.query = query;
    this.rank.value = query.rank ?? "0";
    if (!before || before.step !== query.step || before.rank !== query.rank) this.#load();
  }

  grown() {
    if (this.answer && !this.answer.available?.length) this.#load();
  }

  whole() {
    this.#look(null);
  }

  leave() {
    this.gone = true;
    this.predicted.destroy();
    this.measured.destroy();
  }

  #change(query) {
    stay(this.shell.address(query));
    this.show({ ...this.query, ...query });
  }

  #move(by) {
    const { available, step } = this.answer ?? {};
    const next = available?.[available.indexOf(step) + by];
    if (next !== undefined) this.#change({ step: String(next) });
  }

  async #load() {
    const { step, rank } = this.query;
    try {
      const answer = await get(runPath(this.name, "/step"), { step, rank: rank ?? 0 });
      if (this.gone || step !== this.query.step || rank !== this.query.rank) return;
      this.answer = answer;
      this.shell.damaged(answer);
    } catch (error) {
      if (!this.gone) failed(this.body, error);
      return;
    }
    this.view = null;
    this.#draw();
  }

  #draw() {
    const { available = [], step, predicted, measured, collectives = [] } = this.answer;
    fill(
      this.steps,
      available.length ? available.map((one) => h("option", { value: one }, integer(one))) : h("option", {}, "none"),
    );
    if (available.length) this.steps.value = String(step);
    this.steps.disabled = !available.length;
    this.earlier.disabled = available.indexOf(step) <= 0;
    this.later.disabled = available.indexOf(step) < 0 || available.indexOf(step) >= available.length - 1;
    fill(
      this.body,
      this.#panel("Predicted", predicted, this.predicted, "This run's plan.json has no prediction of the step."),
      this.#panel(
        "Measured",
        measured,
        this.measured,
        "No timeline of this rank has been recorded yet; telemetry.timeline_every sets how often one is.",
      ),
      predicted?.spans?.length || measured?.spans?.length ? kinds(predicted, measured) : null,
      collectives.length
        ? [h("section", { class: "panel" }, h("h2", {}, "Collectives"), collectiveTable(collectives))]
        : null,
    );
    this.#look(null);
    this.#tell(null);
  }

  #panel(name, side, spans, missing) {
    const known = side?.spans?.length;
    return h(
      "section",
      { class: "panel" },
      h("h2", {}, name, isNumber(side?.seconds) ? h("span", { class: "hint" }, ` ${seconds(side.seconds)}`) : null),
      known ? spans.element : words(missing),
      side?.dropped ? h("p", { class: "hint" }, `${integer(side.dropped)} further spans were not recorded.`) : null,
    );
  }

  // Both on one scale: from 0 to the longer of the two, or what was dragged over.
  #look(view) {
    if (!this.answer) return;
    const sides = [this.answer.predicted, this.answer.measured].filter((side) => side?.spans?.length);
    const ends = sides
      .flatMap((side) => [side.seconds ?? 0, ...side.spans.map((span) => span.start_s + span.duration_s)])
      .filter(isNumber);
    this.reset.hidden = view === null;
    const shown = view ?? [0, ends.reduce((a, b) => Math.max(a, b), 0) || 1];
    this.predicted.show(this.answer.predicted?.spans ?? [], shown);
    this.measured.show(this.answer.measured?.spans ?? [], shown);
  }

  #tell(span) {
    const known = span
      ? [
          `${span.kind}${span.name && span.name !== span.kind ? ` ${span.name}` : ""}`,
          `${seconds(span.duration_s)} from ${seconds(span.start_s)}`,
          isNumber(span.bytes) ? bytes(span.bytes) : "",
          span.group ? `group ${span.group}` : "",
        ]
      : [];
    const text = known.filter(Boolean).join(", ");
    const drawn = this.answer?.predicted?.spans?.length || this.answer?.measured?.spans?.length;
    say(this.detail, text || (drawn ? "Point at a span, or move with the arrow keys; drag to zoom." : ""));
    if (span && document.activeElement?.tagName === "CANVAS") announce(text);
  }
}

// Seconds per kind, summed over the spans of a side; overlap counts twice, as it does on the device.
function kinds(predicted, measured) {
  const sum = (side, kind) =>
    side?.spans?.length
      ? side.spans
          .filter((span) => span.kind === kind)
          .reduce((total, span) => total + (isNumber(span.duration_s) ? span.duration_s : 0), 0)
      : null;
  const rows = Object.keys(KINDS)
    .map((kind) => ({ kind, predicted: sum(predicted, kind), measured: sum(measured, kind) }))
    .filter((row) => row.predicted || row.measured);
  return h(
    "section",
    { class: "panel" },
    h("h2", {}, "Time by kind"),
    table(
      [
        {
          head: "Kind",
          cell: (row) => [h("span", { class: "swatch", style: { background: `var(--${KINDS[row.kind]})` } }), row.kind],
        },
        { head: "Predicted", kind: "number", cell: (row) => seconds(row.predicted) },
        { head: "Measured", kind: "number", cell: (row) => seconds(row.measured) },
        {
          head: "Difference",
          kind: "number",
          cell: (row) => (row.predicted && row.measured ? signed(row.measured / row.predicted - 1) : NONE),
        },
      ],
      rows,
      { caption: "Time by kind" },
    ),
    h("p", { class: "hint" }, "Sums over spans: overlapping work counts in both rows."),
  );
}

function collectiveTable(collectives) {
  return table(
    [
      { head: "Operation", cell: (one) => one.op },
      { head: "Group", cell: (one) => one.group ?? NONE },
      { head: "Calls", kind: "number", cell: (one) => integer(one.count) },
      { head: "Time", kind: "number", cell: (one) => seconds(one.seconds) },
      { head: "Tensors", kind: "number", cell: (one) => bytes(one.bytes) },
      {
        head: "Rate",
        kind: "number",
        cell: (one) => (one.bytes && one.seconds ? `${bytes(one.bytes / one.seconds)}/s` : NONE),
      },
    ],
    collectives,
    { caption: "Collectives of this step" },
  );
}
