// The plan: layout, where its step goes, memory, why not another one.

import { get, runPath } from "../api.js";
import { facts, fill, h, table, words } from "../dom.js";
import { failed, loading } from "../parts/states.js";
import { NONE, bytes, count, integer, isNumber, layoutName, own, percent, seconds, signed, title } from "../units.js";

const PARTS = {
  matmul_s: "matrix products",
  attention_s: "attention",
  elementwise_s: "memory-bound work",
  head_s: "output head and loss",
  recompute_s: "recompute",
  tensor_s: "tensor traffic",
  context_s: "context traffic",
  expert_s: "expert traffic",
  pipeline_send_s: "pipeline sends",
  bubble_s: "pipeline bubble",
  shard_s: "ZeRO traffic",
  gradient_s: "gradient traffic",
  optimizer_s: "optimizer",
  launch_s: "kernel launches",
  overhead_s: "host overhead",
};
const MOST_ROWS = 100; // a plan names a handful; a damaged one may name anything
const HUES = ["blue", "teal", "gold", "purple", "sky", "orange", "green", "brown", "red", "grey"];
const AXES = [
  ["data", "Data"],
  ["shard", "Shards per replica"],
  ["tensor", "Tensor"],
  ["context", "Context"],
  ["pipeline", "Pipeline"],
  ["virtual_pipeline", "Chunks per stage"],
  ["expert", "Expert"],
];

export class PlanPage {
  constructor(outlet, name, shell) {
    Object.assign(this, { outlet, name, shell });
    fill(outlet, loading());
    this.#load();
  }

  show() {}

  leave() {
    this.gone = true;
  }

  async #load() {
    try {
      const plan = await get(runPath(this.name, "/plan"));
      if (this.gone) return;
      this.shell.damaged(plan);
      this.#draw(plan);
    } catch (error) {
      if (!this.gone) failed(this.outlet, error);
    }
  }

  #draw(plan) {
    if (!Object.keys(plan.layout ?? {}).length)
      return fill(
        this.outlet,
        words("This run has no readable plan.json, so there is no layout and no prediction to show."),
      );
    fill(
      this.outlet,
      h("div", { class: "pair" }, layout(plan), prediction(plan)),
      h("div", { class: "pair" }, breakdown(plan.prediction?.breakdown_s ?? {}), memory(plan.memory ?? {})),
      reasons(plan.reasons),
      alternatives((plan.alternatives ?? []).slice(0, MOST_ROWS)),
      mapping((plan.mapping ?? []).slice(0, MOST_ROWS)),
      warnings(plan.warnings),
    );
  }
}

function layout({ layout_name: name, layout: split, rank_order: order }) {
  const axes = AXES.filter(([key]) => isNumber(split[key])).map(([key, text]) => [text, integer(split[key])]);
  const batch = isNumber(split.micro_batch)
    ? `${integer(split.accumulation)} × ${integer(split.micro_batch)} sequences per rank and step`
    : null;
  return h(
    "section",
    { class: "panel" },
    h("h2", {}, name || layoutName(split)),
    facts([
      ...axes,
      ["ZeRO", split.zero],
      ["Micro-batches", batch],
      ["Recompute", split.recompute],
      ["Precision", split.precision],
      ["Schedule", split.pipeline > 1 ? split.schedule : null],
      ["Offload", split.offload],
      ["Rank order", Array.isArray(order) ? `${order.join(", ")} (fastest first)` : null],
    ]),
  );
}

function prediction({ prediction: known = {}, duration = {}, reliability = {}, bill = {} }) {
  const range = (low, high, format) =>
    isNumber(low) && isNumber(high) ? ` (80%: ${format(low)} to ${format(high)})` : "";
  const when = (value, text) => (isNumber(value) ? text : null);
  return h(
    "section",
    { class: "panel" },
    h("h2", {}, "Prediction"),
    facts([
      ["Step", when(known.step_s, seconds(known.step_s) + range(known.step_s_low, known.step_s_high, seconds))],
      ["Tokens/s", when(known.tokens_per_s, count(known.tokens_per_s))],
      ["MFU", when(known.mfu, percent(known.mfu))],
      ["Parameters", when(known.parameters, count(known.parameters))],
      ["Steps", when(duration.steps, integer(duration.steps))],
      [
        "Wall clock",
        when(duration.wall_s, seconds(duration.wall_s) + range(duration.wall_s_low, duration.wall_s_high, seconds)),
      ],
      ["Effective training time", when(reliability.effective_time, percent(reliability.effective_time))],
      [
        "Failures per day",
        when(
          reliability.failures_per_day,
          isNumber(reliability.failures_per_day) ? reliability.failures_per_day.toPrecision(3) : NONE,
        ),
      ],
      ["Checkpoint every", when(reliability.interval_s, seconds(reliability.interval_s))],
      ["Device hours", when(bill.device_hours, count(bill.device_hours))],
    ]),
  );
}

function parts(rows, format, caption, total) {
  const most = Math.max(...rows.map((row) => row.value));
  return table(
    [
      { head: "Part", cell: (row) => [h("span", { class: "swatch", style: { background: row.hue } }), row.text] },
      { head: caption === "Memory" ? "Size" : "Time", kind: "number", cell: (row) => format(row.value) },
      { head: "Share", kind: "number", cell: (row) => percent(total ? row.value / total : null) },
      {
        head: h("span", { class: "unseen" }, "As a bar"),
        kind: "bars",
        cell: (row) =>
          h(
            "div",
            { class: "bar-cell" },
            h("i", { style: { width: `${(100 * row.value) / most}%`, background: row.hue } }),
          ),
      },
    ],
    rows,
    { caption },
  );
}

function listed(values, text) {
  return Object.entries(values)
    .filter(([, value]) => isNumber(value) && value > 0)
    .sort((a, b) => b[1] - a[1])
    .map(([key, value], index) => ({ text: text(key), value, hue: `var(--${HUES[index % HUES.length]})` }));
}

function breakdown(values) {
  const rows = listed(values, (key) => own(PARTS, key) ?? title(key).toLowerCase());
  const total = rows.reduce((sum, row) => sum + row.value, 0);
  return h(
    "section",
    { class: "panel" },
    h("h2", {}, "Where the step goes"),
    rows.length ? parts(rows, seconds, "Where the step goes", total) : words("Not in this plan."),
  );
}

function memory({ parts_bytes: sizes = {}, total_bytes: total, usable_bytes: usable }) {
  const rows = listed(sizes, (key) => key.replaceAll("_", " "));
  const room =
    isNumber(total) && isNumber(usable) && usable
      ? `${bytes(total)} of ${bytes(usable)} usable: ${percent(1 - total / usable)} headroom`
      : "";
  return h(
    "section",
    { class: "panel" },
    h("h2", {}, "Memory per device"),
    rows.length ? parts(rows, bytes, "Memory", usable) : words("Not in this plan."),
    h("p", { class: "hint" }, room),
  );
}

function reasons(list) {
  const lines = (Array.isArray(list) ? list : [])
    .map((one) => (typeof one === "string" ? one : one?.text))
    .filter(Boolean);
  return lines.length
    ? h(
        "section",
        { class: "panel" },
        h("h2", {}, "Why"),
        h(
          "ul",
          {},
          lines.map((line) => h("li", {}, line)),
        ),
      )
    : null;
}

function alternatives(rows) {
  if (!rows.length) return h("section", { class: "panel" }, h("h2", {}, "Alternatives"), words("The plan lists none."));
  return h(
    "section",
    { class: "panel" },
    h("h2", {}, "Why not another layout"),
    table(
      [
        {
          head: "Layout",
          cell: (row) => [layoutName(row.layout_name ?? row.layout), h("div", { class: "hint" }, row.idea ?? "")],
        },
        { head: "Step", kind: "number", cell: (row) => seconds(row.step_s) },
        { head: "Against the plan", kind: "number", cell: (row) => signed(row.slower) },
        { head: "Memory", kind: "number", cell: (row) => bytes(row.memory_bytes) },
        {
          head: "Why not",
          cell: (row) =>
            h(
              "div",
              { class: "long" },
              row.reason ?? "",
              row.wins_if ? h("div", { class: "hint" }, row.wins_if) : null,
            ),
        },
      ],
      rows,
      { caption: "Alternatives" },
    ),
  );
}

function mapping(rows) {
  if (!rows.length) return null;
  return h(
    "section",
    { class: "panel" },
    h("h2", {}, "Communication by axis"),
    table(
      [
        { head: "Axis", cell: (row) => row.axis },
        { head: "Size", kind: "number", cell: (row) => integer(row.size) },
        { head: "Stride", kind: "number", cell: (row) => integer(row.stride) },
        { head: "Links", cell: (row) => row.tier },
        { head: "Operation", cell: (row) => row.operation },
        { head: "By", cell: (row) => row.algorithm },
        { head: "Sent per step", kind: "number", cell: (row) => bytes(row.bytes_per_step) },
        { head: "On the wire", kind: "number", cell: (row) => seconds(row.wire_s) },
        { head: "Not hidden", kind: "number", cell: (row) => seconds(row.shown_s) },
      ],
      rows,
      { caption: "Axes and links" },
    ),
  );
}

function warnings(list) {
  const lines = (Array.isArray(list) ? list : []).filter((one) => typeof one === "string");
  return lines.length
    ? h(
        "section",
        { class: "panel" },
        h("h2", {}, "Warnings"),
        h(
          "ul",
          {},
          lines.map((line) => h("li", {}, line)),
        ),
      )
    : null;
}
