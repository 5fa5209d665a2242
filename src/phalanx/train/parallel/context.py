"""Context parallelism: one sequence over several ranks, as a drop-in for the attention core of a model.

Three kinds, all exact: "ring" (keys and values are passed round while blocks are computed), "ulysses" (each rank
computes some heads of the whole sequence), "allgather" (keys and values gathered per layer).
docs/decisions/0012-context-kinds.md compares them.

B batch, N query heads, K key/value heads, S local sequence, L whole sequence, H head, C context ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from phalanx.errors import mistake, nearest
from phalanx.train.models.layers import Core, causal_attention
from phalanx.train.parallel import exchanges

__all__ = ["KINDS", "Core", "UlyssesCore", "check_heads", "context_core", "local_positions", "split_sequence"]


def context_core(kind: str, group: ProcessGroup) -> Core:
    """Return causal attention over a sequence that is split over `group` as `split_sequence` does.

    Raises UserError for an unknown `kind`.
    """
    if kind not in KINDS:
        raise mistake(
            "parallel.context_kind",
            f'"{kind}" is no kind of context parallelism',
            fix=f"use {', '.join(KINDS)}" + (f'; did you mean "{near}"?' if (near := nearest(kind, KINDS)) else ""),
        )
    return KINDS[kind](group)


def check_heads(kind: str, heads: int, ranks: int) -> None:
    """Raise UserError if the query heads of a tensor rank do not divide over the context ranks with Ulysses."""
    if kind == "ulysses" and heads % ranks:
        divisor = next(n for n in range(ranks, 0, -1) if heads % n == 0)
        raise mistake(
            "parallel.context",
            f"{ranks} context ranks do not divide the {heads} query heads of each tensor rank",
            why="Ulysses gives every context rank whole heads",
            fix=f'use {divisor} context ranks, or the kind "ring" or "allgather", which split no heads',
        )


def _ring_core(group: ProcessGroup) -> Core:
    def core(q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor) -> Tensor:
        out: Tensor = RingAttention.apply(q_BNSH, k_BKSH, v_BKSH, group)  # type: ignore[no-untyped-call]
        return out

    return core


def _allgather_core(group: ProcessGroup) -> Core:
    def core(q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor) -> Tensor:
        out: Tensor = GatheredAttention.apply(q_BNSH, k_BKSH, v_BKSH, group)  # type: ignore[no-untyped-call]
        return out

    return core


class UlyssesCore:
    """Attention in which each rank of `group` computes some heads of the whole sequence, with the kernel `local`."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.local: Core = causal_attention

    def __call__(self, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor) -> Tensor:
        """Exchange sequence for heads, attend, and exchange back."""
        heads, ranks = q_BNSH.shape[1], self.group.size()
        check_heads("ulysses", heads, ranks)
        copies = kv_copies(heads, k_BKSH.shape[1], ranks)
        q, k, v = (
            _to_heads(x.repeat_interleave(repeats, dim=1) if repeats > 1 else x, self.group)
            for x, repeats in ((q_BNSH, 1), (k_BKSH, copies), (v_BKSH, copies))
        )
        return _to_sequence(self.local(q, k, v), self.group)


def kv_copies(heads: int, kv_heads: int, ranks: int) -> int:
    """Return how often Ulysses must repeat each key/value head to give every rank whole heads.

    >>> kv_copies(32, 8, 4), kv_copies(32, 8, 16), kv_copies(12, 6, 4)
    (1, 2, 2)
    """
    group = heads // kv_heads
    return next(n for n in range(1, group + 1) if group % n == 0 and kv_heads * n % ranks == 0)


def _to_heads(x_BNSH: Tensor, group: ProcessGroup) -> Tensor:
    """Turn all heads of this rank's part of the sequence into the whole sequence, in order, of a part of the heads."""
    parts_CBNSH = x_BNSH.reshape(x_BNSH.shape[0], group.size(), -1, *x_BNSH.shape[2:]).movedim(1, 0)
    return join_all(exchanges.exchange_rows(parts_CBNSH, group), dim=2)


def _to_sequence(x_BNLH: Tensor, group: ProcessGroup) -> Tensor:
    parts_CBNSH = exchanges.exchange_rows(split_all(x_BNLH, group.size(), dim=2), group)
    return parts_CBNSH.movedim(0, 1).flatten(1, 2)


KINDS: Mapping[str, Callable[[ProcessGroup], Core]] = {
    "ring": _ring_core,
    "ulysses": UlyssesCore,
    "allgather": _allgather_core,
}


# The part of a sequence that a context rank holds: head and tail, so that causal attention costs every rank the same.
#
# Rank c of C holds slices c and 2C-1-c of 2C equal ones: its queries see c + 1 and 2C - c slices, 2C + 1 for every c.


def slice_length(sequence: int, ranks: int) -> int:
    """Return the tokens of one of the 2·ranks slices; raise UserError if the sequence does not divide.

    >>> slice_length(4096, 4)
    512
    """
    if sequence % (2 * ranks):
        nearest_length = sequence - sequence % (2 * ranks) or 2 * ranks
        raise mistake(
            "job: data.sequence",
            f"{sequence} tokens do not divide into {2 * ranks} slices for {ranks} context ranks",
            why="each context rank holds one slice from the head and one from the tail of every sequence",
            fix=f"use {nearest_length} or another multiple of {2 * ranks}, or fewer context ranks",
        )
    return sequence // (2 * ranks)


def local_positions(sequence: int, rank: int, ranks: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the positions of the tokens that `rank` holds, ascending: int64 [sequence / ranks].

    >>> [local_positions(8, rank, 2).tolist() for rank in range(2)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    if ranks == 1:
        return torch.arange(sequence, device=device)
    length = slice_length(sequence, ranks)
    starts = (rank * length, (2 * ranks - 1 - rank) * length)
    return torch.cat([torch.arange(start, start + length, device=device) for start in starts])


def split_sequence(x_BS: Tensor, rank: int, ranks: int, dim: int = 1) -> Tensor:
    """Return the part of a whole sequence that `rank` holds, split along `dim`."""
    if ranks == 1:
        return x_BS
    length = slice_length(x_BS.shape[dim], ranks)
    starts = (rank * length, (2 * ranks - 1 - rank) * length)
    return torch.cat([x_BS.narrow(dim, start, length) for start in starts], dim=dim)


def split_all(x: Tensor, ranks: int, dim: int) -> Tensor:
    """Return the parts of a whole sequence that all ranks hold, stacked along a new first dimension."""
    return torch.stack([split_sequence(x, rank, ranks, dim) for rank in range(ranks)])


def join_all(parts_C: Tensor, dim: int) -> Tensor:
    """Return the whole sequence, in order, from the stacked parts of all ranks; `dim` does not count the stacking."""
    rank_parts = parts_C.unbind(0)
    length = rank_parts[0].shape[dim] // 2
    heads = [rank_part.narrow(dim, 0, length) for rank_part in rank_parts]
    tails = [rank_part.narrow(dim, length, length) for rank_part in reversed(rank_parts)]
    return torch.cat([*heads, *tails], dim=dim)


# Exact causal attention from blocks: each block gives an output and its log-sum-exp, and blocks merge.
#
# Two ways to bring the keys and values of the other ranks: round a ring while computing, or gathered at once.
#
# B batch, N query heads, K key/value heads (N is a multiple of K), S local sequence, L whole sequence, T keys of a
# block, H head, C context ranks, X = 2 (keys, values). Rank c of C holds slices c and 2C-1-c of 2C: its positions
# ascend.


# The CUDA kernel requires a head size that is a multiple of 8 and at most 256
_FLASH_HEADS = (8, 256)


def attend_block(q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Attend to one block of keys; return the output and the log-sum-exp of the scores [B, N, S].

    `causal` requires as many queries as keys.
    """
    if q_BNSH.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q_BNSH, k_BKSH, v_BKSH, 0.0, causal)
        return out, lse
    if _fits_flash(q_BNSH):
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q_BNSH, k_BKSH, v_BKSH, 0.0, causal)
        return out, lse
    s_BNST = _attention_scores(q_BNSH, k_BKSH, causal=causal)
    lse = s_BNST.logsumexp(-1)
    p_BNST = (s_BNST - lse[..., None]).exp().to(v_BKSH.dtype)
    return p_BNST @ _repeat_heads(v_BKSH, q_BNSH.shape[1]), lse


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
    """Return the gradients of one block, given the output and log-sum-exp of ALL blocks of these queries."""
    block = (grad_BNSH, q_BNSH, k_BKSH, v_BKSH, out_BNSH, lse_BNS)
    if q_BNSH.device.type == "cpu":
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*block, 0.0, causal)
        return dq, dk, dv
    if _fits_flash(q_BNSH):
        # Dropout's random state, which the kernel wants and does not read without dropout
        unused = torch.empty((), dtype=torch.uint64, device=q_BNSH.device)
        lengths = (None, None, q_BNSH.shape[2], k_BKSH.shape[2])
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *(tensor.contiguous() for tensor in block), *lengths, 0.0, causal, unused, unused
        )
        return dq, dk, dv
    return _math_backward(*block, causal=causal)


def _fits_flash(q_BNSH: Tensor) -> bool:
    multiple, max_size = _FLASH_HEADS
    size = q_BNSH.shape[-1]
    is_16_bit = q_BNSH.dtype in (torch.bfloat16, torch.float16)
    return q_BNSH.device.type == "cuda" and is_16_bit and size % multiple == 0 and size <= max_size


def _repeat_heads(x_BKSH: Tensor, heads: int) -> Tensor:
    return x_BKSH.repeat_interleave(heads // x_BKSH.shape[1], dim=1)


def _attention_scores(q_BNSH: Tensor, k_BKSH: Tensor, *, causal: bool) -> Tensor:
    wide = torch.promote_types(q_BNSH.dtype, torch.float32)
    keys = _repeat_heads(k_BKSH, q_BNSH.shape[1]).transpose(-1, -2)
    s_BNST: Tensor = (q_BNSH @ keys).to(wide) * q_BNSH.shape[-1] ** -0.5
    if causal:
        visible = torch.ones(s_BNST.shape[-2:], dtype=torch.bool, device=s_BNST.device).tril()
        s_BNST = s_BNST.masked_fill(~visible, float("-inf"))
    return s_BNST


def _math_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    heads, grouped = q.shape[1], (k.shape[0], k.shape[1], -1, k.shape[2], k.shape[3])
    p_BNST = (_attention_scores(q, k, causal=causal) - lse[..., None]).exp()
    wide = p_BNST.dtype
    dp_BNST = (grad @ _repeat_heads(v, heads).transpose(-1, -2)).to(wide)
    # Softmax backward, dS = P (dP - rowsum(dO O)): the row sum covers all blocks, as does the log-sum-exp in P.
    shift_BNS1 = (grad.to(wide) * out.to(wide)).sum(-1, keepdim=True)
    ds_BNST = (p_BNST * (dp_BNST - shift_BNS1) * q.shape[-1] ** -0.5).to(q.dtype)
    dk_BNSH, dv_BNSH = ds_BNST.transpose(-1, -2) @ q, p_BNST.to(q.dtype).transpose(-1, -2) @ grad
    return ds_BNST @ _repeat_heads(k, heads), dk_BNSH.view(grouped).sum(2), dv_BNSH.view(grouped).sum(2)


class _Merged:
    """Running merge of attention outputs over different keys, weighted by their log-sum-exps (in fp32 or wider)."""

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        # Copies: both are modified in place, and selective recompute may have saved the originals.
        self.out, self.lse = out.to(lse.dtype, copy=True), lse.clone()

    def add(self, out: Tensor, lse: Tensor, queries: slice) -> None:
        """Merge the output of a block for some of the queries."""
        merged, merged_lse = self.out[:, :, queries], self.lse[:, :, queries]
        joint_lse = torch.logaddexp(merged_lse, lse)
        # A block's weight in the merged output is the exponential of its log-sum-exp less the joint one.
        merged.mul_((merged_lse - joint_lse).exp()[..., None]).add_(out * (lse - joint_lse).exp()[..., None])
        merged_lse.copy_(joint_lse)


def _seen_slices(rank: int, distance: int, length: int) -> tuple[slice, slice]:
    """Return which of this rank's queries see which keys of the rank `distance` places before it in the ring.

    With the head-and-tail split this is half a block without a mask: an earlier rank's first slice precedes all
    queries of this rank and its second slice follows them all; both slices of a later rank precede this rank's second
    slice and follow its first.
    """
    half = length // 2
    return (slice(0, length), slice(0, half)) if distance <= rank else (slice(half, length), slice(0, length))


class RingAttention(torch.autograd.Function):
    """Attention that passes keys and values round the ring while it computes.

    A hop carries one rank's keys and values: C-1 hops forward, C-1 backward, C-1 of gradients. In the backward pass
    the gradients follow one hop later.
    """

    @staticmethod
    def forward(ctx: Any, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, group: ProcessGroup) -> Tensor:
        travel = _Travel(torch.stack([k_BKSH, v_BKSH]), group)
        merged = _Merged(*attend_block(q_BNSH, k_BKSH, v_BKSH, causal=True))
        for distance in range(1, group.size()):
            queries, keys = _seen_slices(group.rank(), distance, q_BNSH.shape[2])
            k, v = travel.next()[:, :, :, keys]
            merged.add(*attend_block(q_BNSH[:, :, queries], k, v, causal=False), queries)
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
            queries, keys = _seen_slices(group.rank(), distance, q.shape[2])
            k, v = travel.next()[:, :, :, keys]
            grads, outs = (grad_BNSH[:, :, queries], q[:, :, queries]), (out[:, :, queries], lse[:, :, queries])
            more_dq, *more = attend_backward(*grads, k, v, *outs, causal=False)
            dq[:, :, queries] += more_dq
            kv_grad_XBKSH = torch.stack([dk, dv]).zero_()
            kv_grad_XBKSH[:, :, :, keys] = torch.stack(more)
            # The gradients that earlier ranks computed for this block arrived while this rank computed its share.
            home = exchanges.pass_on(kv_grad_XBKSH if home is None else kv_grad_XBKSH + home.wait(), group)
        if home is not None:
            more_dk, more_dv = home.wait()
            dk, dv = dk + more_dk, dv + more_dv
        return dq.to(q.dtype), dk, dv, None


class _Travel:
    """Keys and values in transit round the ring, always one hop ahead of the computation."""

    def __init__(self, kv_XBKSH: Tensor, group: ProcessGroup) -> None:
        self._group, self._hops = group, group.size() - 1
        self._hop = exchanges.pass_on(kv_XBKSH, group) if self._hops else None

    def next(self) -> Tensor:
        """Return the next rank's block, and start the transfer of the one after it."""
        assert self._hop is not None, "the ring has no further block"
        arrived = self._hop.wait()
        self._hops -= 1
        self._hop = exchanges.pass_on(arrived, self._group) if self._hops else None
        return arrived


class GatheredAttention(torch.autograd.Function):
    """Attention that gathers all keys and values at once, and again in backward.

    It has the ring's traffic in fewer and larger messages, and holds the keys and values of the whole sequence in
    memory while one layer computes.
    """

    @staticmethod
    def forward(ctx: Any, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, group: ProcessGroup) -> Tensor:
        kv_XBKLH = _gather_pairs(k_BKSH, v_BKSH, group)
        merged = _Merged(*attend_block(q_BNSH, k_BKSH, v_BKSH, causal=True))
        for queries, keys in _earlier_keys(group, q_BNSH.shape[2]):
            k, v = kv_XBKLH[:, :, :, keys]
            merged.add(*attend_block(q_BNSH[:, :, queries], k, v, causal=False), queries)
        out_BNSH = merged.out.to(q_BNSH.dtype)
        ctx.save_for_backward(q_BNSH, k_BKSH, v_BKSH, out_BNSH, merged.lse)
        ctx.group = group
        return out_BNSH

    @staticmethod
    def backward(ctx: Any, grad_BNSH: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        group: ProcessGroup = ctx.group
        q, k, v, out, lse = ctx.saved_tensors
        kv_XBKLH = _gather_pairs(k, v, group)
        kv_grad = torch.zeros_like(kv_XBKLH)
        dq, *own_kv_grad = attend_backward(grad_BNSH, q, k, v, out, lse, causal=True)
        dq = dq.to(lse.dtype)
        for queries, keys in _earlier_keys(group, q.shape[2]):
            k, v = kv_XBKLH[:, :, :, keys]
            grads, outs = (grad_BNSH[:, :, queries], q[:, :, queries]), (out[:, :, queries], lse[:, :, queries])
            more_dq, *more = attend_backward(*grads, k, v, *outs, causal=False)
            dq[:, :, queries] += more_dq
            kv_grad[:, :, :, keys] += torch.stack(more)
        parts_CXBKSH = split_all(kv_grad, group.size(), dim=3)
        parts_CXBKSH[group.rank()] += torch.stack(own_kv_grad)
        dk, dv = exchanges.reduce_scatter(parts_CXBKSH, group)
        return dq.to(q.dtype), dk, dv, None


def _gather_pairs(k_BKSH: Tensor, v_BKSH: Tensor, group: ProcessGroup) -> Tensor:
    return join_all(exchanges.all_gather(torch.stack([k_BKSH, v_BKSH]), group), dim=3)


def _earlier_keys(group: ProcessGroup, length: int) -> list[tuple[slice, slice]]:
    """Return, as contiguous runs, the keys of other ranks that this rank's queries see."""
    half, first, second = length // 2, group.rank(), 2 * group.size() - 1 - group.rank()
    runs = [
        (slice(0, length), slice(0, first * half)),
        (slice(half, length), slice((first + 1) * half, second * half)),
    ]
    return [(queries, keys) for queries, keys in runs if keys.stop > keys.start]
