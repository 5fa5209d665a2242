"""The means of one rank's blocks, small enough to be kept for a thousand ranks: what meshes are drawn from."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.record.archive.event_index import SUFFIX
from phalanx.record.archive.rank_file import KeptBlocks
from phalanx.record.archive.series import SERIES, Spans
from phalanx.record.host_file import stat_events

Stamp = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Digest:
    """Of every block its steps and time, and of every series its mean and how many values that is of."""

    stamp: Stamp  # of the files it was made from
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    t: NDArray[np.float64]
    steps: NDArray[np.int64]
    mean: NDArray[np.float32]  # [block, series]
    count: NDArray[np.uint16]

    @classmethod
    def of(cls, kept: KeptBlocks, stamp: Stamp) -> Digest:
        """Of the blocks that stayed; of one that was cut short, with what was undone in its means."""
        blocks, series = kept.blocks, kept.blocks["series"][:, : len(SERIES)]
        return cls(
            stamp=stamp,
            first=blocks["first"].copy(),
            last=np.minimum(blocks["last"], kept.below - 1),
            t=blocks["t_last"].copy(),
            steps=blocks["steps"].astype(np.int64),
            mean=series["mean"].copy(),
            count=series["count"].copy(),
        )

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        arrays = (self.first, self.last, self.t, self.steps, self.mean, self.count)
        return sum(array.nbytes for array in arrays)

    def steps_in(self, span: tuple[int, int]) -> int:
        """Steps of the blocks that reach into a range."""
        return int(self.steps[self._inside_span(span)].sum())

    def spans(self, column: int, span: tuple[int, int]) -> Spans:
        """One series in a range, a block at a time; least and largest are not kept."""
        taken = self._inside_span(span) & (self.count[:, column] > 0)
        mean, count = self.mean[taken, column].astype(np.float64), self.count[taken, column].astype(np.int64)
        order = np.argsort(self.first[taken], kind="stable")
        return Spans(
            first=self.first[taken][order],
            last=self.last[taken][order],
            t=self.t[taken][order],
            low=mean[order],
            high=mean[order],
            total=(mean * count)[order],
            count=count[order],
        )

    def _inside_span(self, span: tuple[int, int]) -> NDArray[np.bool_]:
        return np.asarray((self.last >= span[0]) & (self.first <= span[1]))


def stamp_of(events: Path, closed: int) -> Stamp:
    """What tells whether a rank's files have changed, without opening them."""
    name = os.fspath(events)
    return (closed, *_size_and_time(name), *_size_and_time(name.removesuffix(".jsonl") + SUFFIX))


def _size_and_time(name: str) -> tuple[int, int]:
    found = stat_events(name)
    return (found.size, found.mtime_ns) if found is not None else (-1, -1)
