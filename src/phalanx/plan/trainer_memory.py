"""Bytes on the fullest device of our own trainer, whose step can be traced: counted tensor by tensor.

`memory.py` counts other frameworks by textbook formulas, and uses this file where a profile has `counted`.
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

# A step of our own trainer may take this much more than is counted here: traced and measured peaks were at most 5.7 %
# above their count (benchmarks/2026-11-16-memory.md), and `phalanx trace --against-plan` fails beyond it.
MEMORY_ERROR = 0.06
RECOMPUTED_PENDING = 1.42  # see _counted_moments
# In units of a layer's weights: an embedding above this counts as a layer (train/model_stages.py).
EMBEDDING_COUNTS = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptTensors:
    """The tensors that our trainer's step keeps, plain or compiled."""

    gated: float  # tensors of the MLP width that a gated layer keeps
    logit_bytes: float  # per 16-bit logit while the loss runs backward
    split_logit_bytes: float  # the same where the vocabulary is split over tensor ranks
    waiting_logit_bytes: float  # per logit of a micro-batch whose backward has not begun


# Gate, up, activation, product. Logits, fp32 log-softmax and two gradients, or three in torch's loss over split
# logits.
PLAIN = KeptTensors(gated=4.0, logit_bytes=14.0, split_logit_bytes=18.0, waiting_logit_bytes=6.0)
# torch's partitioner keeps what backward would otherwise have to write out again: gate, up and their product. The loss
# keeps 16-bit logits and makes a 16-bit gradient; split logits keep their fp32 log-softmax and make an fp32 gradient.
# Read off the partitioner and 39 peaks measured on an H200 (benchmarks/2026-11-16-memory.md).
COMPILED = KeptTensors(gated=3.0, logit_bytes=4.0, split_logit_bytes=10.0, waiting_logit_bytes=2.0)


def _is_compiled(c: Cases, f: MemoryProfile) -> NDArray[np.bool_]:
    """Return a mask of the cases whose blocks are compiled.

    torch cannot split the backward of a compiled block in two, so the trainer runs uncompiled there
    (rank_settings.py).
    """
    return np.asarray((np.asarray(f.compiled) > 0) & ~((c.schedule == ZERO_BUBBLE) & (c.pp > 1)))


@dataclass(frozen=True, kw_only=True, slots=True)
class _StageTable:
    """A candidate for the fullest stage of every case, as columns in layers and micro-batches."""

    columns: dict[str, Floats]
    matters: NDArray[np.bool_]  # False: another candidate holds at least as much of everything


def _stage_tables(c: Cases) -> list[_StageTable]:
    keys = (c.schedule, c.pp, np.maximum(c.vpp, 1.0), c.accumulation, c.layers, head_layers(c))
    shape = np.broadcast_shapes(*(np.shape(key) for key in keys))
    # One number for all keys of a case, because sorting rows is ten times slower.
    code: NDArray[np.int64] = np.zeros(shape, dtype=np.int64)
    for key in keys:
        if np.ndim(key):
            values, place = np.unique(key, return_inverse=True)
            code = np.unique(code, return_inverse=True)[1].reshape(shape) if code.any() else code
            code = code * values.size + place.reshape(np.shape(key))
    _, firsts, places = np.unique(code, return_index=True, return_inverse=True)
    distinct_rows = zip(*(np.broadcast_to(key, shape).reshape(-1)[firsts].tolist() for key in keys), strict=True)
    table = np.stack([_load_columns(*row) for row in distinct_rows], axis=2)  # [candidate, column, row]
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
    """Return [candidate, column]: loads that may be a pipeline's fullest; the last column is 1 if the load matters.

    A candidate does not matter if another one holds at least as much of everything: every part of `_counted_stage`
    grows with every column, and with the share of layers whose backward is split. Of equal candidates the first
    matters.
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
    loads_table = np.array(
        [(*_values_of(load), load.split_layers / max(load.layers, 1)) for load in loads], dtype=np.float64
    )
    is_covered = (loads_table[:, None] <= loads_table[None]).all(axis=2)  # [candidate, other candidate]
    # True where the other candidate comes first.
    is_earlier = np.tri(len(loads), k=-1, dtype=bool)
    is_outweighed = (is_covered & (~is_covered.T | is_earlier)).any(axis=1)
    return np.column_stack((loads_table[:, :-1], ~is_outweighed))


def _chunks_loss(c: Cases, f: MemoryProfile) -> NDArray[np.bool_]:
    """Return a mask of the cases where the trainer never holds all logits of a micro-batch."""
    drops = drops_logits(c.tokens, c.vocab, tensor=c.tp, pipeline=c.pp)
    return np.asarray((np.asarray(f.chunked_loss) > 0) & drops)


def _float8_head_bytes(c: Cases) -> Floats:
    """Return the extra bytes of an fp8 head: two one-byte copies of its weight, and gradients of a few logit chunks."""
    chunk = loss_chunk(c.tokens, c.vocab)
    group = np.minimum(c.tokens, group_tokens(chunk, c.vocab))
    return np.asarray(2.0 * c.vocab * c.hidden + (chunk + group) * c.vocab)


def _drops_product(c: Cases, f: MemoryProfile) -> NDArray[np.bool_]:
    """Return a mask of the cases where backward computes the product of a gated MLP again."""
    splits_backward = (c.schedule == ZERO_BUBBLE) & (c.pp > 1)
    is_large = drops_product(c.tokens, c.ffn, tensor=c.tp, splits_backward=splits_backward)
    is_excluded = (c.recompute == FULL) | (c.recompute == SELECTIVE) | (c.precision == FP8) | (c.moe_layers > 0)
    return np.asarray((np.asarray(f.dropped_product) > 0) & is_large & ~is_excluded)


def _counted_layer(c: Cases, f: MemoryProfile) -> dict[str, Floats]:
    """Return the bytes of one layer of one micro-batch in our trainer, by use.

    The uses are: kept without recompute, kept by selective and by full recompute, gradients at the outputs of its
    matrices, and the working memory of its backward beyond what it frees.
    """
    tokens, size = c.tokens, element_bytes(c)
    split_ranks = np.where(c.sp > 0, c.tp, 1.0)
    has_tensor = np.where(c.tp > 1, 1.0, 0.0)
    queries = c.heads / c.tp * (c.qk_dim + c.v_dim) / 2.0
    keys = np.maximum(c.kv_heads / c.tp, 1.0) * (c.qk_dim + c.v_dim)  # keys and values
    drops = _drops_product(c, f)
    dense_ways = np.where(_is_compiled(c, f), COMPILED.gated, PLAIN.gated)
    dense_ways = 2.0 + (np.where(drops, 2.0, dense_ways) - 2.0) * c.gated
    # experts' products are not fused with the operations between them
    expert_ways = 2.0 + (PLAIN.gated - 2.0) * c.gated
    num_widening = 1.0 + c.gated  # matrices that widen
    moe_share = c.moe_layers / c.layers
    routed = routed_tokens(c) / tokens
    dense = (1.0 - moe_share) * c.ffn / c.tp + moe_share * c.shared_ffn / c.tp
    experts = moe_share * routed * c.expert_ffn
    inner_width = dense + experts
    # Tokens on their way to the experts and back.
    routed_width = moe_share * routed * 2.0 * c.hidden
    attention = queries * (2.0 + np.asarray(f.heads_copies)) + keys
    # Two sums into the residual stream, split by sequence parallelism; two inputs of matrices, which are gathered.
    kept_width = (
        c.hidden * (2.0 / split_ranks + 2.0) + attention + dense * dense_ways + experts * expert_ways + routed_width
    )
    # Selective recompute keeps the results of matrices, attention and collectives: with tensor parallelism the two
    # sums both before and after they are reduced, and the gathered inputs.
    outputs = c.hidden * (1.0 / split_ranks + 2.0 + has_tensor * (2.0 / split_ranks + np.where(c.sp > 0, 2.0, 0.0)))
    # Compiled, only tensors that backward needs are kept: not the last matrix's output, which is in the next input.
    last = (1.0 - moe_share) * c.gated * c.hidden * (1.0 + has_tensor / split_ranks)
    outputs = outputs - np.where(_is_compiled(c, f), last, 0.0)
    selective = outputs + attention + inner_width * num_widening + routed_width
    gradients = c.hidden * (2.0 + 3.0 / split_ranks) + queries + keys + inner_width * num_widening + routed_width
    # In the backward of the last layer's MLP: the gradients of product, gate and up, beyond what is freed there.
    working = c.hidden * (2.0 + 2.0 * has_tensor) + 2.0 * inner_width * np.where(c.gated > 0, 1.0, 0.5) + routed_width
    working = working + np.where(drops, dense, 0.0)  # the product is computed again
    working = np.maximum(working, c.hidden * 2.0 + np.asarray(f.sequence_copies) * c.cp * keys)
    # In fp8 the inputs of matrices are kept in one byte (train/parallel/float8.py): both norms' and the product of the
    # MLP. Attention's output is kept in 16 bit for its own backward; compiled, its rounded copy is made again.
    one_byte_width = 2.0 * c.hidden + dense - np.where(_is_compiled(c, f), 0.0, queries)
    return {
        "kept": (kept_width * size - np.where(c.precision == FP8, one_byte_width, 0.0)) * tokens,
        "selective": selective * tokens * size,
        "full": c.hidden / split_ranks * tokens * size,
        "gradients": gradients * tokens * size,
        "working": working * tokens * size,
    }


def _counted_state(c: Cases, f: MemoryProfile, load: dict[str, Floats]) -> dict[str, Floats]:
    """Return the parts of one stage that do not depend on its activations."""
    tables = np.where(c.pp <= 1, 2.0 - c.tied, load["embedding"] + load["head"])
    stage = HeldStage(layers=load["layers"], in_flight=np.ones(()), tables=tables, head=load["head"])
    parts = state_bytes(c, f, stage)
    # Split backwards hand over gradients only when the step is done: until then they also exist in 16 bit.
    share = np.where(c.pp > 1, load["split_layers"] / np.maximum(load["layers"], 1.0), 0.0)
    parts["gradients"] = parts["gradients"] + share * parts["weights"]
    return parts


def _kept_by_layer(c: Cases, layer: dict[str, Floats]) -> Floats:
    """Return the bytes that a layer keeps of a micro-batch until its backward."""
    is_selective, is_full = c.recompute == SELECTIVE, c.recompute == FULL
    return np.where(is_full, layer["full"], np.where(is_selective, layer["selective"], layer["kept"]))


def _counted_moments(
    c: Cases, f: MemoryProfile, layer: dict[str, Floats], load: dict[str, Floats]
) -> tuple[Floats, Floats]:
    """Return the activations and logits of one stage at its fullest moment, except the moment of `_reducing_bytes`."""
    is_selective, is_full = c.recompute == SELECTIVE, c.recompute == FULL
    kept_bytes = _kept_by_layer(c, layer)
    # of the layer that runs backward
    rebuilt = np.where(is_full | is_selective, layer["kept"] - np.where(is_full, 0.0, kept_bytes), 0.0)
    # Full recompute rebuilds a layer for the first half of its backward and keeps all of it for the second, with more
    # of its graph than the first forward would: 1.42 times in the trace of one layout (8B, V-shaped); the factor is
    # not derived.
    pending_bytes = (layer["kept"] + layer["gradients"]) * np.where(is_full, RECOMPUTED_PENDING, 1.0)
    size, num_logits = element_bytes(c), c.tokens * c.vocab / c.tp
    # The output of a chunk, or the input of the next.
    sent_bytes = np.where(c.pp > 1, layer["full"], 0.0)
    # Some backward begins or, split in two, has done its first half.
    activations = (
        load["held"] * kept_bytes
        + load["pending"] * pending_bytes
        + load["outputs"] * sent_bytes
        + rebuilt
        + layer["working"]
    )
    activations = activations + _reduced_beside(c, f, kept_bytes)
    logits = load["late_logits"] * size * num_logits
    if not load["head"].any():
        return activations, logits
    is_compiled, is_split = _is_compiled(c, f), c.tp > 1
    whole_logit_bytes = np.where(is_compiled, COMPILED.logit_bytes, PLAIN.logit_bytes)
    loss_logit_bytes = np.where(
        is_split, np.where(is_compiled, COMPILED.split_logit_bytes, PLAIN.split_logit_bytes), whole_logit_bytes
    )
    waiting_bytes = np.where(is_compiled & ~is_split, COMPILED.waiting_logit_bytes, PLAIN.waiting_logit_bytes)
    extra_bytes = size - 2.0  # the counts are those of 16-bit logits
    waiting_logit_bytes = load["waiting_logits"] * (waiting_bytes + extra_bytes)
    held_at_head = (
        load["head_held"] * kept_bytes + load["head_pending"] * pending_bytes + load["head_outputs"] * sent_bytes
    )
    late_logit_bytes = load["head_late_logits"] * size
    chunked = _chunks_loss(c, f)
    # A stage holds its logits until its backward is done; without a pipeline only their gradient remains by then.
    end_bytes = np.where(c.pp > 1, 2.0, 1.0) * size
    # The loss runs backward, then the head's matrix, whose gradient is made, then, if split, half of the layers.
    unchunked_logits = load["head"] * np.where(chunked, 0.0, num_logits)
    # In chunks: the logits of some tokens, and the gradients of the head and of its input.
    chunk_logits = load["head"] * np.where(chunked, loss_chunk(c.tokens, c.vocab) * c.vocab * size, 0.0)
    if np.any(np.asarray(f.float8_head)):
        chunk_logits = chunk_logits + load["head"] * np.where(
            chunked, np.asarray(f.float8_head) * _float8_head_bytes(c), 0.0
        )
    head_gradients = load["head"] * np.where(chunked, (c.vocab * c.hidden + c.tokens * c.hidden) * size, 0.0)
    moments = [
        (
            held_at_head + head_gradients,
            chunk_logits + unchunked_logits * (loss_logit_bytes + extra_bytes + waiting_logit_bytes + late_logit_bytes),
        ),
        (
            held_at_head + load["head"] * c.vocab * c.hidden / c.tp * size,
            unchunked_logits * (end_bytes + waiting_logit_bytes + late_logit_bytes),
        ),
    ]
    if load["head_layers"].any():
        turned_bytes = load["head_layers"] * (pending_bytes - kept_bytes)
        moments.append(
            (
                held_at_head + turned_bytes,
                np.where(load["head_layers"] > 0, num_logits * (end_bytes + late_logit_bytes), 0.0),
            )
        )
    for more_activations, more_logits in moments:
        is_fuller = more_activations + more_logits > activations + logits
        activations, logits = (
            np.where(is_fuller, more_activations, activations),
            np.where(is_fuller, more_logits, logits),
        )
    return activations, logits


def _counted_stage(c: Cases, f: MemoryProfile, layer: dict[str, Floats], load: dict[str, Floats]) -> dict[str, Floats]:
    """Return the parts of one stage at its fullest moment."""
    if np.any(c.offload == OFFLOAD_ACTIVATIONS):
        load = _without_offloaded(c, load)
    activations, logits = _counted_moments(c, f, layer, load)
    if np.any((c.zero >= 2) & (c.pp <= 1)):
        # A layer has gone backward, and its gradients are reduced.
        held_bytes = np.maximum(load["held"] - 1.0, 0.0) * _kept_by_layer(c, layer)
        reducing_bytes = _reducing_bytes(c, f, held=held_bytes)
        is_fuller = reducing_bytes > activations + logits
        activations, logits = np.where(is_fuller, reducing_bytes, activations), np.where(is_fuller, 0.0, logits)
    return all_parts(_counted_state(c, f, load), activations, logits)


def _without_offloaded(c: Cases, load: dict[str, Floats]) -> dict[str, Floats]:
    """Return the load of a stage on the device where activations move to host memory.

    Two layers stay: the one that computes and the one whose copy is on the link. The tensors of a layer's backward, the
    logits and the buffers of reductions stay as well; full recompute leaves little to move.
    """
    is_offloaded = offloads_activations(c)
    reduced = {name: np.where(is_offloaded, np.minimum(load[name], 2.0), load[name]) for name in ("held", "head_held")}
    return load | reduced


def _reducing_bytes(c: Cases, f: MemoryProfile, *, held: Floats) -> Floats:
    """Return the activations and buffers while FSDP2 reduces a layer's gradients (ZeRO-2 and 3 outside of a pipeline).

    They come on top of the shards of all gradients. This layer's gradients are as large as its weights, which are gone
    by then and were counted; they exist again as the reduction's input, and their shard as its output. In the only
    micro-batch of a step that shard is new, and the moment of the last layer to be reduced, when nothing else is held,
    is the fullest.
    """
    w = rank_weights(c, stage_layers=c.layers)
    routed_weights = np.where(c.moe_layers > 0, c.experts * mlp_weights(c, c.expert_ffn) / expert_split(c), 0.0)
    expert_shards = expert_sharers(c, w.expert_replicas)
    shard_bytes = (
        (w.layer - routed_weights) / np.maximum(c.shard, 1.0) + routed_weights / expert_shards
    ) * f.gradient_bytes
    buffers = w.layer * f.gradient_bytes + np.where(c.accumulation > 1, shard_bytes + held, 0.0)
    return np.where((c.zero >= 2) & (c.pp <= 1) & (c.offload != OFFLOAD_PARAMETERS), buffers, 0.0)


def _reduced_beside(c: Cases, f: MemoryProfile, each: Floats) -> Floats:
    """Return the bytes that FSDP2 still reduces while a layer runs backward (ZeRO-2 and 3 outside of a pipeline).

    A reduction's input is freed when the next reduction begins. During the last layer's backward it is the output
    head's; during any other layer's, when one layer's activations are gone, that of the layer after it. In the only
    micro-batch of a step the shards of all gradients, which are counted, do not exist yet.
    """
    is_sharded = (c.zero >= 2) & (c.pp <= 1) & (c.offload != OFFLOAD_PARAMETERS)
    if not np.any(is_sharded):
        return np.zeros(())
    w = rank_weights(c, stage_layers=c.layers)
    head_weights = (1.0 - c.tied) * c.vocab * c.hidden / c.tp
    input_bytes = np.maximum(head_weights * f.gradient_bytes, w.layer * f.gradient_bytes - each)
    shard_bytes = (w.dense + w.experts) / np.maximum(c.shard, 1.0) * f.gradient_bytes
    input_bytes = np.where(c.accumulation > 1, input_bytes, input_bytes - shard_bytes)
    return np.where(is_sharded, np.maximum(input_bytes, 0.0), 0.0)


def counted_stages(c: Cases, f: MemoryProfile) -> list[dict[str, Floats]]:
    """Return the parts of every stage that may be the fullest; the first entry is the first stage."""
    layer = _counted_layer(c, f)
    return [_counted_stage(c, f, layer, table.columns) for table in _stage_tables(c)]


def most_counted(c: Cases, f: MemoryProfile, limit_bytes: float) -> Floats:
    """Return the largest sum of all stages in our own trainer; stages that cannot be the largest or fit are skipped.

    A search spends a third of its time here, so only some indices of the last axis are counted for the later stages.
    """
    layer = _counted_layer(c, f)
    first, *later_tables = _stage_tables(c)
    shape = np.broadcast_shapes((1,), *(np.shape(getattr(c, item.name)) for item in fields(Cases)))
    total: Floats = np.empty(shape)
    _add_parts(_counted_stage(c, f, layer, first.columns), out=total)
    may_fit = total.min(axis=tuple(range(total.ndim - 1)), initial=np.inf) <= limit_bytes
    for table in later_tables:
        counts = table.matters.any(axis=tuple(range(table.matters.ndim - 1))) if table.matters.ndim else table.matters
        where = np.flatnonzero(counts & may_fit)
        if where.size:
            layer_part = {name: at_places(value, where) for name, value in layer.items()}
            load = {name: at_places(value, where) for name, value in table.columns.items()}
            sums = np.empty((*shape[:-1], where.size))
            _add_parts(_counted_stage(c.at_places(where), f, layer_part, load), out=sums)
            if where.size == shape[-1]:
                np.maximum(total, sums, out=total)
            else:
                total[..., where] = np.maximum(total[..., where], sums)
    return total


def _add_parts(parts: dict[str, Floats], *, out: Floats) -> None:
    """Add up the parts as `sum_parts` does, without a new array for each: the small ones first."""
    *small_parts, activations, logits, buffers = parts.values()
    np.add(sum(small_parts, np.zeros(())), activations, out=out)
    for part in (logits, buffers):
        if part.any():
            np.add(out, part, out=out)
