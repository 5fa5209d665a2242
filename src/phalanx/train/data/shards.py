"""Writing tokens: a shard grows until it is closed, and is named with its digest only when it is safe on disk."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from phalanx.job.dataset import Shard, Split


class _Hashed:
    """A file that digests what is written to it."""

    def __init__(self, path: Path) -> None:
        self.stream: BinaryIO = path.open("wb")
        self.sha256 = hashlib.sha256()

    def write(self, data: bytes) -> None:
        self.stream.write(data)
        self.sha256.update(data)

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
        self._tokens = _Hashed(folder / f"{stem}.bin")
        self._index = _Hashed(folder / f"{stem}.idx")

    def write(self, documents: Sequence[tuple[list[int], int]], end_of_text: int) -> None:
        """Append documents (tokens, bytes of text), each followed by the end of text."""
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
        """Flush to the disk and say what was written."""
        return Shard(
            file=f"{self._stem}.bin",
            split=self.split,
            tokens=self.tokens,
            documents=self.documents,
            text_bytes=self.text_bytes,
            sha256=self._tokens.close(),
            index_sha256=self._index.close(),
        )

    def abandon(self) -> None:
        """Close the files after a failure; nobody names them."""
        for file in (self._tokens, self._index):
            with contextlib.suppress(OSError):  # a full disk refuses the last buffer too
                file.stream.close()
