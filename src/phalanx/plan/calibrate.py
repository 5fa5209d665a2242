"""Calibration: refit five factors to a few measured steps of one system, leaving the rest of the cost model unchanged.

The step time is a sum of parts; each factor multiplies one group of parts, before the time hidden behind another part
is subtracted. Three measurements cannot determine five numbers, so every factor has a log-normal prior at 1 whose
width is how far systems really differ: the maximum-posterior solution moves only the factors that the measurements
determine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
from scipy.optimize import least_squares

from phalanx.errors import mistake
from phalanx.io.codec import Bounds, from_json_values, json_values
from phalanx.io.files import read_text
from phalanx.plan.cases import Floats
from phalanx.plan.plan import CalibrationNote
from phalanx.plan.step import StepTimes, smooth_max

GROUPS: dict[str, tuple[str, ...]] = {
    "compute": ("matmul_s", "attention_s", "head_s", "recompute_s"),
    "memory": ("elementwise_s", "optimizer_s"),
    "host": ("launch_s", "overhead_s"),
    "inner_traffic": ("tensor_s", "context_s", "expert_s", "pipeline_send_s"),
    "outer_traffic": ("gradient_s", "shard_s"),
}
# Log widths of the priors. Chosen on sources left out of the fit: three measured rows of each then bring the mean of
# median errors from 14 % to 9 % (benchmarks/fit_physics.py --leave-one-out). The host's is our choice: how long a
# launch takes differs by about 30 % between hosts, and 0.25, 0.4 and 0.8 give published runs the same 5.7 % median
# (`phalanx backtest --draw 3`, seeds 0 to 4).
PRIOR_SIGMA = {"compute": 0.07, "memory": 0.1, "host": 0.3, "inner_traffic": 0.5, "outer_traffic": 0.4}
# A factor further than this many sigmas from 1 costs linearly: a system that is off throughout may be far off.
PRIOR_AT = 3.0
LARGEST_FACTOR = 20.0  # largest factor in either direction; beyond it the measurement is of something else
# Least scatter: repeat runs differ by less than 1 %; the model leaves out about this much more.
NOISE = 0.03
# Residuals beyond this many times the noise count linearly, so that one bad measurement does not bend the rest.
ROBUST_AT = 3.0

Factor = Annotated[float, Bounds(ge=1 / LARGEST_FACTOR, le=LARGEST_FACTOR)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Factors on the parts of a step; 1 leaves the prediction unchanged."""

    compute: Factor = 1.0
    memory: Factor = 1.0
    host: Factor = 1.0
    inner_traffic: Factor = 1.0
    outer_traffic: Factor = 1.0


# Parts that the device computes while its layers run; and all parts that ZeRO-3 traffic can hide behind.
DEVICE = ("matmul_s", "attention_s", "elementwise_s", "recompute_s", "tensor_s", "context_s", "expert_s")
BUSY = (*DEVICE, "launch_s", "head_s", "pipeline_send_s", "overhead_s")


def apply_calibration(times: StepTimes, scalars: Calibration) -> StepTimes:
    """Return the step with the factors applied to its parts; the bubble scales with the work it waits for.

    Overlapped parts are combined again: next to a device that takes 0.8 of the time more of the host's time is exposed,
    and a layout whose step the host determines does not gain. Scaling only the exposed time would make work that costs
    nothing there, such as recompute, look like a gain.
    """
    scaled = {part: getattr(times, part) * getattr(scalars, group) for group, parts in GROUPS.items() for part in parts}
    device_before_s, device_after_s = (
        _sum_parts(getattr(times, part) for part in DEVICE),
        _sum_parts(scaled[part] for part in DEVICE),
    )
    device_s, host_s = times.device_s * device_after_s / np.maximum(device_before_s, 1e-30), times.host_s * scalars.host
    # As differences, so that factors of 1 change nothing, even for a mixture of two steps (`recompute_layers`).
    exposed_s = smooth_max(device_s, host_s, times.launch_sharpness) - device_after_s
    exposed_before_s = smooth_max(times.device_s, times.host_s, times.launch_sharpness) - device_before_s
    scaled["launch_s"] = times.launch_s + exposed_s - exposed_before_s
    busy_factor = _sum_parts(scaled[part] for part in BUSY) / np.maximum(
        _sum_parts(getattr(times, part) for part in BUSY), 1e-30
    )
    busy_s = times.busy_s * busy_factor
    exposed_s = smooth_max(busy_s, times.moving_s * scalars.outer_traffic, times.shard_sharpness) - busy_s
    exposed_before_s = smooth_max(times.busy_s, times.moving_s, times.shard_sharpness) - times.busy_s
    scaled["shard_s"] = times.shard_s + exposed_s - exposed_before_s
    work = _sum_parts(scaled.values())
    factor = work / np.maximum(_sum_parts(getattr(times, part) for part in scaled), 1e-30)
    bubble = times.bubble_s * factor
    return replace(times, **scaled, bubble_s=bubble, step_s=work + bubble, micro_s=times.micro_s * factor)


def _sum_parts(parts: Iterable[Floats]) -> Floats:
    total: Floats = np.zeros(())
    for part in parts:
        total = total + part
    return total


def fit_calibration(times: StepTimes, measured_s: Floats, noise: Floats | float = NOISE) -> Calibration:
    """Return the factors that best explain measured steps; with no measurements all are 1.

    `noise` is the log scatter expected of each measurement around a well-calibrated prediction.
    """
    is_usable = np.isfinite(measured_s) & (measured_s > 0)
    target, usable_times = np.log(measured_s[is_usable]), times.take(is_usable)
    sigma = np.array(list(PRIOR_SIGMA.values()))
    scatter = np.maximum(NOISE, np.broadcast_to(np.asarray(noise, dtype=np.float64), measured_s.shape)[is_usable])

    def residuals(logs: Floats) -> Floats:
        scalars = dict(zip(GROUPS, np.exp(logs), strict=True))
        error = (np.log(apply_calibration(usable_times, Calibration(**scalars)).step_s) - target) / scatter
        return np.concatenate([_soft_residual(error, ROBUST_AT), _soft_residual(logs / sigma, PRIOR_AT)])

    limit = np.log(LARGEST_FACTOR)
    solution = least_squares(residuals, np.zeros(len(GROUPS)), bounds=(-limit, limit))
    return Calibration(**{name: float(np.exp(log)) for name, log in zip(GROUPS, solution.x, strict=True)})


def _soft_residual(residual: Floats, at: float) -> Floats:
    """Return a residual whose square grows like residual² up to `at` and only linearly beyond."""
    soft: Floats = np.sign(residual) * at * np.sqrt(2.0 * (np.sqrt(1.0 + (residual / at) ** 2) - 1.0))
    return soft


# Read the file that `phalanx calibrate` wrote, strictly: a typing error must not change a plan.


VERSION = 1
NOUN = "calibration file"
CURE = "write it again with phalanx calibrate"


def read_calibration(path: Path) -> CalibrationNote:
    """Read the factors in a file; raises UserError with every mistake in it."""
    where = str(path)
    try:
        data = json.loads(read_text(path, noun=NOUN))
    except (ValueError, RecursionError) as error:
        raise mistake(where, f"is not JSON: {error}", fix=CURE) from None
    if not isinstance(data, dict) or not isinstance(data.get("scalars"), dict):
        raise mistake(where, f"is no {NOUN}: it has no object named scalars", fix=CURE)
    if data.get("version") != VERSION or isinstance(data["version"], bool):
        version = str(data.get("version"))[:40]
        raise mistake(where, f"version = {version} is not {VERSION}, the one this Phalanx reads", fix=CURE)
    if missing := [name for name in GROUPS if name not in data["scalars"]]:
        raise mistake(where, f"scalars lacks {', '.join(missing)}", fix=CURE)
    scalars = from_json_values(Calibration, data["scalars"], f"{where}: scalars", noun=NOUN, fix=CURE)
    return CalibrationNote(file=where, scalars=json_values(scalars))
