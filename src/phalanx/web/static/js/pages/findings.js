// What the training specification says of this run.

import { get, runPath } from "../api.js";
import { fill, h, words } from "../dom.js";
import { failed, loading } from "../parts/states.js";
import { integer } from "../units.js";

export class FindingsPage {
  constructor(outlet, name) {
    Object.assign(this, { outlet, name });
    fill(outlet, loading());
    this.#load();
  }

  show() {}

  leave() {
    this.gone = true;
  }

  async #load() {
    try {
      const answer = await get(runPath(this.name, "/findings"));
      if (!this.gone) this.#draw(answer);
    } catch (error) {
      if (!this.gone) failed(this.outlet, error);
    }
  }

  #draw({ available, findings = [] }) {
    const count = findings.length;
    fill(
      this.outlet,
      h(
        "section",
        { class: "panel" },
        h("h2", {}, count ? `${integer(count)} ${count === 1 ? "finding" : "findings"}` : "Findings"),
        count ? findings.map(finding) : words("Nothing speaks against this run."),
        available
          ? []
          : words(
              "These are the warnings of the plan and what was shut out while the run went on. ",
              h("code", {}, "phalanx check"),
              ", which holds a run against the training specification, has not looked at it.",
            ),
      ),
    );
  }
}

function finding(one) {
  return h(
    "div",
    { class: "finding" },
    h("h3", {}, [one.rule, one.source, one.level].filter(Boolean).join(" · ")),
    h("p", {}, one.what ?? ""),
    (one.hints ?? []).map((line) => h("p", { class: "hint" }, line)),
  );
}
