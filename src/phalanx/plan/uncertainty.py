"""The 80 % interval of a step time: wider where the prediction leans on what is hard to know.

The width is a sum of named terms over shares of the step (pipeline bubble, exposed traffic, host-bound time, experts),
fitted as 10 % and 90 % quantiles of log(measured / predicted) over the published runs, so it is not symmetric: runs
are more often slower than predicted than faster. Each framework scales both sides by how much its own runs scatter.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from phalanx.plan.cases import Cases, Floats
from phalanx.plan.step import StepTimes

FEATURES = ("base", "host", "pipeline", "traffic", "experts", "small", "spread")
SMALL_STEP_S = 1.0


def features(c: Cases, times: StepTimes) -> Floats:
    """One row per case, columns as FEATURES; all are shares between 0 and about 1."""
    step = times.step_s
    host = (times.launch_s + times.overhead_s) / step
    pipeline = times.bubble_s / step
    traffic = (times.tensor_s + times.gradient_s + times.shard_s + times.context_s) / step
    experts = (c.moe_layers > 0).astype(np.float64)
    small = SMALL_STEP_S / (SMALL_STEP_S + step)
    spread = np.log2(np.maximum(1.0, c.devices / c.domain)) / 10.0  # domains that must run in step
    columns = (1.0, host, pipeline, traffic, experts, small, spread)
    return np.stack([np.broadcast_to(np.asarray(one, dtype=np.float64), step.shape) for one in columns], axis=-1)


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(resources.files("phalanx.plan").joinpath("uncertainty.toml").read_text("utf-8"))


def weights() -> tuple[Floats, Floats]:
    """(below, above): log widths per feature."""
    below, above = ([float(_table()[side][name]) for name in FEATURES] for side in ("below", "above"))
    return np.asarray(below), np.asarray(above)


def scales(frameworks: Sequence[str]) -> tuple[Floats, Floats]:
    """(below, above): how much wider the runs of each framework scatter than the common widths say."""
    known = _table()["scale"]
    pairs = [known.get(name, known["default"]) for name in frameworks]
    return np.asarray([p["below"] for p in pairs]), np.asarray([p["above"] for p in pairs])


def interval(c: Cases, times: StepTimes, frameworks: str | Sequence[str] = "default") -> tuple[Floats, Floats]:
    """(low, high) seconds that hold four runs of five; `frameworks` are profile names, one or one per case."""
    table = features(c, times)
    below, above = weights()
    names = [frameworks] if isinstance(frameworks, str) else frameworks
    scale_below, scale_above = scales(names)
    low = np.exp(-(table @ below) * scale_below)
    return times.step_s * low, times.step_s * np.exp((table @ above) * scale_above)
