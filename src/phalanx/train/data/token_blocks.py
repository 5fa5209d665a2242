"""Shards of tokens, read block by block: what was compared with its digest is what is handed out.

A block is read into memory of our own, compared there, and kept while there is room; one that was let go is compared
again when it is read again. A memory map would not do: the kernel may drop a page that was compared and read another in
its place, and a file that is cut short ends the process.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import Problem, SystemFailure, UserError, mistake
from phalanx.io.files import FileTooLargeError, read_bounded
from phalanx.job.dataset import (
    BLOCK_BYTES,
    BLOCK_DIGEST_BYTES,
    REBUILD,
    DatasetManifest,
    Shard,
    add_blocks,
    block_digest,
    count_blocks,
)

MOST_FILES = 256  # shards open at once; each takes a file handle, and 1,024 is a usual limit
MOST_CACHE_BYTES = 1 << 25  # blocks kept by a rank: the corpus of a first run fits
MOST_READ_BYTES = 1 << 22  # read at once

RawTokens = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLimit:
    """The vocabulary that token numbers must fit."""

    vocab: int
    whose: str = "the model"


class _OpenShard:
    """One file of tokens and the digests of its blocks."""

    def __init__(self, folder: Path, shard: Shard, manifest: DatasetManifest) -> None:
        self.path = folder / shard.file
        self.size_bytes = shard.tokens * manifest.token_bytes
        self.block_bytes = manifest.block_bytes or BLOCK_BYTES
        self.digests = _read_digests(folder, shard, count_blocks(self.size_bytes, self.block_bytes))
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise _unreadable_file(self.path, error) from error
        weakref.finalize(self, os.close, self._descriptor)  # when nobody reads from it any more
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            raise mistake(str(self.path), "is not a file", fix=REBUILD)

    def read(self, first: int, count: int) -> bytes:
        """So many blocks, compared with their digests."""
        begin = first * self.block_bytes
        data = self._read_bytes(begin, min(count * self.block_bytes, self.size_bytes - begin))
        if self.digests:
            view = memoryview(data)
            for number in range(count):
                block = view[number * self.block_bytes : (number + 1) * self.block_bytes]
                at = (first + number) * BLOCK_DIGEST_BYTES
                if block_digest(block) != self.digests[at : at + BLOCK_DIGEST_BYTES]:
                    raise self._damaged_block(first + number, len(block))
        return data

    def _read_bytes(self, offset: int, size: int) -> bytes:
        parts = []
        while size:
            try:
                data = os.pread(self._descriptor, size, offset)
            except OSError as error:
                raise _unreadable_file(self.path, error) from error
            if not data:
                what = f"is truncated: it ends at byte {offset:,} of {self.size_bytes:,}"
                raise mistake(str(self.path), what, why="it was whole when training began", fix=REBUILD)
            parts.append(data)
            size, offset = size - len(data), offset + len(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _damaged_block(self, number: int, size: int) -> UserError:
        begin = number * self.block_bytes
        what = f"bytes {begin:,} to {begin + size - 1:,} are not what was written: their digest differs"
        why = "the model would learn from damaged tokens, and nothing else would tell"
        return mistake(str(self.path), what, why=why, fix=REBUILD)


def _read_digests(folder: Path, shard: Shard, blocks: int) -> bytes:
    """The digests of a shard's blocks, which the manifest vouches for; empty where the dataset has none."""
    if not shard.blocks_sha256:
        return b""
    path = folder / shard.block_file
    try:
        data = read_bounded(path, blocks * BLOCK_DIGEST_BYTES)
    except OSError as error:
        raise _unreadable_file(path, error) from error
    except FileTooLargeError:
        data = b""
    if hashlib.sha256(data).hexdigest() != shard.blocks_sha256 or len(data) != blocks * BLOCK_DIGEST_BYTES:
        what = "is not what was written: its digest differs from the one in the manifest"
        raise mistake(str(path), what, why="no block could be compared", fix=f"make it again: {add_blocks(folder)}")
    return data


def _unreadable_file(path: Path, error: OSError) -> SystemFailure:
    return SystemFailure(Problem(where=str(path), what=f"cannot be read: {error.strerror or error}"))


class BlockReader:
    """All shards of a dataset, numbered as they are added; threads may share it."""

    def __init__(self, *, limit: TokenLimit | None = None, most_cache_bytes: int = MOST_CACHE_BYTES) -> None:
        self._limit, self._room = limit, most_cache_bytes
        self._shards: list[tuple[Path, Shard, DatasetManifest]] = []
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()
        self._blocks: OrderedDict[tuple[int, int], RawTokens] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, folder: Path, shard: Shard, manifest: DatasetManifest) -> int:
        """A further shard, opened when it is first read; its number."""
        self._shards.append((folder, shard, manifest))
        return len(self._shards) - 1

    def read(self, file: int, start: int, out: NDArray[np.int64]) -> None:
        """Fill `out` with the tokens of a shard from `start` on; raises UserError for those that have changed."""
        manifest = self._shards[file][2]
        per_block = (manifest.block_bytes or BLOCK_BYTES) // manifest.token_bytes
        number, done, last = start // per_block, 0, (start + len(out) - 1) // per_block
        with self._lock:
            while done < len(out):
                block = self._blocks.get((file, number))
                if block is None:
                    self._load_blocks(file, number, last)
                    block = self._blocks[file, number]
                else:
                    self._blocks.move_to_end((file, number))
                begin = start + done - number * per_block
                part = block[begin : begin + len(out) - done]
                out[done : done + len(part)] = part
                done, number = done + len(part), number + 1

    def _load_blocks(self, file: int, first: int, last: int) -> None:
        """Read blocks from the first, which is missing, to the next that is not, or the last that is wanted."""
        found, manifest = self._open_shard(file), self._shards[file][2]
        most = max(1, MOST_READ_BYTES // found.block_bytes)
        count = 1
        while first + count <= last and count < most and (file, first + count) not in self._blocks:
            count += 1
        kind: np.dtype[np.unsignedinteger[Any]] = np.dtype(manifest.dtype).newbyteorder("<")
        data = np.frombuffer(found.read(first, count), dtype=kind)
        per_block = found.block_bytes // manifest.token_bytes
        self._check_numbers(found.path, data, first * per_block)
        for number in range(count):
            block = data[number * per_block : (number + 1) * per_block]
            # Copied: a block that stays must not keep all that was read with it.
            self._blocks[file, first + number] = block if count == 1 else block.copy()
        # Those just read are the youngest, and stay however little room there is.
        while len(self._blocks) > max(count, self._room // found.block_bytes):
            self._blocks.popitem(last=False)

    def _check_numbers(self, path: Path, data: RawTokens, start: int) -> None:
        """No token is beyond the vocabulary: split over tensor ranks, a row that no rank has is a row of zeros."""
        limit = self._limit
        if limit is None or limit.vocab > np.iinfo(data.dtype).max or int(data.max()) < limit.vocab:
            return
        place = int(np.argmax(data >= limit.vocab))
        raise mistake(
            str(path),
            f"token {start + place:,} is {int(data[place]):,}, and {limit.whose} has a vocabulary of {limit.vocab:,}",
            why="the embedding has no row for it",
            fix=f"compare the file with what was built ({add_blocks(path.parent)}); where it has changed, build it "
            f"again, else set model.vocab = {-(-(int(data.max()) + 1) // 64) * 64} or more",
        )

    def _open_shard(self, file: int) -> _OpenShard:
        found = self._open.pop(file, None) or _OpenShard(*self._shards[file])
        self._open[file] = found
        if len(self._open) > MOST_FILES:
            self._open.popitem(last=False)
        return found
