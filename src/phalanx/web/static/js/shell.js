// Around the pages of one run: its header, its tabs, what is missing from its record, and its stream.

import { get, outdate, runPath, stream } from "./api.js";
import { fill, h, say } from "./dom.js";
import { calmly, setLive } from "./live.js";
import { here, link } from "./route.js";
import { NONE, bytes, count, integer, isNumber, money, percent, plural, seconds, signed } from "./units.js";
import { notice } from "./parts/states.js";
import { CostPage } from "./pages/cost.js";
import { FindingsPage } from "./pages/findings.js";
import { LedgerPage } from "./pages/ledger.js";
import { MeshPage } from "./pages/mesh.js";
import { PeersPage } from "./pages/peers.js";
import { PlanPage } from "./pages/plan.js";
import { RunPage } from "./pages/run.js";
import { StepPage } from "./pages/step.js";

export const TABS = [
  ["", "Run"],
  ["mesh", "Mesh"],
  ["step", "Step"],
  ["ledger", "Ledger"],
  ["plan", "Plan"],
  ["findings", "Findings"],
  ["cost", "Cost"],
  ["peers", "Peers"], // of runs over slow links only
];
const PAGES = {
  "": RunPage,
  mesh: MeshPage,
  step: StepPage,
  ledger: LedgerPage,
  plan: PlanPage,
  findings: FindingsPage,
  cost: CostPage,
  peers: PeersPage,
};

const AGAIN_MS = 3000;
const HEADER_MS = 5000; // the header's slow numbers (means over the run) are asked for this often while it grows

export class RunShell {
  constructor(outlet, name) {
    this.name = name;
    this.damage = new Map();
    this.title = h("h1", {}, name);
    this.state = h("span", { class: "state" });
    this.under = h("p", { class: "under" });
    this.done = h("i");
    this.figures = h("dl", { class: "figures" });
    this.notice = h("div");
    this.tabs = h(
      "nav",
      { class: "tabs", "aria-label": "Views of this run" },
      TABS.map(([, text]) => h("a", {}, text)),
    );
    this.outlet = h("div");
    this.head = h(
      "div",
      {},
      h("div", { class: "top" }, this.title, this.state),
      this.under,
      (this.track = h("div", { class: "progress", "aria-hidden": "true" }, this.done)),
      this.figures,
      this.notice,
    );
    fill(outlet, this.head, this.tabs, this.outlet);
    this.refresh = calmly(() => this.#load(), HEADER_MS);
    this.#begin();
  }

  show(parts, query) {
    const tab = Object.hasOwn(PAGES, parts[2] ?? "") ? (parts[2] ?? "") : "";
    if (tab !== this.tab) {
      this.page?.leave();
      this.tab = tab;
      fill(this.outlet);
      this.page = new PAGES[tab](this.outlet, this.name, this);
    }
    this.#tabs(tab, query);
    this.page.show(query);
  }

  // Changed in place: whoever stands on a tab with the keyboard stays there.
  #tabs(tab, query) {
    TABS.forEach(([key], index) => {
      const anchor = this.tabs.children[index];
      anchor.href = link(key ? ["runs", this.name, key] : ["runs", this.name], { rank: query.rank });
      anchor.hidden = key === "peers" && key !== tab && !this.info?.has_peers;
      if (key === tab) anchor.setAttribute("aria-current", "page");
      else anchor.removeAttribute("aria-current");
    });
  }

  // A page changes its own part of the address.
  address(query, { keep = true } = {}) {
    const now = here();
    return link(now.parts, keep ? { ...now.query, ...query } : query);
  }

  whole() {
    this.page?.whole?.();
  }

  leave() {
    this.gone = true;
    this.refresh.stop();
    clearTimeout(this.timer);
    clearTimeout(this.checkTimer);
    this.close?.();
    this.page?.leave();
    setLive("off");
  }

  // Until the server answers: it may be starting, or still reading.
  async #begin() {
    await this.#load();
    if (this.info) this.#listen();
    else if (!this.gone && this.problem?.status !== 404) this.timer = setTimeout(() => this.#begin(), AGAIN_MS);
  }

  async #load() {
    const asked = (this.asked = Symbol("newest question"));
    try {
      const answer = await get(runPath(this.name));
      if (asked !== this.asked) return;
      this.info = { ...answer, cost: this.cost, check: this.check };
    } catch (error) {
      this.problem = error;
      if (!this.gone && !this.info) fill(this.notice, h("p", { class: "wrong", role: "alert" }, error.message));
      return;
    }
    if (this.gone) return;
    if (this.problem) this.#recovered();
    this.#header();
    this.#tabs(this.tab, here().query);
    this.page?.informed?.(this.info);
    if (this.info.settled === false) this.timer = setTimeout(() => this.#load(), AGAIN_MS);
    this.#add("cost", "/cost");
    this.#add("check", "/verdicts");
  }

  // What takes the server longer comes into the header when it is there.
  async #add(key, path) {
    const answer = await get(runPath(this.name, path)).catch(() => null);
    if (this.gone || !answer) return;
    this.info[key] = this[key] = answer;
    this.#header();
    if (key !== "check" || answer.settled !== false) return;
    clearTimeout(this.checkTimer);
    this.checkTimer = setTimeout(() => this.#add(key, path), AGAIN_MS);
  }

  #recovered() {
    this.problem = this.damageText = null;
    fill(this.notice);
  }

  #listen() {
    if (this.gone || !this.info) return;
    this.close = stream(this.name, {
      onstate: (state) => setLive(state === "ended" || !this.info.live ? (state === "lost" ? "lost" : "off") : state),
      onprogress: (progress) => this.#progress(progress),
      onmarks: () => {
        outdate();
        this.page?.marked?.();
      },
      onend: () => this.#ended(),
    });
  }

  #progress(progress) {
    // Against what the page was told last: the header may have learned of these steps from an answer of its own.
    const { step, state } = progress;
    const grew = !this.told || step !== this.told.step || state !== this.told.state;
    this.told = { step, state };
    this.info.progress = { ...this.info.progress, ...progress };
    this.#state();
    if (!grew) return;
    outdate();
    this.refresh();
    this.page?.grown?.(progress);
  }

  #ended() {
    outdate();
    this.#load();
    this.page?.grown?.({});
    this.page?.marked?.();
  }

  #header() {
    const summary = this.info.summary ?? {};
    this.#state();
    const split = summary.layout || "";
    const size =
      isNumber(summary.parameters) && summary.parameters > 0 ? `${count(summary.parameters)} parameters` : "";
    const who = [
      summary.model && `${summary.model}${size ? `, ${size}` : ""}`,
      split,
      summary.cluster && `${summary.cluster}${summary.world > 0 ? `, ${plural(summary.world, "rank")}` : ""}`,
      summary.message,
    ];
    fill(
      this.under,
      who.filter(Boolean).map((text) => h("span", {}, text)),
    );
    fill(
      this.figures,
      figures(summary, this.info).map(([name, big, beside]) =>
        h("div", {}, h("dt", {}, name), h("dd", { class: "big" }, big), h("dd", { class: "beside" }, beside)),
      ),
    );
    this.damaged(this.info);
  }

  #state() {
    const { state = "", step, steps, left_s: left } = this.info.progress ?? {};
    const { live } = this.info;
    const named = state || this.info.summary?.state || "unknown";
    const going = ["running", "launching"].includes(named);
    const where = isNumber(step) ? `, ${integer(step)}${steps ? ` of ${integer(steps)}` : ""} steps` : "";
    const rest = isNumber(left) && going ? `, ${seconds(left)} left` : going && !live ? ", but silent" : "";
    this.state.dataset.state = named;
    say(this.state, `${named}${where}${rest}`);
    this.track.hidden = !going;
    this.done.style.width = isNumber(step) && steps ? `${Math.min(100, (100 * step) / steps)}%` : "0";
  }

  // Ranks are read when a page asks for them, so what is missing comes to light page by page.
  damaged({ damage = [] }) {
    for (const one of damage ?? []) this.damage.set(`${one.where} ${one.what}`, one);
    const all = [...this.damage.values()];
    const text = JSON.stringify(all);
    if (this.gone || text === this.damageText) return;
    this.damageText = text;
    fill(this.notice, all.length ? notice(all) : null);
  }
}

// Prediction beside measurement: [name, measured, what stands under it].
function figures(summary, info) {
  const pair = (name, key, format) => {
    const { predicted = null, measured = null } = summary[key] ?? {};
    const error = isNumber(predicted) && isNumber(measured) && predicted ? `, ${signed(measured / predicted - 1)}` : "";
    return [name, format(measured), isNumber(predicted) ? `plan ${format(predicted)}${error}` : "no prediction"];
  };
  const loss = [summary.last_loss, summary.first_loss];
  const held = summary.evaluation?.loss;
  const cost = info.cost?.so_far ?? {};
  const rows = [
    [
      "Loss",
      isNumber(loss[0]) ? loss[0].toFixed(3) : NONE,
      isNumber(held) ? `${held.toFixed(3)} on held-out text` : isNumber(loss[1]) ? `from ${loss[1].toFixed(3)}` : "",
    ],
    pair("Step", "step_s", seconds),
    pair("Tokens/s", "tokens_per_s", count),
    pair("MFU", "mfu", percent),
    pair("Memory, fullest rank", "memory_bytes", bytes),
    pair("Effective training time", "effective_time", percent),
  ];
  if (isNumber(cost.usd))
    rows.push([
      "Cost so far",
      money(cost.usd),
      isNumber(info.cost.projected?.usd) ? `${money(info.cost.projected.usd)} projected` : "",
    ]);
  if (info.check?.available) rows.push(["Specification", ...checked(info.check)]);
  return rows.filter(([, big, beside]) => big !== NONE || !["", "no prediction"].includes(beside));
}

function checked({ counts = {}, errors = 0, so_far: more }) {
  const failed = counts.fail ?? 0;
  const big = failed ? `${integer(failed)} of ${integer(failed + (counts.pass ?? 0))} fail` : `${integer(counts.pass)} pass`;
  const beside = [
    errors && `${integer(errors)} ${errors === 1 ? "error" : "errors"}`,
    counts.unknown && `${integer(counts.unknown)} unknown`,
    counts.waived && `${integer(counts.waived)} waived`,
    more && "so far",
  ];
  return [big, beside.filter(Boolean).join(", ")];
}
