// The frame: picks the page that the address names, the theme, the shortcuts.

import { announce, byId, fill, h } from "./dom.js";
import { setLive } from "./live.js";
import { repaint } from "./paint.js";
import { go, here, link } from "./route.js";
import { ComparePage } from "./pages/compare.js";
import { RunsPage } from "./pages/runs.js";
import { RunShell, TABS } from "./shell.js";

const KEYS = [
  ["?", "this list"],
  ["r", "all runs"],
  ["/", "filter the runs"],
  ["1 … 8", `of a run: ${TABS.map(([, text]) => text.toLowerCase()).join(", ")}`],
  ["← →", "in a chart, map or timeline: move; with Shift by ten"],
  ["+ −", "in a chart: zoom in and out; dragging zooms too"],
  ["0", "show the whole run; double-clicking does the same"],
  ["↑ ↓ Enter", "in the mesh: move between ranks, select one"],
  ["t", "light, dark or system theme"],
];

let page = null;

function show() {
  const { parts, query } = here();
  const wanted = parts[0] === "runs" && parts[1] ? `run ${parts[1]}` : parts[0] === "compare" ? "compare" : "runs";
  if (page?.key !== wanted) {
    const moved = page !== null;
    page?.leave();
    fill(byId("main"));
    const outlet = byId("main").appendChild(h("div"));
    page =
      parts[0] === "runs" && parts[1]
        ? new RunShell(outlet, parts[1])
        : wanted === "compare"
          ? new ComparePage(outlet)
          : new RunsPage(outlet);
    page.key = wanted;
    setLive("off");
    scrollTo(0, 0);
    if (moved) byId("main").focus({ preventScroll: true });
  }
  page.show(parts, query);
  trail(parts);
}

function trail(parts) {
  const tab = TABS.find(([key]) => key === (parts[2] ?? ""));
  const words = parts[0] === "compare" ? ["Compare"] : parts[1] ? [parts[1], tab?.[1] ?? ""] : [];
  const links = parts[1] ? [link(["runs", parts[1]])] : [];
  fill(
    byId("trail"),
    h("a", { href: "#/" }, "Runs"),
    words
      .filter(Boolean)
      .map((text, index) =>
        h(
          "span",
          { class: "part" },
          links[index] && words[index + 1] && parts[2] ? h("a", { href: links[index] }, text) : text,
        ),
      ),
  );
  document.title = [...words.filter(Boolean).toReversed(), "Phalanx"].join(" · ");
}

const THEMES = ["system", "light", "dark"];

function theme(step) {
  const now = THEMES.indexOf(document.documentElement.dataset.theme ?? "system");
  const next = THEMES[(now + step) % THEMES.length];
  if (next === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  try {
    if (step && next === "system") localStorage.removeItem("phalanx.theme");
    else if (step) localStorage.setItem("phalanx.theme", next);
  } catch {
    // Storage may be forbidden: the choice then lasts till the reload.
  }
  const button = byId("theme-button");
  button.textContent = { system: "Auto", light: "Light", dark: "Dark" }[next];
  button.setAttribute("aria-label", `Theme: ${next}. Change it`);
  if (step) {
    repaint();
    announce(`Theme: ${next}`);
  }
}

function shortcut(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  if (event.target.closest?.("input:not([type=checkbox]), select, textarea, dialog[open]")) return;
  const { parts, query } = here();
  const tab = TABS[Number(event.key) - 1];
  if (event.key === "?") byId("help").showModal();
  else if (event.key === "t") theme(1);
  else if (event.key === "r") go("#/");
  else if (event.key === "/") focusFilter();
  else if (event.key === "0") page?.whole?.();
  else if (tab && parts[0] === "runs" && parts[1])
    go(link(tab[0] ? ["runs", parts[1], tab[0]] : ["runs", parts[1]], { rank: query.rank }));
  else return;
  event.preventDefault();
}

function focusFilter() {
  const focus = () => byId("filter")?.focus();
  if (!here().parts.length) return focus();
  addEventListener("hashchange", focus, { once: true }); // after the one that shows the page
  go("#/");
}

byId("skip").addEventListener("click", (event) => {
  event.preventDefault();
  byId("main").focus();
});
byId("theme-button").addEventListener("click", () => theme(1));
byId("help-button").addEventListener("click", () => byId("help").showModal());
fill(
  byId("help-keys"),
  KEYS.map(([key, text]) =>
    h(
      "div",
      {},
      h(
        "dt",
        {},
        key.split(" ").map((part) => [part === "…" ? "…" : h("kbd", {}, part), " "]),
      ),
      h("dd", {}, text),
    ),
  ),
);
addEventListener("keydown", shortcut);
addEventListener("hashchange", show);
theme(0);
show();
