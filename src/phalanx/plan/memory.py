"""Bytes on the fullest device, term by term, and whether they fit."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from importlib import resources
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.cases import FP4, FP8, FP16, GPIPE, SCHEDULES, ZERO_BUBBLE, Cases, Floats, at_places
from phalanx.plan.compute import FULL, SELECTIVE, element_bytes, routed_tokens
from phalanx.plan.physics import Number
from phalanx.plan.schedules import StageLoad, stage_loads
from phalanx.plan.weights import attention_weights, expert_sharers, expert_split, mlp_weights, rank_weights

# A step of our own trainer may take this much more than is counted here: traced and measured peaks lay at most 5.7 %
# above their count (benchmarks/2026-11-16-memory.md), and `phalanx trace --against-plan` fails beyond it.
MEMORY_ERROR = 0.06
FEEDBACK_BYTES = 4.0  # per gradient of a whole layer: what compression rounded away and adds to the next step, in fp32
OFFLOAD_ACTIVATIONS, OFFLOAD_PARAMETERS = 2, 3  # indices in cases.OFFLOAD
RECOMPUTED_PENDING = 1.42  # see _counted_stage
EMBEDDING_COUNTS = 0.5  # of a layer's weights: an embedding above this counts as a layer (train/model_stages.py)
INDEX_LIMIT = 2.0**31  # elements a 32-bit index reaches; loss kernels fail on larger logit tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryProfile:
    """What a framework keeps, in bytes per element; the defaults are mixed-precision AdamW as Megatron does it."""

    gradient_bytes: Number = 4.0
    gradient_bytes_fp16: Number = 4.0  # the same for fp16 with loss scaling, which often accumulates in fp16
    optimizer_bytes: Number = 12.0  # fp32 master weights and two moments
    table_optimizer_bytes: Number = 0.0  # more of them for embedding and head, which Muon leaves to AdamW
    hidden_copies: Number = 4.0  # tensors of [tokens, hidden] a layer keeps, split only by sequence parallelism
    gathered_kept: Number = 0.0  # of these, inputs of tensor-parallel matrices kept gathered instead of gathered again
    shard_copy: Number = 1.0  # 1: a 16-bit copy of ZeRO-3's shards beside the master weights
    width_copies: Number = 1.0  # multiple of the textbook count for tensors split by tensor parallelism
    narrow_copies: Number = 1.0  # further multiple under fp8 and fp4, where some linears keep one-byte inputs
    gathered_copies: Number = 4.0  # transient full-width [tokens, hidden] buffers of gathers around the head
    selective_kept: Number = 0.65  # share of activations that selective recompute keeps
    pipeline_fragmentation: Number = 1.0  # reserved over allocated activations once forwards and backwards alternate
    logit_bytes: Number = 8.0  # per logit on the last stage: 16-bit logits, fp32 copy, gradient
    base_bytes: Number = 1.0e9  # communicator buffers, workspaces, buckets
    usable: Number = 0.92  # share of the device's memory that tensors can fill (context, ECC, fragmentation)
    balanced_stages: Number = 1.0  # as in physics.Profile
    light_first: Number = (
        1.0  # 1: of an uneven split the first stage, which holds most micro-batches, gets a layer less
    )
    # The rest describes our own trainer, whose step can be traced: what it keeps is counted tensor by tensor.
    counted: Number = 0.0  # 1: by `_counted_stage`, and hidden_copies to logit_bytes above are not looked at
    compiled: Number = 0.0  # 1: blocks and loss are compiled, except under a schedule that splits backward
    heads_copies: Number = 0.0  # further tensors of the queries' width that context parallelism keeps (Ulysses: 1)
    sequence_copies: Number = 0.0  # whole sequences of keys and values in one layer's backward (all-gather: 3)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """Bytes on the fullest device; the parts add up to `total`."""

    weights: Floats
    gradients: Floats
    optimizer: Floats
    activations: Floats
    logits: Floats
    gathered: Floats  # layers ZeRO-3 has gathered, and full-width buffers of tensor parallelism
    buffers: Floats
    total: Floats
    first_stage: Floats  # the same sum for the first stage: rank 0, whose memory most logs print
    usable: Floats
    runs: NDArray[np.bool_]  # as `can_run` says

    @property
    def fits(self) -> NDArray[np.bool_]:
        """True where the layout can run in the memory there is."""
        return (self.total <= self.usable) & self.runs

    @property
    def margin(self) -> Floats:
        """Free share of the usable memory; negative when it does not fit."""
        return 1.0 - self.total / self.usable


@dataclass(frozen=True, kw_only=True, slots=True)
class MostMemory:
    """The sum of a MemoryUse without its parts."""

    total: Floats


def layer_activations(c: Cases, f: MemoryProfile) -> tuple[Floats, Floats]:
    """(kept per layer without recompute, kept with full recompute) for one micro-batch, bytes."""
    tokens, size = c.tokens, element_bytes(c)
    spread = np.where(c.sp > 0, c.tp, 1.0)
    heads, kv = c.heads / c.tp, np.maximum(c.kv_heads / c.tp, 1.0)
    gathered = np.where(c.sp > 0, f.gathered_kept, 0.0)
    hidden = tokens * c.hidden * size * (gathered + (f.hidden_copies - gathered) / spread)
    attention = tokens * size * (heads * (c.qk_dim + c.v_dim) + kv * (c.qk_dim + c.v_dim))
    # Up projection, activation function and, when gated, the gate and the product: 2 or 4 tensors of the MLP width.
    dense = tokens * size * c.ffn / c.tp * (2.0 + 2.0 * c.gated)
    routed = routed_tokens(c) * size * (2.0 * c.hidden + c.expert_ffn * (2.0 + 2.0 * c.gated))
    shared = tokens * size * c.shared_ffn / c.tp * (2.0 + 2.0 * c.gated)
    moe_share = c.moe_layers / c.layers
    mlp = (1.0 - moe_share) * dense + moe_share * (routed + shared)
    # Unfused attention keeps scores, probabilities and the dropout mask: 5 bytes per score (Korthikanti et al. 2022).
    scores = np.where((c.flash > 0) | (c.recompute == SELECTIVE), 0.0, 5.0 * heads * tokens * c.seq)
    narrow = (c.precision == FP8) | (c.precision == FP4)
    kept = hidden + (attention + mlp) * f.width_copies * np.where(narrow, f.narrow_copies, 1.0)
    kept = kept * np.where(c.recompute == SELECTIVE, f.selective_kept, 1.0) + scores
    return kept, tokens * c.hidden * size / spread


def in_flight(c: Cases) -> Floats:
    """Micro-batches whose activations the first stage holds at once, in units of the stage's layers."""
    count = c.accumulation
    one = np.minimum(c.pp, count)
    interleaved = np.minimum(c.pp * (1.0 + (c.pp - 1.0) / (c.pp * c.vpp)), count * 1.0)
    held = np.where(c.vpp > 1, interleaved, one)
    return np.where(c.schedule == GPIPE, count, held)


def empty_stages(c: Cases, *, balanced: Number) -> Floats:
    """Pipeline stages that would hold no layer; a balanced split needs room for the head as well."""
    counts_head = np.asarray(balanced) > 0
    share = (c.layers + np.where(counts_head, head_layers(c), 0.0)) / c.pp
    used = np.minimum(np.ceil(c.layers / np.maximum(share, 1e-9) - 1e-9), c.layers)
    # One stage may hold the head alone, one more only the loss.
    spare = np.where(counts_head, 2.0, 0.0)
    return np.maximum(0.0, c.pp - used - spare)


def head_layers(c: Cases) -> Floats:
    """The output head in units of a layer, by parameters: what a balanced split counts it as."""
    moe_share = c.moe_layers / c.layers
    mlp = (1.0 - moe_share) * mlp_weights(c, c.ffn)
    mlp = mlp + moe_share * mlp_weights(c, c.expert_ffn * c.topk + c.shared_ffn)
    return c.vocab * c.hidden / (attention_weights(c) + mlp)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stage:
    layers: Floats
    in_flight: Floats
    tables: Floats  # embedding matrices it holds
    head: Floats  # 1 where it computes logits


def _state_bytes(c: Cases, f: MemoryProfile, stage: _Stage) -> dict[str, Floats]:
    """The bytes of a stage that do not depend on its activations."""
    w = rank_weights(c, stage_layers=stage.layers)
    dense = w.dense - w.embedding + stage.tables * c.vocab * c.hidden / c.tp
    size = element_bytes(c)
    shard = np.where(c.zero >= 1, c.shard, 1.0)
    # Parameters in host memory: their gradients and optimizer live there too; what is gathered is on the device.
    resident = np.where(c.offload == OFFLOAD_PARAMETERS, 0.0, 1.0)
    expert_shard = np.where(c.zero >= 1, expert_sharers(c, w.expert_replicas), 1.0)

    gradient_bytes = np.where(c.precision == FP16, f.gradient_bytes_fp16, f.gradient_bytes)

    def held(least_zero: int) -> Floats:
        split = c.zero >= least_zero
        return dense / np.where(split, shard, 1.0) + w.experts / np.where(split, expert_shard, 1.0)

    state = held(1) * f.optimizer_bytes + stage.tables * c.vocab * c.hidden / c.tp / shard * f.table_optimizer_bytes
    # In a pipeline ZeRO-3 cannot drop gathered layers between micro-batches: the stage keeps its full weights and
    # accumulates full gradients (torchtitan's reshard_after_forward default).
    stays = (c.zero == 3) & (c.pp > 1)
    unsharded = np.where(stays, (dense + w.experts) * (size + gradient_bytes), 2.0 * w.layer * size)
    return {
        "weights": held(3) * size * resident * np.where(c.zero == 3, f.shard_copy, 1.0),
        # A pipeline reduces gradients once, after the last micro-batch: until then ZeRO-2 holds whole ones there.
        "gradients": np.where((c.zero == 2) & (c.pp > 1), dense + w.experts, held(2)) * gradient_bytes * resident,
        "optimizer": np.where(c.offload == 1, 0.0, state * resident),
        "gathered": np.where(c.zero == 3, unsharded, 0.0),
        "buffers": f.base_bytes + np.where(c.compression > 0, (dense + w.experts) * FEEDBACK_BYTES, 0.0),
    }


def _stage_bytes(c: Cases, f: MemoryProfile, stage: _Stage) -> dict[str, Floats]:
    parts = _state_bytes(c, f, stage)
    kept, checkpoint = layer_activations(c, f)
    full = c.recompute == FULL
    activations = stage.in_flight * stage.layers * np.where(full, checkpoint, kept) + np.where(full, kept, 0.0)
    alternates = (c.pp > 1) & (c.tp > 1) & (c.accumulation > c.pp)
    activations = activations * np.where(alternates, f.pipeline_fragmentation, 1.0)
    activations = np.where(c.offload == OFFLOAD_ACTIVATIONS, np.minimum(activations, 2.0 * kept), activations)
    # Full-width buffers of tensor parallelism's gathers.
    wide = np.where(c.tp > 1, stage.head * f.gathered_copies + 4.0, 0.0) * c.tokens * c.hidden * element_bytes(c)
    waiting = np.where((c.schedule == GPIPE) & (c.pp > 1), stage.in_flight - 1.0, 0.0)
    logits = stage.head * c.tokens * c.vocab / c.tp * (f.logit_bytes + waiting * PLAIN.waiting_logit_bytes)
    return _all_parts(parts | {"gathered": parts["gathered"] + wide}, activations, logits)


def _all_parts(state: dict[str, Floats], activations: Floats, logits: Floats) -> dict[str, Floats]:
    """All parts of a stage, in the order in which they are added up."""
    buffers = state.pop("buffers")
    return {**state, "activations": activations, "logits": logits, "buffers": buffers}


def _both_ends(c: Cases, f: MemoryProfile) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """The bytes of the first stage (activations in flight) and of the last (logits): one of them is the fullest."""
    balanced = np.asarray(f.balanced_stages) > 0
    share = (c.layers + np.where(balanced, head_layers(c), 0.0)) / c.pp
    single = c.pp <= 1
    most = np.where(single, c.layers, np.minimum(np.ceil(share - 1e-9), c.layers))
    left = np.where(single, c.layers, np.clip(c.layers - most * (c.pp - 1.0), 0.0, most))
    # Slots left over when every stage takes `most`: the last stage gives up its own for the head, then the first.
    slots = most * c.pp - c.layers
    lighter = (np.asarray(f.light_first) > 0) & (slots > np.ceil(np.where(balanced, head_layers(c), 0.0))) & (most > 1)
    early = np.where(single | ~lighter, most, most - 1.0)
    both = np.where(single, 2.0 - c.tied, 1.0)
    first = _Stage(layers=early, in_flight=in_flight(c), tables=both, head=np.where(single, 1.0, 0.0))
    # GPipe's last stage holds every micro-batch too, before the first backward; the others' holds one.
    held = np.where(single | (c.schedule == GPIPE), in_flight(c), 1.0)
    last = _Stage(layers=left, in_flight=held, tables=both, head=np.ones_like(left))
    return _stage_bytes(c, f, first), _stage_bytes(c, f, last)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    """What our trainer's step keeps, plain or compiled."""

    gated: float  # tensors of the MLP width that a gated layer keeps
    logit_bytes: float  # per 16-bit logit while the loss goes backward
    split_logit_bytes: float  # the same where the vocabulary is split over tensor ranks
    waiting_logit_bytes: float  # per logit of a micro-batch whose backward has not begun


# Gate, up, activation, product. Logits, fp32 log-softmax and two gradients, or three in torch's loss over split logits.
PLAIN = _Kept(gated=4.0, logit_bytes=14.0, split_logit_bytes=18.0, waiting_logit_bytes=6.0)
# torch's partitioner keeps what backward would have to write out again: gate, up and their product. The loss keeps
# 16-bit logits and makes a 16-bit gradient; split logits keep their fp32 log-softmax and make an fp32 gradient. Read
# off the partitioner and 39 peaks measured on an H200 (benchmarks/2026-11-16-memory.md).
COMPILED = _Kept(gated=3.0, logit_bytes=4.0, split_logit_bytes=10.0, waiting_logit_bytes=2.0)


def _is_compiled(c: Cases, f: MemoryProfile) -> NDArray[np.bool_]:
    """torch cannot split the backward of a compiled block in two: there the trainer runs plain (train/settings.py)."""
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


def _counted_layer(c: Cases, f: MemoryProfile) -> dict[str, Floats]:
    """Bytes of one layer of one micro-batch in our trainer: kept, kept by selective and by full recompute, gradients at
    the outputs of its matrices, and what its backward takes beside what it gives back."""
    tokens, size = c.tokens, element_bytes(c)
    spread = np.where(c.sp > 0, c.tp, 1.0)
    tensors = np.where(c.tp > 1, 1.0, 0.0)
    queries = c.heads / c.tp * (c.qk_dim + c.v_dim) / 2.0
    keys = np.maximum(c.kv_heads / c.tp, 1.0) * (c.qk_dim + c.v_dim)  # and values
    dense_ways = 2.0 + (np.where(_is_compiled(c, f), COMPILED.gated, PLAIN.gated) - 2.0) * c.gated
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
    selective = outputs + attention + wide * inner + moved
    gradients = c.hidden * (2.0 + 3.0 / spread) + queries + keys + wide * inner + moved
    # In the backward of the last layer's MLP: the gradients of product, gate and up beside what is given back there.
    working = c.hidden * (2.0 + 2.0 * tensors) + 2.0 * wide * np.where(c.gated > 0, 1.0, 0.5) + moved
    working = np.maximum(working, c.hidden * 2.0 + np.asarray(f.sequence_copies) * c.cp * keys)
    return {
        "kept": kept * tokens * size,
        "selective": selective * tokens * size,
        "full": c.hidden / spread * tokens * size,
        "gradients": gradients * tokens * size,
        "working": working * tokens * size,
    }


def _counted_state(c: Cases, f: MemoryProfile, load: dict[str, Floats]) -> dict[str, Floats]:
    """The parts of one stage that do not depend on its activations."""
    tables = np.where(c.pp <= 1, 2.0 - c.tied, load["embedding"] + load["head"])
    stage = _Stage(layers=load["layers"], in_flight=np.ones(()), tables=tables, head=load["head"])
    parts = _state_bytes(c, f, stage)
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
    # A stage holds its logits until its backward is done; without a pipeline only their gradient is left by then.
    left = np.where(c.pp > 1, 2.0, 1.0) * size
    # The loss goes backward, then the head's matrix, whose gradient is made, then, if split, half of the layers.
    moments = [
        (at_head, load["head"] * each_logit * (logit + wider + waiting + late_logits)),
        (
            at_head + load["head"] * c.vocab * c.hidden / c.tp * size,
            load["head"] * each_logit * (left + waiting + late_logits),
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
    activations, logits = _counted_moments(c, f, layer, load)
    if np.any((c.zero >= 2) & (c.pp <= 1)):
        # A layer has gone backward, and its gradients are reduced.
        held = np.maximum(load["held"] - 1.0, 0.0) * _kept_by_layer(c, layer)
        more = _reducing_bytes(c, f, held=held)
        wins = more > activations + logits
        activations, logits = np.where(wins, more, activations), np.where(wins, 0.0, logits)
    if np.any(c.offload == OFFLOAD_ACTIVATIONS):
        activations = np.where(
            c.offload == OFFLOAD_ACTIVATIONS, np.minimum(activations, 2.0 * layer["kept"]), activations
        )
    return _all_parts(_counted_state(c, f, load), activations, logits)


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


def _stage_candidates(c: Cases, f: MemoryProfile) -> list[dict[str, Floats]]:
    """The parts of every stage that may be the fullest; the first is the first stage."""
    counted = np.asarray(f.counted) > 0
    if not counted.any():
        return list(_both_ends(c, f))
    layer = _counted_layer(c, f)
    own = [_counted_stage(c, f, layer, table.columns) for table in _stage_tables(c)]
    if counted.all():
        return own
    first, last = _both_ends(c, f)
    others = [first, last, last, last]
    return [
        {name: np.where(counted, value, other[name]) for name, value in mine.items()}
        for mine, other in zip(own, others, strict=True)
    ]


def _sum_parts(parts: dict[str, Floats]) -> Floats:
    return sum(parts.values(), np.zeros(()))


def can_run(c: Cases, f: MemoryProfile) -> NDArray[np.bool_]:
    """False where a stage would be empty, or the logits outgrow a 32-bit index."""
    return (empty_stages(c, balanced=f.balanced_stages) < 1) & (c.tokens * c.vocab / c.tp <= INDEX_LIMIT)


def predict_most_memory(c: Cases, f: MemoryProfile, *, limit_bytes: float = np.inf) -> MostMemory:
    """The bytes of the fullest stage of every case; where they are more than the limit, maybe too few, but more too."""
    if np.ndim(f.counted) == 0 and f.counted > 0:
        return MostMemory(total=_most_counted(c, f, limit_bytes))
    total: Floats = np.zeros(())
    for parts in _stage_candidates(c, f):
        total = np.maximum(total, _sum_parts(parts))
    return MostMemory(total=total)


def _most_counted(c: Cases, f: MemoryProfile, limit_bytes: float) -> Floats:
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
    """`_sum_parts` without a new array for each: the small ones first, as there."""
    *small, activations, logits, buffers = parts.values()
    np.add(sum(small, np.zeros(())), activations, out=out)
    for more in (logits, buffers):
        if more.any():
            np.add(out, more, out=out)


def predict_memory(c: Cases, f: MemoryProfile) -> MemoryUse:
    """The fullest stage of every case, part by part."""
    first, *others = _stage_candidates(c, f)
    parts, total_first = first, _sum_parts(first)
    total = total_first
    for other in others:
        wins = total >= _sum_parts(other)
        parts = {name: np.where(wins, value, other[name]) for name, value in parts.items()}
        total = _sum_parts(parts)
    return MemoryUse(
        **parts,
        total=total,
        first_stage=total_first + np.zeros_like(total),
        usable=c.memory_bytes * np.asarray(f.usable) + np.zeros_like(total),
        runs=can_run(c, f) & np.ones_like(total, dtype=bool),
    )


@cache
def memory_profiles() -> dict[str, MemoryProfile]:
    """Shipped memory profiles by framework; always holds `default`."""
    text = resources.files("phalanx.plan").joinpath("memory.toml").read_text("utf-8")
    return {name: MemoryProfile(**values) for name, values in tomllib.loads(text).items()}


def stack_memory(chosen: list[MemoryProfile]) -> MemoryProfile:
    """One profile whose fields are arrays: row by row, the profiles given."""
    names = [field.name for field in fields(MemoryProfile)]
    return MemoryProfile(**{name: np.asarray([getattr(one, name) for one in chosen]) for name in names})
