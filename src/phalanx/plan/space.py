"""Every legal layout of a model on a number of devices, as columns that are cut into chunks for the cost model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.ask import Ask
from phalanx.plan.cases import COMPRESSION, OFFLOAD, RECOMPUTE, SCHEDULES, Floats
from phalanx.plan.layout import Layout

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# Larger micro-batches are legal but never tried unless fixed by hand: throughput is flat long before.
MOST_MICRO_BATCH = 256
CHUNK_ROWS = 1 << 15  # 256 kB per column: the arithmetic stays in the second-level cache
NONE, FULL, DOMAIN, GIVEN = range(4)  # who shares a sharded copy


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """All combinations of `base` rows (degrees, micro-batch, schedule) and `choice` rows (ZeRO, recompute, ...)."""

    ask: Ask
    devices: int
    base: dict[str, Ints]
    choice: dict[str, Ints]

    @property
    def rows(self) -> int:
        """Combinations before the illegal ones are masked out."""
        return self.base["tp"].size * self.choice["zero"].size

    def chunks(self) -> Iterator[tuple[Ints, Ints, dict[str, Floats]]]:
        """(base index, choice index, layout columns) of the legal layouts, chunk by chunk."""
        wide = self.choice["zero"].size
        step = max(1, CHUNK_ROWS // wide)
        for start in range(0, self.base["tp"].size, step):
            rows = np.arange(start, min(start + step, self.base["tp"].size), dtype=np.int64)
            base = np.repeat(rows, wide)
            choice = np.tile(np.arange(wide, dtype=np.int64), rows.size)
            columns = self.columns(base, choice)
            legal = _legal(self.ask, columns)
            if legal.any():
                kept = {name: value[legal].astype(np.float64) for name, value in columns.items() if name != "group"}
                yield base[legal], choice[legal], kept

    def columns(self, base: Ints, choice: Ints) -> dict[str, Ints]:
        """Layout columns of some combinations, with the shard size worked out."""
        columns = {name: value[base] for name, value in self.base.items()}
        columns |= {name: value[choice] for name, value in self.choice.items()}
        columns["shard"] = _shard_size(self.ask, columns)
        return columns

    def layout(self, base: int, choice: int) -> Layout:
        """One combination as a value."""
        row = {name: int(value[0]) for name, value in self.columns(np.array([base]), np.array([choice])).items()}
        return Layout(
            data=row["dp"],
            shard=row["shard"],
            tensor=row["tp"],
            context=row["cp"],
            pipeline=row["pp"],
            virtual_pipeline=row["vpp"],
            expert=row["ep"],
            zero=row["zero"],
            sequence_parallel=bool(row["sp"]),
            micro_batch=row["micro_batch"],
            accumulation=self.ask.global_sequences // (row["dp"] * row["micro_batch"]),
            recompute=RECOMPUTE[row["recompute"]],
            precision=self.ask.precision,
            schedule=SCHEDULES[row["schedule"]],
            offload=OFFLOAD[row["offload"]],
            compression=COMPRESSION[row["compression"]],
        )


def build(
    ask: Ask,
    *,
    devices: int = 0,
    offload: tuple[str, ...] = ("none",),
    widest_tensor: int = 0,
    most_micro: int = MOST_MICRO_BATCH,
) -> Space:
    """The space on `devices` devices (all of the cluster's by default); it may be empty."""
    count = devices or ask.cluster.devices
    limit = widest_tensor or ask.cluster.domain_devices
    degrees = [row for row in splits(ask, count) if "tensor" in ask.fixed or row[0] <= limit]
    return Space(ask=ask, devices=count, base=_base(ask, degrees, most_micro), choice=_choices(ask, offload))


def splits(ask: Ask, devices: int) -> list[tuple[int, int, int, int]]:
    """(tensor, context, pipeline, data) with product `devices`, each legal for the model, the batch and the job."""
    found = []
    for tp in tensor_sizes(ask, devices):
        for cp in context_sizes(ask, devices // tp):
            for pp in pipeline_sizes(ask, devices // (tp * cp)):
                dp = devices // (tp * cp * pp)
                if ask.fixed.get("data", dp) == dp and ask.global_sequences % dp == 0:
                    found.append((tp, cp, pp, dp))
    return found


def tensor_sizes(ask: Ask, devices: int) -> list[int]:
    """Tensor sizes that give each rank whole heads."""
    heads, kv_heads = ask.model.heads, ask.model.kv_heads
    sizes = [n for n in _allowed(ask, "tensor", devices) if heads % n == 0]
    copied = ask.limits.copies_kv_heads or "tensor" in ask.fixed
    return [n for n in sizes if kv_heads % n == 0 or (copied and n % kv_heads == 0) or ask.model.is_mla]


def context_sizes(ask: Ask, devices: int) -> list[int]:
    """Context sizes; each rank takes two slices, one early and one late, so that causal work is even."""
    if not ask.limits.context and "context" not in ask.fixed:
        return [1]
    return [n for n in _allowed(ask, "context", devices) if n == 1 or ask.sequence % (2 * n) == 0]


def pipeline_sizes(ask: Ask, devices: int) -> list[int]:
    """Pipeline depths with at least one layer per stage."""
    return [n for n in _allowed(ask, "pipeline", devices) if n <= ask.model.layers]


def _allowed(ask: Ask, name: str, devices: int) -> list[int]:
    if name in ask.fixed:
        size = int(ask.fixed[name])
        return [size] if devices % size == 0 else []
    return list(divisors(devices))


@cache
def divisors(number: int) -> tuple[int, ...]:
    """All divisors, in order.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


def expert_sizes(ask: Ask, ranks: int) -> list[int]:
    """Expert sizes: whole experts per rank, whole groups within data × context × tensor."""
    if not ask.model.is_moe:
        return [1]
    sizes = [n for n in divisors(ask.model.experts) if ranks % n == 0]
    return [n for n in sizes if ask.fixed.get("expert", n) == n]


def micro_batches(ask: Ask, dp: int, most: int = MOST_MICRO_BATCH) -> list[int]:
    """Micro-batch sizes that divide a data rank's share."""
    share = ask.global_sequences // dp
    if "micro" in ask.fixed:
        return [int(ask.fixed["micro"])] if share % int(ask.fixed["micro"]) == 0 else []
    return [n for n in divisors(share) if n <= most]


def schedules(ask: Ask, pp: int, accumulation: int) -> list[tuple[int, int]]:
    """(schedule, model chunks per stage) that a pipeline of this depth can run."""
    wanted = ask.fixed.get("schedule")
    if pp == 1:
        # One stage: every schedule is the same, and a fixed one is kept as written.
        only = SCHEDULES.index(str(wanted)) if wanted else SCHEDULES.index("1f1b")
        return [(only, 1)] if ask.fixed.get("virtual_pipeline", 1) == 1 else []
    found = []
    for name in (str(wanted),) if wanted else ask.limits.schedules:
        chunks = _chunks(ask, pp, accumulation) if name == "interleaved" else (1,)
        found += [(SCHEDULES.index(name), n) for n in chunks if ask.fixed.get("virtual_pipeline", n) == n]
    return found


def _chunks(ask: Ask, pp: int, accumulation: int) -> list[int]:
    # Megatron's interleaved schedule takes micro-batches in groups of the pipeline's depth.
    if accumulation % pp:
        return []
    per_stage = -(-ask.model.layers // pp)
    return [n for n in divisors(per_stage) if n > 1 and pp * n <= ask.model.layers]


def _base(ask: Ask, degrees: list[tuple[int, int, int, int]], most_micro: int) -> dict[str, Ints]:
    rows: list[tuple[int, ...]] = []
    for tp, cp, pp, dp in degrees:
        inner = [
            (micro, *one)
            for micro in micro_batches(ask, dp, most_micro)
            for one in schedules(ask, pp, ask.global_sequences // (dp * micro))
        ]
        for ep in expert_sizes(ask, dp * cp * tp):
            rows += [(tp, cp, pp, dp, ep, *one) for one in inner]
    table = np.array(rows, dtype=np.int64).reshape(-1, 8)
    names = ("tp", "cp", "pp", "dp", "ep", "micro_batch", "schedule", "vpp")
    return {name: table[:, index].copy() for index, name in enumerate(names)}


def _choices(ask: Ask, offload: tuple[str, ...]) -> dict[str, Ints]:
    fixed = ask.fixed
    groups = (GIVEN,) if "shard" in fixed else (FULL, DOMAIN)
    zeros = _zeros(ask)
    shared = [(zero, group) for zero in zeros for group in (groups if zero else (NONE,))]
    recomputes = [str(fixed["recompute"])] if "recompute" in fixed else list(RECOMPUTE)
    flags = (bool(fixed["sequence_parallel"]),) if "sequence_parallel" in fixed else (False, True)
    offloads = (str(fixed["offload"]),) if "offload" in fixed else offload
    compressions = (str(fixed["compression"]),) if "compression" in fixed else ("none",)
    rows = [
        (zero, group, RECOMPUTE.index(recompute), int(sp), OFFLOAD.index(off), COMPRESSION.index(compress))
        for zero, group in shared
        for recompute in recomputes
        for sp in flags
        for off in offloads
        for compress in compressions
    ]
    table = np.array(rows, dtype=np.int64).reshape(-1, 6)
    names = ("zero", "group", "recompute", "sp", "offload", "compression")
    return {name: table[:, index].copy() for index, name in enumerate(names)}


def _zeros(ask: Ask) -> tuple[int, ...]:
    """ZeRO stages to try: parameters in host memory need the third, PowerSGD's whole gradients none."""
    if "zero" in ask.fixed:
        return (int(ask.fixed["zero"]),)
    if ask.fixed.get("offload") == "parameters":
        return (3,)
    return (0,) if ask.fixed.get("compression") == "powersgd" else ask.limits.zero


def _shard_size(ask: Ask, c: dict[str, Ints]) -> Ints:
    replicas = c["dp"] * c["cp"]
    inside = np.maximum(1, ask.cluster.domain_devices // c["tp"])
    given = int(ask.fixed.get("shard", 1))
    return np.select([c["group"] == FULL, c["group"] == DOMAIN, c["group"] == GIVEN], [replicas, inside, given], 1)


def _legal(ask: Ask, c: dict[str, Ints]) -> Bools:
    replicas, shard = c["dp"] * c["cp"], c["shard"]
    within = (shard > 1) & (shard < replicas) & (replicas % shard == 0)
    alone = replicas == 1
    grouped = np.select(
        [c["group"] == DOMAIN, c["group"] == GIVEN], [within & ~alone, replicas % shard == 0], np.ones_like(within)
    ).astype(bool)
    staged = np.isin(c["zero"], ask.limits.zero_with_pipeline) | (c["pp"] == 1)
    if "zero" in ask.fixed:
        sharded = grouped
    else:
        # ZeRO-2 between micro-batches either keeps whole gradients (then it is ZeRO-1) or reduces them every time.
        whole = (c["zero"] != 2) | (ask.global_sequences == c["dp"] * c["micro_batch"])
        # One rank alone has nobody to share with, but may keep its parameters in host memory.
        hosted = c["offload"] == OFFLOAD.index("parameters")
        sharded = grouped & staged & whole & ((c["zero"] == 0) | ~alone | hosted)
    slices = (ask.sequence // c["cp"]) % c["tp"] == 0
    # Without tensor parallelism there is nothing for sequence parallelism to split: one of the two rows is kept.
    unsplit = (c["tp"] == 1) & (c["sp"] == 0)
    if ask.fixed.get("sequence_parallel") is True:
        unsplit = c["tp"] == 1
    legal: Bools = sharded & (unsplit | ((c["tp"] > 1) & ((c["sp"] == 0) | slices)))
    if not ask.limits.selective_zero_bubble:
        bubble, kept = SCHEDULES.index("zero-bubble"), RECOMPUTE.index("selective")
        legal &= ~((c["pp"] > 1) & (c["schedule"] == bubble) & (c["recompute"] == kept))
    return legal
