// The horizontal axis of a run: steps, tokens or time, and the way between them.

import { isNumber } from "../units.js";

export const X = [
  ["step", "Steps"],
  ["tokens", "Tokens"],
  ["time", "Time"],
];
export const X_UNITS = { step: "steps", tokens: "tokens", time: "s" };

// Turns steps and times into places on the chosen axis, and back.
export class Axis {
  constructor(kind, { curves = {}, tokens_per_step: perStep }, query) {
    this.kind = kind;
    this.unit = X_UNITS[kind] ?? "steps";
    const longest = Object.values(curves).reduce(
      (best, curve) => (curve?.step?.length > (best?.step?.length ?? 0) ? curve : best),
      null,
    );
    this.step = longest?.step ?? [];
    this.t = longest?.t ?? [];
    this.start = this.t.find(isNumber) ?? 0;
    this.tokens = curves.tokens?.step?.length
      ? seen(curves.tokens)
      : (step) => (isNumber(perStep) ? step * perStep : null);
    this.zoomed = Boolean(query.first || query.last);
    this.scale = this.step.map((step, index) => this.#value(step, this.t[index]));
  }

  #value(step, t) {
    if (this.kind === "time") return isNumber(t) ? t - this.start : null;
    return this.kind === "tokens" ? this.tokens(step) : step;
  }

  // The curve with x, without the points whose place is unknown or behind the one before.
  // A series that is measured now and then is drawn from one time to the next; in any other, nothing is a gap.
  along(curve) {
    const kept = { x: [], mean: [], low: [], high: [] };
    const sparse = curve.mean.filter(isNumber).length < curve.mean.length / 2;
    curve.step.forEach((step, index) => {
      const x = this.#value(step, curve.t[index]);
      if (!isNumber(x) || x <= (kept.x.at(-1) ?? -Infinity) || (sparse && !isNumber(curve.mean[index]))) return;
      kept.x.push(x);
      for (const key of ["mean", "low", "high"]) kept[key].push(curve[key][index] ?? null);
    });
    return kept;
  }

  alongTime(times, series) {
    const kept = { x: [], values: series.map(() => []) };
    times.forEach((t, index) => {
      const x = !isNumber(t) ? null : this.kind === "time" ? t - this.start : this.#near(t);
      if (!isNumber(x) || x < (kept.x.at(-1) ?? -Infinity) || (this.zoomed && !this.holds(x))) return;
      const place = x === kept.x.at(-1) ? kept.x.length - 1 : kept.x.length; // of one place the latest counts
      kept.x[place] = x;
      series.forEach((values, order) => (kept.values[order][place] = values[index] ?? null));
    });
    return kept;
  }

  // By time where it is known: a step that was done again has two places, and the mark belongs to one of them.
  place(mark) {
    if (this.kind === "time") return isNumber(mark.t) ? mark.t - this.start : null;
    if (!isNumber(mark.step)) return isNumber(mark.t) ? this.#near(mark.t) : null;
    return this.kind === "tokens" ? this.tokens(mark.step) : mark.step;
  }

  // From the first to the last place, for all charts alike; null while there is no such range.
  get range() {
    const known = this.scale.filter(isNumber);
    return known.length > 1 && known.at(-1) > known[0] ? [known[0], known.at(-1)] : null;
  }

  holds(x) {
    if (!this.scale.length) return false;
    const [low, high] = [this.scale[0], this.scale.at(-1)];
    const room = Math.max((high - low) * 0.01, high - (this.scale.at(-2) ?? high)); // marks of step n stand after it
    return x >= low - room && x <= high + room;
  }

  steps(from, to) {
    if (this.kind === "step") return [Math.max(0, Math.floor(from)), Math.ceil(to)];
    const inside = this.step.filter((_, index) => this.scale[index] >= from && this.scale[index] <= to);
    return inside.length ? [inside[0], inside.at(-1)] : [0, 0];
  }

  #near(t) {
    if (this.zoomed && (t < this.t[0] || t > this.t.at(-1))) return null;
    let index = this.t.findIndex((value) => value >= t);
    if (index < 0) index = this.t.length - 1;
    return this.scale[index];
  }
}

// Tokens seen by the end of a step, from the mean per step in each bucket.
function seen(curve) {
  const steps = curve?.step ?? [];
  const mean = curve.mean.filter(isNumber)[0] ?? 0;
  const sums = [steps[0] * mean];
  for (let index = 1; index < steps.length; index += 1)
    sums.push(sums[index - 1] + (steps[index] - steps[index - 1]) * (curve.mean[index - 1] ?? mean));
  return (step) => {
    let index = steps.findLastIndex((one) => one <= step);
    if (index < 0) index = 0;
    return sums[index] + (step - steps[index]) * (curve.mean[index] ?? mean);
  };
}
