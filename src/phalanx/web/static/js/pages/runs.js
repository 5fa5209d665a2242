// All runs of the folder: filter, sort, choose some to compare.

import { get } from "../api.js";
import { fill, h, say, scroll, words } from "../dom.js";
import { failed, loading } from "../parts/states.js";
import { link, stay } from "../route.js";
import { NONE, ago, clock, count, integer, isNumber, money, percent, plural } from "../units.js";

const AGAIN_MS = 5000;
const number = (key, format, head, hint) => ({
  key,
  head,
  hint,
  kind: "number",
  sort: (run) => run[key],
  cell: (run) => format(run[key]),
});

// Of a run that goes on as it goes now, of one that is over its mean.
const rate = (key, format, head) => ({
  ...number(key, format, head, "mean of the run; while it is running, of its last 20 steps"),
  cell: (run) => (run.live && isNumber(run[key]) ? [format(run[key]), h("small", {}, " now")] : format(run[key])),
});

const COLUMNS = [
  {
    key: "name",
    head: "Run",
    sort: (run) => run.name,
    cell: (run) => [
      h("a", { href: link(["runs", run.name]) }, run.name),
      h(
        "small",
        {},
        [run.model, run.layout, run.world > 0 && plural(run.world, "rank")].filter(Boolean).join(" · ") ||
          "no plan",
      ),
    ],
  },
  {
    key: "state",
    head: "State",
    sort: (run) => run.state,
    cell: (run) =>
      h(
        "span",
        { class: "state", data: { state: run.state } },
        run.state,
        ["running", "launching"].includes(run.state) && run.live === false ? ", silent" : "",
      ),
  },
  {
    key: "step",
    head: "Steps",
    kind: "number",
    sort: (run) => run.step,
    cell: (run) => (isNumber(run.step) ? `${integer(run.step)}${run.steps ? ` / ${integer(run.steps)}` : ""}` : NONE),
  },
  number("loss", (value) => (isNumber(value) ? value.toFixed(3) : NONE), "Loss"),
  rate("tokens_per_s", count, "Tokens/s"),
  rate("mfu", percent, "MFU"),
  number("effective", percent, "Effective"),
  number("incidents", (value) => (value ? integer(value) : NONE), "Incidents"),
  number("usd", money, "Cost"),
  {
    key: "started",
    head: "Started",
    kind: "number",
    sort: (run) => run.started ?? run.updated,
    cell: (run) => (isNumber(run.started) ? h("span", { title: clock(run.started) }, ago(run.started)) : NONE),
  },
];

export class RunsPage {
  constructor(outlet) {
    this.outlet = outlet;
    this.filter = h("input", {
      id: "filter",
      type: "search",
      placeholder: "name, model, layout, state",
      size: 28,
      oninput: () => this.#change({ q: this.filter.value }),
    });
    this.count = h("span", { class: "hint", role: "status" });
    this.compare = h(
      "button",
      {
        type: "button",
        disabled: true,
        onclick: () => (location.hash = link(["compare"], { runs: [...this.picked].join(",") })),
      },
      "Compare",
    );
    this.body = h("div", {}, loading());
    this.picked = new Set();
    fill(
      outlet,
      h("div", { class: "top" }, h("h1", {}, "Runs"), this.count),
      h("div", { class: "tools" }, h("label", {}, "Filter", this.filter), h("span", { class: "grow" }), this.compare),
      this.body,
    );
    this.timer = setInterval(() => document.visibilityState === "visible" && this.#load(), AGAIN_MS);
    this.#load();
  }

  show(_, query) {
    this.query = query;
    if (document.activeElement !== this.filter) this.filter.value = query.q ?? "";
    this.picked = new Set((query.pick ?? "").split(",").filter(Boolean));
    this.#draw();
  }

  leave() {
    this.gone = true;
    clearInterval(this.timer);
  }

  async #load() {
    try {
      this.answer = await get("runs");
    } catch (error) {
      if (!this.gone) failed(this.body, error);
      this.drawn = null;
      return;
    }
    if (!this.gone) this.#draw();
    if (this.answer.settled === false && !this.gone) setTimeout(() => !this.gone && this.#load(), 1000);
  }

  #change(query) {
    this.query = { ...this.query, ...query };
    stay(link([], this.query));
    this.#draw();
  }

  #draw() {
    if (!this.answer || this.gone) return;
    const rows = this.#rows();
    const all = this.answer.runs.length;
    const where = this.answer.root ? ` in ${this.answer.root}` : "";
    say(
      this.count,
      rows.length === all
        ? `${plural(all, "run")}${where}`
        : `${integer(rows.length)} of ${integer(all)} runs${where}`,
    );
    this.compare.disabled = this.picked.size < 2;
    this.compare.textContent =
      this.picked.size < 2 ? "Compare: select two or more" : `Compare ${this.picked.size} runs`;
    const text = JSON.stringify([rows, this.query.sort, [...this.picked]]);
    if (text === this.drawn) return;
    this.drawn = text;
    const focus = document.activeElement?.dataset?.focus;
    const left = this.body.firstElementChild?.scrollLeft ?? 0;
    fill(
      this.body,
      all === 0
        ? words(
            "There are no runs here yet. ",
            h("code", {}, "phalanx train job.toml"),
            " starts one; it appears here at once.",
          )
        : rows.length === 0
          ? words(`No run matches “${this.query.q}”.`)
          : this.#table(rows),
    );
    this.body.firstElementChild.scrollLeft = left;
    if (focus) this.body.querySelector(`[data-focus="${CSS.escape(focus)}"]`)?.focus();
  }

  #rows() {
    const wanted = (this.query.q ?? "").toLowerCase().split(/\s+/).filter(Boolean);
    const rows = this.answer.runs.filter((run) =>
      wanted.every((word) =>
        [run.name, run.model, run.layout, run.state, run.cluster].join(" ").toLowerCase().includes(word),
      ),
    );
    const [key, down] = this.#sorting();
    const column = COLUMNS.find((one) => one.key === key) ?? COLUMNS.at(-1);
    return rows.sort((a, b) => (down ? -1 : 1) * order(column.sort(a), column.sort(b), down));
  }

  #sorting() {
    const sort = this.query.sort ?? "-started";
    return [sort.replace(/^-/, ""), sort.startsWith("-")];
  }

  #table(rows) {
    const [key, down] = this.#sorting();
    const heads = COLUMNS.map((column) =>
      h(
        "th",
        {
          scope: "col",
          class: column.kind,
          "aria-sort": column.key === key ? (down ? "descending" : "ascending") : null,
        },
        h(
          "button",
          {
            type: "button",
            title: column.hint ?? null,
            data: { focus: `sort ${column.key}` },
            onclick: () => this.#change({ sort: column.key === key && !down ? `-${column.key}` : column.key }),
          },
          column.head,
        ),
      ),
    );
    const body = rows.map((run) =>
      h(
        "tr",
        {},
        h("td", { class: "tick" }, this.#tick(run)),
        COLUMNS.map((column, index) =>
          h(
            index ? "td" : "th",
            { class: column.kind, scope: index ? null : "row" },
            column.cell(run),
            index === 1 && run.damage
              ? h("span", { class: "flag", title: "parts of its record are missing or damaged" }, " · damaged")
              : null,
          ),
        ),
      ),
    );
    const head = h("thead", {}, h("tr", {}, h("td", { class: "tick" }), heads));
    const box = scroll("Runs", h("table", {}, h("caption", { class: "unseen" }, "Runs"), head, h("tbody", {}, body)));
    box.classList.add("runs");
    return box;
  }

  #tick(run) {
    return h("input", {
      type: "checkbox",
      "aria-label": `Compare ${run.name}`,
      checked: this.picked.has(run.name),
      data: { focus: `pick ${run.name}` },
      onchange: (event) => this.#pick(run.name, event.target.checked),
    });
  }

  #pick(name, on) {
    this.picked[on ? "add" : "delete"](name);
    this.#change({ pick: [...this.picked].join(",") });
  }
}

// What is not known comes last in either direction.
function order(a, b, down) {
  const [lacksA, lacksB] = [a === null || a === undefined || a === "", b === null || b === undefined || b === ""];
  if (lacksA || lacksB) return (lacksA - lacksB) * (down ? -1 : 1);
  return typeof a === "number" && typeof b === "number"
    ? a - b
    : String(a).localeCompare(String(b), "en", { numeric: true });
}
