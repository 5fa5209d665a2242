"""Bytes on the fullest device of our own trainer, whose step can be traced: counted tensor by tensor.

`memory.py` counts other frameworks by the textbook, and asks here where a profile says `counted`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.cases import FP8, SCHEDULES, ZERO_BUBBLE, Cases, Floats, at_places
from phalanx.plan.compute import FULL, SELECTIVE, element_bytes, routed_tokens
from phalanx.plan.lean_step import drops_logits, drops_product, group_tokens, loss_chunk
from phalanx.plan.memory_profile import (
    OFFLOAD_ACTIVATIONS,
    OFFLOAD_PARAMETERS,
    HeldStage,
    MemoryProfile,
    all_parts,
    head_layers,
    offloads_activations,
    state_bytes,
)
from phalanx.plan.schedules import StageLoad, stage_loads
from phalanx.plan.weights import expert_sharers, expert_split, mlp_weights, rank_weights

# A step of our own trainer may take this much more than is counted here: traced and measured peaks lay at most 5.7 %
# above their count (benchmarks/2026-11-16-memory.md), and `phalanx trace --against-plan` fails beyond it.
MEMORY_ERROR = 0.06
RECOMPUTED_PENDING = 1.42  # see _counted_moments
EMBEDDING_COUNTS = 0.5  # of a layer's weights: an embedding above this counts as a layer (train/model_stages.py)


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptTensors:
    """What our trainer's step keeps, plain or compiled."""

    gated: float  # tensors of the MLP width that a gated layer keeps
    logit_bytes: float  # per 16-bit logit while the loss goes backward
    split_logit_bytes: float  # the same where the vocabulary is split over tensor ranks
    waiting_logit_bytes: float  # per logit of a micro-batch whose backward has not begun


# Gate, up, activation, product. Logits, fp32 log-softmax and two gradients, or three in torch's loss over split logits.
PLAIN = KeptTensors(gated=4.0, logit_bytes=14.0, split_logit_bytes=18.0, waiting_logit_bytes=6.0)
# torch's partitioner keeps what backward would have to write out again: gate, up and their product. The loss keeps
# 16-bit logits and makes a 16-bit gradient; split logits keep their fp32 log-softmax and make an fp32 gradient. Read
# off the partitioner and 39 peaks measured on an H200 (benchmarks/2026-11-16-memory.md).
COMPILED = KeptTensors(gated=3.0, logit_bytes=4.0, split_logit_bytes=10.0, waiting_logit_bytes=2.0)


def _is_compiled(c: Cases, f: MemoryProfile) -> NDArray[np.bool_]:
    """torch cannot split the backward of a compiled block in two: the trainer runs plain there (rank_settings.py)."""
    return np.asarray((np.asarray(f.compiled) > 0) & ~((c.schedule == ZERO_BUBBLE) & (c.pp > 1)))


@dataclass(frozen=True, kw_only=True, slots=True)
class _StageTable:
    """A candidate for the fullest stage of every case, as columns: what it holds, in layers and micro-batches."""

    columns: dict[str, Floats]
    matters: NDArray[np.bool_]  # False: another candidate holds as much of everything


def _stage_tables(c: Cases) -> list[_StageTable]:
    keys = (c.schedule, c.pp, np.maximum(c.vpp, 1.0), c.accumulation, c.layers, head_layers(c))
    shape = np.broadcast_shapes(*(np.shape(key) for key in keys))
    # One number for all keys of a case: rows would be sorted ten times slower.
    code: NDArray[np.int64] = np.zeros(shape, dtype=np.int64)
    for key in keys:
        if np.ndim(key):
            values, place = np.unique(key, return_inverse=True)
            code = np.unique(code, return_inverse=True)[1].reshape(shape) if code.any() else code
            code = code * values.size + place.reshape(np.shape(key))
    _, firsts, places = np.unique(code, return_index=True, return_inverse=True)
    known = zip(*(np.broadcast_to(key, shape).reshape(-1)[firsts].tolist() for key in keys), strict=True)
    table = np.stack([_load_columns(*row) for row in known], axis=2)  # [candidate, column, row]
    return [
        _StageTable(
            columns={name: row[places].reshape(shape) for name, row in zip(LOADS, rows[:-1], strict=True)},
            matters=rows[-1].astype(bool)[places].reshape(shape),
        )
        for rows in table
    ]


LOADS = tuple(item.name for item in fields(StageLoad))
_values_of = attrgetter(*LOADS)


@lru_cache(maxsize=16384)
def _load_columns(schedule: float, pp: float, vpp: float, count: float, layers: float, head: float) -> Floats:
    """[candidate, column]: what the candidates for the fullest stage of a pipeline hold, and last whether each matters.

    One does not that holds no more of anything than another: every part of `_counted_stage` grows with every column,
    and with the share of layers whose backward is split. Of candidates that are the same the first matters.
    """
    embed_cost = 1.0 if head > EMBEDDING_COUNTS else 0.0
    loads = stage_loads(
        SCHEDULES[int(schedule)],
        int(pp),
        int(vpp),
        int(count),
        int(layers),
        embed_cost=embed_cost,
        head_cost=head,
    )
    held = np.array([(*_values_of(one), one.split_layers / max(one.layers, 1)) for one in loads], dtype=np.float64)
    less = (held[:, None] <= held[None]).all(axis=2)  # [candidate, other]
    first = np.tri(len(loads), k=-1, dtype=bool)  # where the other comes before it
    outweighed = (less & (~less.T | first)).any(axis=1)
    return np.column_stack((held[:, :-1], ~outweighed))


def _chunks_loss(c: Cases, f: MemoryProfile) -> NDArray[np.bool_]:
    """Where the trainer never holds all logits of a micro-batch."""
    large = drops_logits(c.tokens, c.vocab, tensor=c.tp, pipeline=c.pp)
    return np.asarray((np.asarray(f.chunked_loss) > 0) & large)


def _float8_head_bytes(c: Cases) -> Floats:
    """More that a head in fp8 holds: its weight in one byte twice, and gradients of logits, those of several parts."""
    part = loss_chunk(c.tokens, c.vocab)
    together = np.minimum(c.tokens, group_tokens(part, c.vocab))
    return np.asarray(2.0 * c.vocab * c.hidden + (part + together) * c.vocab)


def _drops_product(c: Cases, f: MemoryProfile) -> NDArray[np.bool_]:
    """Where it makes the product of a gated MLP again."""
    splits = (c.schedule == ZERO_BUBBLE) & (c.pp > 1)
    large = drops_product(c.tokens, c.ffn, tensor=c.tp, splits_backward=splits)
    kept = (c.recompute == FULL) | (c.recompute == SELECTIVE) | (c.precision == FP8) | (c.moe_layers > 0)
    return np.asarray((np.asarray(f.dropped_product) > 0) & large & ~kept)


def _counted_layer(c: Cases, f: MemoryProfile) -> dict[str, Floats]:
    """Bytes of one layer of one micro-batch in our trainer: kept, kept by selective and by full recompute, gradients at
    the outputs of its matrices, and what its backward takes beside what it gives back."""
    tokens, size = c.tokens, element_bytes(c)
    spread = np.where(c.sp > 0, c.tp, 1.0)
    tensors = np.where(c.tp > 1, 1.0, 0.0)
    queries = c.heads / c.tp * (c.qk_dim + c.v_dim) / 2.0
    keys = np.maximum(c.kv_heads / c.tp, 1.0) * (c.qk_dim + c.v_dim)  # and values
    remade = _drops_product(c, f)
    dense_ways = np.where(_is_compiled(c, f), COMPILED.gated, PLAIN.gated)
    dense_ways = 2.0 + (np.where(remade, 2.0, dense_ways) - 2.0) * c.gated
    expert_ways = 2.0 + (PLAIN.gated - 2.0) * c.gated  # experts' products are not fused with what is between them
    inner = 1.0 + c.gated  # matrices that widen
    moe_share = c.moe_layers / c.layers
    routed = routed_tokens(c) / tokens
    dense = (1.0 - moe_share) * c.ffn / c.tp + moe_share * c.shared_ffn / c.tp
    experts = moe_share * routed * c.expert_ffn
    wide = dense + experts
    moved = moe_share * routed * 2.0 * c.hidden  # tokens on their way to the experts and back
    attention = queries * (2.0 + np.asarray(f.heads_copies)) + keys
    # Two sums into the residual stream, split by sequence parallelism; two inputs of matrices, which are gathered.
    kept = c.hidden * (2.0 / spread + 2.0) + attention + dense * dense_ways + experts * expert_ways + moved
    # Selective recompute keeps what matrices, attention and collectives give: with tensor parallelism the two sums both
    # before and after they are reduced, and the gathered inputs.
    outputs = c.hidden * (1.0 / spread + 2.0 + tensors * (2.0 / spread + np.where(c.sp > 0, 2.0, 0.0)))
    # Compiled, nothing is kept that backward does not need: not the last matrix's output, which is in the next input.
    last = (1.0 - moe_share) * c.gated * c.hidden * (1.0 + tensors / spread)
    outputs = outputs - np.where(_is_compiled(c, f), last, 0.0)
    selective = outputs + attention + wide * inner + moved
    gradients = c.hidden * (2.0 + 3.0 / spread) + queries + keys + wide * inner + moved
    # In the backward of the last layer's MLP: the gradients of product, gate and up beside what is given back there.
    working = c.hidden * (2.0 + 2.0 * tensors) + 2.0 * wide * np.where(c.gated > 0, 1.0, 0.5) + moved
    working = working + np.where(remade, dense, 0.0)  # the product is there again
    working = np.maximum(working, c.hidden * 2.0 + np.asarray(f.sequence_copies) * c.cp * keys)
    # In fp8 the inputs of matrices are kept in one byte (train/parallel/float8.py): both norms' and the product of the
    # MLP. Attention's output is kept in 16 bit for its own backward; compiled, its rounded copy is made again.
    narrow = 2.0 * c.hidden + dense - np.where(_is_compiled(c, f), 0.0, queries)
    return {
        "kept": (kept * size - np.where(c.precision == FP8, narrow, 0.0)) * tokens,
        "selective": selective * tokens * size,
        "full": c.hidden / spread * tokens * size,
        "gradients": gradients * tokens * size,
        "working": working * tokens * size,
    }


def _counted_state(c: Cases, f: MemoryProfile, load: dict[str, Floats]) -> dict[str, Floats]:
    """The parts of one stage that do not depend on its activations."""
    tables = np.where(c.pp <= 1, 2.0 - c.tied, load["embedding"] + load["head"])
    stage = HeldStage(layers=load["layers"], in_flight=np.ones(()), tables=tables, head=load["head"])
    parts = state_bytes(c, f, stage)
    # Split backwards hand gradients over only when the step is done: until then they are there in 16 bit as well.
    share = np.where(c.pp > 1, load["split_layers"] / np.maximum(load["layers"], 1.0), 0.0)
    parts["gradients"] = parts["gradients"] + share * parts["weights"]
    return parts


def _kept_by_layer(c: Cases, layer: dict[str, Floats]) -> Floats:
    """What a layer keeps of a micro-batch until its backward."""
    selective, full = c.recompute == SELECTIVE, c.recompute == FULL
    return np.where(full, layer["full"], np.where(selective, layer["selective"], layer["kept"]))


def _counted_moments(
    c: Cases, f: MemoryProfile, layer: dict[str, Floats], load: dict[str, Floats]
) -> tuple[Floats, Floats]:
    """Activations and logits of one stage at the fullest of its moments, but for that of `_reducing_bytes`."""
    selective, full = c.recompute == SELECTIVE, c.recompute == FULL
    each = _kept_by_layer(c, layer)
    again = np.where(
        full | selective, layer["kept"] - np.where(full, 0.0, each), 0.0
    )  # of the layer that goes backward
    # Full recompute rebuilds a layer for the first half of its backward and keeps all of it for the second, with more
    # of its graph than the first forward would: 1.42 times in the trace of one layout (8B, V-shaped), not counted out.
    late = (layer["kept"] + layer["gradients"]) * np.where(full, RECOMPUTED_PENDING, 1.0)
    size, each_logit = element_bytes(c), c.tokens * c.vocab / c.tp
    sent = np.where(c.pp > 1, layer["full"], 0.0)  # the output of a chunk, or the input of the next
    # Some backward begins or, split in two, has done its first half.
    activations = load["held"] * each + load["pending"] * late + load["outputs"] * sent + again + layer["working"]
    activations = activations + _reduced_beside(c, f, each)
    logits = load["late_logits"] * size * each_logit
    if not load["head"].any():
        return activations, logits
    compiled, split = _is_compiled(c, f), c.tp > 1
    whole_logit = np.where(compiled, COMPILED.logit_bytes, PLAIN.logit_bytes)
    logit = np.where(split, np.where(compiled, COMPILED.split_logit_bytes, PLAIN.split_logit_bytes), whole_logit)
    waits = np.where(compiled & ~split, COMPILED.waiting_logit_bytes, PLAIN.waiting_logit_bytes)
    wider = size - 2.0  # the counts are those of 16-bit logits
    waiting = load["waiting_logits"] * (waits + wider)
    at_head = load["head_held"] * each + load["head_pending"] * late + load["head_outputs"] * sent
    late_logits = load["head_late_logits"] * size
    chunked = _chunks_loss(c, f)
    # A stage holds its logits until its backward is done; without a pipeline only their gradient is left by then.
    left = np.where(c.pp > 1, 2.0, 1.0) * size
    # The loss goes backward, then the head's matrix, whose gradient is made, then, if split, half of the layers.
    whole = load["head"] * np.where(chunked, 0.0, each_logit)
    # In parts: those of some tokens, beside the gradients of the head and of its input.
    part = load["head"] * np.where(chunked, loss_chunk(c.tokens, c.vocab) * c.vocab * size, 0.0)
    if np.any(np.asarray(f.float8_head)):
        part = part + load["head"] * np.where(chunked, np.asarray(f.float8_head) * _float8_head_bytes(c), 0.0)
    inputs = load["head"] * np.where(chunked, (c.vocab * c.hidden + c.tokens * c.hidden) * size, 0.0)
    moments = [
        (at_head + inputs, part + whole * (logit + wider + waiting + late_logits)),
        (
            at_head + load["head"] * c.vocab * c.hidden / c.tp * size,
            whole * (left + waiting + late_logits),
        ),
    ]
    if load["head_layers"].any():
        turned = load["head_layers"] * (late - each)
        moments.append((at_head + turned, np.where(load["head_layers"] > 0, each_logit * (left + late_logits), 0.0)))
    for more, more_logits in moments:
        wins = more + more_logits > activations + logits
        activations, logits = np.where(wins, more, activations), np.where(wins, more_logits, logits)
    return activations, logits


def _counted_stage(c: Cases, f: MemoryProfile, layer: dict[str, Floats], load: dict[str, Floats]) -> dict[str, Floats]:
    """The parts of one stage at its fullest moment."""
    if np.any(c.offload == OFFLOAD_ACTIVATIONS):
        load = _without_offloaded(c, load)
    activations, logits = _counted_moments(c, f, layer, load)
    if np.any((c.zero >= 2) & (c.pp <= 1)):
        # A layer has gone backward, and its gradients are reduced.
        held = np.maximum(load["held"] - 1.0, 0.0) * _kept_by_layer(c, layer)
        more = _reducing_bytes(c, f, held=held)
        wins = more > activations + logits
        activations, logits = np.where(wins, more, activations), np.where(wins, 0.0, logits)
    return all_parts(_counted_state(c, f, load), activations, logits)


def _without_offloaded(c: Cases, load: dict[str, Floats]) -> dict[str, Floats]:
    """The load of a stage on the device where activations move to host memory.

    Two layers stay: the one at work and the one whose copy is on the link. What a layer's backward needs, the logits
    and the buffers of reductions stay as well; full recompute leaves little to move.
    """
    leaves = offloads_activations(c)
    moved = {name: np.where(leaves, np.minimum(load[name], 2.0), load[name]) for name in ("held", "head_held")}
    return load | moved


def _reducing_bytes(c: Cases, f: MemoryProfile, *, held: Floats) -> Floats:
    """Activations and buffers while FSDP2 reduces a layer's gradients (ZeRO-2 and 3 outside of a pipeline).

    Beside the shards of all gradients: this layer's as large as its weights, which are gone by then and were counted;
    all of them again as what the reduction reads, and its own shard as what it writes. In the only micro-batch of a
    step that shard is new, and the last layer to be reduced, beside which nothing is held, has the most.
    """
    w = rank_weights(c, stage_layers=c.layers)
    routed = np.where(c.moe_layers > 0, c.experts * mlp_weights(c, c.expert_ffn) / expert_split(c), 0.0)
    sharers = expert_sharers(c, w.expert_replicas)
    written = ((w.layer - routed) / np.maximum(c.shard, 1.0) + routed / sharers) * f.gradient_bytes
    buffers = w.layer * f.gradient_bytes + np.where(c.accumulation > 1, written + held, 0.0)
    return np.where((c.zero >= 2) & (c.pp <= 1) & (c.offload != OFFLOAD_PARAMETERS), buffers, 0.0)


def _reduced_beside(c: Cases, f: MemoryProfile, each: Floats) -> Floats:
    """What FSDP2 still reduces while a layer goes backward (ZeRO-2 and 3 outside of a pipeline): a reduction's input is
    given back when the next begins. Beside the last layer that is the output head's; beside any other, of which one
    layer's activations are gone, the next layer's. In the only micro-batch of a step the shards of all gradients, which
    are counted, are not there yet."""
    sharded = (c.zero >= 2) & (c.pp <= 1) & (c.offload != OFFLOAD_PARAMETERS)
    if not np.any(sharded):
        return np.zeros(())
    w = rank_weights(c, stage_layers=c.layers)
    head = (1.0 - c.tied) * c.vocab * c.hidden / c.tp
    beside = np.maximum(head * f.gradient_bytes, w.layer * f.gradient_bytes - each)
    shards = (w.dense + w.experts) / np.maximum(c.shard, 1.0) * f.gradient_bytes
    beside = np.where(c.accumulation > 1, beside, beside - shards)
    return np.where(sharded, np.maximum(beside, 0.0), 0.0)


def counted_stages(c: Cases, f: MemoryProfile) -> list[dict[str, Floats]]:
    """The parts of every stage that may be the fullest; the first is the first stage."""
    layer = _counted_layer(c, f)
    return [_counted_stage(c, f, layer, table.columns) for table in _stage_tables(c)]


def most_counted(c: Cases, f: MemoryProfile, limit_bytes: float) -> Floats:
    """The largest sum of all stages in our own trainer, each counted only where it may be the largest and may fit.

    A search spends a third of its time here. Of the last axis only some places are counted for the later stages.
    """
    layer = _counted_layer(c, f)
    first, *others = _stage_tables(c)
    shape = np.broadcast_shapes((1,), *(np.shape(getattr(c, item.name)) for item in fields(Cases)))
    total: Floats = np.empty(shape)
    _add_parts(_counted_stage(c, f, layer, first.columns), out=total)
    may_fit = total.min(axis=tuple(range(total.ndim - 1)), initial=np.inf) <= limit_bytes
    for table in others:
        counts = table.matters.any(axis=tuple(range(table.matters.ndim - 1))) if table.matters.ndim else table.matters
        where = np.flatnonzero(counts & may_fit)
        if where.size:
            near = {name: at_places(value, where) for name, value in layer.items()}
            load = {name: at_places(value, where) for name, value in table.columns.items()}
            sums = np.empty((*shape[:-1], where.size))
            _add_parts(_counted_stage(c.at_places(where), f, near, load), out=sums)
            if where.size == shape[-1]:
                np.maximum(total, sums, out=total)
            else:
                total[..., where] = np.maximum(total[..., where], sums)
    return total


def _add_parts(parts: dict[str, Floats], *, out: Floats) -> None:
    """`sum_parts` without a new array for each: the small ones first, as there."""
    *small, activations, logits, buffers = parts.values()
    np.add(sum(small, np.zeros(())), activations, out=out)
    for more in (logits, buffers):
        if more.any():
            np.add(out, more, out=out)
