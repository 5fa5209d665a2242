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
    if (!available)
      return fill(
        this.outlet,
        h(
          "section",
          { class: "panel" },
          h("h2", {}, "Findings"),
          words(
            "This run holds no findings yet. They come from ",
            h("code", {}, "phalanx check"),
            ", which holds a job, a plan or a run against the training specification. ",
            "Once it has looked at this run, what it says stands here.",
          ),
        ),
      );
    if (!findings.length)
      return fill(
        this.outlet,
        h(
          "section",
          { class: "panel" },
          h("h2", {}, "Findings"),
          words("phalanx check has looked at this run and found nothing to say."),
        ),
      );
    fill(
      this.outlet,
      h("section", { class: "panel" }, h("h2", {}, `${integer(findings.length)} findings`), findings.map(finding)),
    );
  }
}

function finding(one) {
  const text = one.what ?? one.text ?? one.message ?? "";
  return h(
    "div",
    { class: "finding" },
    h("h3", {}, [one.rule, one.level ?? one.severity].filter(Boolean).join(" · ")),
    h("p", {}, text),
    [one.where, one.why, one.fix].filter(Boolean).map((line) => h("p", { class: "hint" }, line)),
  );
}
