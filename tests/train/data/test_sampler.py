"""The order of the samples: complete, repeatable, well mixed, and the same from wherever one looks."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.train.data.sampler import BlendSampler, GlobalSampler, interleave_sources, make_sampler, source_quotas

SIZES = [1, 2, 3, 4, 5, 7, 16, 97, 100, 1009, 65_536, 99_991]


@pytest.mark.parametrize("size", SIZES)
def test_every_epoch_is_a_permutation(size: int) -> None:
    epochs = GlobalSampler(size, seed=3).indices(0, 3 * size).reshape(3, size)
    for epoch in epochs:
        assert (np.bincount(epoch, minlength=size) == 1).all()
    if size > 16:
        assert (epochs[0] != epochs[1]).any()


@given(
    size=st.one_of(st.integers(1, 300), st.integers(1, 2**60)),
    seed=st.integers(0, 2**70),
    first=st.integers(0, 2**40),
    counts=st.lists(st.integers(0, 50), min_size=1, max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_any_cut_of_the_positions_gives_the_same_order(size: int, seed: int, first: int, counts: list[int]) -> None:
    sampler = GlobalSampler(size, seed)
    whole = sampler.indices(first, sum(counts))
    starts = np.cumsum([first, *counts])
    parts = [sampler.indices(int(start), count) for start, count in zip(starts[:-1], counts, strict=True)]
    assert whole.tolist() == np.concatenate(parts).tolist()
    assert ((whole >= 0) & (whole < size)).all()


@given(size=st.integers(1, 2**50), first=st.integers(0, 2**30), count=st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_no_sample_twice_in_an_epoch_of_any_size(size: int, first: int, count: int) -> None:
    found = GlobalSampler(size, 7).indices(first, count)
    epochs = np.arange(first, first + count) // size
    pairs = set(zip(epochs.tolist(), found.tolist(), strict=True))
    assert len(pairs) == count


def test_a_billion_samples_need_no_table() -> None:
    sampler = GlobalSampler(10**9, seed=0)
    tracemalloc.start()
    found = sampler.indices(10**9 - 500_000, 10**6)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(np.unique(found[:500_000])) == len(np.unique(found[500_000:])) == 500_000
    assert peak_bytes < 10**9  # a table of them would take 8 GB


def test_seeds_and_epochs_differ() -> None:
    one, other = GlobalSampler(10_000, 0), GlobalSampler(10_000, 1)
    # Two shuffles of n agree in about one place, whatever n is.
    assert (one.indices(0, 10_000) == other.indices(0, 10_000)).sum() < 10
    assert (one.indices(0, 10_000) == one.indices(10_000, 10_000)).sum() < 10


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_well_shuffled(seed: int) -> None:
    size = 1_000_003
    order = GlobalSampler(size, seed).indices(0, size)
    steps = np.diff(order)
    ascending = np.diff(np.flatnonzero(np.concatenate([[True], steps < 0, [True]])))
    assert ascending.max() < 14, "a run of 14 rising samples comes once in 10^11"
    # Differences of neighbours and of places a row of the grid apart spread evenly: chi² of 999 degrees is 999 ± 45.
    for lag in (1, 2, 1000, 1001):
        counts = np.bincount((order[lag:] - order[:-lag]) % size * 1000 // size, minlength=1000)
        expected = (size - lag) / 1000
        assert ((counts - expected) ** 2 / expected).sum() < 999 + 6 * 45
    assert abs(np.corrcoef(np.arange(size), order)[0, 1]) < 5 / np.sqrt(size)


def test_tiny_sizes_reach_every_order() -> None:
    epochs = GlobalSampler(4, 0).indices(0, 4 * 24_000).reshape(-1, 4)
    kinds, counts = np.unique(epochs, axis=0, return_counts=True)
    assert len(kinds) == 24
    assert ((counts - 1000) ** 2 / 1000).sum() < 60  # chi² of 23 degrees is 23 ± 7


def test_no_sample_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        GlobalSampler(0, 1)


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    weights=st.lists(st.sampled_from([0.3, 0.5, 1.0, 1.0, 2.0, 3.7]), min_size=6, max_size=6),
    seed=st.integers(0, 100),
)
@settings(max_examples=60, deadline=None)
def test_a_blend_keeps_quotas_and_epochs(sizes: list[int], weights: list[float], seed: int) -> None:
    sampler = BlendSampler.of(sizes, weights[: len(sizes)], seed)
    found = sampler.indices(0, 2 * sampler.num_samples)
    base = 0
    for size, quota in zip(sizes, sampler.quotas, strict=True):
        mine = found[(found >= base) & (found < base + size)] - base
        assert len(mine) == 2 * quota
        for start in range(0, len(mine) - size + 1, size):  # every epoch of the source, in the order of drawing
            assert sorted(mine[start : start + size].tolist()) == list(range(size))
        base += size


@given(
    shares=st.lists(st.integers(1, 10**6), min_size=1, max_size=9),
    first=st.integers(0, 10**12),
    count=st.integers(1, 300),
)
@settings(max_examples=60, deadline=None)
def test_interleaving_is_even_everywhere(shares: list[int], first: int, count: int) -> None:
    positions = np.arange(first, first + count)
    source, place = interleave_sources(positions, shares)
    for number, share in enumerate(shares):
        mine = place[source == number]
        assert (np.diff(mine) == 1).all()
        if len(mine):
            expected = positions[source == number] * (share / sum(shares))
            # one sample for every halving that leads to the source
            assert np.abs(mine - expected).max() <= 4 + 1e-6 * first / 10**6


def test_weight_two_is_seen_twice_as_often() -> None:
    sampler = make_sampler([1000, 1000], [1.0, 2.0], seed=0)
    found = sampler.indices(0, 3000)
    assert (np.bincount(found, minlength=2000) == np.repeat([1, 2], 1000)).all()
    assert abs(int((found[:300] >= 1000).sum()) - 200) <= 1


def test_sources_without_a_sample_are_passed_over() -> None:
    sampler = make_sampler([5, 0, 0, 0, 3], [1.0] * 5, seed=0)
    assert sorted(sampler.indices(0, 8).tolist()) == list(range(8))


def test_blend_positions_are_stateless() -> None:
    sampler = make_sampler([17, 5, 40], [1.0, 2.0, 0.5], seed=9)
    whole = sampler.indices(0, 500)
    assert [int(sampler.indices(place, 1)[0]) for place in range(500)] == whole.tolist()


def test_quotas_of_huge_sources_stay_in_range() -> None:
    found = source_quotas([10**12, 10**12, 1], [1.0, 3.0, 1.0])
    assert sum(found) < 2**31
    assert found[1] == pytest.approx(3 * found[0])
    assert found[2] == 1
