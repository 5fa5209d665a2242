"""Judge a run by a scaling law: the predicted loss with its band, and an early warning when the run leaves it.

The law describes finished runs, whose learning rate has decayed. A running training lies above it, for two reasons
(`allowed_above`), by less and less; a loss further above is reported as a warning. So is a loss below the band:
held-out text that is in the training data, another tokenizer, or a law of other data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from phalanx.scale.fit_result import ScalingFit
from phalanx.scale.laws import law_loss
from phalanx.scale.step_law import BATCH_TOKENS

# Share of the loss, while the learning rate is at its peak. Loss above the floor of its valley is proportional to the
# rate, and decay removes it (arXiv:2405.18392, arXiv:2408.11029). A run sized by `allocate` from our own sweep was
# 7.1 % above the law before its decay, then 4.3, 3.3, 2.4 and 2.2 % with 0.48, 0.24, 0.06 and none of the rate left.
ALLOWANCE = 0.08
# Number of windows over which training losses are averaged: losses of single steps scatter by several per cent.
WINDOWS = 32
Z80 = 1.2816  # normal quantile of an 80 % interval
RISING = 3  # evaluations in a row at which the loss moves away from the law


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedLoss:
    """One evaluation with the law's band for the same tokens."""

    tokens: float
    loss: float
    predicted: float
    low: float
    high: float
    # Share above `high` that is normal as long as the run has not finished.
    allowed: float = 0.0

    @property
    def ratio(self) -> float:
        """Measured over predicted loss."""
        return self.loss / self.predicted


@dataclass(frozen=True, kw_only=True, slots=True)
class RunForecast:
    """The comparison of a run with a law."""

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
    """Return the predicted loss of a finished run and the ends of its 80 % interval.

    The interval covers the uncertainty of the law, of its form, and the noise of single runs.
    """
    names = tuple(fit.parameters)
    value = law_loss(fit.method, fit.values(), params, tokens)
    drawn = np.array([law_loss(fit.method, dict(zip(names, row, strict=True)), params, tokens) for row in fit.draws])
    spread = float(np.std(np.log(drawn))) if len(drawn) else 0.0
    width = Z80 * math.hypot(spread, fit.diagnostics.residual_sd, fit.drift_at(6.0 * params * tokens))
    return value, value * math.exp(-width), value * math.exp(width)


def allowed_above(
    fit: ScalingFit, params: float, tokens: float, planned_tokens: float, *, rate_left: float, allowance: float
) -> float:
    """Return the share of the loss by which a healthy run may lie above the law after `tokens` tokens.

    First, `allowance` times the remaining learning rate (`rate_left`: 1 until the decay begins, 0 at its end).
    Second, its batch is the best one for all of its tokens, which grows with D^0.571 (Step Law): early on it has
    taken fewer steps than the runs of the law had for as many tokens, and is where they were after so many steps.
    """
    done = min(1.0, tokens / planned_tokens)
    now = law_loss(fit.method, fit.values(), params, tokens)
    by_steps = law_loss(fit.method, fit.values(), params, max(1.0, tokens * done**BATCH_TOKENS))
    return allowance * rate_left + max(0.0, by_steps / now - 1.0)


def average_windows(curve: Sequence[tuple[float, float]], windows: int = WINDOWS) -> list[tuple[float, float]]:
    """Return means of (tokens, loss) over at most `windows` equal parts of a curve.

    >>> average_windows([(1, 4.0), (2, 3.0), (3, 3.0), (4, 2.0)], 2)
    [(1.5, 3.5), (3.5, 2.5)]
    """
    ends = np.linspace(0, len(curve), min(windows, len(curve)) + 1).round().astype(int)
    points = np.array(curve, dtype=np.float64).reshape(-1, 2)
    means = [points[begin:end].mean(axis=0) for begin, end in pairwise(ends)]
    return [(float(tokens), float(loss)) for tokens, loss in means]


def judge_run(
    fit: ScalingFit,
    *,
    run: str,
    finished: bool,
    params: float,
    planned_tokens: float,
    curve: Sequence[tuple[float, float]],
    rate_left: Sequence[float] = (),
    evaluated: bool = True,
    allowance: float = ALLOWANCE,
    notes: tuple[str, ...] = (),
) -> RunForecast:
    """Compare the (tokens, loss) points of a run with the law.

    `rate_left` is the remaining share of the learning rate's decay at each point; without it the rate is assumed at
    its peak. Losses that are not `evaluated` on held-out text scatter, so a rise over several of them is ignored.
    """
    evaluations = []
    for index, (tokens, loss) in enumerate(curve):
        predicted, low, high = law_band(fit, params, tokens)
        left_share = rate_left[index] if rate_left else 1.0
        allowed = allowed_above(fit, params, tokens, planned_tokens, rate_left=left_share, allowance=allowance)
        room = 0.0 if finished else allowed
        evaluations.append(
            PredictedLoss(tokens=tokens, loss=loss, predicted=predicted, low=low, high=high, allowed=room)
        )
    final, final_low, final_high = law_band(fit, params, planned_tokens)
    verdict, sentence = "inside", "no evaluation yet"
    if evaluations:
        is_away = evaluated and _is_moving_away(fit, evaluations)
        verdict, sentence = _verdict(evaluations[-1], is_away=is_away, below=0.0 if finished else allowance / 2)
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


def _verdict(last: PredictedLoss, *, is_away: bool, below: float) -> tuple[str, str]:
    """Return the verdict and its sentence for the latest loss; `below` is the allowed share under the band."""
    percent = f"{100 * (last.ratio - 1):+.1f} % from the predicted {last.predicted:.4f}"
    band = f"80 % interval {last.low:.4f} to {last.high:.4f}"
    if last.allowed >= 0.0005:
        band += f", up to {100 * last.allowed:.1f} % above it allowed at this point of the training"
    summary = f"loss {last.loss:.4f} is {percent} ({band})"
    if last.loss > last.high * (1.0 + last.allowed):
        return "above", f"{summary}: look for the cause now"
    if last.loss < last.low * (1.0 - below):
        return "below", (
            f"{summary}: suspiciously low; is held-out text in the training data, or was the law fitted with another "
            "tokenizer?"
        )
    if is_away:
        return "moving away", f"{summary}, and further off at each of {RISING} evaluations"
    return "inside", summary


def _is_moving_away(fit: ScalingFit, evaluations: Sequence[PredictedLoss]) -> bool:
    """Return True if the loss moved away from the law at each of the latest evaluations, by more than noise."""
    ratios = [evaluation.ratio for evaluation in evaluations[-RISING - 1 :]]
    rises = all(after > before for before, after in pairwise(ratios))
    return len(ratios) > RISING and rises and ratios[-1] / ratios[0] - 1 > 2 * fit.diagnostics.residual_sd
