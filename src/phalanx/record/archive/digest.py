"""The means of one rank's blocks, small enough to keep for a thousand ranks: the data behind meshes."""

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
    """Steps and time of every block, and mean and count of values of every series in it."""

    stamp: Stamp  # of the files it was made from
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    t: NDArray[np.float64]
    steps: NDArray[np.int64]
    mean: NDArray[np.float32]  # [block, series]
    count: NDArray[np.uint16]

    @classmethod
    def of(cls, kept: KeptBlocks, stamp: Stamp) -> Digest:
        """Build a digest of the blocks that stayed.

        The means of a block that was cut short include its undone steps.
        """
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
        """Memory of the arrays in bytes."""
        arrays = (self.first, self.last, self.t, self.steps, self.mean, self.count)
        return sum(array.nbytes for array in arrays)

    def steps_in(self, span: tuple[int, int]) -> int:
        """Return the number of steps of the blocks that reach into a range."""
        return int(self.steps[self._inside_span(span)].sum())

    def spans(self, column: int, span: tuple[int, int]) -> Spans:
        """Return one series in a range, one span per block.

        A digest has no minima and maxima: both are set to the mean.
        """
        used = self._inside_span(span) & (self.count[:, column] > 0)
        mean, count = self.mean[used, column].astype(np.float64), self.count[used, column].astype(np.int64)
        order = np.argsort(self.first[used], kind="stable")
        return Spans(
            first=self.first[used][order],
            last=self.last[used][order],
            t=self.t[used][order],
            low=mean[order],
            high=mean[order],
            total=(mean * count)[order],
            count=count[order],
        )

    def _inside_span(self, span: tuple[int, int]) -> NDArray[np.bool_]:
        return np.asarray((self.last >= span[0]) & (self.first <= span[1]))


def stamp_of(events: Path, closed: int) -> Stamp:
    """Return a value that changes when a rank's files change, without opening them."""
    name = os.fspath(events)
    return (closed, *_size_and_time(name), *_size_and_time(name.removesuffix(".jsonl") + SUFFIX))


def _size_and_time(name: str) -> tuple[int, int]:
    file_stat = stat_events(name)
    return (file_stat.size, file_stat.mtime_ns) if file_stat is not None else (-1, -1)
