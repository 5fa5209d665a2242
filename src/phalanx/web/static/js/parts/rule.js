// A rule in its own words, fetched when somebody opens it and kept as long as the page lives.

import { get } from "../api.js";
import { facts, fill, h, words } from "../dom.js";

const SECTIONS = [
  ["requirement", "Requirement"],
  ["why", "Why"],
  ["how", "How it is checked"],
  ["bad", "Bad"],
  ["good", "Good"],
  ["fix", "Fix"],
  ["waive", "When to waive"],
  ["history", "History"],
];
const known = new Map();

// `opened` remembers which rules are open, so that a page that is drawn anew leaves them so.
export function explained(id, opened) {
  const body = h("div", { class: "rule" });
  const element = h("details", {}, h("summary", {}, `About ${id}`), body);
  element.addEventListener("toggle", () => {
    if (element.open) opened.add(id);
    else opened.delete(id);
    if (element.open && !body.childNodes.length) tell(id, body);
  });
  if (opened.has(id)) element.open = true;
  return element;
}

async function tell(id, body) {
  if (!known.has(id)) {
    fill(body, words("Reading the rule …"));
    try {
      known.set(id, await get(`rules/${encodeURIComponent(id)}`));
    } catch (error) {
      return fill(body, h("p", { class: "wrong", role: "alert" }, error.message));
    }
  }
  const rule = known.get(id);
  const texts = SECTIONS.filter(([key]) => rule[key]).map(([key, name]) => [name, text(key, rule[key])]);
  const limits = (rule.limits ?? []).map((one) => h("li", {}, `${one.name} = ${limit(one)}: ${one.note}`));
  const sources = (rule.references ?? []).map((one) => h("li", {}, `${one.text} (${one.mark})`));
  return fill(body, facts([...texts, ["Limits", h("ul", {}, limits)], ["Sources", h("ul", {}, sources)]]));
}

function limit({ value, unit, special = {} }) {
  const named = Object.entries(special).map(([key, other]) => `${key}: ${shown(other)}`);
  return `${shown(value)}${unit ? ` ${unit}` : ""}${named.length ? ` (${named.join(", ")})` : ""}`;
}

const shown = (value) => (Array.isArray(value) ? value.join(", ") : String(value));

// Fragments of job files and logs as they are; prose with `code` in it.
function text(key, value) {
  if (key === "bad" || key === "good") return h("pre", {}, h("code", {}, value));
  return value.split("`").map((part, index) => (index % 2 ? h("code", {}, part) : part));
}
