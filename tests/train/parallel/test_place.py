"""Boxes: which part of which tensor a rank holds, without asking anyone."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.train.parallel.tensor_shard import RegionSplit, ShardRegion, chunk_range


@given(st.integers(0, 40), st.integers(1, 9))
def test_chunks_are_torchs_own(length, parts):
    cut = torch.arange(length).chunk(parts)
    for index in range(parts):
        first, size = chunk_range(length, parts, index)
        wanted = cut[index].tolist() if index < len(cut) else []
        assert list(range(first, first + size)) == wanted


def test_a_box_is_cut_out_of_the_whole():
    whole = torch.arange(24).view(4, 6)
    box = ShardRegion(shape=(4, 6), start=(2, 3), size=(2, 2), cuts=())
    assert box.of(whole).tolist() == [[15, 16], [21, 22]]


def test_groups_of_a_dimension_are_outermost_first():
    outer, inner, other = object(), object(), object()
    cuts = tuple(
        RegionSplit(dim=dim, parts=parts, index=0, group=group)
        for dim, parts, group in ((0, 2, outer), (1, 3, other), (0, 4, inner))
    )
    box = ShardRegion(shape=(16, 6), start=(0, 0), size=(2, 2), cuts=cuts)
    assert box.groups == {0: (outer, inner), 1: (other,)}
    assert box.parts == prod((2, 3, 4))
