// The small sign at the top that says whether the page follows a run.

import { byId, say } from "./dom.js";

const TEXTS = { off: "", live: "live", lost: "connecting again", ended: "ended" };

export function setLive(state) {
  const element = byId("live");
  element.dataset.state = state;
  say(element, TEXTS[state] ?? "");
}

// Calls at most once per `pause_ms`, and always once more after the last request.
export function calmly(work, pause_ms) {
  let timer = 0;
  let last = -Infinity;
  const run = () => {
    timer = 0;
    last = performance.now();
    work();
  };
  const ask = () => {
    if (!timer) timer = setTimeout(run, Math.max(0, last + pause_ms - performance.now()));
  };
  ask.stop = () => clearTimeout(timer);
  return ask;
}
