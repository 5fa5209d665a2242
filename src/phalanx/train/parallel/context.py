"""Context parallelism: one sequence over several ranks, as a drop-in for the attention core of a model.

Three kinds, all exact: "ring" (keys and values travel behind the computation), "ulysses" (each rank takes the whole
sequence of some heads), "allgather" (keys and values gathered per layer). docs/decisions/0012-context-kinds.md compares
them.

B batch, N query heads, K key/value heads, S local sequence, L whole sequence, H head, C context ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from phalanx.errors import mistake, nearest
from phalanx.train.parallel import wire
from phalanx.train.parallel.context_ring import GatheredAttention, RingAttention

__all__ = ["KINDS", "Core", "check_heads", "context_core", "local_positions", "split_sequence"]

Core = Callable[[Tensor, Tensor, Tensor], Tensor]  # q_BNSH, k_BKSH, v_BKSH -> o_BNSH


def context_core(kind: str, group: ProcessGroup) -> Core:
    """Causal attention over a sequence split over `group` (head and tail: see context_order.split_sequence)."""
    if kind not in KINDS:
        raise mistake(
            "parallel.context_kind",
            f'"{kind}" is no kind of context parallelism',
            fix=f"use {', '.join(KINDS)}" + (f'; did you mean "{near}"?' if (near := nearest(kind, KINDS)) else ""),
        )
    return KINDS[kind](group)


def check_heads(kind: str, heads: int, ranks: int) -> None:
    """Raise UserError where Ulysses cannot give every rank as many query heads (of those this tensor rank holds)."""
    if kind == "ulysses" and heads % ranks:
        fit = next(n for n in range(ranks, 0, -1) if heads % n == 0)
        raise mistake(
            "parallel.context",
            f"{ranks} context ranks do not divide the {heads} query heads of each tensor rank",
            why="Ulysses gives every context rank whole heads",
            fix=f'use {fit} context ranks, or the kind "ring" or "allgather", which split no heads',
        )


def _ring(group: ProcessGroup) -> Core:
    def core(q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor) -> Tensor:
        out: Tensor = RingAttention.apply(q_BNSH, k_BKSH, v_BKSH, group)  # type: ignore[no-untyped-call]
        return out

    return core


def _allgather(group: ProcessGroup) -> Core:
    def core(q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor) -> Tensor:
        out: Tensor = GatheredAttention.apply(q_BNSH, k_BKSH, v_BKSH, group)  # type: ignore[no-untyped-call]
        return out

    return core


def _ulysses(group: ProcessGroup) -> Core:
    def core(q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor) -> Tensor:
        heads, ranks = q_BNSH.shape[1], group.size()
        check_heads("ulysses", heads, ranks)
        copies = kv_copies(heads, k_BKSH.shape[1], ranks)
        q, k, v = (
            _to_heads(one.repeat_interleave(times, dim=1) if times > 1 else one, group)
            for one, times in ((q_BNSH, 1), (k_BKSH, copies), (v_BKSH, copies))
        )
        return _to_sequence(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), group)

    return core


def kv_copies(heads: int, kv_heads: int, ranks: int) -> int:
    """How often Ulysses repeats each key/value head: the least that gives every rank whole ones, beside their queries.

    >>> kv_copies(32, 8, 4), kv_copies(32, 8, 16), kv_copies(12, 6, 4)
    (1, 2, 2)
    """
    group = heads // kv_heads
    return next(n for n in range(1, group + 1) if group % n == 0 and kv_heads * n % ranks == 0)


def _to_heads(x_BNSH: Tensor, group: ProcessGroup) -> Tensor:
    """All heads of a part of the sequence -> the whole sequence, in order, of a part of the heads."""
    parts_CBNSH = x_BNSH.reshape(x_BNSH.shape[0], group.size(), -1, *x_BNSH.shape[2:]).movedim(1, 0)
    return join_all(wire.exchange(parts_CBNSH, group), dim=2)


def _to_sequence(x_BNLH: Tensor, group: ProcessGroup) -> Tensor:
    parts_CBNSH = wire.exchange(split_all(x_BNLH, group.size(), dim=2), group)
    return parts_CBNSH.movedim(0, 1).flatten(1, 2)


KINDS: Mapping[str, Callable[[ProcessGroup], Core]] = {"ring": _ring, "ulysses": _ulysses, "allgather": _allgather}


# Which part of a sequence each context rank holds: head and tail, so that causal attention costs every rank the same.
#
# Rank c of C holds slices c and 2C-1-c of 2C equal ones: its queries see c + 1 and 2C - c slices, 2C + 1 for every c.


def slice_length(sequence: int, ranks: int) -> int:
    """Tokens of one of the 2·ranks slices; raises UserError where the sequence does not divide.

    >>> slice_length(4096, 4)
    512
    """
    if sequence % (2 * ranks):
        fit = sequence - sequence % (2 * ranks) or 2 * ranks
        raise mistake(
            "job: data.sequence",
            f"{sequence} tokens do not divide into {2 * ranks} slices for {ranks} context ranks",
            why="each context rank holds one slice from the head and one from the tail of every sequence",
            fix=f"use {fit} or another multiple of {2 * ranks}, or fewer context ranks",
        )
    return sequence // (2 * ranks)


def local_positions(sequence: int, rank: int, ranks: int, device: torch.device | str = "cpu") -> Tensor:
    """Positions of the tokens `rank` holds, ascending: int64 [sequence / ranks].

    >>> [local_positions(8, rank, 2).tolist() for rank in range(2)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    if ranks == 1:
        return torch.arange(sequence, device=device)
    length = slice_length(sequence, ranks)
    starts = (rank * length, (2 * ranks - 1 - rank) * length)
    return torch.cat([torch.arange(start, start + length, device=device) for start in starts])


def split_sequence(x_BS: Tensor, rank: int, ranks: int, dim: int = 1) -> Tensor:
    """The part of a whole sequence that `rank` holds, cut along `dim`."""
    if ranks == 1:
        return x_BS
    length = slice_length(x_BS.shape[dim], ranks)
    starts = (rank * length, (2 * ranks - 1 - rank) * length)
    return torch.cat([x_BS.narrow(dim, start, length) for start in starts], dim=dim)


def split_all(x: Tensor, ranks: int, dim: int) -> Tensor:
    """What every rank holds of a whole sequence, stacked along a new first dimension."""
    return torch.stack([split_sequence(x, rank, ranks, dim) for rank in range(ranks)])


def join_all(parts_C: Tensor, dim: int) -> Tensor:
    """The whole sequence, in order, from what every rank holds (stacked first); `dim` counts without the stacking."""
    parts = parts_C.unbind(0)
    length = parts[0].shape[dim] // 2
    heads = [part.narrow(dim, 0, length) for part in parts]
    tails = [part.narrow(dim, length, length) for part in reversed(parts)]
    return torch.cat([*heads, *tails], dim=dim)
