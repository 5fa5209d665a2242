"""Which sample stands at which place: a shuffle that is computed, not stored, so every rank agrees without a table."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Words = NDArray[np.uint64]

# Three rounds shuffle a million samples so well that neighbours meet as by chance; only tiny sizes need more: over
# 20,000 epochs of 5 samples chi² per degree of freedom is 26 with 4 rounds, 8 with 6, 2 with 8 and 1.2 with 10.
ROUNDS = 10
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, the increment of splitmix64 (Steele, Lea, Flood 2014)
MOST_PERIOD = 2**31  # two numbers below it multiply without leaving int64


class Sampler(Protocol):
    """Anything that says which samples stand at the global positions [first, first + count)."""

    @property
    def num_samples(self) -> int:
        """Positions after which the order begins anew."""
        ...

    def indices(self, first: int, count: int) -> Integers:
        """The samples at positions [first, first + count)."""
        ...


@dataclass(frozen=True, slots=True)
class GlobalSampler:
    """Epoch after epoch, each a permutation of all samples drawn by `seed` and the number of the epoch.

    >>> sampler = GlobalSampler(10**9, seed=0)
    >>> bool((sampler.indices(5, 3) == sampler.indices(0, 8)[5:]).all())
    True
    >>> sorted(GlobalSampler(5, seed=1).indices(5, 5).tolist())
    [0, 1, 2, 3, 4]
    """

    num_samples: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError(f"a sampler needs at least one sample, not {self.num_samples}")

    def indices(self, first: int, count: int) -> Integers:
        """The samples at positions [first, first + count); takes time in proportion to `count` alone."""
        return self.at(np.arange(first, first + count, dtype=np.int64))

    def at(self, positions: Integers) -> Integers:
        """The samples at any positions."""
        epoch, place = np.divmod(positions.astype(np.uint64), np.uint64(self.num_samples))
        key = _mix_bits(epoch * np.uint64(GOLDEN) + np.uint64(seed_word(self.seed)))
        return permute_places(place, key, self.num_samples).astype(np.int64)


@dataclass(frozen=True, slots=True)
class BlendSampler:
    """Sources in turn, as evenly as whole samples allow, each through its own shuffle.

    Of every `sum(quotas)` positions source s gets exactly quotas[s]. Its draws follow its own epochs: no sample comes
    a second time before all of its source came once.
    """

    sizes: tuple[int, ...]  # samples of each source; sample i of source s is numbered sum(sizes[:s]) + i
    quotas: tuple[int, ...]
    seed: int

    @classmethod
    def of(cls, sizes: Sequence[int], weights: Sequence[float], seed: int) -> BlendSampler:
        """A weight of 2 shows each sample of a source twice as often as one of a source with weight 1."""
        return cls(tuple(sizes), source_quotas(sizes, weights), seed)

    @property
    def num_samples(self) -> int:
        """Positions after which the interleaving repeats."""
        return sum(self.quotas)

    def indices(self, first: int, count: int) -> Integers:
        """The samples at positions [first, first + count)."""
        positions = np.arange(first, first + count, dtype=np.int64)
        source, place = interleave_sources(positions, self.quotas)
        found = np.empty(count, dtype=np.int64)
        base = 0
        for number, size in enumerate(self.sizes):
            mine = source == number
            if mine.any():
                shuffle = GlobalSampler(size, seed_word(self.seed, number + 1))
                found[mine] = base + shuffle.at(place[mine])
            base += size
        return found


def make_sampler(sizes: Sequence[int], weights: Sequence[float], seed: int) -> Sampler:
    """The sampler of a dataset with these sources."""
    if len(sizes) == 1:
        return GlobalSampler(sizes[0], seed)
    return BlendSampler.of(sizes, weights, seed)


def source_quotas(sizes: Sequence[int], weights: Sequence[float]) -> tuple[int, ...]:
    """Samples of each source per period: size × weight in lowest terms of whole samples.

    >>> source_quotas([300, 100], [1, 2])
    (300, 200)
    """
    wanted = [size * weight for size, weight in zip(sizes, weights, strict=True)]
    scale = min(1.0, MOST_PERIOD / 2 / sum(wanted))
    return tuple(max(1, round(one * scale)) if one else 0 for one in wanted)


def interleave_sources(positions: Integers, shares: Sequence[int]) -> tuple[Integers, Integers]:
    """The source at each position, and how many of that source came before it.

    Halves the sources again and again. Among two halves with shares a and b, the first has had floor(p·a/(a+b)) of the
    first p positions: a staircase that needs no table (Bresenham's line), never off by a whole sample.
    """
    source = np.zeros_like(positions)
    if len(shares) == 1:
        return source, positions
    middle = len(shares) // 2
    left, total = sum(shares[:middle]), sum(shares)
    before, after = _staircase_positions(positions, left, total), _staircase_positions(positions + 1, left, total)
    place = np.empty_like(positions)
    for mine, half, had in (
        (after > before, slice(0, middle), before),
        (after == before, slice(middle, None), positions - before),
    ):
        which, deeper = interleave_sources(had[mine], shares[half])
        source[mine], place[mine] = which + (half.start or 0), deeper
    return source, place


def _staircase_positions(positions: Integers, part: int, whole: int) -> Integers:
    turns, rest = np.divmod(positions, whole)
    return np.asarray(turns * part + rest * part // whole)


def permute_places(places: Words, key: Words, size: int) -> Words:
    """A permutation of [0, size) chosen by `key`: a Feistel network on a grid just larger than size, walked until the
    value falls inside (Black and Rogaway 2002)."""
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    value = _feistel_round(places, key, rows, columns)
    outside = np.flatnonzero(value >= size)
    while outside.size:  # fewer than `rows` of the grid's cells lie outside, so this is rare but for tiny sizes
        value[outside] = _feistel_round(value[outside], key[outside], rows, columns)
        outside = outside[value[outside] >= size]
    return value


def _feistel_round(value: Words, key: Words, rows: int, columns: int) -> Words:
    row, column = np.divmod(value, np.uint64(columns))
    for turn in range(ROUNDS):
        salt = key + np.uint64(turn * GOLDEN % 2**64)
        if turn % 2:
            column = (column + (_mix_bits(row ^ salt) >> np.uint64(1))) % np.uint64(
                columns
            )  # >> 1: the sum must not wrap
        else:
            row = (row + (_mix_bits(column ^ salt) >> np.uint64(1))) % np.uint64(rows)
    return np.asarray(row * np.uint64(columns) + column)


def _mix_bits(word: Words) -> Words:
    """splitmix64's finaliser: every input bit reaches every output bit."""
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(word ^ (word >> np.uint64(31)))


def seed_word(*parts: int) -> int:
    """64 bits that any other parts would not give."""
    text = " ".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
