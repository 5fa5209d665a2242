// What the training specification says of this run: every verdict with its numbers, its cost and its cure.

import { get, runPath } from "../api.js";
import { choice, fill, h, pick, say, words } from "../dom.js";
import { calmly } from "../live.js";
import { failed, loading } from "../parts/states.js";
import { explained } from "../parts/rule.js";
import { stay } from "../route.js";
import { integer, isNumber, money } from "../units.js";

const GROWN_MS = 5000; // while the run grows
const AGAIN_MS = 2000; // while its log is still being read
const SHOWN = [
  ["", "Problems"],
  ["unknown", "Unknown"],
  ["waived", "Waived"],
  ["pass", "Passed"],
  ["all", "All"],
];
const SEVERITIES = [
  ["", "Any severity"],
  ["error", "Errors"],
  ["warning", "Warnings"],
  ["info", "Remarks"],
];
const ORDER = { fail: 0, unknown: 1, waived: 2, pass: 3 };
const WORDS = { fail: "fails", unknown: "unknown", waived: "waived", pass: "passes" };

export class FindingsPage {
  constructor(outlet, name, shell) {
    Object.assign(this, { outlet, name, shell, opened: new Set(), query: {} });
    this.head = h("h2", {}, "Training specification");
    this.about = h("p", { class: "hint", role: "status" });
    this.shown = choice("Verdicts to show", SHOWN, "", (key) => this.#change({ show: key }));
    this.severity = choice("Severity", SEVERITIES, "", (key) => this.#change({ severity: key }));
    this.list = h("div");
    this.beside = h("div");
    fill(outlet, loading());
    this.refresh = calmly(() => this.#load(), GROWN_MS);
    this.#load();
  }

  show(query) {
    this.query = query;
    pick(this.shown, SHOWN.some(([key]) => key === query.show) ? query.show : "");
    pick(this.severity, SEVERITIES.some(([key]) => key === query.severity) ? query.severity : "");
    if (this.answer) this.#draw();
  }

  grown() {
    this.refresh();
  }

  leave() {
    this.gone = true;
    this.refresh.stop();
    clearTimeout(this.timer);
  }

  async #load() {
    try {
      const answer = await get(runPath(this.name, "/findings"));
      if (this.gone) return;
      this.shell.damaged(answer);
      this.#take(answer);
    } catch (error) {
      if (!this.gone) failed(this.answer ? this.beside : this.outlet, error);
    }
  }

  #take(answer) {
    const text = JSON.stringify(answer);
    if (!this.answer) fill(this.outlet, this.#frame());
    // Whoever reads or has something selected is not disturbed by an answer that says the same.
    if (text !== this.text) {
      this.text = text;
      this.answer = answer;
      this.#draw();
    }
    clearTimeout(this.timer);
    if (answer.settled === false) this.timer = setTimeout(() => this.#load(), AGAIN_MS);
  }

  #change(query) {
    stay(this.shell.address(query));
    this.show(Object.fromEntries(Object.entries({ ...this.query, ...query }).filter(([, value]) => value !== "")));
  }

  #frame() {
    const tools = h("div", { class: "tools" }, this.shown, this.severity);
    return [h("section", { class: "panel verdicts" }, this.head, this.about, tools), this.list, this.beside];
  }

  #draw() {
    const { available, settled, report = {}, groups = [], remarks = [] } = this.answer;
    const waiting = settled ? "The run could not be checked." : "The run is being checked; verdicts appear here.";
    say(this.about, available ? summary(report, this.answer) : waiting);
    const kept = groups
      .map((group) => ({ ...group, findings: group.findings.filter((one) => this.#wants(one)).sort(worst) }))
      .filter((group) => group.findings.length);
    fill(
      this.list,
      kept.map((group) => this.#group(group)),
      available && !kept.length ? h("section", { class: "panel" }, words(this.#nothing())) : null,
    );
    fill(this.beside, remarked(remarks));
  }

  #wants(one) {
    const { show = "", severity = "" } = this.query;
    const verdict = show === "all" || (show === "" ? one.verdict === "fail" : one.verdict === show);
    return verdict && (severity === "" || one.severity === severity);
  }

  #nothing() {
    const { show = "", severity = "" } = this.query;
    return show === "" && severity === "" ? "No rule is violated." : "No findings of this kind.";
  }

  #group({ group, title, findings }) {
    return h(
      "section",
      { class: "panel", data: { group } },
      h("h2", {}, `${group} · ${title}`),
      findings.map((one) => this.#finding(one)),
    );
  }

  #finding(one) {
    const lines = [one.file && (one.line ? `${one.file}:${one.line}` : one.file), cost(one.impact ?? {})];
    return h(
      "article",
      { class: "finding" },
      h(
        "h3",
        {},
        h("span", { class: "verdict", data: { verdict: one.verdict, severity: one.severity } }, verdict(one)),
        ` ${one.rule} ${one.slug}`,
      ),
      h("p", {}, one.what),
      (one.formula ?? []).map((line) => h("p", { class: "formula" }, h("code", {}, line))),
      one.reason ? h("p", {}, `Waived: ${one.reason}`) : null,
      one.fix ? h("p", { class: "cure" }, h("b", {}, "Fix: "), one.fix) : null,
      lines.filter(Boolean).map((line) => h("p", { class: "hint" }, line)),
      explained(one.rule, this.opened),
    );
  }
}

const worst = (a, b) =>
  ORDER[a.verdict] - ORDER[b.verdict] || rank(a.severity) - rank(b.severity) || a.rule.localeCompare(b.rule);
const rank = (severity) => ["error", "warning", "info"].indexOf(severity);

// A rule that has nothing to say about this run is no pass.
function verdict({ verdict: said, severity, applies }) {
  if (said === "fail") return severity === "info" ? "remark" : severity;
  return said === "pass" && applies === false ? "does not apply" : (WORDS[said] ?? "");
}

function summary({ counts = {}, edition, profile, scaling, errors }, { so_far: more }) {
  const told = ["pass", "fail", "unknown", "waived"].map((key) => `${integer(counts[key] ?? 0)} ${key}`);
  const wrong = errors ? `, ${integer(errors)} of them ${errors === 1 ? "an error" : "errors"}` : "";
  told[1] += wrong;
  return `${told.join(" · ")}${more ? " so far" : ""}. Edition ${edition}, profile ${profile}, class ${scaling}.`;
}

function cost({ points, usd, note }) {
  const parts = [];
  if (isNumber(points) && points > 0)
    parts.push(`${points < 0.01 ? "below 0.01" : points.toFixed(points < 1 ? 2 : 1)} points of effective training time`);
  if (isNumber(usd) && usd > 0) parts.push(`about ${money(usd)}`);
  const told = parts.join(", ");
  return told && note ? `Costs ${told}: ${note}` : told ? `Costs ${told}` : (note ?? "");
}

function remarked(remarks) {
  if (!remarks.length) return null;
  return h(
    "section",
    { class: "panel" },
    h("h2", {}, "Plan warnings and excluded hosts"),
    remarks.map((one) =>
      h(
        "article",
        { class: "finding" },
        h("h3", {}, one.source === "plan" ? "Plan" : "Run"),
        h("p", {}, one.what ?? ""),
        (one.hints ?? []).map((line) => h("p", { class: "hint" }, line)),
      ),
    ),
  );
}
