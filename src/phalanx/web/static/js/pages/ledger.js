// Where every second of the run went.

import { runPath, settled } from "../api.js";
import { fill, h, table, words } from "../dom.js";
import { calmly } from "../live.js";
import { Chart } from "../parts/chart.js";
import { failed, loading } from "../parts/states.js";
import { isNumber, own, percent, seconds, title, windowName } from "../units.js";

const UPDATE_MS = 10000;

// In the order of the bar: the first three are the steps that stayed, so their edge is the effective training time.
const ACCOUNTS = {
  productive: ["green", "steps that were kept"],
  stragglers: ["gold", "in those steps: time lost to ranks slower than their peers"],
  data: ["brown", "in those steps: waiting for the batch"],
  compile: ["sky", "compiling inside steps"],
  init: ["grey", "from launch until the ranks were ready"],
  checkpoint: ["blue", "training waited for a checkpoint"],
  evaluate: ["teal", "held-out text"],
  guard: ["purple", "checks of the state"],
  detect: ["orange", "until a failure was detected"],
  restore: ["red", "from detection to the first step afterwards"],
  lost_work: ["rose", "steps that had to be repeated"],
  stopping: ["grey", "after the last step"],
  other: ["brown", "no event explains it"],
};

export class LedgerPage {
  constructor(outlet, name, shell) {
    Object.assign(this, { outlet, name, shell });
    this.body = h("div", {}, loading());
    fill(outlet, this.body);
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
    this.chart?.destroy();
  }

  async #load() {
    try {
      this.answer = await settled(runPath(this.name, "/ledger"), () => this.gone);
    } catch (error) {
      if (!this.gone) failed(this.body, error);
      return;
    }
    if (this.gone) return;
    this.shell.damaged(this.answer);
    this.#draw();
  }

  #draw() {
    const { wall_s: wall, accounts = {}, labels = {}, effective } = this.answer;
    const rows = Object.entries(accounts)
      .filter(([, value]) => isNumber(value) && value !== 0)
      .map(([name, value]) => ({
        name,
        label: title(own(labels, name) ?? name),
        value,
        share: wall ? value / wall : null,
      }))
      .sort((a, b) => place(a.name) - place(b.name));
    this.chart?.destroy();
    this.chart = null;
    if (!rows.length || !wall) return fill(this.body, words("Nothing to show yet: no step has been recorded."));
    const panel = h(
      "section",
      { class: "panel accounts" },
      h("h2", {}, `${seconds(wall)} of wall clock`),
      bar(rows, wall),
      h("p", { class: "under-bar" }, closing(this.answer)),
      accountTable(rows),
    );
    fill(this.body, panel);
    if (effective?.t?.length) this.#effective(effective);
  }

  #effective({ t, cumulative = [], last_hour: hour = [], window_s: window }) {
    const kept = t
      .map((_, index) => index)
      .filter((index) => isNumber(t[index]) && (index === 0 || t[index] > t[index - 1]));
    this.chart = new Chart({
      title: "Effective training time",
      name: "cumulative",
      unit: "",
      xUnit: "s",
      zero: true,
      most: 1,
      height: 220,
    });
    this.chart.element.style.marginTop = "1.5rem";
    this.body.append(this.chart.element);
    this.chart.show({
      x: kept.map((index) => t[index] - t[kept[0]]),
      lines: [
        { label: "cumulative", values: kept.map((index) => cumulative[index] ?? null), hue: "green" },
        { label: windowName(window), values: kept.map((index) => hour[index] ?? null), hue: "orange" },
      ],
    });
  }
}

function place(name) {
  const index = Object.keys(ACCOUNTS).indexOf(name);
  return index < 0 ? 99 : index;
}

const hue = (name) => `var(--${own(ACCOUNTS, name)?.[0] ?? "grey"})`;

function bar(rows, wall) {
  const parts = rows
    .filter((row) => row.value > 0)
    .map((row) =>
      h("i", {
        title: `${row.label} ${percent(row.share)}`,
        style: { width: `${(100 * row.value) / wall}%`, background: hue(row.name) },
      }),
    );
  const spoken = rows.map((row) => `${row.label} ${percent(row.share)}`).join(", ");
  return h("div", { class: "meter", role: "img", "aria-label": spoken }, parts);
}

function closing({ closes, gap, effective_share: share, clock_jumps: jumps }) {
  const parts = [
    isNumber(share) ? `${percent(share)} effective: steps that were kept, without compilation.` : "",
    closes === false
      ? `The accounts do not add up${gap ? `: ${gap}` : ""}.`
      : "The accounts add up: every second is in exactly one.",
    jumps ? `The clock jumped ${jumps === 1 ? "once" : `${jumps} times`}.` : "",
  ];
  return parts.filter(Boolean).join(" ");
}

function accountTable(rows) {
  const most = Math.max(...rows.map((row) => row.value));
  return table(
    [
      {
        head: "Account",
        cell: (row) => [h("span", { class: "swatch", style: { background: hue(row.name) } }), row.label],
      },
      { head: "Time", kind: "number", cell: (row) => seconds(row.value) },
      { head: "Share", kind: "number", cell: (row) => percent(row.share) },
      {
        head: h("span", { class: "unseen" }, "As a bar"),
        kind: "bars",
        cell: (row) =>
          h(
            "div",
            { class: "bar-cell" },
            h("i", { style: { width: `${(100 * Math.max(0, row.value)) / most}%`, background: hue(row.name) } }),
          ),
      },
      { head: "What it is", cell: (row) => h("span", { class: "hint" }, own(ACCOUNTS, row.name)?.[1] ?? "") },
    ],
    rows,
    { caption: "Accounts" },
  );
}
