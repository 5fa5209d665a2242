"""Reader of token shards, block by block, which returns only data that matches its digest.

A block is read into this process's memory, compared there, and cached while there is room; an evicted block is
compared again when it is read again. A memory map is unsuitable: the kernel may drop a page that was compared and
read another in its place, and a truncated file ends the process.
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

# Shards open at once; each takes a file descriptor, and 1,024 is a usual limit
MOST_FILES = 256
# Blocks cached by a rank: the corpus of a first run fits
MOST_CACHE_BYTES = 1 << 25
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
            # O_NONBLOCK: opening a pipe at this path must not hang; it has no effect on regular files.
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise _unreadable_file(self.path, error) from error
        # Once no reader refers to it
        weakref.finalize(self, os.close, self._descriptor)
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            raise mistake(str(self.path), "is not a file", fix=REBUILD)

    def read(self, first: int, count: int) -> bytes:
        """Read `count` blocks and compare them with their digests; raise UserError for a damaged one."""
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
        chunks = []
        while size:
            try:
                data = os.pread(self._descriptor, size, offset)
            except OSError as error:
                raise _unreadable_file(self.path, error) from error
            if not data:
                problem = f"is truncated: it ends at byte {offset:,} of {self.size_bytes:,}"
                raise mistake(str(self.path), problem, why="it was whole when training began", fix=REBUILD)
            chunks.append(data)
            size, offset = size - len(data), offset + len(data)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _damaged_block(self, number: int, size: int) -> UserError:
        begin = number * self.block_bytes
        problem = f"bytes {begin:,} to {begin + size - 1:,} are not what was written: their digest differs"
        reason = "the model would learn from damaged tokens, and nothing else would tell"
        return mistake(str(self.path), problem, why=reason, fix=REBUILD)


def _read_digests(folder: Path, shard: Shard, blocks: int) -> bytes:
    """Read the digests of a shard's blocks, checked against the manifest; empty if the dataset has none."""
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
        problem = "is not what was written: its digest differs from the one in the manifest"
        raise mistake(str(path), problem, why="no block could be compared", fix=f"make it again: {add_blocks(folder)}")
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
        """Add a shard, which is opened when it is first read; return its number."""
        self._shards.append((folder, shard, manifest))
        return len(self._shards) - 1

    def read(self, file: int, start: int, out: NDArray[np.int64]) -> None:
        """Fill `out` with a shard's tokens from index `start`; raise UserError if they have changed."""
        manifest = self._shards[file][2]
        per_block = (manifest.block_bytes or BLOCK_BYTES) // manifest.token_bytes
        number, num_done, last = start // per_block, 0, (start + len(out) - 1) // per_block
        with self._lock:
            while num_done < len(out):
                block = self._blocks.get((file, number))
                if block is None:
                    self._load_blocks(file, number, last)
                    block = self._blocks[file, number]
                else:
                    self._blocks.move_to_end((file, number))
                begin = start + num_done - number * per_block
                tokens = block[begin : begin + len(out) - num_done]
                out[num_done : num_done + len(tokens)] = tokens
                num_done, number = num_done + len(tokens), number + 1

    def _load_blocks(self, file: int, first: int, last: int) -> None:
        """Read blocks from `first`, which is not cached, up to the next cached one or `last`."""
        shard, manifest = self._open_shard(file), self._shards[file][2]
        max_count = max(1, MOST_READ_BYTES // shard.block_bytes)
        count = 1
        while first + count <= last and count < max_count and (file, first + count) not in self._blocks:
            count += 1
        dtype: np.dtype[np.unsignedinteger[Any]] = np.dtype(manifest.dtype).newbyteorder("<")
        data = np.frombuffer(shard.read(first, count), dtype=dtype)
        per_block = shard.block_bytes // manifest.token_bytes
        self._check_numbers(shard.path, data, first * per_block)
        for number in range(count):
            block = data[number * per_block : (number + 1) * per_block]
            # Copied, because a view would keep everything that was read together.
            self._blocks[file, first + number] = block if count == 1 else block.copy()
        # The blocks just read are the newest, and stay even if there is no room.
        while len(self._blocks) > max(count, self._room // shard.block_bytes):
            self._blocks.popitem(last=False)

    def _check_numbers(self, path: Path, data: RawTokens, start: int) -> None:
        """Raise UserError for a token beyond the vocabulary: tensor ranks would all embed it as zeros."""
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
        shard = self._open.pop(file, None) or _OpenShard(*self._shards[file])
        self._open[file] = shard
        if len(self._open) > MOST_FILES:
            self._open.popitem(last=False)
        return shard
