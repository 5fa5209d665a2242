"""Every legal layout of a model on a number of devices, as tables of combinations and as grids for the cost model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.cases import COMPRESSION, OFFLOAD, RECOMPUTE, SCHEDULES, Floats
from phalanx.plan.layout import Layout
from phalanx.plan.request import PlanRequest
from phalanx.units import all_divisors

# Larger micro-batches are legal but not tried unless fixed by hand: throughput stops growing well below.
MOST_MICRO_BATCH = 256
NO_ROW = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """All combinations of `base` rows (degrees, micro-batch, schedule) and `choice` rows (ZeRO, recompute, ...)."""

    request: PlanRequest
    devices: int
    base: dict[str, Ints]
    choice: dict[str, Ints]
    experts: Ints  # all expert sizes
    of_expert: Ints  # [expert, rest]: rows of `base`, NO_ROW where the size is not legal
    product: Ints  # [sharing, recompute, sequence parallelism]: rows of `choice`
    zero2: str = "whole"  # as in `part`

    def part(self, offload: str, base: Bools | None = None, *, zero2: str = "any") -> Space:
        """Return the layouts of one kind of offload, over some rows of `base`; both tables keep their rows.

        `zero2="whole"` limits ZeRO-2 to steps of one micro-batch; `"repeated"` limits the layouts to ZeRO-2 in steps
        of several micro-batches.
        """
        kind = self.choice["offload"][self.product[:, 0, 0]] == OFFLOAD.index(offload)
        if zero2 == "repeated":
            kind &= self.choice["zero"][self.product[:, 0, 0]] == 2
        of_expert = self.of_expert
        if base is not None:
            of_expert = np.where((of_expert != NO_ROW) & np.append(base, False)[of_expert], of_expert, NO_ROW)
        return replace(self, product=self.product[kind], of_expert=of_expert, zero2=zero2)

    @property
    def rows(self) -> int:
        """The number of combinations before illegal ones are masked out."""
        return self.base["tp"].size * self.choice["zero"].size

    def grids(self) -> Iterator[Grid]:
        """Yield grids that together hold all legal layouts."""
        legal = self._legal_parts()
        depths = self.base["pp"][self.of_expert.max(axis=0, initial=NO_ROW)]
        for columns in group_alike(legal):
            for rest_columns in _by_depth(columns, depths[columns]):
                used_ways = [np.flatnonzero(mask[:, rest_columns].any(axis=1)) for mask in legal]
                step = max(1, GRID_CELLS // math.prod(mask.size for mask in used_ways))
                for start in range(0, rest_columns.size, step):
                    yield self._make_grid(used_ways, rest_columns[start : start + step], legal)

    def _legal_parts(self) -> tuple[Bools, Bools, Bools, Bools]:
        """Return where each sharing, recompute, sequence split and expert size is legal, as four masks [way, rest].

        No rule depends on two of these choices at once, so the legal combinations are the product of the masks.
        """
        first_rows = self.of_expert.max(axis=0, initial=NO_ROW)
        columns = {name: value[first_rows] for name, value in self.base.items()}

        def legal(rule: Callable[[PlanRequest, dict[str, Ints]], Bools], ways: Ints) -> Bools:
            choices = {name: value[ways][:, None] for name, value in self.choice.items()}
            return np.broadcast_to(rule(self.request, columns | choices), (ways.size, first_rows.size))

        return (
            legal(partial(may_share, zero2=self.zero2), self.product[:, 0, 0]),
            legal(may_recompute, self.product[0, :, 0]),
            legal(may_split_sequence, self.product[0, 0, :]),
            self.of_expert != NO_ROW,
        )

    def _make_grid(self, used: list[Ints], rest: Ints, legal: tuple[Bools, ...]) -> Grid:
        share, recompute, split, expert = (mask[np.ix_(ways, rest)] for mask, ways in zip(legal, used, strict=True))
        choice, base = self.product[np.ix_(*used[:3])], self.of_expert[np.ix_(used[3], rest)]
        columns = {name: value[base.max(axis=0)] for name, value in self.base.items()}
        columns["ep"] = self.experts[used[3]][:, None]
        for name in ("zero", "group", "offload", "compression"):
            # A column with one value becomes a scalar, so that it does not enlarge the terms that use it.
            column = self.choice[name][choice[:, 0, 0]][:, None, None, None, None]
            columns[name] = column.reshape(-1)[0:1].reshape(()) if (column == column.flat[0]).all() else column
        columns["shard"] = shard_size(self.request, columns)
        columns["recompute"] = self.choice["recompute"][choice[0, :, 0]][:, None, None, None]
        columns["sp"] = self.choice["sp"][choice[0, 0, :]][:, None, None]
        return Grid(
            base=base,
            choice=choice,
            legal=share[:, None, None, None] & recompute[:, None, None] & split[:, None] & expert,
            columns={name: value.astype(np.float64) for name, value in columns.items() if name != "group"},
        )

    def columns(self, base: Ints, choice: Ints) -> dict[str, Ints]:
        """Return the layout columns of some combinations, including the shard size."""
        columns = {name: value[base] for name, value in self.base.items()}
        columns |= {name: value[choice] for name, value in self.choice.items()}
        columns["shard"] = shard_size(self.request, columns)
        return columns

    def layout(self, base: int, choice: int) -> Layout:
        """Return one combination as a Layout."""
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
            accumulation=self.request.global_sequences // (row["dp"] * row["micro_batch"]),
            recompute=RECOMPUTE[row["recompute"]],
            precision=self.request.precision,
            schedule=SCHEDULES[row["schedule"]],
            offload=OFFLOAD[row["offload"]],
            compression=COMPRESSION[row["compression"]],
        )


def build_space(
    request: PlanRequest,
    *,
    devices: int = 0,
    offload: tuple[str, ...] = ("none",),
    widest_tensor: int = 0,
    most_micro: int = MOST_MICRO_BATCH,
) -> Space:
    """Return the space of layouts on `devices` devices (by default all of the cluster's); it may be empty."""
    count = devices or request.cluster.devices
    limit = widest_tensor or request.cluster.domain_devices
    degrees = [row for row in device_splits(request, count) if "tensor" in request.fixed or row[0] <= limit]
    base, experts, of_expert = _base_table(request, degrees, most_micro)
    choice, product = _choice_table(request, offload)
    return Space(
        request=request,
        devices=count,
        base=base,
        choice=choice,
        experts=experts,
        of_expert=of_expert,
        product=product,
    )


def device_splits(request: PlanRequest, devices: int) -> list[tuple[int, int, int, int]]:
    """Return every (tensor, context, pipeline, data) with product `devices` that model, batch and job allow."""
    splits = []
    for tp in tensor_sizes(request, devices):
        for cp in context_sizes(request, devices // tp):
            for pp in pipeline_sizes(request, devices // (tp * cp)):
                dp = devices // (tp * cp * pp)
                if request.fixed.get("data", dp) == dp and request.global_sequences % dp == 0:
                    splits.append((tp, cp, pp, dp))
    return splits


def tensor_sizes(request: PlanRequest, devices: int) -> list[int]:
    """Return the tensor sizes that give each rank whole heads."""
    heads, kv_heads = request.model.heads, request.model.kv_heads
    sizes = [n for n in _allowed_sizes(request, "tensor", devices) if heads % n == 0]
    can_copy = request.limits.copies_kv_heads or "tensor" in request.fixed
    return [n for n in sizes if kv_heads % n == 0 or (can_copy and n % kv_heads == 0) or request.model.is_mla]


def context_sizes(request: PlanRequest, devices: int) -> list[int]:
    """Return the context sizes; each rank takes an early and a late slice, so that causal attention is balanced."""
    if not request.limits.context and "context" not in request.fixed:
        return [1]
    return [n for n in _allowed_sizes(request, "context", devices) if n == 1 or request.sequence % (2 * n) == 0]


def pipeline_sizes(request: PlanRequest, devices: int) -> list[int]:
    """Return the pipeline depths with at least one layer per stage."""
    return [n for n in _allowed_sizes(request, "pipeline", devices) if n <= request.model.layers]


def _allowed_sizes(request: PlanRequest, name: str, devices: int) -> list[int]:
    if name in request.fixed:
        size = int(request.fixed[name])
        return [size] if devices % size == 0 else []
    return list(all_divisors(devices))


def expert_sizes(request: PlanRequest, ranks: int) -> list[int]:
    """Return the expert sizes with whole experts per rank and whole groups within data × context × tensor."""
    if not request.model.is_moe:
        return [1]
    sizes = [n for n in all_divisors(request.model.experts) if ranks % n == 0]
    return [n for n in sizes if request.fixed.get("expert", n) == n]


def micro_batches(request: PlanRequest, dp: int, most: int = MOST_MICRO_BATCH) -> list[int]:
    """Return the micro-batch sizes up to `most` that divide a data rank's share of the batch."""
    share = request.global_sequences // dp
    if "micro" in request.fixed:
        return [int(request.fixed["micro"])] if share % int(request.fixed["micro"]) == 0 else []
    return [n for n in all_divisors(share) if n <= most]


def possible_schedules(request: PlanRequest, pp: int, accumulation: int) -> list[tuple[int, int]]:
    """Return the (schedule, model chunks per stage) pairs that a pipeline of this depth can run."""
    fixed_schedule = request.fixed.get("schedule")
    if pp == 1:
        # With one stage every schedule is the same; a fixed one is kept as written.
        schedule = SCHEDULES.index(str(fixed_schedule)) if fixed_schedule else SCHEDULES.index("1f1b")
        return [(schedule, 1)] if request.fixed.get("virtual_pipeline", 1) == 1 else []
    schedules = []
    for name in (str(fixed_schedule),) if fixed_schedule else request.limits.schedules:
        chunks = _chunk_counts(request, pp, accumulation) if name == "interleaved" else (1,)
        schedules += [(SCHEDULES.index(name), n) for n in chunks if request.fixed.get("virtual_pipeline", n) == n]
    return schedules


def _chunk_counts(request: PlanRequest, pp: int, accumulation: int) -> list[int]:
    # Megatron's interleaved schedule takes micro-batches in groups of the pipeline's depth.
    if accumulation % pp:
        return []
    per_stage = -(-request.model.layers // pp)
    # A job for another framework may fix chunks that hold the embedding or the head alone (job/cross_checks.py).
    max_chunks = request.model.layers + (2 if "virtual_pipeline" in request.fixed and request.limits.bare_ends else 0)
    return [n for n in all_divisors(per_stage) if n > 1 and pp * n <= max_chunks]


def _base_table(
    request: PlanRequest, degrees: list[tuple[int, int, int, int]], most_micro: int
) -> tuple[dict[str, Ints], Ints, Ints]:
    """Return the base table, all expert sizes, and the rows of `base` for each expert size.

    The table is ordered by degrees, and within them by expert size.
    """

    @cache
    def whole_rounds(pp: int, is_whole: bool) -> list[tuple[int, int]]:
        return possible_schedules(request, pp, pp if is_whole else pp + 1)

    @cache
    def inner(pp: int, dp: int) -> Ints:
        share = request.global_sequences // dp
        rows = [
            (micro, *schedule)
            for micro in micro_batches(request, dp, most_micro)
            for schedule in whole_rounds(pp, share // micro % pp == 0)
        ]
        return np.array(rows, dtype=np.int64).reshape(-1, 3)

    sizes = {ranks: expert_sizes(request, ranks) for ranks in {tp * cp * dp for tp, cp, _, dp in degrees}}
    degrees = [(tp, cp, pp, dp) for tp, cp, pp, dp in degrees if sizes[tp * cp * dp]]
    experts = sorted({size for rank_sizes in sizes.values() for size in rank_sizes})
    has_size = np.array([[size in sizes[tp * cp * dp] for size in experts] for tp, cp, _, dp in degrees], dtype=bool)
    has_size = has_size.reshape(len(degrees), len(experts))
    inner_tables = [inner(pp, dp) for *_, pp, dp in degrees]
    lengths = np.array([len(table) for table in inner_tables], dtype=np.int64)
    # Rows of a block of degrees start where those before it end; each expert size repeats the inner rows.
    blocks = lengths * has_size.sum(axis=1)
    start = (np.cumsum(blocks) - blocks)[:, None] + (np.cumsum(has_size, axis=1) - 1) * lengths[:, None]
    inner_rows = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    of_expert = np.where(
        np.repeat(has_size, lengths, axis=0).T, np.repeat(start, lengths, axis=0).T + inner_rows, NO_ROW
    )
    base_table = np.zeros((int(blocks.sum()), 8), dtype=np.int64)
    of_degrees = np.repeat(np.array(degrees, dtype=np.int64).reshape(-1, 4), lengths, axis=0)
    table_rows = np.hstack((of_degrees, np.concatenate((np.zeros((0, 3), dtype=np.int64), *inner_tables))))
    for size, rows in zip(experts, of_expert, strict=True):
        is_used = rows != NO_ROW
        base_table[rows[is_used]] = np.insert(table_rows[is_used], 4, size, axis=1)
    names = ("tp", "cp", "pp", "dp", "ep", "micro_batch", "schedule", "vpp")
    columns = {name: base_table[:, index].copy() for index, name in enumerate(names)}
    return columns, np.array(experts, dtype=np.int64), of_expert


def _choice_table(request: PlanRequest, offload: tuple[str, ...]) -> tuple[dict[str, Ints], Ints]:
    """Return the choice table, and its rows as a product of sharing, recompute and sequence parallelism."""
    fixed = request.fixed
    groups = (GIVEN,) if "shard" in fixed else (FULL, DOMAIN)
    offloads = (str(fixed["offload"]),) if "offload" in fixed else offload
    compressions = (str(fixed["compression"]),) if "compression" in fixed else ("none",)
    sharing_ways = [
        (zero, group, offload_kind, compression_kind)
        for zero, group in ((zero, group) for zero in _zero_stages(request) for group in (groups if zero else (NONE,)))
        for offload_kind in offloads
        # Only ZeRO-3 frees parameters after each layer, so only it can offload them.
        if zero == 3 or offload_kind != "parameters" or "offload" in fixed
        for compression_kind in compressions
    ]
    recomputes = [str(fixed["recompute"])] if "recompute" in fixed else list(RECOMPUTE)
    flags = (bool(fixed["sequence_parallel"]),) if "sequence_parallel" in fixed else (False, True)
    rows = [
        (
            zero,
            group,
            RECOMPUTE.index(recompute),
            int(sp),
            OFFLOAD.index(offload_kind),
            COMPRESSION.index(compression_kind),
        )
        for zero, group, offload_kind, compression_kind in sharing_ways
        for recompute in recomputes
        for sp in flags
    ]
    table = np.array(rows, dtype=np.int64).reshape(-1, 6)
    names = ("zero", "group", "recompute", "sp", "offload", "compression")
    product = np.arange(len(rows)).reshape(len(sharing_ways), len(recomputes), len(flags))
    return {name: table[:, index].copy() for index, name in enumerate(names)}, product


def _zero_stages(request: PlanRequest) -> tuple[int, ...]:
    """Return the ZeRO stages to try: 3 with parameters in host memory, 0 with PowerSGD (whole gradients)."""
    if "zero" in request.fixed:
        return (int(request.fixed["zero"]),)
    if request.fixed.get("offload") == "parameters":
        return (3,)
    return (0,) if request.fixed.get("compression") == "powersgd" else request.limits.zero


# Layouts as products of short lists, which the search prices all at once.


Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# 1 MB for a term that depends on all axes: the arithmetic stays in the second-level cache.
GRID_CELLS = 1 << 17
# A grid takes 2 ms however small it is, the time of about this many unnecessary cells.
WASTED_CELLS = 1 << 14


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Layouts that are a product of five short lists, so that no term of the cost model is computed twice.

    Axes, slowest first: what is sharded (ZeRO stage, group, offload), recompute, sequence parallelism, expert size,
    and the rest of the base. A term is as large as the axes it depends on, and NumPy broadcasts.
    """

    base: Ints  # [expert, rest]: rows of Space.base
    choice: Ints  # [sharing, recompute, sequence parallelism]: rows of Space.choice
    legal: Bools  # broadcasts to `shape`, as do the columns
    columns: dict[str, Floats]

    @property
    def shape(self) -> tuple[int, ...]:
        """The length of each axis."""
        return (*self.choice.shape, *self.base.shape)

    def rows(self, where: Bools) -> tuple[Ints, Ints]:
        """Return the (base row, choice row) of the layouts selected by the mask."""
        of_choice = where.reshape(self.choice.size, -1).sum(axis=1)
        return np.broadcast_to(self.base, self.shape)[where], np.repeat(self.choice, of_choice)

    def around(self, where: Bools) -> tuple[Grid, Bools]:
        """Return the smallest grid that contains the selected layouts, and the mask of them in it."""
        axes = range(len(self.shape))
        kept_entries = [
            np.flatnonzero(where.any(axis=tuple(other_axis for other_axis in axes if other_axis != axis)))
            for axis in axes
        ]
        columns = {name: keep_entries(value, kept_entries) for name, value in self.columns.items()}
        base, choice = keep_entries(self.base, kept_entries), keep_entries(self.choice, kept_entries[:3])
        return Grid(
            base=base, choice=choice, legal=keep_entries(self.legal, kept_entries), columns=columns
        ), keep_entries(where, kept_entries)


def group_alike(legal: tuple[Bools, ...]) -> list[Ints]:
    """Group the columns of the masks that have nearly the same legal ways; columns without any legal way are left out.

    Merging two groups prices cells that are not legal; groups are merged while that costs fewer than WASTED_CELLS.
    """
    bits = np.packbits(np.concatenate(legal), axis=0, bitorder="little").T
    codes = np.ascontiguousarray(bits).view(f"S{bits.shape[1]}").reshape(-1)
    unique_codes, kind, counts = np.unique(codes, return_inverse=True, return_counts=True)
    ends = accumulate(len(mask) for mask in legal)
    masks = [(1 << end) - (1 << (end - len(mask))) for end, mask in zip(ends, legal, strict=True)]

    def cells(ways: int, count: int) -> int:
        return count * math.prod([(ways & mask).bit_count() for mask in masks])

    patterns = [
        (int.from_bytes(mask, "little"), count, [index])
        for index, (mask, count) in enumerate(zip(unique_codes.tolist(), counts.tolist(), strict=True))
    ]
    groups: list[tuple[int, int, list[int]]] = []  # legal ways, columns, their kinds
    for ways, count, kinds in sorted(patterns, key=lambda mask: -cells(*mask[:2])):
        own_cells = cells(ways, count)
        wasted_cells = [
            cells(ways | group_ways, count + group_count) - own_cells - cells(group_ways, group_count)
            for group_ways, group_count, _ in groups
        ]
        if wasted_cells and own_cells and min(wasted_cells) < WASTED_CELLS:
            nearest = wasted_cells.index(min(wasted_cells))
            group_ways, group_count, group_kinds = groups[nearest]
            groups[nearest] = (ways | group_ways, count + group_count, [*group_kinds, *kinds])
        elif own_cells:
            groups.append((ways, count, kinds))
    return [np.flatnonzero(np.isin(kind, kinds)) for *_, kinds in groups]


def _by_depth(columns: Ints, depths: Ints) -> list[Ints]:
    """Return the columns ordered by pipeline depth, those without a pipeline separately.

    Only without a pipeline does ZeRO-3 gather and reduce alongside every micro-batch, in terms that depend on all
    axes. In a pipeline trainer_memory.py counts some stages only at some depths.
    """
    columns = columns[np.argsort(depths, kind="stable")]
    num_single = int(np.count_nonzero(depths == 1))
    return [group for group in (columns[:num_single], columns[num_single:]) if group.size]


def keep_entries(values: NDArray[Any], kept: list[Ints]) -> NDArray[Any]:
    """Return the values at the given entries of each axis that they have."""
    for axis in range(1, values.ndim + 1):
        if values.shape[-axis] > kept[-axis].size:
            values = values.take(kept[-axis], axis=-axis)
    return values


# Rules for legal layouts: how state can be sharded, the sequence split and activations recomputed.


NONE, FULL, DOMAIN, GIVEN = range(4)  # ranks that share a copy: one, all replicas, a domain, a given number


def shard_size(request: PlanRequest, c: dict[str, Ints]) -> Ints:
    """Return the number of ranks that share one copy of the sharded state."""
    replicas = c["dp"] * c["cp"]
    domain_size = np.maximum(1, request.cluster.domain_devices // c["tp"])
    fixed_size = int(request.fixed.get("shard", 1))
    return np.select(
        [c["group"] == FULL, c["group"] == DOMAIN, c["group"] == GIVEN], [replicas, domain_size, fixed_size], 1
    )


def may_share(request: PlanRequest, c: dict[str, Ints], *, zero2: str = "any") -> Bools:
    """Return a mask of the layouts whose state can be sharded this way; `zero2` as in `Space.part`."""
    replicas, shard = c["dp"] * c["cp"], shard_size(request, c)
    is_partial = (shard > 1) & (shard < replicas) & (replicas % shard == 0)
    is_single = replicas == 1
    is_grouped: Bools = np.select(
        [c["group"] == DOMAIN, c["group"] == GIVEN],
        [is_partial & ~is_single, replicas % shard == 0],
        np.ones_like(is_partial),
    ).astype(bool)
    if "zero" in request.fixed:
        return is_grouped
    is_staged = np.isin(c["zero"], request.limits.zero_with_pipeline) | (c["pp"] == 1)
    # ZeRO-2 reduces after every micro-batch: slower than ZeRO-1, and useful only where ZeRO-1 does not fit.
    is_one_micro_batch = request.global_sequences == c["dp"] * c["micro_batch"]
    if zero2 != "any":
        is_staged &= (c["zero"] != 2) | (is_one_micro_batch if zero2 == "whole" else ~is_one_micro_batch)
    # A single rank has no other rank to share with, but may keep its parameters in host memory.
    is_hosted = c["offload"] == OFFLOAD.index("parameters")
    legal: Bools = is_grouped & is_staged & ((c["zero"] == 0) | ~is_single | is_hosted)
    return legal


def may_split_sequence(request: PlanRequest, c: dict[str, Ints]) -> Bools:
    """Return a mask of the layouts whose choice of sequence parallelism is legal."""
    slices = (request.sequence // c["cp"]) % c["tp"] == 0
    # Without tensor parallelism sequence parallelism has no effect, so only one of the two rows is kept.
    unsplit = (c["tp"] == 1) & (c["sp"] == 0)
    if request.fixed.get("sequence_parallel") is True:
        unsplit = c["tp"] == 1
    legal: Bools = unsplit | ((c["tp"] > 1) & ((c["sp"] == 0) | slices))
    return legal


def may_recompute(request: PlanRequest, c: dict[str, Ints]) -> Bools:
    """Return a mask of the layouts whose schedule supports their recompute."""
    if request.limits.selective_zero_bubble:
        return np.ones_like(c["recompute"] + c["pp"], dtype=bool)
    bubble, selective = SCHEDULES.index("zero-bubble"), RECOMPUTE.index("selective")
    legal: Bools = ~((c["pp"] > 1) & (c["schedule"] == bubble) & (c["recompute"] == selective))
    return legal
