"""Bytes on the fullest device, term by term, and whether they fit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.cases import FP4, FP8, GPIPE, Cases, Floats
from phalanx.plan.compute import FULL, SELECTIVE, element_bytes, routed_tokens
from phalanx.plan.memory_profile import (
    HeldStage,
    MemoryProfile,
    all_parts,
    head_layers,
    offloads_activations,
    state_bytes,
    sum_parts,
)
from phalanx.plan.physics import Number
from phalanx.plan.trainer_memory import PLAIN, counted_stages, most_counted

INDEX_LIMIT = 2.0**31  # elements that a 32-bit index reaches; loss kernels fail on larger logit tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """Bytes on the fullest device; the parts add up to `total`."""

    weights: Floats
    gradients: Floats
    optimizer: Floats
    activations: Floats
    logits: Floats
    gathered: Floats  # layers that ZeRO-3 has gathered, and full-width buffers of tensor parallelism
    buffers: Floats
    total: Floats
    first_stage: Floats  # the same sum for the first stage: rank 0, whose memory most logs print
    usable: Floats
    runs: NDArray[np.bool_]  # the result of `can_run`

    @property
    def fits(self) -> NDArray[np.bool_]:
        """A mask of the layouts that can run in the available memory."""
        return (self.total <= self.usable) & self.runs

    @property
    def headroom(self) -> Floats:
        """The free share of the usable memory; negative when it does not fit."""
        return 1.0 - self.total / self.usable


@dataclass(frozen=True, kw_only=True, slots=True)
class MostMemory:
    """The sum of a MemoryUse without its parts."""

    total: Floats


def layer_activations(c: Cases, f: MemoryProfile) -> tuple[Floats, Floats]:
    """Return the bytes that a layer keeps of one micro-batch, without recompute and with full recompute."""
    tokens, size = c.tokens, element_bytes(c)
    split_ranks = np.where(c.sp > 0, c.tp, 1.0)
    heads, kv = c.heads / c.tp, np.maximum(c.kv_heads / c.tp, 1.0)
    gathered = np.where(c.sp > 0, f.gathered_kept, 0.0)
    hidden = tokens * c.hidden * size * (gathered + (f.hidden_copies - gathered) / split_ranks)
    attention = tokens * size * (heads * (c.qk_dim + c.v_dim) + kv * (c.qk_dim + c.v_dim))
    # Up projection, activation function and, when gated, the gate and the product: 2 or 4 tensors of the MLP width.
    dense = tokens * size * c.ffn / c.tp * (2.0 + 2.0 * c.gated)
    routed = routed_tokens(c) * size * (2.0 * c.hidden + c.expert_ffn * (2.0 + 2.0 * c.gated))
    shared = tokens * size * c.shared_ffn / c.tp * (2.0 + 2.0 * c.gated)
    moe_share = c.moe_layers / c.layers
    mlp = (1.0 - moe_share) * dense + moe_share * (routed + shared)
    # Unfused attention keeps scores, probabilities and the dropout mask: 5 bytes per score (Korthikanti et al. 2022).
    scores = np.where((c.flash > 0) | (c.recompute == SELECTIVE), 0.0, 5.0 * heads * tokens * c.seq)
    is_narrow = (c.precision == FP8) | (c.precision == FP4)
    kept_bytes = hidden + (attention + mlp) * f.width_copies * np.where(is_narrow, f.narrow_copies, 1.0)
    kept_bytes = kept_bytes * np.where(c.recompute == SELECTIVE, f.selective_kept, 1.0) + scores
    return kept_bytes, tokens * c.hidden * size / split_ranks


def in_flight(c: Cases) -> Floats:
    """Return the micro-batches whose activations the first stage holds at once, in units of the stage's layers."""
    count = c.accumulation
    plain = np.minimum(c.pp, count)
    interleaved = np.minimum(c.pp * (1.0 + (c.pp - 1.0) / (c.pp * c.vpp)), count * 1.0)
    num_held = np.where(c.vpp > 1, interleaved, plain)
    return np.where(c.schedule == GPIPE, count, num_held)


def empty_stages(c: Cases, *, balanced: Number) -> Floats:
    """Return the pipeline stages that would hold no layer; a balanced split needs room for the head as well."""
    counts_head = np.asarray(balanced) > 0
    share = (c.layers + np.where(counts_head, head_layers(c), 0.0)) / c.pp
    used_stages = np.minimum(np.ceil(c.layers / np.maximum(share, 1e-9) - 1e-9), c.layers)
    # One stage may hold the head alone, one more only the loss.
    spare_stages = np.where(counts_head, 2.0, 0.0)
    return np.maximum(0.0, c.pp - used_stages - spare_stages)


def _stage_bytes(c: Cases, f: MemoryProfile, stage: HeldStage) -> dict[str, Floats]:
    parts = state_bytes(c, f, stage)
    kept_bytes, checkpoint_bytes = layer_activations(c, f)
    is_full = c.recompute == FULL
    activations = stage.in_flight * stage.layers * np.where(is_full, checkpoint_bytes, kept_bytes) + np.where(
        is_full, kept_bytes, 0.0
    )
    alternates = (c.pp > 1) & (c.tp > 1) & (c.accumulation > c.pp)
    activations = activations * np.where(alternates, f.pipeline_fragmentation, 1.0)
    activations = np.where(offloads_activations(c), np.minimum(activations, 2.0 * kept_bytes), activations)
    # Full-width buffers of tensor parallelism's gathers.
    wide_buffers = (
        np.where(c.tp > 1, stage.head * f.gathered_copies + 4.0, 0.0) * c.tokens * c.hidden * element_bytes(c)
    )
    waiting_batches = np.where((c.schedule == GPIPE) & (c.pp > 1), stage.in_flight - 1.0, 0.0)
    logits = stage.head * c.tokens * c.vocab / c.tp * (f.logit_bytes + waiting_batches * PLAIN.waiting_logit_bytes)
    return all_parts(parts | {"gathered": parts["gathered"] + wide_buffers}, activations, logits)


def _both_ends(c: Cases, f: MemoryProfile) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Return the bytes of the first stage (activations in flight) and the last (logits); one of them is the fullest."""
    is_balanced = np.asarray(f.balanced_stages) > 0
    share = (c.layers + np.where(is_balanced, head_layers(c), 0.0)) / c.pp
    is_single = c.pp <= 1
    max_layers = np.where(is_single, c.layers, np.minimum(np.ceil(share - 1e-9), c.layers))
    last_layers = np.where(is_single, c.layers, np.clip(c.layers - max_layers * (c.pp - 1.0), 0.0, max_layers))
    # Free slots when every stage takes `max_layers`: the last stage gives up one for the head, then the first.
    free_slots = max_layers * c.pp - c.layers
    is_first_lighter = (
        (np.asarray(f.light_first) > 0)
        & (free_slots > np.ceil(np.where(is_balanced, head_layers(c), 0.0)))
        & (max_layers > 1)
    )
    first_layers = np.where(is_single | ~is_first_lighter, max_layers, max_layers - 1.0)
    num_tables = np.where(is_single, 2.0 - c.tied, 1.0)
    first = HeldStage(
        layers=first_layers, in_flight=in_flight(c), tables=num_tables, head=np.where(is_single, 1.0, 0.0)
    )
    # GPipe's last stage also holds every micro-batch, before the first backward; with the others it holds one.
    last_in_flight = np.where(is_single | (c.schedule == GPIPE), in_flight(c), 1.0)
    last = HeldStage(layers=last_layers, in_flight=last_in_flight, tables=num_tables, head=np.ones_like(last_layers))
    return _stage_bytes(c, f, first), _stage_bytes(c, f, last)


def _stage_candidates(c: Cases, f: MemoryProfile) -> list[dict[str, Floats]]:
    """Return the parts of every stage that may be the fullest; the first entry is the first stage."""
    is_counted = np.asarray(f.counted) > 0
    if not is_counted.any():
        return list(_both_ends(c, f))
    counted_parts = counted_stages(c, f)
    if is_counted.all():
        return counted_parts
    first, last = _both_ends(c, f)
    textbook = [first, last, last, last]
    return [
        {name: np.where(is_counted, value, textbook_stage[name]) for name, value in counted_stage.items()}
        for counted_stage, textbook_stage in zip(counted_parts, textbook, strict=True)
    ]


def can_run(c: Cases, f: MemoryProfile) -> NDArray[np.bool_]:
    """Return False where a stage would be empty, or the logits exceed a 32-bit index."""
    return (empty_stages(c, balanced=f.balanced_stages) < 1) & (c.tokens * c.vocab / c.tp <= INDEX_LIMIT)


def predict_most_memory(c: Cases, f: MemoryProfile, *, limit_bytes: float = np.inf) -> MostMemory:
    """Return the bytes of the fullest stage of every case.

    A total above `limit_bytes` may be too low, but the exact total is above the limit too.
    """
    if np.ndim(f.counted) == 0 and f.counted > 0:
        return MostMemory(total=most_counted(c, f, limit_bytes))
    total: Floats = np.zeros(())
    for parts in _stage_candidates(c, f):
        total = np.maximum(total, sum_parts(parts))
    return MostMemory(total=total)


def predict_memory(c: Cases, f: MemoryProfile) -> MemoryUse:
    """Return the bytes of the fullest stage of every case, part by part."""
    first, *later_stages = _stage_candidates(c, f)
    parts, total_first = first, sum_parts(first)
    total = total_first
    for stage in later_stages:
        is_fuller = total >= sum_parts(stage)
        parts = {name: np.where(is_fuller, value, stage[name]) for name, value in parts.items()}
        total = sum_parts(parts)
    return MemoryUse(
        **parts,
        total=total,
        first_stage=total_first + np.zeros_like(total),
        usable=c.memory_bytes * np.asarray(f.usable) + np.zeros_like(total),
        runs=can_run(c, f) & np.ones_like(total, dtype=bool),
    )
