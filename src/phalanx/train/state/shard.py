"""The file of one rank: a safetensors file of the boxes it owns, hashed while it is written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from phalanx.errors import mistake
from phalanx.train.parallel.tensor_shard import TensorShard
from phalanx.train.state import paths as names
from phalanx.train.state.index import JSON, RESERVED, RankIndex, Row, StoredShard, header_of
from phalanx.train.state.paths import CHUNK_BYTES, WritableFile
from phalanx.train.state.shards import STORED_DTYPES, Region, dtype_name
from phalanx.train.state.storage import CheckpointDraft

MOST_UNHASHED = 4  # tensors written and not yet hashed


def owned_shards(pieces: Sequence[TensorShard]) -> list[TensorShard]:
    """The pieces this rank writes: those it owns that are not empty, widest elements first so that all are aligned."""
    mine = [piece for piece in pieces if piece.owner and piece.tensor.numel()]
    seen: set[str] = set()
    for piece in mine:
        _check_shard(piece, seen)
        seen.add(piece.name)
    return sorted(mine, key=lambda piece: (-piece.tensor.element_size(), piece.name))


def _check_shard(piece: TensorShard, seen: set[str]) -> None:
    kind, box = dtype_name(piece.tensor.dtype), region_of(piece)
    if kind not in STORED_DTYPES:
        raise mistake(
            piece.name, f"is {kind}, which a checkpoint cannot hold", fix=f"one of {', '.join(STORED_DTYPES)}"
        )
    if piece.name in seen or piece.name in ("", RESERVED):
        raise mistake(piece.name or "''", "names two pieces of one rank, or is no name", fix="one piece a tensor")
    if not len(piece.shape) == len(box.start) == len(box.size) or any(map(int.__gt__, box.end, piece.shape)):
        what = f"starts at {list(piece.start)} with {list(box.size)}, outside the whole {list(piece.shape)}"
        raise mistake(piece.name, what)


def region_of(piece: TensorShard) -> Region:
    """The box a piece holds."""
    return Region(tuple(piece.start), tuple(piece.tensor.shape))


def write_rank_file(
    draft: CheckpointDraft,
    rank: int,
    pieces: Sequence[TensorShard],
    meta: Mapping[str, JSON],
    go_on: Callable[[], None],
) -> RankIndex:
    """Write the tensors of a rank and flush them; returns the index. `go_on` is called now and then, and may raise."""
    mine = owned_shards(pieces)
    header = header_of(map(_row, mine))
    size_bytes = len(header) + sum(map(shard_bytes, mine))
    # The file is flushed while the last digests are still computed: the inner block ends first.
    with ThreadPoolExecutor(max_workers=1) as hasher:
        digests: list[Future[str]] = []
        with draft.create(names.data_name(rank), size_bytes) as writer:
            writer.write(memoryview(header))
            for piece in mine:
                data = tensor_bytes(piece.tensor)
                digests.append(hasher.submit(_hex_digest, data))
                _write(writer, data, go_on)
                _wait_until_few(digests)
    entries = tuple(_entries(mine, [digest.result() for digest in digests], rank, len(header)))
    header_sha256 = _hex_digest(memoryview(header))
    return RankIndex(rank=rank, header_bytes=len(header), header_sha256=header_sha256, entries=entries, meta=meta)


def _hex_digest(data: memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def _write(writer: WritableFile, data: memoryview, go_on: Callable[[], None]) -> None:
    for begin in range(0, len(data), CHUNK_BYTES):
        go_on()
        writer.write(data[begin : begin + CHUNK_BYTES])


def _wait_until_few(digests: Sequence[Future[str]]) -> None:
    """Hashing may lag behind, but not by the whole state: it may be a copy of what is on a GPU."""
    if len(digests) > MOST_UNHASHED:
        digests[-1 - MOST_UNHASHED].result()


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in row order, as the processor keeps them (little-endian); a copy only where it must be."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def shard_bytes(piece: TensorShard) -> int:
    """Bytes of the local tensor."""
    return piece.tensor.numel() * piece.tensor.element_size()


def _row(piece: TensorShard) -> Row:
    shape = tuple(piece.tensor.shape)
    return Row(name=piece.name, dtype=dtype_name(piece.tensor.dtype), shape=shape, size_bytes=shard_bytes(piece))


def _entries(pieces: Sequence[TensorShard], digests: Sequence[str], rank: int, offset: int) -> Iterator[StoredShard]:
    for piece, digest in zip(pieces, digests, strict=True):
        yield StoredShard(
            name=piece.name,
            dtype=dtype_name(piece.tensor.dtype),
            shape=tuple(piece.shape),
            box=region_of(piece),
            rank=rank,
            offset=offset,
            size_bytes=shard_bytes(piece),
            sha256=digest,
        )
        offset += shard_bytes(piece)
