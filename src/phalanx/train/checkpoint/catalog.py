"""The catalog: the boxes of every tensor of a checkpoint, whichever rank wrote them."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from phalanx.train.checkpoint.boxes import Box, BoxIndex, Gap, first_gap, overlap
from phalanx.train.checkpoint.damage import Damaged, damaged
from phalanx.train.checkpoint.index import Entry, Index, read_index
from phalanx.train.checkpoint.manifest import Manifest, read_manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """One tensor as it lies in a checkpoint: its boxes, which all agree on dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    entries: tuple[Entry, ...]
    places: BoxIndex

    def covering(self, box: Box) -> list[tuple[Entry, Box]]:
        """The entries that hold parts of `box`, with those parts; raises Damaged unless they tile it exactly."""
        near = [self.entries[position] for position in self.places.meeting(box)]
        parts = [(entry, part) for entry in near if (part := overlap(entry.box, box)) is not None]
        try:
            gap = first_gap(box, [part for _, part in parts])
        except OverflowError as error:
            raise damaged(self.name, f"is cut beyond measure: {error}") from error
        if gap is not None:
            raise self._uncovered(gap, parts)
        return parts

    def _uncovered(self, gap: Gap, parts: list[tuple[Entry, Box]]) -> Damaged:
        where = f"elements {list(gap.box.start)} to {list(gap.box.end)} (end excluded) of {list(self.shape)}"
        if not gap.times:
            return damaged(self.name, f"has a hole: no rank wrote {where}")
        ranks = [str(entry.rank) for entry, part in parts if overlap(part, gap.box)]
        return damaged(self.name, f"is there twice: ranks {', '.join(ranks)} all wrote {where}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Catalog:
    """Everything a checkpoint says about itself; tensors by name."""

    folder: Path
    manifest: Manifest
    indexes: tuple[Index, ...]
    tensors: dict[str, Stored]


def read_catalog(folder: Path, only: Container[str] | None = None) -> Catalog:
    """The catalog of a committed folder, of all tensors or those named in `only`; raises Damaged."""
    manifest = read_manifest(folder)
    indexes = tuple(read_index(folder, rank, files) for rank, files in enumerate(manifest.ranks))
    boxes: dict[str, list[Entry]] = {}
    for index in indexes:
        for entry in index.entries:
            if only is None or entry.name in only:
                boxes.setdefault(entry.name, []).append(entry)
    tensors = {name: _stored(folder, name, boxes[name]) for name in sorted(boxes)}
    return Catalog(folder=folder, manifest=manifest, indexes=indexes, tensors=tensors)


def _stored(folder: Path, name: str, entries: list[Entry]) -> Stored:
    first = entries[0]
    for entry in entries:
        if (entry.dtype, entry.shape) != (first.dtype, first.shape):
            what = (
                f"{name} is {first.dtype} {list(first.shape)} for rank {first.rank} "
                f"and {entry.dtype} {list(entry.shape)} for rank {entry.rank}"
            )
            raise damaged(folder, what, why="the ranks that wrote it did not run the same model")
    places = BoxIndex([entry.box for entry in entries])
    return Stored(name=name, dtype=first.dtype, shape=first.shape, entries=tuple(entries), places=places)
