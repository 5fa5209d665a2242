"""Writing one snapshot into a segment: the copy the training waits for, and the sealing it does not wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch

from phalanx.elastic.replica_store import MemorySegment, SegmentHeader
from phalanx.train.parallel.tensor_shard import TensorShard
from phalanx.train.state import snapshot as contents_text
from phalanx.train.state.index import JSON
from phalanx.train.state.shards import owned_shards
from phalanx.train.state.snapshot import SnapshotIndex, crc32_text, lay_out_snapshot, tensor_in_segment

# Room for an index: names, shapes and numbers of a box take 150 to 250 bytes; the segment grows if it is not enough.
ENTRY_BYTES = 256
MOST_SUMMERS = 4  # threads that sum a snapshot up; a rank on a CPU has one, and shares it with the training


def pin_segment(segment: MemorySegment, view: memoryview) -> None:
    """Pin a segment's memory, so that a GPU's copy into it is as fast as the bus; kept as long as the process lives.

    Memory that cannot be pinned is written to all the same, only slower.
    """
    if segment.pinned is not None and len(segment.pinned) >= len(view):
        return
    segment.pinned = view
    address = np.frombuffer(view, np.uint8).ctypes.data
    if torch.cuda.cudart().cudaHostRegister(address, len(view), 0):
        with suppress(RuntimeError):  # the failure would be told again, by the next kernel that is launched
            torch.zeros(1, device="cuda")


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotDraft:
    """A snapshot whose values are taken and which does not count yet."""

    segment: MemorySegment
    contents: SnapshotIndex


@torch.no_grad()
def take_snapshot(
    segment: MemorySegment,
    pieces: Sequence[TensorShard],
    *,
    rank: int,
    meta: Mapping[str, JSON],
    rank_meta: Mapping[str, JSON],
) -> SnapshotDraft:
    """Copy what this rank owns of `pieces`; what the segment held before is gone from the first byte on."""
    mine = owned_shards(pieces)
    contents = lay_out_snapshot(mine, rank, meta, rank_meta)
    segment.wipe()
    view = segment.reserve(contents.end + ENTRY_BYTES * (len(mine) + 4))
    devices = {piece.tensor.device for piece in mine if piece.tensor.is_cuda}
    if devices:
        pin_segment(segment, view)
    for piece, entry in zip(mine, contents.entries, strict=True):
        tensor_in_segment(view, entry).copy_(piece.tensor.detach(), non_blocking=piece.tensor.is_cuda)
    for device in devices:
        torch.cuda.synchronize(device)
    return SnapshotDraft(segment=segment, contents=contents)


def seal_snapshot(
    draft: SnapshotDraft, *, sequence: int, rank: int, world: int, epoch: int, step: int
) -> SegmentHeader:
    """Sum everything up, write the index and then the header; from then on the snapshot counts."""
    segment, view = draft.segment, draft.segment.view()
    contents = draft.contents.summed(view, threads=min(MOST_SUMMERS, torch.get_num_threads()))
    text = contents_text.encode_snapshot_index(contents)
    view = segment.reserve(contents.end + len(text))
    view[contents.end : contents.end + len(text)] = text
    header = SegmentHeader(
        sequence=sequence,
        epoch=epoch,
        step=step,
        rank=rank,
        world=world,
        tensors=len(contents.entries),
        data_bytes=sum(entry.size_bytes for entry in contents.entries),
        index_at=contents.end,
        index_bytes=len(text),
        index_crc32=int(crc32_text(memoryview(text)), 16),
    )
    segment.seal(header)
    return header
