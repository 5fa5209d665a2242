// All ranks over time, and one of them with its peers.

import { get, runPath } from "../api.js";
import { announce, choice, facts, fill, h, pick, table, words } from "../dom.js";
import { calmly } from "../live.js";
import { Heat, rampCanvas } from "../parts/heat.js";
import { failed, loading } from "../parts/states.js";
import { stay } from "../route.js";
import { integer, isNumber, own, reading, seconds, title } from "../units.js";

const UPDATE_MS = 4000;
const NAMES = [
  ["compute_s", "Compute"],
  ["wait_s", "Not computing"],
  ["memory_bytes", "Memory"],
  ["utilization", "Utilization"],
];
const AXES = { tensor: "sky", context: "gold", data: "green", pipeline: "purple" };
const MOST_PEERS = 64; // buttons of one axis
const LATEST = [
  ["duration_s", "s"],
  ["compute_s", "s"],
  ["wait_s", "s"],
  ["data_s", "s"],
  ["memory_bytes", "bytes"],
  ["bytes_sent", "bytes"],
];
const MONITOR = [
  ["utilization", "ratio"],
  ["memory_pressure", "ratio"],
  ["memory_bytes", "bytes"],
  ["memory_limit_bytes", "bytes"],
  ["allocation_retries", ""],
  ["power_w", "W"],
  ["energy_j", "J"],
  ["temperature_c", "°C"],
];

export class MeshPage {
  constructor(outlet, name, shell) {
    Object.assign(this, { outlet, name, shell });
    this.series = choice("Series", NAMES, "compute_s", (key) => this.#change({ name: key === "compute_s" ? "" : key }));
    this.reading = h("p", { class: "hint grow" });
    this.heat = new Heat({
      label: "Ranks over time. Arrow keys move, Enter selects a rank.",
      onmove: (cell) => this.#read(cell),
      onpick: (rank) => this.#change({ rank }),
    });
    this.slow = h("div");
    this.map = h("section", { class: "panel" }, loading());
    this.side = h(
      "section",
      { class: "panel side", "aria-label": "One rank" },
      words("Select a rank to see its peers on each axis."),
    );
    fill(
      outlet,
      h("div", { class: "tools" }, this.series, this.reading),
      this.slow,
      h("div", { class: "mesh" }, this.map, this.side),
    );
    this.update = calmly(() => this.#load(), UPDATE_MS);
  }

  show(query) {
    const before = this.query;
    this.query = query;
    pick(this.series, query.name ?? "compute_s");
    if (!before || before.name !== query.name) this.#load();
    if (!before || before.rank !== query.rank) this.#rank();
  }

  grown() {
    this.update();
  }

  leave() {
    this.gone = true;
    this.update.stop();
    this.heat.destroy();
  }

  #change(query) {
    stay(this.shell.address(query));
    this.show(
      Object.fromEntries(
        Object.entries({ ...this.query, ...query })
          .map(([key, value]) => [key, String(value)])
          .filter(([, value]) => value !== ""),
      ),
    );
  }

  async #load() {
    const name = this.query.name ?? "compute_s";
    try {
      const mesh = await get(runPath(this.name, "/mesh"), { name, columns: 120 });
      if (this.gone || name !== (this.query.name ?? "compute_s")) return;
      this.mesh = mesh;
      this.shell.damaged(mesh);
    } catch (error) {
      if (!this.gone) failed(this.map, error);
      this.drawn = false;
      return;
    }
    this.#draw();
  }

  #draw() {
    const { mesh } = this;
    this.#stragglers(mesh.stragglers ?? []);
    if (!mesh.step.length || !mesh.ranks.length) {
      this.drawn = false;
      return fill(this.map, words(`${title(mesh.name)} is not recorded in this run.`));
    }
    if (!this.drawn) {
      this.low = h("span");
      this.high = h("span");
      fill(
        this.map,
        this.heat.element,
        h(
          "div",
          { class: "ramp" },
          this.low,
          rampCanvas(),
          this.high,
          h("span", {}, "each column is the mean of a range of steps; wider gaps separate hosts"),
        ),
      );
      this.drawn = true;
    }
    this.heat.show(mesh);
    this.low.textContent = reading(this.heat.low, mesh.unit, mesh.name);
    this.high.textContent = reading(this.heat.high, mesh.unit, mesh.name);
  }

  #stragglers(found) {
    const text = JSON.stringify(found);
    if (text === this.slowText) return;
    this.slowText = text;
    if (!found.length) return fill(this.slow);
    const lines = found.slice(0, 8).map((one) => this.#straggler(one));
    fill(
      this.slow,
      h(
        "div",
        { class: "notice" },
        found.length === 1
          ? "One rank is slower than those that do the same work:"
          : `${integer(found.length)} ranks are slower than those that do the same work:`,
        h("ul", {}, lines),
      ),
    );
  }

  #straggler({ rank, text = "" }) {
    const [name, known] = [`rank ${rank}`, String(text ?? "")];
    const rest = known.startsWith(name) ? known.slice(name.length) : ` ${known}`;
    return h(
      "li",
      {},
      h("a", { href: this.shell.address({ rank }), onclick: (event) => this.#follow(event, rank) }, name),
      rest,
    );
  }

  #follow(event, rank) {
    event.preventDefault();
    this.#change({ rank });
  }

  #read(cell) {
    if (!cell) return fill(this.reading);
    const { places = [], hosts = [], unit, name } = this.mesh;
    const who = [`rank ${cell.rank}`, places[cell.row], hosts[cell.row], `step ${integer(cell.step)}`]
      .filter(Boolean)
      .join(", ");
    const text = `${who}: ${isNumber(cell.value) ? reading(cell.value, unit, name) : "nothing recorded"}`;
    fill(this.reading, text);
    if (document.activeElement === this.heat.canvas) announce(text);
  }

  async #rank() {
    const { rank } = this.query;
    if (rank === undefined) return this.heat.pick(null);
    try {
      const one = await get(runPath(this.name, `/ranks/${encodeURIComponent(rank)}`));
      if (this.gone || rank !== this.query.rank) return;
      this.heat.pick(one.rank, colours(one));
      fill(this.side, this.#details(one));
    } catch (error) {
      if (!this.gone) failed(this.side, error);
    }
  }

  #details(one) {
    const peers = Object.entries(one.peers ?? {});
    return [
      h("h2", {}, `Rank ${one.rank}`),
      facts([["Place", one.place], ["Host", one.host], ...numbers(one.latest ?? {}, LATEST)]),
      peers.length ? [h("h3", {}, "Peers"), peers.map(([axis, ranks]) => this.#peers(axis, ranks, one.rank))] : null,
      one.latency?.length ? [h("h3", {}, "Latency to neighbours"), latency(one.latency)] : null,
      Object.keys(one.monitor ?? {}).length
        ? [h("h3", {}, "Device"), facts([...numbers(one.monitor, MONITOR), ["Measured by", sources(one.monitor)]])]
        : null,
    ];
  }

  #peers(axis, ranks, self) {
    const others = ranks.filter((rank) => rank !== self);
    const buttons = others
      .slice(0, MOST_PEERS)
      .map((rank) =>
        h(
          "li",
          {},
          h(
            "button",
            { type: "button", "aria-label": `rank ${rank}, ${axis}`, onclick: () => this.#change({ rank }) },
            rank,
          ),
        ),
      );
    const hue = own(AXES, axis) ?? "grey";
    return [
      h("p", { class: "hint axis" }, h("span", { class: "swatch", style: { background: `var(--${hue})` } }), axis),
      h("ul", { class: "peers" }, buttons),
      others.length > MOST_PEERS ? h("p", { class: "hint" }, `and ${integer(others.length - MOST_PEERS)} more`) : null,
    ];
  }
}

function colours(one) {
  const found = new Map();
  for (const [axis, ranks] of Object.entries(one.peers ?? {}))
    for (const rank of ranks) if (rank !== one.rank) found.set(rank, own(AXES, axis) ?? "grey");
  return found;
}

function numbers(values, wanted) {
  return wanted
    .filter(([key]) => isNumber(values[key]))
    .map(([key, unit]) => [title(key), reading(values[key], unit, key)]);
}

function sources(monitor) {
  const found = ["utilization_source", "memory_pressure_source", "energy_source"]
    .map((key) => monitor[key])
    .filter(Boolean);
  return [...new Set(found)].join(", ");
}

function latency(pairs) {
  return table(
    [
      { head: "Rank", cell: (pair) => integer(pair.peer) },
      { head: "Axis", cell: (pair) => pair.axis },
      { head: "Median", kind: "number", cell: (pair) => seconds(pair.p50_s) },
      { head: "99th percentile", kind: "number", cell: (pair) => seconds(pair.p99_s) },
    ],
    pairs.slice(0, MOST_PEERS),
    { caption: "Latency to neighbours" },
  );
}
