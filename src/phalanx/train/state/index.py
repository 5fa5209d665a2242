"""The index of a rank: which box of which tensor lies where in its file, with a digest for each."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from phalanx.train.state import names
from phalanx.train.state.boxes import Box
from phalanx.train.state.damage import damaged
from phalanx.train.state.dtypes import KINDS
from phalanx.train.state.jsontext import JSON, from_text, to_line
from phalanx.train.state.manifest import RankFiles, is_count
from phalanx.train.state.storage import Folder
from phalanx.train.state.streams import read_whole, reason

MOST_BYTES = 2**28  # a million boxes on one rank, at 250 bytes a row
MOST_DIMS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A box of one tensor in the file of one rank. `offset` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    rank: int
    offset: int
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Index:
    """Everything one rank wrote: its header, its boxes, and what it alone had to remember (its random state, say)."""

    rank: int
    header_bytes: int
    header_sha256: str
    entries: tuple[Entry, ...]
    meta: Mapping[str, JSON]


def encode(index: Index) -> bytes:
    """The text of an index, a line per tensor."""
    rows = [
        {
            "name": entry.name,
            "dtype": entry.dtype,
            "shape": entry.shape,
            "start": entry.box.start,
            "local": entry.box.size,
            "offset": entry.offset,
            "bytes": entry.size_bytes,
            "sha256": entry.sha256,
        }
        for entry in index.entries
    ]
    header = {"bytes": index.header_bytes, "sha256": index.header_sha256}
    head = f'{{"rank":{index.rank},\n"header":{to_line(header)},\n"meta":{to_line(index.meta)},\n"tensors":[\n'
    return (head + ",\n".join(map(to_line, rows)) + "\n]}\n").encode("ascii")


def read_index(parts: Folder, rank: int, files: RankFiles) -> Index:
    """The index of a rank, as the manifest vouches for it; raises Damaged."""
    path = parts.place / names.index_name(rank)
    try:
        data = read_whole(parts.open(path.name), most_bytes=min(files.index_bytes, MOST_BYTES))
    except OSError as error:
        raise damaged(path, f"cannot be read: {reason(error)}") from error
    if len(data) != files.index_bytes or hashlib.sha256(data).hexdigest() != files.index_sha256:
        raise damaged(path, "is not what the manifest says was written: its digest differs")
    try:
        return _decode(from_text(data), rank, files)
    except (ValueError, TypeError, KeyError) as error:
        raise damaged(path, f"is not a sound index: {error}") from error


def _decode(body: Any, rank: int, files: RankFiles) -> Index:
    header = body["header"]
    if body["rank"] != rank or not is_count(header["bytes"]) or not isinstance(body["meta"], dict):
        raise ValueError(f"it is not the index of rank {rank}")
    entries = tuple(_entry(row, rank) for row in body["tensors"])
    if len(entries) != files.tensors:
        raise ValueError(f"it lists {len(entries)} tensors, and the manifest counts {files.tensors}")
    _check_places(entries, header["bytes"], files.data_bytes)
    return Index(
        rank=rank,
        header_bytes=header["bytes"],
        header_sha256=header["sha256"],
        entries=entries,
        meta=body["meta"],
    )


def _check_places(entries: Sequence[Entry], header_bytes: int, data_bytes: int) -> None:
    """Boxes follow each other without a gap from the header to the end, so that every byte has a digest."""
    if len({entry.name for entry in entries}) != len(entries):
        raise ValueError("it names a tensor twice")
    end = header_bytes
    for entry in entries:
        if entry.offset != end:
            raise ValueError(f"{entry.name} lies at byte {entry.offset:,}, not at {end:,}")
        end += entry.size_bytes
    if end != data_bytes:
        raise ValueError(f"its tensors end at byte {end:,} of {data_bytes:,}")


def _entry(row: Any, rank: int) -> Entry:
    shape, box = _ints(row["shape"]), Box(_ints(row["start"]), _ints(row["local"]))
    entry = Entry(
        name=row["name"],
        dtype=row["dtype"],
        shape=shape,
        box=box,
        rank=rank,
        offset=row["offset"],
        size_bytes=row["bytes"],
        sha256=row["sha256"],
    )
    if not isinstance(entry.name, str) or entry.dtype not in KINDS or not is_count(entry.offset):
        raise ValueError(f"{entry.name!r} has dtype {entry.dtype!r} and offset {entry.offset!r}")
    if not len(shape) == len(box.start) == len(box.size) <= MOST_DIMS or any(map(int.__gt__, box.end, shape)):
        raise ValueError(f"{entry.name}: the box {box} is not inside the shape {list(shape)}")
    if not box.volume or entry.size_bytes != prod(box.size) * KINDS[entry.dtype].size_bytes:
        raise ValueError(f"{entry.name}: {entry.size_bytes!r} bytes do not hold {list(box.size)} of {entry.dtype}")
    return entry


def _ints(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(map(is_count, values)):
        raise ValueError(f"{values!r} is not a list of whole numbers")
    return tuple(values)
