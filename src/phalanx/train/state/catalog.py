"""The catalog: every tensor of a checkpoint with all its boxes, whichever ranks wrote them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.train.state.boxes import Box, Gap, first_gap, overlap, whole
from phalanx.train.state.damage import Damaged, damaged
from phalanx.train.state.index import Entry, Index, read_index
from phalanx.train.state.manifest import Manifest, read_manifest
from phalanx.train.state.storage import Folder, folder_of
from phalanx.train.state.url import Place


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """One tensor as it lies in a checkpoint: its boxes, which all agree on dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    entries: tuple[Entry, ...]

    def check_whole(self) -> None:
        """Raises Damaged unless the boxes cover every element once."""
        check_cover(self.name, whole(self.shape), [(entry, entry.box) for entry in self.entries])


@dataclass(frozen=True, kw_only=True, slots=True)
class Catalog:
    """Everything a checkpoint says about itself; tensors by name."""

    place: Place
    parts: Folder
    manifest: Manifest
    indexes: tuple[Index, ...]
    tensors: dict[str, Stored]


def read_catalog(place: Place) -> Catalog:
    """The catalog of a commit; raises Damaged."""
    folder = folder_of(place)
    manifest = read_manifest(folder)
    parts = folder.parts(manifest.attempt)
    indexes = tuple(read_index(parts, rank, files) for rank, files in enumerate(manifest.ranks))
    boxes: dict[str, list[Entry]] = {}
    for index in indexes:
        for entry in index.entries:
            boxes.setdefault(entry.name, []).append(entry)
    tensors = {name: _stored(place, name, boxes[name]) for name in sorted(boxes)}
    return Catalog(place=place, parts=parts, manifest=manifest, indexes=indexes, tensors=tensors)


def _stored(place: Place, name: str, entries: list[Entry]) -> Stored:
    for entry in entries:
        check_agreement(place, entries[0], entry)
    return Stored(name=name, dtype=entries[0].dtype, shape=entries[0].shape, entries=tuple(entries))


def check_agreement(where: object, first: Entry, entry: Entry) -> None:
    """Raises Damaged unless two boxes are of one and the same tensor."""
    if (entry.dtype, entry.shape) != (first.dtype, first.shape):
        what = (
            f"{entry.name} is {first.dtype} {list(first.shape)} for rank {first.rank} "
            f"and {entry.dtype} {list(entry.shape)} for rank {entry.rank}"
        )
        raise damaged(where, what, why="the ranks that wrote it did not run the same model")


def check_cover(name: str, box: Box, parts: Sequence[tuple[Entry, Box]]) -> None:
    """Raises Damaged unless the parts of `box` that entries hold tile it exactly."""
    try:
        gap = first_gap(box, [part for _, part in parts])
    except OverflowError as error:
        raise damaged(name, f"is cut beyond measure: {error}") from error
    if gap is not None:
        raise _uncovered(name, gap, parts)


def _uncovered(name: str, gap: Gap, parts: Sequence[tuple[Entry, Box]]) -> Damaged:
    where = f"elements {list(gap.box.start)} to {list(gap.box.end)} (end excluded)"
    if not gap.times:
        return damaged(name, f"has a hole: no rank wrote {where}")
    ranks = [str(entry.rank) for entry, part in parts if overlap(part, gap.box)]
    return damaged(name, f"is there twice: ranks {', '.join(ranks)} all wrote {where}")
