// What a page shows when there is nothing to show, or not all of it.

import { ApiError } from "../api.js";
import { fill, h, words } from "../dom.js";
import { integer } from "../units.js";

const MOST_LINES = 20;

// What the record lacks, quietly: one line, and the list on demand.
export function notice(damage) {
  const lines = damage
    .slice(0, MOST_LINES)
    .map((one) => h("li", {}, `${one.where}: ${one.what}`, one.count > 1 ? ` (${integer(one.count)} times)` : ""));
  const head =
    damage.length === 1
      ? "One part of this run's record is missing or damaged; the rest is shown."
      : `${integer(damage.length)} parts of this run's record are missing or damaged; the rest is shown.`;
  return h(
    "details",
    { class: "notice", open: damage.length <= 3 },
    h("summary", {}, head),
    h(
      "ul",
      {},
      lines,
      damage.length > MOST_LINES ? h("li", {}, `and ${integer(damage.length - MOST_LINES)} more`) : null,
    ),
  );
}

// In words; a mistake of the page itself also goes to the console.
export function failed(outlet, error) {
  if (!(error instanceof ApiError)) reportError(error);
  fill(outlet, h("p", { class: "wrong", role: "alert" }, error.message));
}

export const loading = () => words("Reading the run …");
