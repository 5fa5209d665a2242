"""Writing one snapshot into a segment: the copy the training waits for, and the sealing it does not wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from phalanx.train.checkpoint.jsontext import JSON
from phalanx.train.checkpoint.shard import owned, raw
from phalanx.train.parallel.pieces import Piece
from phalanx.train.vault import contents as contents_text
from phalanx.train.vault.contents import Contents, checksum, lay_out, tensor_at
from phalanx.train.vault.header import Header
from phalanx.train.vault.segment import Segment

# Room for an index: names, shapes and numbers of a box take 150 to 250 bytes; the segment grows if it is not enough.
ENTRY_BYTES = 256


class Staging:
    """Pinned host memory for what comes from a GPU: the copy over the bus is then as fast as the bus."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, piece: Piece) -> torch.Tensor:
        """Start the copy of a piece; it is there after `finish`."""
        held = self._buffers.get(piece.name)
        if held is None or held.shape != piece.tensor.shape or held.dtype != piece.tensor.dtype:
            held = torch.empty(piece.tensor.shape, dtype=piece.tensor.dtype, pin_memory=piece.tensor.is_cuda)
            self._buffers[piece.name] = held
        held.copy_(piece.tensor.detach(), non_blocking=True)
        return held

    @staticmethod
    def finish(pieces: Sequence[Piece]) -> None:
        """Wait for the copies."""
        for device in {piece.tensor.device for piece in pieces if piece.tensor.is_cuda}:
            torch.cuda.synchronize(device)


def is_staged(piece: Piece) -> bool:
    """Whether a piece is not in host memory, so that its copy goes through pinned memory."""
    return piece.tensor.device.type != "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A snapshot whose values are taken and which does not count yet."""

    segment: Segment
    contents: Contents
    staged: tuple[tuple[int, torch.Tensor], ...]  # entries whose bytes still wait in pinned memory


@torch.no_grad()
def take(
    segment: Segment,
    pieces: Sequence[Piece],
    *,
    rank: int,
    meta: Mapping[str, JSON],
    rank_meta: Mapping[str, JSON],
    staging: Staging,
) -> Draft:
    """Copy what this rank owns of `pieces`; what the segment held before is gone from the first byte on."""
    mine = owned(pieces)
    contents = lay_out(mine, rank, meta, rank_meta)
    segment.wipe()
    view = segment.reserve(contents.end + ENTRY_BYTES * (len(mine) + 4))
    staged = []
    for place, (piece, entry) in enumerate(zip(mine, contents.entries, strict=True)):
        if is_staged(piece):
            staged.append((place, staging.take(piece)))
        else:
            tensor_at(view, entry).copy_(piece.tensor.detach())
    staging.finish(mine)
    return Draft(segment=segment, contents=contents, staged=tuple(staged))


def seal(draft: Draft, *, sequence: int, rank: int, world: int, epoch: int, step: int) -> Header:
    """Sum everything up, write the index and then the header; from then on the snapshot counts."""
    segment, view = draft.segment, draft.segment.view()
    for place, tensor in draft.staged:
        entry = draft.contents.entries[place]
        # numpy lets other threads run meanwhile; torch would start a second team of threads for this one.
        np.copyto(np.frombuffer(view, np.uint8, entry.size_bytes, entry.offset), np.frombuffer(raw(tensor), np.uint8))
    contents = draft.contents.summed(view)
    text = contents_text.encode(contents)
    view = segment.reserve(contents.end + len(text))
    view[contents.end : contents.end + len(text)] = text
    header = Header(
        sequence=sequence,
        epoch=epoch,
        step=step,
        rank=rank,
        world=world,
        tensors=len(contents.entries),
        data_bytes=sum(entry.size_bytes for entry in contents.entries),
        index_at=contents.end,
        index_bytes=len(text),
        index_crc32=int(checksum(memoryview(text)), 16),
    )
    segment.seal(header)
    return header
