"""Where a restore reads from: a committed folder, or segments of memory that outlived the process that wrote them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch

from phalanx.train.state.boxes import Box
from phalanx.train.state.index import Entry, Index, read_index
from phalanx.train.state.manifest import read_manifest
from phalanx.train.state.reading import Shard
from phalanx.train.state.storage import folder_of
from phalanx.train.state.url import Place, Url


class Tensors(Protocol):
    """The open tensors of one rank."""

    def check(self, entries: Iterable[Entry]) -> None:
        """Compare the bytes of these boxes with what was written; raises Damaged, naming the tensor."""

    def read(self, entry: Entry, part: Box) -> torch.Tensor:
        """The elements of `part`, which lies inside the entry's box, on the CPU; only after `check`."""


class Source(Protocol):
    """The state of one step, as the ranks of some world wrote it. Safe to use from several threads."""

    @property
    def where(self) -> str:
        """What messages call it."""

    @property
    def step(self) -> int:
        """Steps that were done."""

    @property
    def world(self) -> int:
        """How many ranks wrote it."""

    @property
    def meta(self) -> Mapping[str, Any]:
        """What the caller of the save wanted to remember."""

    def count(self, rank: int) -> int:
        """How many boxes a rank wrote; the index of one without any is asked for only for its meta."""

    def index(self, rank: int) -> Index:
        """What a rank wrote; raises Damaged."""

    def open(self, rank: int) -> AbstractContextManager[Tensors]:
        """The tensors of a rank; raises Damaged."""


class FolderSource:
    """A committed folder; raises Damaged when its manifest is not sound."""

    def __init__(self, place: Place) -> None:
        folder = folder_of(place)
        self._place = place
        self._manifest = read_manifest(folder)
        self._parts = folder.parts(self._manifest.attempt)
        self._indexes: dict[int, Index] = {}

    @property
    def where(self) -> str:
        """The folder."""
        return str(self._place)

    @property
    def step(self) -> int:
        """The step of the manifest."""
        return self._manifest.step

    @property
    def world(self) -> int:
        """How many ranks wrote the folder."""
        return self._manifest.world

    @property
    def meta(self) -> Mapping[str, Any]:
        """The meta of rank 0."""
        return self._manifest.meta

    def count(self, rank: int) -> int:
        """As the manifest counts them."""
        return self._manifest.ranks[rank].tensors

    def index(self, rank: int) -> Index:
        """The index the manifest vouches for; read once."""
        if rank not in self._indexes:
            self._indexes[rank] = read_index(self._parts, rank, self._manifest.ranks[rank])
        return self._indexes[rank]

    def open(self, rank: int) -> Shard:
        """The safetensors file of a rank."""
        return Shard(self._parts, self.index(rank))


def source_of(where: Place | Source) -> Source:
    """The source itself, or that of a folder; raises Damaged."""
    return FolderSource(where) if isinstance(where, Path | Url) else where
