"""A run beside the law: where its loss should be, and an early warning when it is not.

The law is of finished runs, whose learning rate has decayed. A run that still goes on lies above it: its loss may be
up to `allowance` over the band before that is worth a warning. A loss below the band is one too: held-out text that is
in the training data, another tokenizer, or a law of other data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from phalanx.scale.fit_result import ScalingFit
from phalanx.scale.laws import law_loss

ALLOWANCE = 0.05  # of the loss, before the learning rate decays
Z80 = 1.2816  # normal quantile of an 80 % interval
RISING = 3  # evaluations in a row at which the loss moves away from the law


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedLoss:
    """One evaluation beside the law's band for as many tokens."""

    tokens: float
    loss: float
    predicted: float
    low: float
    high: float

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.loss / self.predicted


@dataclass(frozen=True, kw_only=True, slots=True)
class RunForecast:
    """A run held against a law."""

    run: str
    finished: bool
    params: float
    planned_tokens: float
    final_loss: float
    final_low: float
    final_high: float
    evaluations: tuple[PredictedLoss, ...]
    allowance: float
    verdict: str  # "inside", "above", "below" or "moving away"
    sentence: str
    notes: tuple[str, ...]


def law_band(fit: ScalingFit, params: float, tokens: float) -> tuple[float, float, float]:
    """Predicted loss of one finished run with its 80 % interval: doubt of the law and of its form, noise of a run."""
    names = tuple(fit.parameters)
    value = law_loss(fit.method, fit.values(), params, tokens)
    drawn = np.array([law_loss(fit.method, dict(zip(names, row, strict=True)), params, tokens) for row in fit.draws])
    spread = float(np.std(np.log(drawn))) if len(drawn) else 0.0
    width = Z80 * math.hypot(spread, fit.diagnostics.residual_sd, fit.drift_at(6.0 * params * tokens))
    return value, value * math.exp(-width), value * math.exp(width)


def judge_run(
    fit: ScalingFit,
    *,
    run: str,
    finished: bool,
    params: float,
    planned_tokens: float,
    curve: list[tuple[float, float]],
    allowance: float = ALLOWANCE,
    notes: tuple[str, ...] = (),
) -> RunForecast:
    """Hold (tokens, loss) of a run against the law."""
    evaluations = []
    for tokens, loss in curve:
        predicted, low, high = law_band(fit, params, tokens)
        evaluations.append(PredictedLoss(tokens=tokens, loss=loss, predicted=predicted, low=low, high=high))
    final, final_low, final_high = law_band(fit, params, planned_tokens)
    room = 0.0 if finished else allowance
    verdict, sentence = "inside", "no evaluation yet"
    if evaluations:
        last = evaluations[-1]
        ratios = [one.ratio for one in evaluations[-RISING - 1 :]]
        percent = f"{100 * (last.ratio - 1):+.1f} % from the predicted {last.predicted:.4f}"
        band = f"80 % interval {last.low:.4f} to {last.high:.4f}" + (
            f", up to {100 * room:.0f} % above it allowed while training" if room else ""
        )
        if last.loss > last.high * (1.0 + room):
            verdict, sentence = "above", f"loss {last.loss:.4f} is {percent} ({band}): look for the cause now"
        elif last.loss < last.low * (1.0 - room / 2):
            verdict = "below"
            sentence = (
                f"loss {last.loss:.4f} is {percent} ({band}): suspiciously low; is held-out text in the training data, "
                "or was the law fitted with another tokenizer?"
            )
        elif (
            len(ratios) > RISING
            and all(after > before for before, after in pairwise(ratios))
            and ratios[-1] / ratios[0] - 1 > 2 * fit.diagnostics.residual_sd
        ):
            verdict = "moving away"
            sentence = f"loss {last.loss:.4f} is {percent} ({band}), and further off at each of {RISING} evaluations"
        else:
            sentence = f"loss {last.loss:.4f} is {percent} ({band})"
    return RunForecast(
        run=run,
        finished=finished,
        params=params,
        planned_tokens=planned_tokens,
        final_loss=final,
        final_low=final_low,
        final_high=final_high,
        evaluations=tuple(evaluations),
        allowance=allowance,
        verdict=verdict,
        sentence=sentence,
        notes=notes,
    )
