"""What is in a checkpoint, as rows to print."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.train.state.catalog import Stored, read_catalog
from phalanx.train.state.url import Place


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One tensor: what it is, and into how many boxes on how many ranks it was cut."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: int
    ranks: int
    bytes: int


def inspect(folder: Place) -> list[Row]:
    """A row per tensor in name order, from the indexes alone; raises Damaged."""
    return [_row(stored) for stored in read_catalog(folder).tensors.values()]


def _row(stored: Stored) -> Row:
    return Row(
        name=stored.name,
        dtype=stored.dtype,
        shape=stored.shape,
        boxes=len(stored.entries),
        ranks=len({entry.rank for entry in stored.entries}),
        bytes=sum(entry.size_bytes for entry in stored.entries),
    )
