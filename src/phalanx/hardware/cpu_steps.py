"""What a training step costs on processor cores: one formula, and the constants of a machine fitted to measured steps.

Cores differ from GPUs in three ways that the planner's other model does not know: nothing runs ahead (the host is the
device, so issuing an operation adds to doing it), ranks that outnumber the cores share them (so a rank that waits in a
pipeline leaves its core to another), and sending takes processor time as well. `phalanx.train.probe_steps` measures a
few small jobs, `fit_rates` finds the constants, and `plan/cpu_step.py` applies them to every layout.
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
    """Seconds of one core for one unit of each kind of work, while all cores are busy; `cores` can be used."""

    cores: Rate
    matmul_s: Rate = 1.0 / 110e9  # per FLOP; these are of a 2.5 GHz Xeon with AVX-512 and torch 2.13
    attention_s: Rate = 1.0 / 50e9  # per FLOP of fused attention, causal half only
    element_s: Rate = 1e-7  # per token and unit of the hidden width: norms, residuals, rotation, activation function
    logit_s: Rate = 1.4e-8  # per logit: loss, forward and backward
    layer_s: Rate = 2e-3  # issuing a layer's operations, forward and backward
    split_s: Rate = 2e-2  # the same for split tensors, beside that: each operation is dispatched by DTensor in Python
    micro_s: Rate = 1.3e-3  # the same around the layers, per micro-batch
    step_s: Rate = 2e-3  # per step: norm, clipping, records
    parameter_s: Rate = 5e-9  # updating a parameter
    message_s: Rate = 1.5e-4  # one hop of a collective
    byte_s: Rate = 1e-9  # sending a byte
    unit_s: Rate = 1e-3  # one gather or scatter of a sharded layer (ZeRO), beside its messages
    stage_s: Rate = 2e-3  # a micro-batch's passage through a pipeline stage, beside its messages
    thread_gain: Rate = 0.8  # log2 of the speed-up by a second thread


PRIOR_SIGMA = {
    "matmul_s": 0.7, "attention_s": 0.7, "element_s": 0.5, "logit_s": 0.5, "layer_s": 0.5, "split_s": 0.7,
    "micro_s": 0.5, "step_s": 0.5, "parameter_s": 0.5,
    "message_s": 0.8, "byte_s": 0.7, "unit_s": 0.7, "stage_s": 0.7, "thread_gain": 0.2,
}  # fmt: skip
NOISE = 0.04  # log scatter of a measured step around the formula
TIMED_NOISE = 0.01  # of the layout that was chosen and timed itself: the formula has to pass through it
ROBUST_AT = 3.0  # errors beyond this many times the noise count linearly: a neighbour's burst must not bend the rest
COMMON_SIGMA = 1.0  # how far a machine as a whole may be from the one the values above are of


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuStep:
    """One training step to be priced, or columns of many; every field broadcasts."""

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
    issue: Floats  # of operations
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
        """All of them."""
        return sum((getattr(self, item.name) for item in fields(self)), start=np.zeros(()))


def _as_floats(value: Any) -> Floats:
    return np.asarray(value, dtype=np.float64)


def cpu_times(x: CpuStep, r: CpuRates) -> CpuTimes:
    """Where a step goes."""
    full, selective = _as_floats(x.recompute) == 2, _as_floats(x.recompute) == 1
    tokens, count = _as_floats(x.tokens), _as_floats(x.count)
    ranks = _as_floats(x.tp) * x.pp * x.cp * x.dp
    crowding = np.maximum(1.0, ranks / r.cores)  # ranks that share a core
    threads = np.maximum(1.0, np.floor(r.cores / ranks))
    speed = threads**r.thread_gain
    queries, keys = _as_floats(x.heads) * x.head_dim, 2.0 * _as_floats(x.kv_heads) * x.head_dim
    weights = x.hidden * (2.0 * queries + keys) + (2.0 + _as_floats(x.gated)) * x.hidden * x.ffn
    wide = (
        x.hidden / np.where(_as_floats(x.sp) > 0, x.tp, 1.0)
        + (0.1 * (queries + keys) + 0.25 * _as_floats(x.ffn)) / x.tp
    )
    # One layer of one micro-batch on one rank, in seconds of a core (of several threads).
    matmul = 6.0 * tokens * weights / x.tp * r.matmul_s / speed
    attention = 7.0 * tokens * x.seq * queries / x.tp * r.attention_s / speed
    element = tokens * wide * r.element_s / speed
    issue = r.layer_s + np.where(_as_floats(x.tp) > 1, r.split_s, 0.0)
    again = np.where(full, matmul / 3.0 + attention * 2.0 / 7.0 + element / 3.0 + issue / 2.0, 0.0)
    again = np.where(selective, element / 4.0 + issue / 2.0, again)
    layer = matmul + attention + element + issue + again
    head = tokens * x.vocab / x.tp * (6.0 * x.hidden * r.matmul_s + r.logit_s) / speed
    # Messages: a hop of a ring waits for its neighbour's turn on a shared core.
    hop = r.message_s * crowding
    hidden_bytes = tokens * x.hidden * 4.0

    def ring(size: Any, num_bytes: Any, rounds: float) -> Floats:
        size = _as_floats(size)
        moved = rounds * (size - 1.0) / size * num_bytes * r.byte_s * crowding
        return np.where(size > 1, rounds * (size - 1.0) * hop + moved, 0.0)

    tensor = ring(x.tp, hidden_bytes, 2.0) * (4.0 + 2.0 * full)
    context = 3.0 * ring(x.cp, tokens * keys * 4.0 * x.cp, 1.0)
    units = np.ceil(_as_floats(x.layers) / x.pp) + 1.0
    piped = _as_floats(x.pp) > 1
    zero = np.where(piped, np.minimum(x.zero, 2.0), x.zero)
    held = 4.0 * _as_floats(x.parameters)
    group = np.where(_as_floats(x.zero) >= 1, np.maximum(x.shard, 1.0), 1.0)
    once = np.where(group > 1, units * (r.unit_s + ring(group, held / units, 1.0)), 0.0)  # every layer, one collective
    shard = np.where(zero == 3, 3.0 * once, np.where(zero == 2, once, 0.0))  # per micro-batch
    copies = np.where(_as_floats(x.zero) >= 1, _as_floats(x.dp) * x.cp / group, _as_floats(x.dp) * x.cp)
    gradient = ring(copies, held / group, 2.0) + np.where(zero == 2, once, np.where(zero == 1, 2.0 * once, 0.0))
    send = np.where(piped, 2.0 * _as_floats(x.vpp) * (r.stage_s + hop + hidden_bytes * r.byte_s), 0.0)
    micro = r.micro_s + np.zeros_like(tokens)
    # The busiest stage sets the pace of a pipeline, unless the ranks share cores: then all their work does.
    per_stage = np.ceil(_as_floats(x.layers) / x.pp)
    last = np.maximum(x.layers - per_stage * (_as_floats(x.pp) - 1.0), 0.0)
    each = layer + tensor + context
    beside = send + micro + shard
    mid, end = per_stage * each + beside, last * each + head + beside
    busiest = np.maximum(mid, end)
    mean = (x.layers * each + head) / x.pp + beside
    alone = count * busiest + (_as_floats(x.pp) - 1.0) / np.maximum(x.vpp, 1.0) * mean
    together = count * mean * crowding
    stages = np.maximum(alone, together)
    update = r.parameter_s * _as_floats(x.parameters) / group * crowding / speed
    agree = 2.0 * np.log2(np.maximum(ranks, 1.0)) * hop
    rounds = np.where(together >= alone, count * crowding, count)
    share = np.where(together >= alone, _as_floats(x.layers) / x.pp, np.where(end >= mid, last, per_stage)) * rounds
    parts = {
        "matmul": share * matmul,
        "attention": share * attention,
        "element": share * element,
        "head": np.where(together >= alone, head / x.pp, np.where(end >= mid, head, 0.0)) * rounds,
        "recompute": share * again,
        "issue": share * issue + rounds * micro,
        "tensor": share * tensor,
        "context": share * context,
        "send": rounds * send,
        "shard": rounds * shard,
    }
    spent = sum(parts.values(), start=np.zeros(()))
    return CpuTimes(
        **parts,
        bubble=np.maximum(0.0, stages - spent),
        gradient=gradient,
        update=update,
        other=r.step_s * crowding + agree,
    )


def fit_rates(steps: Sequence[CpuStep], seconds: Sequence[float], cores: int, *, timed: int = 0) -> CpuRates:
    """The most probable constants: a common factor of the machine, and each constant around it.

    Gauss-Newton on logarithms; with nothing measured the values of `CpuRates` come back. The last `timed` steps are of
    layouts that were chosen and timed themselves: they count for more than reference steps.
    """
    names = list(PRIOR_SIGMA)
    start = CpuRates(cores=float(cores))
    prior = np.array([getattr(start, name) for name in names])
    sigma = np.array([*PRIOR_SIGMA.values(), COMMON_SIGMA])
    target = np.log(np.asarray(seconds, dtype=np.float64))
    noise = np.where(np.arange(len(target)) < len(target) - timed, NOISE, TIMED_NOISE)
    columns = CpuStep(**{f.name: np.array([float(getattr(one, f.name)) for one in steps]) for f in fields(CpuStep)})

    def rates_of(logs: Floats) -> CpuRates:
        common = np.where(np.array(names) == "thread_gain", 0.0, logs[-1])
        values = prior * np.exp(logs[:-1] + common)
        return replace(start, **dict(zip(names, map(float, values), strict=True)))

    def residuals(logs: Floats) -> Floats:
        errors = (np.log(cpu_times(columns, rates_of(logs)).step) - target) / noise
        soft = np.sign(errors) * ROBUST_AT * np.sqrt(2.0 * (np.sqrt(1.0 + (errors / ROBUST_AT) ** 2) - 1.0))
        return np.concatenate([soft, logs / sigma])

    logs = np.zeros(len(sigma))
    if not len(target):
        return start
    damping, now = 1e-2, residuals(logs)
    for _ in range(60):
        slope = np.stack([(residuals(logs + step) - now) / 1e-5 for step in 1e-5 * np.eye(len(logs))], axis=1)
        normal = slope.T @ slope
        move = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -slope.T @ now)
        tried = residuals(logs + move)
        if tried @ tried < now @ now:
            better = now @ now - tried @ tried < 1e-6 * (now @ now)
            logs, now, damping = logs + move, tried, damping / 5.0
            if better:
                break
        else:
            damping *= 5.0
            if damping > 1e8:
                break
    return rates_of(logs)
