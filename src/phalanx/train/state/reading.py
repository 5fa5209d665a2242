"""Reading the file of one rank: its bytes against the digests of its index, and boxes out of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

from phalanx.train.state import names
from phalanx.train.state.boxes import Box
from phalanx.train.state.damage import Damaged, damaged
from phalanx.train.state.dtypes import KINDS
from phalanx.train.state.header import Row, header_of
from phalanx.train.state.index import Entry, Index
from phalanx.train.state.storage import Folder
from phalanx.train.state.streams import CHUNK_BYTES, reason


class Shard:
    """The open tensors of one rank. Check an entry before you read from it."""

    def __init__(self, parts: Folder, index: Index) -> None:
        self._path = parts.place / names.data_name(index.rank)
        self._index = index
        try:
            self._file = parts.open(self._path.name)
        except OSError as error:
            raise self._unreadable(error) from error

    def check(self, entries: Iterable[Entry]) -> None:
        """Compare size, header and the given boxes with their digests; raises Damaged, naming the tensor."""
        end = sum(entry.size_bytes for entry in self._index.entries) + self._index.header_bytes
        if self._file.size_bytes != end:
            what = f"has {self._file.size_bytes:,} bytes instead of {end:,}"
            raise damaged(self._path, what, why="it was cut, or is another rank's file")
        self._check_header()
        for entry in entries:
            if self._digest(entry.offset, entry.size_bytes) != entry.sha256:
                what = f"holds another {entry.name} than was written: its digest differs"
                raise damaged(self._path, what, why="training would go on with wrong numbers")

    def _check_header(self) -> None:
        """Other readers believe the header, so it must say what the index says, byte for byte."""
        index = self._index
        header = header_of(
            Row(name=entry.name, dtype=entry.dtype, shape=entry.box.size, size_bytes=entry.size_bytes)
            for entry in index.entries
        )
        if index.header_bytes != len(header) or hashlib.sha256(header).hexdigest() != index.header_sha256:
            what = f"has a header of {index.header_bytes:,} bytes that is not the header of its tensors"
            raise damaged(self._path, what, why="other programs would read something else")
        if self._digest(0, index.header_bytes) != index.header_sha256:
            raise damaged(self._path, "has another header than was written: its digest differs")

    def read(self, entry: Entry, part: Box) -> torch.Tensor:
        """The elements of `part`, which lies inside the entry's box."""
        kind = KINDS[entry.dtype]
        rows = _rows(part, entry.box)  # only what is wanted along the first dimension is read
        row_bytes = entry.size_bytes // entry.box.size[0] if entry.box.size else entry.size_bytes
        data = torch.empty(len(rows) * row_bytes, dtype=torch.uint8)
        try:
            self._file.read_into(data.numpy().data, entry.offset + rows.start * row_bytes)
        except OSError as error:
            raise self._unreadable(error) from error
        values = data.view(kind.torch)
        if not entry.box.size:
            return values.reshape(())
        read = Box((entry.box.start[0] + rows.start, *entry.box.start[1:]), (len(rows), *entry.box.size[1:]))
        return values.view(read.size)[part.within(read)]

    def _digest(self, offset: int, size_bytes: int) -> str:
        digest, buffer = hashlib.sha256(), memoryview(bytearray(min(size_bytes, CHUNK_BYTES)))
        try:
            for begin in range(0, size_bytes, CHUNK_BYTES):
                chunk = buffer[: min(CHUNK_BYTES, size_bytes - begin)]
                self._file.read_into(chunk, offset + begin)
                digest.update(chunk)
        except OSError as error:
            raise self._unreadable(error) from error
        return digest.hexdigest()

    def _unreadable(self, error: OSError) -> Damaged:
        return damaged(self._path, f"cannot be read: {reason(error)}")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Shard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _rows(part: Box, box: Box) -> range:
    if not box.size:
        return range(1)
    return range(part.start[0] - box.start[0], part.start[0] - box.start[0] + part.size[0])
