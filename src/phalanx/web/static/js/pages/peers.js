// Peers on slow links: a map of links, the rounds as a timeline, and what happened to whom.

import { get, runPath } from "../api.js";
import { facts, fill, h, scroll, table, words } from "../dom.js";
import { calmly } from "../live.js";
import { failed, loading } from "../parts/states.js";
import { NONE, bytes, clock, integer, isNumber, percent, seconds } from "../units.js";

const UPDATE_MS = 3000;
const SVG = "http://www.w3.org/2000/svg";
const MAP = { width: 860, height: 400, flat: 150, radius: 140, wide: 2.2 };
const NARROW_MAP = { width: 300, height: 400, flat: 400, radius: 140, wide: 0.75 }; // two others above and below
const LINE = { left: 130, width: 900, row: 26, most: 60 };
const COLOURS = { gradient: "var(--sky)", weights: "var(--blue)", meet: "var(--grey)" };

export class PeersPage {
  constructor(outlet, name, shell) {
    Object.assign(this, { outlet, name, shell });
    fill(outlet, loading());
    this.update = calmly(() => this.#load(), UPDATE_MS);
  }

  show() {
    this.update();
  }

  grown() {
    this.update();
  }

  marked() {
    this.update();
  }

  leave() {
    this.gone = true;
    this.update.stop();
  }

  async #load() {
    try {
      const answer = await get(runPath(this.name, "/peers"));
      if (this.gone) return;
      this.shell.damaged(answer);
      this.#draw(answer);
    } catch (error) {
      if (!this.gone) failed(this.outlet, error);
    }
  }

  #draw(answer) {
    if (!answer.rounds.length && !answer.peers.length) {
      fill(this.outlet, words("No exchange between peers is recorded. Runs with [sync] have them: docs/slow-links.md."));
      return;
    }
    fill(
      this.outlet,
      section(
        "Links",
        facts([
          ["Mode", `${answer.mode || NONE}${isNumber(answer.inner_steps) ? `, H = ${integer(answer.inner_steps)}` : ""}`],
          ["Codec", answer.codec],
          ["Utilisation", utilisation(answer)],
          ["Rounds", integer(answer.rounds_in_all)],
          ["Sent", bytes(answer.bytes_sent)],
          ["Received", bytes(answer.bytes_received)],
        ]),
        scroll("Map of peers and links", map(answer.peers, this.outlet.clientWidth < MAP.width ? NARROW_MAP : MAP)),
        peerTable(answer.peers),
      ),
      section("Rounds", scroll("Rounds as a timeline", timeline(answer)), key()),
      answer.happened.length ? section("What happened", happened(answer.happened, answer.peers)) : null,
    );
  }
}

const section = (name, ...children) => h("section", { class: "panel" }, h("h2", {}, name), children);

function utilisation({ utilisation: measured, planned_utilisation: planned }) {
  if (!isNumber(measured)) return "not known yet";
  return `${percent(measured)}${isNumber(planned) ? `, plan ${percent(planned)}` : ""}`;
}

// SVG elements need their namespace; text stays text, as in dom.js.
function s(tag, props = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(props)) element.setAttribute(name, String(value));
  for (const child of children.flat()) element.append(child instanceof Node ? child : String(child));
  return element;
}

const nameOf = (peer) => peer.name || peer.id.slice(0, 8);

// This peer in the middle, the others around it: a record knows the links of its own peer.
function map(peers, size) {
  const self = peers.find((peer) => peer.is_self);
  const others = peers.filter((peer) => peer !== self);
  const height = others.length > 2 ? size.height : size.flat; // two others stand to the left and right
  const centre = { x: size.width / 2, y: height / 2 - 20 };
  const place = others.map((_, index) => {
    const angle = (2 * Math.PI * index) / Math.max(1, others.length) + (size === MAP ? Math.PI : -Math.PI / 2);
    return { x: centre.x + size.wide * size.radius * Math.cos(angle), y: centre.y + size.radius * Math.sin(angle) };
  });
  const most = Math.max(1, ...others.map(speed));
  const lines = self ? others.map((peer, index) => drawLink(peer, centre, place[index], most)) : [];
  const isTold = size === MAP || others.length <= 2; // among many, words would lie on words: the table has them
  const nodes = others.map((peer, index) => drawPeer(peer, place[index], isTold));
  if (self) nodes.push(drawPeer(self, centre, isTold));
  return s(
    "svg",
    { viewBox: `0 0 ${size.width} ${height}`, width: size.width, height, role: "img", class: "peer-map" },
    s("title", {}, `Map of ${peers.length} peers and the links of this one`),
    lines,
    nodes,
  );
}

const speed = (peer) => Math.min(peer.up_mbps ?? Infinity, peer.down_mbps ?? Infinity, 1e6) || 0;

function drawLink(peer, from, to, most) {
  const known = isNumber(peer.up_mbps) || isNumber(peer.down_mbps);
  const width = known ? 1 + (7 * speed(peer)) / most : 1.5;
  const label = [
    known ? `${integer(Math.round(speed(peer)))} Mbit/s` : null,
    isNumber(peer.latency_s) ? seconds(peer.latency_s) : null,
  ].filter(Boolean);
  // Names and shares stand below their peers: away from those of the upper end of the line.
  const along = Math.abs(to.y - from.y) < 20 ? 0.5 : to.y > from.y ? 0.62 : 0.38;
  return s(
    "g",
    {},
    s("line", {
      x1: from.x,
      y1: from.y,
      x2: to.x,
      y2: to.y,
      stroke: peer.present ? "var(--edge)" : "var(--rule)",
      "stroke-width": width.toFixed(1),
      "stroke-dasharray": peer.present ? "none" : "4 4",
    }),
    s(
      "text",
      { x: from.x + along * (to.x - from.x), y: from.y + along * (to.y - from.y) - 8, class: "soft" },
      label.join(", "),
    ),
  );
}

function drawPeer(peer, { x, y }, isTold) {
  const colour = !peer.present ? "var(--grey)" : peer.dropped ? "var(--orange)" : "var(--green)";
  const beside = [
    isNumber(peer.credit_share) ? `${percent(peer.credit_share)} of the samples` : null,
    peer.client_only ? "only sends" : isNumber(peer.share) ? `averages ${percent(peer.share)}` : null,
    peer.present ? null : "away",
  ].filter(Boolean);
  return s(
    "g",
    {},
    s("circle", { cx: x, cy: y, r: peer.is_self ? 16 : 12, fill: colour, stroke: "var(--paper)", "stroke-width": 2 }),
    s("text", { x, y: y + 30, class: "name" }, `${nameOf(peer)}${peer.is_self ? " (this)" : ""}`),
    isTold ? s("text", { x, y: y + 46, class: "soft" }, beside.join(", ")) : [],
  );
}

function peerTable(peers) {
  const number = "number";
  return table(
    [
      { head: "Peer", cell: (peer) => `${nameOf(peer)}${peer.is_self ? " (this)" : ""}` },
      { head: "Now", cell: (peer) => (peer.present ? "takes part" : "away") },
      { head: "Samples", kind: number, cell: (peer) => integer(peer.credit) },
      { head: "Of all", kind: number, cell: (peer) => percent(peer.credit_share) },
      { head: "Rounds", kind: number, cell: (peer) => integer(peer.rounds) },
      { head: "Dropped", kind: number, cell: (peer) => integer(peer.dropped) },
      { head: "Share", kind: number, cell: (peer) => (peer.client_only ? "only sends" : percent(peer.share)) },
      { head: "Round trip", kind: number, cell: (peer) => seconds(peer.latency_s) },
      { head: "Up, Mbit/s", kind: number, cell: (peer) => integer(peer.up_mbps) },
      { head: "Down, Mbit/s", kind: number, cell: (peer) => integer(peer.down_mbps) },
    ],
    peers,
    { caption: "Peers" },
  );
}

// A row per peer, a bar per round in which it took part; bars are as long as the exchange took.
function timeline({ rounds, peers }) {
  const shown = rounds.filter((round) => isNumber(round.t)).slice(-LINE.most);
  if (!shown.length) return words("No round is finished yet.");
  const start = Math.min(...shown.map((round) => round.t - (round.seconds ?? 0)));
  const end = Math.max(...shown.map((round) => round.t), start + 1e-3);
  const at = (t) => LINE.left + ((t - start) / (end - start)) * (LINE.width - LINE.left - 10);
  const height = peers.length * LINE.row + 34;
  const rows = peers.map((peer, index) => {
    const top = index * LINE.row + 4;
    const bars = shown
      .filter((round) => round.members.includes(peer.id) || Object.hasOwn(round.dropped, peer.id))
      .map((round) => bar(round, peer, at, top));
    return s("g", {}, s("text", { x: 0, y: top + 15, class: "row" }, nameOf(peer).slice(0, 18)), bars);
  });
  return s(
    "svg",
    { viewBox: `0 0 ${LINE.width} ${height}`, width: LINE.width, height, role: "img", class: "peer-line" },
    s("title", {}, `The last ${shown.length} rounds of ${peers.length} peers`),
    rows,
    s("text", { x: LINE.left, y: height - 8, class: "row" }, clock(start)),
    s("text", { x: LINE.width - 10, y: height - 8, class: "row end" }, clock(end)),
  );
}

function bar(round, peer, at, top) {
  const dropped = Object.hasOwn(round.dropped, peer.id) ? round.dropped[peer.id] : "";
  const left = at(round.t - (round.seconds ?? 0));
  const told = `round ${integer(round.round)}, step ${integer(round.step)}: ${round.kind}, ${seconds(round.seconds)}`;
  return s(
    "rect",
    {
      x: left.toFixed(1),
      y: top,
      width: Math.max(2, at(round.t) - left).toFixed(1),
      height: LINE.row - 8,
      fill: dropped ? "var(--red)" : (COLOURS[round.kind] ?? "var(--purple)"),
    },
    s("title", {}, dropped ? `${told}; dropped: ${dropped}` : told),
  );
}

function key() {
  const entries = [
    ["var(--sky)", "gradients of a step"],
    ["var(--blue)", "updates of H steps"],
    ["var(--grey)", "a meeting without an update"],
    ["var(--red)", "dropped"],
  ];
  return h(
    "p",
    { class: "hint" },
    entries.map(([colour, text]) => h("span", {}, h("span", { style: { color: colour } }, "■ "), text, " \u00a0 ")),
  );
}

function happened(rows, peers) {
  const names = new Map(peers.map((peer) => [peer.id, nameOf(peer)]));
  return table(
    [
      { head: "When", cell: (row) => clock(row.t) },
      { head: "Step", kind: "number", cell: (row) => integer(row.step) },
      { head: "Peer", cell: (row) => (row.peer ? (names.get(row.peer) ?? row.peer.slice(0, 8)) : NONE) },
      { head: "What", cell: (row) => row.kind },
      { head: "In words", cell: (row) => row.text },
    ],
    rows.toReversed(),
    { caption: "What happened to peers" },
  );
}
