"""Exact causal attention from blocks: each block gives an output and its log-sum-exp, and blocks merge.

Two ways to bring the keys and values of the other ranks: round a ring while computing, or gathered at once.

B batch, N query heads, K key/value heads (N is a multiple of K), S local sequence, L whole sequence, T keys of a block,
H head, C context ranks, X = 2 (keys, values). Rank c of C holds slices c and 2C-1-c of 2C: its positions ascend.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from phalanx.train.parallel import wire
from phalanx.train.parallel.context import join_all, split_all

_FLASH_HEADS = (8, 256)  # the CUDA kernel wants a head size that is a multiple of 8 and at most 256


def attend(q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """One block: its output and the log-sum-exp of its scores [B, N, S]. `causal` needs as many queries as keys."""
    if q_BNSH.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q_BNSH, k_BKSH, v_BKSH, 0.0, causal)
        return out, lse
    if _flash(q_BNSH):
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q_BNSH, k_BKSH, v_BKSH, 0.0, causal)
        return out, lse
    s_BNST = _scores(q_BNSH, k_BKSH, causal=causal)
    lse = s_BNST.logsumexp(-1)
    p_BNST = (s_BNST - lse[..., None]).exp().to(v_BKSH.dtype)
    return p_BNST @ _repeat(v_BKSH, q_BNSH.shape[1]), lse


def attend_backward(
    grad_BNSH: Tensor,
    q_BNSH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    out_BNSH: Tensor,
    lse_BNS: Tensor,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one block, given the output and log-sum-exp of ALL blocks of these queries."""
    block = (grad_BNSH, q_BNSH, k_BKSH, v_BKSH, out_BNSH, lse_BNS)
    if q_BNSH.device.type == "cpu":
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*block, 0.0, causal)
        return dq, dk, dv
    if _flash(q_BNSH):
        unused = torch.empty((), dtype=torch.uint64, device=q_BNSH.device)  # dropout's random state; there is none
        lengths = (None, None, q_BNSH.shape[2], k_BKSH.shape[2])
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *(one.contiguous() for one in block), *lengths, 0.0, causal, unused, unused
        )
        return dq, dk, dv
    return _math_backward(*block, causal=causal)


def _flash(q_BNSH: Tensor) -> bool:
    multiple, most = _FLASH_HEADS
    size = q_BNSH.shape[-1]
    low = q_BNSH.dtype in (torch.bfloat16, torch.float16)
    return q_BNSH.device.type == "cuda" and low and size % multiple == 0 and size <= most


def _repeat(x_BKSH: Tensor, heads: int) -> Tensor:
    return x_BKSH.repeat_interleave(heads // x_BKSH.shape[1], dim=1)


def _scores(q_BNSH: Tensor, k_BKSH: Tensor, *, causal: bool) -> Tensor:
    wide = torch.promote_types(q_BNSH.dtype, torch.float32)
    keys = _repeat(k_BKSH, q_BNSH.shape[1]).transpose(-1, -2)
    s_BNST: Tensor = (q_BNSH @ keys).to(wide) * q_BNSH.shape[-1] ** -0.5
    if causal:
        seen = torch.ones(s_BNST.shape[-2:], dtype=torch.bool, device=s_BNST.device).tril()
        s_BNST = s_BNST.masked_fill(~seen, float("-inf"))
    return s_BNST


def _math_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    heads, grouped = q.shape[1], (k.shape[0], k.shape[1], -1, k.shape[2], k.shape[3])
    p_BNST = (_scores(q, k, causal=causal) - lse[..., None]).exp()
    wide = p_BNST.dtype
    dp_BNST = (grad @ _repeat(v, heads).transpose(-1, -2)).to(wide)
    shift_BNS1 = (grad.to(wide) * out.to(wide)).sum(-1, keepdim=True)
    ds_BNST = (p_BNST * (dp_BNST - shift_BNS1) * q.shape[-1] ** -0.5).to(q.dtype)
    dk_BNSH, dv_BNSH = ds_BNST.transpose(-1, -2) @ q, p_BNST.to(q.dtype).transpose(-1, -2) @ grad
    return ds_BNST @ _repeat(k, heads), dk_BNSH.view(grouped).sum(2), dv_BNSH.view(grouped).sum(2)


class _Merged:
    """Outputs of blocks over different keys, merged into one by their log-sum-exps (in fp32 or wider)."""

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        # Copies: both are added to, and selective recompute may have kept the originals to hand out again.
        self.out, self.lse = out.to(lse.dtype, copy=True), lse.clone()

    def add(self, out: Tensor, lse: Tensor, queries: slice) -> None:
        """Merge a block of some of the queries."""
        whole, before = self.out[:, :, queries], self.lse[:, :, queries]
        both = torch.logaddexp(before, lse)
        whole.mul_((before - both).exp()[..., None]).add_(out * (lse - both).exp()[..., None])
        before.copy_(both)


def _seen(rank: int, distance: int, length: int) -> tuple[slice, slice]:
    """Which of our queries see which keys of the rank `distance` places before us in the ring.

    The zigzag makes it half a block, unmasked: an earlier rank's first slice precedes all our queries and its second
    follows them all; both slices of a later rank precede our second slice and follow our first.
    """
    half = length // 2
    return (slice(0, length), slice(0, half)) if distance <= rank else (slice(half, length), slice(0, length))


class RingAttention(torch.autograd.Function):
    """Keys and values travel round the ring behind the computation; in backward their gradients follow one hop later.

    A hop carries what one rank holds of keys and values: C-1 hops forward, C-1 backward, C-1 of gradients.
    """

    @staticmethod
    def forward(ctx: Any, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, group: ProcessGroup) -> Tensor:
        travel = _Travel(torch.stack([k_BKSH, v_BKSH]), group)
        merged = _Merged(*attend(q_BNSH, k_BKSH, v_BKSH, causal=True))
        for distance in range(1, group.size()):
            queries, keys = _seen(group.rank(), distance, q_BNSH.shape[2])
            k, v = travel.next()[:, :, :, keys]
            merged.add(*attend(q_BNSH[:, :, queries], k, v, causal=False), queries)
        out_BNSH = merged.out.to(q_BNSH.dtype)
        ctx.save_for_backward(q_BNSH, k_BKSH, v_BKSH, out_BNSH, merged.lse)
        ctx.group = group
        return out_BNSH

    @staticmethod
    def backward(ctx: Any, grad_BNSH: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        group: ProcessGroup = ctx.group
        q, k, v, out, lse = ctx.saved_tensors
        travel = _Travel(torch.stack([k, v]), group)
        dq, dk, dv = attend_backward(grad_BNSH, q, k, v, out, lse, causal=True)
        dq, home = dq.to(lse.dtype), None
        for distance in range(1, group.size()):
            queries, keys = _seen(group.rank(), distance, q.shape[2])
            k, v = travel.next()[:, :, :, keys]
            grads, outs = (grad_BNSH[:, :, queries], q[:, :, queries]), (out[:, :, queries], lse[:, :, queries])
            more_dq, *more = attend_backward(*grads, k, v, *outs, causal=False)
            dq[:, :, queries] += more_dq
            part_XBKSH = torch.stack([dk, dv]).zero_()
            part_XBKSH[:, :, :, keys] = torch.stack(more)
            # What the ranks before us found for this block arrived while we computed our share.
            home = wire.pass_on(part_XBKSH if home is None else part_XBKSH + home.wait(), group)
        if home is not None:
            more_dk, more_dv = home.wait()
            dk, dv = dk + more_dk, dv + more_dv
        return dq.to(q.dtype), dk, dv, None


class _Travel:
    """Keys and values on their way round the ring, always one hop ahead of the computation."""

    def __init__(self, kv_XBKSH: Tensor, group: ProcessGroup) -> None:
        self._group, self._hops = group, group.size() - 1
        self._hop = wire.pass_on(kv_XBKSH, group) if self._hops else None

    def next(self) -> Tensor:
        """The block of the next rank back; the one after it starts on its way."""
        assert self._hop is not None, "the ring has no further block"
        arrived = self._hop.wait()
        self._hops -= 1
        self._hop = wire.pass_on(arrived, self._group) if self._hops else None
        return arrived


class GatheredAttention(torch.autograd.Function):
    """All keys and values at once, forgotten after forward and gathered again for backward: the ring's traffic,
    in fewer and larger messages, with the keys and values of the whole sequence in memory while one layer computes."""

    @staticmethod
    def forward(ctx: Any, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, group: ProcessGroup) -> Tensor:
        kv_XBKLH = _gather(k_BKSH, v_BKSH, group)
        merged = _Merged(*attend(q_BNSH, k_BKSH, v_BKSH, causal=True))
        for queries, keys in _earlier(group, q_BNSH.shape[2]):
            k, v = kv_XBKLH[:, :, :, keys]
            merged.add(*attend(q_BNSH[:, :, queries], k, v, causal=False), queries)
        out_BNSH = merged.out.to(q_BNSH.dtype)
        ctx.save_for_backward(q_BNSH, k_BKSH, v_BKSH, out_BNSH, merged.lse)
        ctx.group = group
        return out_BNSH

    @staticmethod
    def backward(ctx: Any, grad_BNSH: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        group: ProcessGroup = ctx.group
        q, k, v, out, lse = ctx.saved_tensors
        kv_XBKLH = _gather(k, v, group)
        whole = torch.zeros_like(kv_XBKLH)
        dq, *own = attend_backward(grad_BNSH, q, k, v, out, lse, causal=True)
        dq = dq.to(lse.dtype)
        for queries, keys in _earlier(group, q.shape[2]):
            k, v = kv_XBKLH[:, :, :, keys]
            grads, outs = (grad_BNSH[:, :, queries], q[:, :, queries]), (out[:, :, queries], lse[:, :, queries])
            more_dq, *more = attend_backward(*grads, k, v, *outs, causal=False)
            dq[:, :, queries] += more_dq
            whole[:, :, :, keys] += torch.stack(more)
        parts_CXBKSH = split_all(whole, group.size(), dim=3)
        parts_CXBKSH[group.rank()] += torch.stack(own)
        dk, dv = wire.reduce_scatter(parts_CXBKSH, group)
        return dq.to(q.dtype), dk, dv, None


def _gather(k_BKSH: Tensor, v_BKSH: Tensor, group: ProcessGroup) -> Tensor:
    return join_all(wire.all_gather(torch.stack([k_BKSH, v_BKSH]), group), dim=3)


def _earlier(group: ProcessGroup, length: int) -> list[tuple[slice, slice]]:
    """Keys of the whole sequence that our queries see besides those we hold ourselves, as contiguous runs."""
    half, first, second = length // 2, group.rank(), 2 * group.size() - 1 - group.rank()
    runs = [
        (slice(0, length), slice(0, first * half)),
        (slice(half, length), slice((first + 1) * half, second * half)),
    ]
    return [(queries, keys) for queries, keys in runs if keys.stop > keys.start]
