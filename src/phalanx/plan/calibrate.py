"""Refit five scalars to a few measured steps of one system, and leave everything else alone.

The step time is a sum of parts; each scalar multiplies one group of parts. Three measurements cannot fix five numbers,
so every scalar has a log-normal prior at 1 whose width says how far systems really differ: the maximum-posterior
solution moves only what the measurements speak about.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares

from phalanx.plan.cases import Floats
from phalanx.plan.step import StepTimes

GROUPS: dict[str, tuple[str, ...]] = {
    "compute": ("matmul_s", "attention_s", "head_s", "recompute_s"),
    "memory": ("elementwise_s", "optimizer_s"),
    "host": ("launch_s", "overhead_s"),
    "inner_traffic": ("tensor_s", "context_s", "expert_s", "pipeline_send_s"),
    "outer_traffic": ("gradient_s", "shard_s"),
}
# Log widths of the priors. Chosen on sources left out of the fit: three measured rows of each then bring the mean of
# median errors from 14 % to 9 % (benchmarks/fit_physics.py --leave-one-out).
PRIOR_SIGMA = {"compute": 0.07, "memory": 0.1, "host": 0.8, "inner_traffic": 0.5, "outer_traffic": 0.4}
PRIOR_AT = (
    3.0  # a factor further than this many sigmas from 1 costs linearly: a system that is off throughout may be far off
)
LARGEST_FACTOR = 20.0  # either way; beyond it the measurement is of something else
NOISE = 0.03  # least scatter: repeat runs differ under 1 %, what the model leaves out about this much more
ROBUST_AT = 3.0  # residuals beyond this many times the noise count linearly: one bad measurement must not bend the rest


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Multipliers on the parts of a step; 1 leaves the prediction as it was."""

    compute: float = 1.0
    memory: float = 1.0
    host: float = 1.0
    inner_traffic: float = 1.0
    outer_traffic: float = 1.0


def calibrated(times: StepTimes, scalars: Calibration) -> StepTimes:
    """The same step with the scalars applied to its parts; the bubble scales as the work it waits for."""
    changed = {}
    for group, parts in GROUPS.items():
        for part in parts:
            changed[part] = getattr(times, part) * getattr(scalars, group)
    before = _grouped(times).sum(axis=0)
    after = sum(changed.values())
    factor = after / np.maximum(before, 1e-30)
    bubble = times.bubble_s * factor
    return replace(times, **changed, bubble_s=bubble, step_s=after + bubble, micro_s=times.micro_s * factor)


def calibrate(times: StepTimes, measured_s: Floats, noise: Floats | float = NOISE) -> Calibration:
    """The scalars that best explain measured steps; with no measurements all are 1.

    `noise` is the log scatter expected of each measurement around a well-calibrated prediction.
    """
    groups, bubble = _grouped(times), times.bubble_s
    usable = np.isfinite(measured_s) & (measured_s > 0)
    target = np.log(measured_s[usable])
    sigma = np.array(list(PRIOR_SIGMA.values()))
    scatter = np.maximum(NOISE, np.broadcast_to(np.asarray(noise, dtype=np.float64), measured_s.shape)[usable])

    def residuals(logs: Floats) -> Floats:
        predicted = _total(groups[:, usable], bubble[usable], np.exp(logs))
        error = (np.log(predicted) - target) / scatter
        return np.concatenate([_soft(error, ROBUST_AT), _soft(logs / sigma, PRIOR_AT)])

    most = np.log(LARGEST_FACTOR)
    found = least_squares(residuals, np.zeros(len(GROUPS)), bounds=(-most, most))
    return Calibration(**{name: float(np.exp(log)) for name, log in zip(GROUPS, found.x, strict=True)})


def _soft(residual: Floats, at: float) -> Floats:
    """A residual whose square grows like residual² up to `at` and only linearly beyond."""
    soft: Floats = np.sign(residual) * at * np.sqrt(2.0 * (np.sqrt(1.0 + (residual / at) ** 2) - 1.0))
    return soft


def _grouped(times: StepTimes) -> Floats:
    return np.stack([np.sum([getattr(times, part) for part in parts], axis=0) for parts in GROUPS.values()])


def _total(groups: Floats, bubble: Floats, scalars: Floats) -> Floats:
    work = groups.sum(axis=0)
    scaled: Floats = (groups * scalars[:, None]).sum(axis=0)
    total: Floats = scaled + bubble * scaled / np.maximum(work, 1e-30)
    return total
