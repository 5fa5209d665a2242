"""Writer of token shards: a shard grows until it is closed, and is named with its digest once it is safe on disk."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from phalanx.job.dataset import BLOCK_BYTES, Shard, Split, block_digest


class _Hashed:
    """A file that computes the digest of its content, and, if requested, of every block."""

    def __init__(self, path: Path, *, block_bytes: int = 0) -> None:
        self.stream: BinaryIO = path.open("wb")
        self.sha256 = hashlib.sha256()
        self._block_bytes, self._rest, self._blocks = block_bytes, b"", bytearray()

    def write(self, data: bytes) -> None:
        self.stream.write(data)
        self.sha256.update(data)
        if not self._block_bytes:
            return
        data = self._rest + data
        full_bytes = len(data) // self._block_bytes * self._block_bytes
        for begin in range(0, full_bytes, self._block_bytes):
            self._blocks += block_digest(data[begin : begin + self._block_bytes])
        self._rest = data[full_bytes:]

    def blocks(self) -> bytes:
        """Return the digests of all blocks; nothing may be written after this."""
        return bytes(self._blocks + (block_digest(self._rest) if self._rest else b""))

    def close(self) -> str:
        self.stream.flush()
        os.fsync(self.stream.fileno())
        self.stream.close()
        return self.sha256.hexdigest()


class ShardWriter:
    """One shard of one split of one source."""

    def __init__(self, folder: Path, stem: str, split: Split, dtype: str) -> None:
        self.split: Split = split
        self.tokens = self.documents = self.text_bytes = 0
        self._stem = stem
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._tokens = _Hashed(folder / f"{stem}.bin", block_bytes=BLOCK_BYTES)
        self._index = _Hashed(folder / f"{stem}.idx")
        self._blocks = _Hashed(folder / f"{stem}.blocks")

    def write(self, documents: Sequence[tuple[list[int], int]], end_of_text: int) -> None:
        """Append documents (tokens, bytes of text), each followed by the end-of-text token."""
        flat: list[int] = []
        ends = []
        for tokens, text_bytes in documents:
            flat += tokens
            flat.append(end_of_text)
            self.text_bytes += text_bytes
            ends += [self.tokens + len(flat), self.text_bytes]
        self._tokens.write(np.asarray(flat, dtype=self._dtype).tobytes())
        self._index.write(np.asarray(ends, dtype="<i8").tobytes())
        self.tokens += len(flat)
        self.documents += len(documents)

    def close(self) -> Shard:
        """Flush to disk, and return the description of the shard."""
        self._blocks.write(self._tokens.blocks())
        return Shard(
            file=f"{self._stem}.bin",
            split=self.split,
            tokens=self.tokens,
            documents=self.documents,
            text_bytes=self.text_bytes,
            sha256=self._tokens.close(),
            index_sha256=self._index.close(),
            blocks_sha256=self._blocks.close(),
        )

    def abandon(self) -> None:
        """Close the files after a failure; no manifest names them."""
        for file in (self._tokens, self._index, self._blocks):
            # A full disk refuses the last buffer too
            with contextlib.suppress(OSError):
                file.stream.close()
