"""The prediction for one layout: step, throughput, utilisation, memory, and time to the token budget."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import numpy as np

from phalanx.errors import Problem
from phalanx.io.files import shipped_text
from phalanx.job.model import TOKENS_PER_PARAMETER, ModelShape
from phalanx.job.parameter_counts import ParameterCount, count_parameters
from phalanx.job.schema import Batch
from phalanx.plan import cpu_step
from phalanx.plan.cases import Cases, Floats
from phalanx.plan.layout import Layout
from phalanx.plan.memory import MemoryUse
from phalanx.plan.reasons import PARTS
from phalanx.plan.request import PlanRequest
from phalanx.plan.score import price_layouts
from phalanx.plan.step import StepTimes
from phalanx.units import format_bytes, format_count

MFU_CONVENTION = (
    "6 × active parameters without the input embedding, plus causal attention (half the scores), "
    "no recompute, over the dense 16-bit peak"
)
NOT_PARTS = ("total", "first_stage", "usable", "runs")  # fields of MemoryUse that are not parts of the sum
MEMORY_PARTS = tuple(item.name for item in fields(MemoryUse) if item.name not in NOT_PARTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """One step: seconds with their 80 % interval, rates, and a breakdown (`breakdown_s`) that adds up to the step."""

    step_s: float
    step_s_low: float
    step_s_high: float
    tokens_per_s: float
    tokens_per_s_per_device: float
    mfu: float
    mfu_convention: str
    model_flops_per_token: float
    parameters: int
    active_parameters: int
    breakdown_s: Mapping[str, float]

    def __repr__(self) -> str:
        rates = f"{format_count(self.tokens_per_s)} tokens/s, {100 * self.mfu:.3g} % MFU"
        return f"<Prediction {self.step_s:.4g} s/step, {rates}>"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport:
    """The memory of the fullest device; `parts_bytes` add up to `total_bytes`."""

    parts_bytes: Mapping[str, float]
    total_bytes: float
    usable_bytes: float
    device_bytes: float

    def __repr__(self) -> str:
        return f"<MemoryReport {format_bytes(self.total_bytes)} of {format_bytes(self.usable_bytes)} usable>"

    @property
    def headroom(self) -> float:
        """The free share of the usable memory."""
        return 1.0 - self.total_bytes / self.usable_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Duration:
    """Time to the token budget: `training_s` of steps alone, and `wall_s` with failures.

    The 80 % interval combines the uncertainty of the step with that of how often a site fails and how soon it
    recovers.
    """

    tokens: int
    steps: int
    training_s: float
    wall_s: float
    wall_s_low: float
    wall_s_high: float


def predict_layout(request: PlanRequest, layout: Layout) -> tuple[Prediction, MemoryReport]:
    """Return the predicted step and memory of one layout."""
    table, times, memory = price_layouts(request, [layout])
    low, high = step_interval(
        table, times, cpu_step.PROFILE if request.cluster.cpu is not None else request.profile_name
    )
    counts = count_parameters(request.model)
    step_s = float(times.step_s[0])
    tokens = request.global_sequences * request.sequence
    flops = flops_per_token(request.model, counts, request.sequence)
    peak = request.cluster.accelerator.peak_bf16_flops or request.cluster.accelerator.peak_fp32_flops
    prediction = Prediction(
        step_s=step_s,
        step_s_low=float(low[0]),
        step_s_high=float(high[0]),
        tokens_per_s=tokens / step_s,
        tokens_per_s_per_device=tokens / step_s / layout.devices,
        mfu=flops * tokens / (step_s * layout.devices * peak) if peak else 0.0,
        mfu_convention=MFU_CONVENTION,
        model_flops_per_token=flops,
        parameters=counts.total,
        active_parameters=counts.active,
        breakdown_s={name: float(getattr(times, name)[0]) for name in PARTS},
    )
    return prediction, memory_report(request, memory)


def memory_report(request: PlanRequest, memory: MemoryUse) -> MemoryReport:
    """Return row 0 of a memory prediction as a report."""
    return MemoryReport(
        parts_bytes={name: float(np.ravel(getattr(memory, name))[0]) for name in MEMORY_PARTS},
        total_bytes=float(memory.total[0]),
        usable_bytes=float(memory.usable[0]),
        device_bytes=request.cluster.accelerator.memory_bytes,
    )


def flops_per_token(m: ModelShape, counts: ParameterCount, sequence: int) -> float:
    """Return the forward and backward FLOPs of one token under MFU_CONVENTION."""
    embedding = 0 if m.tied else counts.embedding
    head_widths = m.qk_nope_dim + m.qk_rope_dim + m.v_head_dim if m.is_mla else 2 * m.head_dim
    attention = 0.5 * 3 * 2 * m.layers * sequence * m.heads * head_widths
    return 6.0 * (counts.active - embedding) + attention


def executed_flops(request: PlanRequest, layout: Layout) -> dict[str, float]:
    """Return the FLOPs that all devices execute in one step of our trainer, by kind of matrix product.

    The kinds are linear, attention and recompute. They exceed `flops_per_token`: a fused attention backward forms the
    scores again (five products for two), and full recompute runs each layer again up to its last matrix, whose result
    backward does not need (torch.utils.checkpoint stops there). Selective recompute keeps every product.
    """
    m, counts = request.model, count_parameters(request.model)
    tokens = request.global_sequences * request.sequence
    head_widths = m.qk_nope_dim + m.qk_rope_dim + m.v_head_dim if m.is_mla else 2 * m.head_dim
    # Forward, of one token: half of 2 · S · N · (H + H).
    scores = m.layers * request.sequence * m.heads * head_widths
    embedding, head = (0 if m.tied else counts.embedding), m.vocab * m.hidden
    norms = counts.final_norm + m.layers * counts.norms_per_layer
    linear = counts.active - embedding - norms
    recompute_flops = 0.0
    if layout.recompute == "full":
        dense = m.dense_layers if m.is_moe else m.layers
        recompute_flops = 2.0 * (linear - head - dense * m.hidden * m.ffn) + scores
    return {"linear": 6.0 * linear * tokens, "attention": 3.5 * scores * tokens, "recompute": recompute_flops * tokens}


def token_budget(tokens: int | str, parameters: int) -> int:
    """Return the number of tokens to train on; "auto" is 20 per parameter."""
    return TOKENS_PER_PARAMETER * parameters if isinstance(tokens, str) else tokens


def run_duration(
    request: PlanRequest,
    layout: Layout,
    *,
    batch: Batch,
    tokens: int,
    step_s: float,
    effective_time: float,
    step_interval_s: tuple[float, float] | None = None,
    effective_interval: tuple[float, float] | None = None,
) -> tuple[Duration, tuple[Problem, ...]]:
    """Return the time to `tokens`, following the batch ramp, and warnings about stages that leave ranks idle."""
    training_s, steps, seen_tokens = 0.0, 0, 0
    warnings: list[Problem] = []
    for index, stage in enumerate(batch.ramp):
        stage_end = min(stage.until_tokens, tokens)
        sequences = stage.global_tokens // request.sequence
        _, times, _ = price_layouts(request, [layout], global_sequences=sequences)
        count = -(-max(0, stage_end - seen_tokens) // stage.global_tokens)
        training_s, steps, seen_tokens = (
            training_s + count * float(times.step_s[0]),
            steps + count,
            max(seen_tokens, stage_end),
        )
        if sequences % (layout.data * layout.micro_batch):
            warnings.append(_uneven_batch(request, layout, index, sequences))
    count = -(-max(0, tokens - seen_tokens) // batch.global_tokens)
    training_s, steps = training_s + count * step_s, steps + count
    wall_s = training_s / effective_time if effective_time > 0 else float("inf")
    # A model that is off on one step is off on all of them: the errors do not average out over the run.
    low_s, high_s = step_interval_s or (step_s, step_s)
    worst, best = effective_interval or (effective_time, effective_time)
    duration = Duration(
        tokens=tokens,
        steps=steps,
        training_s=training_s,
        wall_s=wall_s,
        wall_s_low=wall_s / _joint_factor(step_s / low_s, best / effective_time if effective_time > 0 else 1.0),
        wall_s_high=wall_s * _joint_factor(high_s / step_s, effective_time / worst if worst > 0 else math.inf),
    )
    return duration, tuple(warnings)


def _joint_factor(*factors: float) -> float:
    """Return the joint 80 % bound of independent factors ≥ 1, whose logarithms add in squares."""
    return math.exp(math.hypot(*(math.log(factor) for factor in factors)))


def _uneven_batch(request: PlanRequest, layout: Layout, index: int, sequences: int) -> Problem:
    return Problem(
        where=request.place("batch.ramp"),
        what=f"batch.ramp[{index}] has {sequences:,} sequences per step, not a multiple of data {layout.data} × "
        f"micro-batch {layout.micro_batch}",
        why="some ranks will idle in that stage",
        fix=f"fix parallel.data to a divisor of {sequences:,}",
    )


# The 80 % interval of a step time: wider where the prediction depends on quantities that are hard to know.
#
# The width is a sum of named terms over shares of the step (pipeline bubble, exposed traffic, host-bound time,
# experts), fitted as 10 % and 90 % quantiles of log(measured / predicted) over the published runs, so it is not
# symmetric: runs are more often slower than predicted than faster. Each framework scales both sides by the scatter of
# its own runs.

FEATURES = ("base", "host", "pipeline", "traffic", "experts", "small", "spread")
SMALL_STEP_S = 1.0


def interval_features(c: Cases, times: StepTimes) -> Floats:
    """Return one row per case with columns as FEATURES; all are shares between 0 and about 1."""
    step = times.step_s
    host = (times.launch_s + times.overhead_s) / step
    pipeline = times.bubble_s / step
    traffic = (times.tensor_s + times.gradient_s + times.shard_s + times.context_s) / step
    experts = (c.moe_layers > 0).astype(np.float64)
    small = SMALL_STEP_S / (SMALL_STEP_S + step)
    # Domains that have to synchronise.
    spread = np.log2(np.maximum(1.0, c.devices / c.domain)) / 10.0
    columns = (1.0, host, pipeline, traffic, experts, small, spread)
    return np.stack([np.broadcast_to(np.asarray(column, dtype=np.float64), step.shape) for column in columns], axis=-1)


@cache
def _uncertainty_table() -> dict[str, Any]:
    return tomllib.loads(shipped_text(__file__, "uncertainty.toml"))


def feature_widths() -> tuple[Floats, Floats]:
    """Return (below, above): the log widths per feature."""
    below, above = ([float(_uncertainty_table()[side][name]) for name in FEATURES] for side in ("below", "above"))
    return np.asarray(below), np.asarray(above)


def framework_scatter(frameworks: Sequence[str]) -> tuple[Floats, Floats]:
    """Return (below, above): factors by which runs of each framework scatter more than the common widths."""
    scales = _uncertainty_table()["scale"]
    pairs = [scales.get(name, scales["default"]) for name in frameworks]
    return np.asarray([p["below"] for p in pairs]), np.asarray([p["above"] for p in pairs])


def step_interval(c: Cases, times: StepTimes, frameworks: str | Sequence[str] = "default") -> tuple[Floats, Floats]:
    """Return (low, high) seconds that contain four runs of five; `frameworks` has one profile name, or one per case."""
    table = interval_features(c, times)
    below, above = feature_widths()
    names = [frameworks] if isinstance(frameworks, str) else frameworks
    scale_below, scale_above = framework_scatter(names)
    low = np.exp(-(table @ below) * scale_below)
    return times.step_s * low, times.step_s * np.exp((table @ above) * scale_above)
