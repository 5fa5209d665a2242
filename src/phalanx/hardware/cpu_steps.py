"""The cost of a training step on processor cores: one formula, and a machine's constants fitted to measured steps.

Cores differ from GPUs in three ways that the planner's other model does not include: nothing runs ahead (the host is
the device, so issuing an operation adds to its time), ranks that outnumber the cores share them (so a rank that waits
in a pipeline leaves its core to another), and sending takes processor time as well. `phalanx.train.probe_steps`
measures a few small jobs, `fit_rates` finds the constants, and `plan/cpu_step.py` applies them to every layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from phalanx.io.codec import Bounds

Floats = NDArray[np.float64]
Rate = Annotated[float, Bounds(gt=0)]  # finite


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuRates:
    """Seconds of one core for one unit of each kind of work, while all cores are busy, and the number of usable cores.

    The defaults are those of a 2.5 GHz Xeon with AVX-512 and torch 2.13.
    """

    cores: Rate
    matmul_s: Rate = 1.0 / 110e9  # per FLOP
    attention_s: Rate = 1.0 / 50e9  # per FLOP of fused attention, causal half only
    element_s: Rate = 1e-7  # per token and unit of the hidden width: norms, residuals, rotation, activation function
    logit_s: Rate = 1.4e-8  # per logit: loss, forward and backward
    layer_s: Rate = 2e-3  # issuing a layer's operations, forward and backward
    # Additional time of a layer with split tensors: DTensor dispatches each operation in Python.
    split_s: Rate = 2e-2
    micro_s: Rate = 1.3e-3  # the same around the layers, per micro-batch
    step_s: Rate = 2e-3  # per step: norm, clipping, records
    parameter_s: Rate = 5e-9  # updating a parameter
    message_s: Rate = 1.5e-4  # one hop of a collective
    byte_s: Rate = 1e-9  # sending a byte
    unit_s: Rate = 1e-3  # one gather or scatter of a sharded layer (ZeRO), besides its messages
    stage_s: Rate = 2e-3  # a micro-batch's passage through a pipeline stage, besides its messages
    thread_gain: Rate = 0.8  # log2 of the speed-up by a second thread


PRIOR_SIGMA = {
    "matmul_s": 0.7, "attention_s": 0.7, "element_s": 0.5, "logit_s": 0.5, "layer_s": 0.5, "split_s": 0.7,
    "micro_s": 0.5, "step_s": 0.5, "parameter_s": 0.5,
    "message_s": 0.8, "byte_s": 0.7, "unit_s": 0.7, "stage_s": 0.7, "thread_gain": 0.2,
}  # fmt: skip
NOISE = 0.04  # log scatter of a measured step around the formula
TIMED_NOISE = 0.01  # the same for the layout that was chosen and timed: the formula has to match it
# Errors beyond this many times the noise count linearly, so that a neighbour's burst of load does not bend the rest.
ROBUST_AT = 3.0
COMMON_SIGMA = 1.0  # how far a whole machine may be from the default values


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuStep:
    """One training step to be predicted, or columns of many; every field broadcasts."""

    layers: Any
    hidden: Any
    heads: Any
    kv_heads: Any
    head_dim: Any
    ffn: Any
    gated: Any
    vocab: Any
    seq: Any
    tokens: Any  # of one micro-batch on one rank
    count: Any  # micro-batches per step
    tp: Any = 1.0
    pp: Any = 1.0
    vpp: Any = 1.0
    cp: Any = 1.0
    dp: Any = 1.0
    shard: Any = 1.0
    zero: Any = 0.0
    sp: Any = 0.0
    recompute: Any = 0.0  # 0 none, 1 selective, 2 full
    parameters: Any = 0.0  # held by one rank before sharding


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuTimes:
    """Seconds per step; `step` is their sum."""

    matmul: Floats
    attention: Floats
    element: Floats
    head: Floats
    recompute: Floats
    issue: Floats  # issuing operations
    tensor: Floats
    context: Floats
    send: Floats
    bubble: Floats
    shard: Floats
    gradient: Floats
    update: Floats
    other: Floats

    @property
    def step(self) -> Floats:
        """The sum of all parts."""
        return sum((getattr(self, item.name) for item in fields(self)), start=np.zeros(()))


def _as_floats(value: Any) -> Floats:
    return np.asarray(value, dtype=np.float64)


def cpu_times(x: CpuStep, r: CpuRates) -> CpuTimes:
    """Return the seconds of a step by part."""
    is_full, is_selective = _as_floats(x.recompute) == 2, _as_floats(x.recompute) == 1
    tokens, count = _as_floats(x.tokens), _as_floats(x.count)
    ranks = _as_floats(x.tp) * x.pp * x.cp * x.dp
    crowding = np.maximum(1.0, ranks / r.cores)  # ranks that share a core
    threads = np.maximum(1.0, np.floor(r.cores / ranks))
    speed = threads**r.thread_gain
    queries, keys = _as_floats(x.heads) * x.head_dim, 2.0 * _as_floats(x.kv_heads) * x.head_dim
    weights = x.hidden * (2.0 * queries + keys) + (2.0 + _as_floats(x.gated)) * x.hidden * x.ffn
    element_width = (
        x.hidden / np.where(_as_floats(x.sp) > 0, x.tp, 1.0)
        + (0.1 * (queries + keys) + 0.25 * _as_floats(x.ffn)) / x.tp
    )
    # One layer of one micro-batch on one rank, in seconds of a core (of several threads).
    matmul = 6.0 * tokens * weights / x.tp * r.matmul_s / speed
    attention = 7.0 * tokens * x.seq * queries / x.tp * r.attention_s / speed
    element = tokens * element_width * r.element_s / speed
    issue = r.layer_s + np.where(_as_floats(x.tp) > 1, r.split_s, 0.0)
    recompute = np.where(is_full, matmul / 3.0 + attention * 2.0 / 7.0 + element / 3.0 + issue / 2.0, 0.0)
    recompute = np.where(is_selective, element / 4.0 + issue / 2.0, recompute)
    layer = matmul + attention + element + issue + recompute
    head = tokens * x.vocab / x.tp * (6.0 * x.hidden * r.matmul_s + r.logit_s) / speed
    # Messages: a hop of a ring waits for its neighbour's turn on a shared core.
    hop = r.message_s * crowding
    hidden_bytes = tokens * x.hidden * 4.0

    def ring(size: Any, num_bytes: Any, rounds: float) -> Floats:
        size = _as_floats(size)
        transfer_s = rounds * (size - 1.0) / size * num_bytes * r.byte_s * crowding
        return np.where(size > 1, rounds * (size - 1.0) * hop + transfer_s, 0.0)

    tensor = ring(x.tp, hidden_bytes, 2.0) * (4.0 + 2.0 * is_full)
    context = 3.0 * ring(x.cp, tokens * keys * 4.0 * x.cp, 1.0)
    units = np.ceil(_as_floats(x.layers) / x.pp) + 1.0
    has_pipeline = _as_floats(x.pp) > 1
    zero = np.where(has_pipeline, np.minimum(x.zero, 2.0), x.zero)
    parameter_bytes = 4.0 * _as_floats(x.parameters)
    group = np.where(_as_floats(x.zero) >= 1, np.maximum(x.shard, 1.0), 1.0)
    # every layer, one collective
    layer_s = np.where(group > 1, units * (r.unit_s + ring(group, parameter_bytes / units, 1.0)), 0.0)
    # Per micro-batch.
    shard = np.where(zero == 3, 3.0 * layer_s, np.where(zero == 2, layer_s, 0.0))
    num_copies = np.where(_as_floats(x.zero) >= 1, _as_floats(x.dp) * x.cp / group, _as_floats(x.dp) * x.cp)
    gradient = ring(num_copies, parameter_bytes / group, 2.0) + np.where(
        zero == 2, layer_s, np.where(zero == 1, 2.0 * layer_s, 0.0)
    )
    send = np.where(has_pipeline, 2.0 * _as_floats(x.vpp) * (r.stage_s + hop + hidden_bytes * r.byte_s), 0.0)
    micro = r.micro_s + np.zeros_like(tokens)
    # The busiest stage sets the pace of a pipeline, unless the ranks share cores: then their total work does.
    per_stage = np.ceil(_as_floats(x.layers) / x.pp)
    last = np.maximum(x.layers - per_stage * (_as_floats(x.pp) - 1.0), 0.0)
    layer_total = layer + tensor + context
    stage_extra = send + micro + shard
    mid_stage, last_stage = per_stage * layer_total + stage_extra, last * layer_total + head + stage_extra
    busiest = np.maximum(mid_stage, last_stage)
    mean = (x.layers * layer_total + head) / x.pp + stage_extra
    unshared_s = count * busiest + (_as_floats(x.pp) - 1.0) / np.maximum(x.vpp, 1.0) * mean
    shared_s = count * mean * crowding
    stages = np.maximum(unshared_s, shared_s)
    update_s = r.parameter_s * _as_floats(x.parameters) / group * crowding / speed
    agree_s = 2.0 * np.log2(np.maximum(ranks, 1.0)) * hop
    rounds = np.where(shared_s >= unshared_s, count * crowding, count)
    share = (
        np.where(
            shared_s >= unshared_s, _as_floats(x.layers) / x.pp, np.where(last_stage >= mid_stage, last, per_stage)
        )
        * rounds
    )
    parts = {
        "matmul": share * matmul,
        "attention": share * attention,
        "element": share * element,
        "head": np.where(shared_s >= unshared_s, head / x.pp, np.where(last_stage >= mid_stage, head, 0.0)) * rounds,
        "recompute": share * recompute,
        "issue": share * issue + rounds * micro,
        "tensor": share * tensor,
        "context": share * context,
        "send": rounds * send,
        "shard": rounds * shard,
    }
    total_s = sum(parts.values(), start=np.zeros(()))
    return CpuTimes(
        **parts,
        bubble=np.maximum(0.0, stages - total_s),
        gradient=gradient,
        update=update_s,
        other=r.step_s * crowding + agree_s,
    )


def fit_rates(steps: Sequence[CpuStep], seconds: Sequence[float], cores: int, *, timed: int = 0) -> CpuRates:
    """Return the most probable constants: a common factor of the machine, and a factor of each constant.

    Gauss-Newton on logarithms; without measurements the defaults of `CpuRates` are returned. The last `timed` steps
    are of layouts that were chosen and timed: they have more weight than reference steps.
    """
    names = list(PRIOR_SIGMA)
    start = CpuRates(cores=float(cores))
    prior = np.array([getattr(start, name) for name in names])
    sigma = np.array([*PRIOR_SIGMA.values(), COMMON_SIGMA])
    target = np.log(np.asarray(seconds, dtype=np.float64))
    noise = np.where(np.arange(len(target)) < len(target) - timed, NOISE, TIMED_NOISE)
    columns = CpuStep(
        **{
            f.name: np.array([float(getattr(step_of_sample, f.name)) for step_of_sample in steps])
            for f in fields(CpuStep)
        }
    )

    def rates_of(logs: Floats) -> CpuRates:
        common_log = np.where(np.array(names) == "thread_gain", 0.0, logs[-1])
        values = prior * np.exp(logs[:-1] + common_log)
        return replace(start, **dict(zip(names, map(float, values), strict=True)))

    def residuals(logs: Floats) -> Floats:
        errors = (np.log(cpu_times(columns, rates_of(logs)).step) - target) / noise
        soft = np.sign(errors) * ROBUST_AT * np.sqrt(2.0 * (np.sqrt(1.0 + (errors / ROBUST_AT) ** 2) - 1.0))
        return np.concatenate([soft, logs / sigma])

    logs = np.zeros(len(sigma))
    if not len(target):
        return start
    damping, current = 1e-2, residuals(logs)
    for _ in range(60):
        slope = np.stack([(residuals(logs + step) - current) / 1e-5 for step in 1e-5 * np.eye(len(logs))], axis=1)
        normal = slope.T @ slope
        change = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -slope.T @ current)
        new_residuals = residuals(logs + change)
        if new_residuals @ new_residuals < current @ current:
            is_converged = current @ current - new_residuals @ new_residuals < 1e-6 * (current @ current)
            logs, current, damping = logs + change, new_residuals, damping / 5.0
            if is_converged:
                break
        else:
            damping *= 5.0
            if damping > 1e8:
                break
    return rates_of(logs)
