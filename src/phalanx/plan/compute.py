"""Seconds of arithmetic and memory traffic for one micro-batch on one rank, summed over all layers.

Times are split into forward and backward. A matmul of M x N x K costs 2MNK FLOPs at the sustained rate, plus the tail
of its last wave of tiles, plus a start-up time, so small matmuls are slow without any table of measured shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.cases import FP4, FP8, FP32, ZERO_BUBBLE, Cases, Floats
from phalanx.plan.lean_step import drops_logits
from phalanx.plan.physics import Physics, Profile

TILE_FLOPS = 2.0 * 128 * 256  # FLOPs per unit of K of the tile shape that large matmuls use
FULL, SELECTIVE = 2, 1
# No training run comes closer to the best matmul rate measured on its device (the best A100 row of the public table,
# 64 % of peak overall, needs 0.90 of 271 TFLOP/s in its matmuls).
MOST_HELD = 0.92


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """Forward and backward seconds of one kind of work."""

    forward: Floats
    backward: Floats

    def __add__(self, other: Pass) -> Pass:
        return Pass(forward=self.forward + other.forward, backward=self.backward + other.backward)

    def times(self, factor: Floats) -> Pass:
        """Return the seconds of `factor` times the work."""
        return Pass(forward=self.forward * factor, backward=self.backward * factor)


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """The device time of one micro-batch through all layers; `head` is separate because only the last stage has it."""

    matmul: Pass
    attention: Pass
    elementwise: Pass
    head: Pass
    recompute: Floats
    operations: Floats  # kernels launched, forward


def matmul_rates(c: Cases, k: Physics, f: Profile) -> tuple[Floats, Floats]:
    """Return (rate of the linear layers, rate of the work that stays in 16 bit), FLOP/s."""
    attained = np.minimum(MOST_HELD, np.where(c.dense_power > 0, k.throttled, 1.0) * k.sustained * f.gemm)
    wide_rate = np.where(c.precision == FP32, c.matmul_fp32_flops, c.matmul_flops) * attained
    # A device without the narrow format computes in 16 bit.
    fp8_rate = np.maximum(c.matmul_fp8_flops * k.fp8, c.matmul_flops) * attained
    fp4_rate = np.maximum(c.matmul_fp4_flops * k.fp4 * attained, fp8_rate)
    fp8_mean, fp4_mean = (
        1.0 / (f.narrow_share / rate + (1.0 - f.narrow_share) / wide_rate) for rate in (fp8_rate, fp4_rate)
    )
    return np.where(c.precision == FP8, fp8_mean, np.where(c.precision == FP4, fp4_mean, wide_rate)), wide_rate


def element_bytes(c: Cases) -> Floats:
    """Return the bytes of an activation element; attention and norms stay in 16 bit under fp8 and fp4."""
    return np.where(c.precision == FP32, 4.0, 2.0)


def _width_misfit(width: Floats) -> Floats:
    """Return 0 for the widths that suit cuBLAS (multiples of 64), 1 for other multiples of 8, 3 for the rest."""
    eights = width * 0.125
    blocks = eights * 0.125
    return np.where(blocks == np.floor(blocks), 0.0, np.where(eights == np.floor(eights), 1.0, 3.0))


def matmul_pass(c: Cases, k: Physics, rows: Floats, cols: Floats, inner: Floats, rate: Floats) -> Pass:
    """Return the time of one linear layer, rows x inner times inner x cols, and of its two backward matmuls."""
    penalty = 1.0 + k.unaligned * np.maximum(_width_misfit(cols), _width_misfit(inner))
    body = penalty * 2.0 * rows * cols * inner / rate
    tail = k.tail * TILE_FLOPS * c.units / rate
    return Pass(
        forward=body + tail * inner + k.start_s,
        backward=2.0 * body + tail * (cols + rows) + 2.0 * k.start_s,
    )


def _attention_linears(c: Cases, k: Physics, rate: Floats) -> Pass:
    tokens, local_heads = c.tokens, c.heads / c.tp
    local_kv = np.maximum(c.kv_heads / c.tp, 1.0)
    fused_width = local_heads * c.qk_dim + local_kv * (c.qk_dim + c.v_dim)
    out = matmul_pass(c, k, tokens, c.hidden, local_heads * c.v_dim, rate)
    standard = matmul_pass(c, k, tokens, fused_width, c.hidden, rate) + out
    is_latent = c.kv_rank > 0
    if not np.any(is_latent):
        return standard
    rank = np.maximum(c.q_rank, 1.0)
    direct = matmul_pass(c, k, tokens, local_heads * c.qk_dim, c.hidden, rate)
    pair = matmul_pass(c, k, tokens, rank, c.hidden, rate) + matmul_pass(
        c, k, tokens, local_heads * c.qk_dim, rank, rate
    )
    low_rank_pass = _choose_pass(c.q_rank > 0, pair, direct)
    low_rank_pass += matmul_pass(c, k, tokens, c.kv_rank + c.rope_dim, c.hidden, rate)
    low_rank_pass += matmul_pass(
        c, k, tokens, local_heads * (c.qk_dim - c.rope_dim + c.v_dim), np.maximum(c.kv_rank, 1.0), rate
    )
    low_rank_pass += out
    return _choose_pass(is_latent, low_rank_pass, standard)


def _choose_pass(which: NDArray[np.bool_], yes: Pass, no: Pass) -> Pass:
    return Pass(forward=np.where(which, yes.forward, no.forward), backward=np.where(which, yes.backward, no.backward))


def _mlp_pass(c: Cases, k: Physics, ffn: Floats, rate: Floats) -> Pass:
    width = np.maximum(ffn, 64.0) / c.tp
    up = matmul_pass(c, k, c.tokens, width * (1.0 + c.gated), c.hidden, rate)
    return up + matmul_pass(c, k, c.tokens, c.hidden, width, rate)


def routed_tokens(c: Cases) -> Floats:
    """Return the token copies that one rank's experts process per micro-batch when routing is balanced."""
    return c.tokens * c.topk / c.tp


def _expert_pass(c: Cases, k: Physics, f: Profile, rate: Floats) -> Pass:
    """Return the time of the local experts' grouped matmuls: one launch, many small matmuls."""
    local_experts = np.maximum(c.experts / np.maximum(c.ep, 1.0), 1.0)
    rows = routed_tokens(c) / local_experts
    slowdown = (1.0 + k.expert_rows / np.maximum(rows, 1.0)) / (k.grouped * f.expert)
    ffn = np.maximum(c.expert_ffn, 64.0)
    forward = backward = np.zeros_like(rows)
    for cols, inner in ((ffn * (1.0 + c.gated), c.hidden), (c.hidden, ffn)):
        body = slowdown * 2.0 * local_experts * rows * cols * inner / rate
        tail = k.tail * TILE_FLOPS * c.units / rate
        forward = forward + body + tail * inner + k.start_s
        backward = backward + 2.0 * body + tail * (cols + rows) + 2.0 * k.start_s
    shared = _mlp_pass(c, k, c.shared_ffn, rate)
    has_shared = c.shared_ffn > 0
    return Pass(
        forward=forward + np.where(has_shared, shared.forward, 0.0),
        backward=backward + np.where(has_shared, shared.backward, 0.0),
    )


def _linear_pass(c: Cases, k: Physics, f: Profile, rate: Floats) -> Pass:
    work = _attention_linears(c, k, rate).times(c.layers) + _mlp_pass(c, k, c.ffn, rate).times(c.layers - c.moe_layers)
    if np.any(c.moe_layers > 0):
        work += _expert_pass(c, k, f, rate).times(c.moe_layers)
    return work


def _attention_core(c: Cases, k: Physics, f: Profile, rate: Floats) -> Pass:
    local_heads = c.heads / c.tp
    flops = 2.0 * c.tokens * c.seq * local_heads * (c.qk_dim + c.v_dim)
    # FlashAttention-2 does not use Hopper's new features, so fused kernels are further from the matmul rate there.
    flash_share = k.flash * np.where(c.dense_power > 0, k.flash_lag, 1.0) * f.flash
    block = c.seq / c.cp  # a ring of context ranks computes attention block by block
    fused_rate = rate * flash_share * c.qk_dim / (c.qk_dim + k.flash_dim) * block / (block + k.flash_length)
    fused = 0.5 * flops / fused_rate  # causal: half the scores are never computed
    odd_factor = np.where(np.mod(c.qk_dim, 8) == 0, 1.0, k.odd_head)
    batched_rate = rate * k.batched * c.qk_dim / (c.qk_dim + k.batched_dim) / odd_factor
    scores = c.tokens * c.seq * local_heads * k.softmax_bytes / (c.memory_bytes_per_s * k.memory)
    return Pass(
        forward=np.where(c.flash > 0, fused, flops / batched_rate + scores),
        backward=np.where(c.flash > 0, 2.5 * k.flash_backward * fused, 2.0 * flops / batched_rate + 1.5 * scores),
    )


def _elementwise_pass(c: Cases, k: Physics, f: Profile) -> Pass:
    tokens, size = c.tokens, element_bytes(c)
    local_heads, local_kv = c.heads / c.tp, np.maximum(c.kv_heads / c.tp, 1.0)
    # Sequence parallelism splits norms and residuals as well.
    split_ranks = np.where(c.sp > 0, c.tp, 1.0)
    qkv = local_heads * c.qk_dim + local_kv * (c.qk_dim + c.v_dim)
    per_layer = tokens * size * (c.hidden * k.hidden_passes / split_ranks + qkv * k.qkv_passes)
    dense_bytes = tokens * size * c.ffn / c.tp * (1.0 + c.gated) * k.ffn_passes
    routed_bytes = (
        routed_tokens(c) * size * (c.hidden * k.expert_passes + c.expert_ffn * (1.0 + c.gated) * k.ffn_passes)
    )
    moved_bytes = c.layers * per_layer + (c.layers - c.moe_layers) * dense_bytes + c.moe_layers * routed_bytes
    width = np.where(c.moe_layers > 0, c.topk * c.expert_ffn, c.ffn) / c.tp
    cast_bytes = (
        np.where((c.precision == FP8) | (c.precision == FP4), k.cast_bytes, 0.0)
        * c.layers
        * tokens
        * (2.0 * c.hidden + local_heads * c.v_dim + width)
    )
    # Our trainer does not compile layers whose backward pass is split in two.
    is_uncompiled = (c.schedule == ZERO_BUBBLE) & (c.pp > 1)
    moved_bytes = moved_bytes * f.elementwise * np.where(is_uncompiled, f.plain_elementwise, 1.0)
    cast_bytes = cast_bytes * f.cast * np.where(is_uncompiled, f.plain_cast, 1.0)
    forward = (moved_bytes + cast_bytes) / (c.memory_bytes_per_s * k.memory)
    return Pass(forward=forward, backward=2.0 * forward)


def compute_seconds(c: Cases, k: Physics, f: Profile) -> Compute:
    """Return the device time of one micro-batch."""
    rate, wide_rate = matmul_rates(c, k, f)
    linears = _linear_pass(c, k, f, rate)
    core = _attention_core(c, k, f, wide_rate).times(c.layers)
    streams = _elementwise_pass(c, k, f)
    last_matmul = matmul_pass(c, k, c.tokens, c.hidden, np.maximum(c.ffn, 64.0) / c.tp, rate).forward * (
        c.layers - c.moe_layers
    )
    full_s = linears.forward - f.early_stop * last_matmul + core.forward + streams.forward
    selective_s = f.selective_attention * core.forward + k.selective * f.selective_streams * streams.forward
    recompute = np.where(c.recompute == FULL, full_s, np.where(c.recompute == SELECTIVE, selective_s, 0.0))
    is_narrow = (c.precision == FP8) | (c.precision == FP4)
    per_layer = k.kernels * (1.0 + k.tensor_kernels * (c.tp > 1)) * (1.0 + f.narrow_kernels * is_narrow)
    # the trainer's other losses stay in 16 bit
    is_chunked = drops_logits(c.tokens, c.vocab, tensor=c.tp, pipeline=c.pp)
    head_rate = np.where((np.asarray(f.narrow_head) > 0) & is_chunked, rate, wide_rate)
    head_matmul = matmul_pass(c, k, c.tokens, c.vocab / c.tp, c.hidden, head_rate)
    loss = c.tokens * c.vocab / c.tp * k.loss_bytes * f.loss / (c.memory_bytes_per_s * k.memory)
    head_pass = head_matmul + Pass(forward=loss / 3.0, backward=2.0 * loss / 3.0)
    return Compute(
        matmul=linears,
        attention=core,
        elementwise=streams,
        head=head_pass,
        recompute=recompute,
        operations=c.layers * per_layer + c.moe_layers * k.expert_kernels,
    )
