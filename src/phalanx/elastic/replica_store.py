"""The in-memory checkpoints of one host: the memory that holds them, and which of it may be overwritten next.

A segment is anonymous memory behind a descriptor, with a snapshot of one rank in it or none:

    header | tensors | index        the header is wiped first and written last, so half a snapshot is none

The agent makes segments before it forks, and every rank inherits them: a rank that dies leaves its segment readable.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import tempfile
import threading
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path

from phalanx.elastic.restore_point import KINDS, Kind, ReplicaInfo
from phalanx.errors import Problem, SystemFailure

MAGIC = b"PHXVLT01"
# One page for the header, so that tensors begin on a page.
DATA_AT = 4096
_FIELDS = struct.Struct("<8sQqqqqQQQQI")
_CRC = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CRC.size
BLANK = bytes(HEADER_BYTES)


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentHeader:
    """The header of a complete snapshot of one rank.

    `sequence` grows with every snapshot of a slot, whatever its step.
    """

    sequence: int
    generation: int
    step: int
    rank: int
    world: int
    tensors: int
    data_bytes: int
    index_at: int
    index_bytes: int
    index_crc32: int

    @property
    def end(self) -> int:
        """The bytes that a segment must have to hold all of this."""
        return self.index_at + self.index_bytes


def encode_header(header: SegmentHeader) -> bytes:
    """Encode a header, with its own checksum at the end."""
    fields = _FIELDS.pack(MAGIC, *astuple(header))
    return fields + _CRC.pack(zlib.crc32(fields))


def decode_header(data: bytes) -> SegmentHeader | None:
    """Decode a header; None when there is none, or only a part of one."""
    if len(data) != HEADER_BYTES or data[: len(MAGIC)] != MAGIC:
        return None
    if _CRC.unpack(data[_FIELDS.size :])[0] != zlib.crc32(data[: _FIELDS.size]):
        return None
    _, *values = _FIELDS.unpack(data[: _FIELDS.size])
    names = SegmentHeader.__dataclass_fields__
    return SegmentHeader(**dict(zip(names, values, strict=True)))


# Files in this folder are memory, on a Linux without memfd.
SHARED_MEMORY = Path("/dev/shm")


class MemorySegment:
    """One buffer of one slot. It grows and never shrinks, so a reader's mapping stays valid."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._descriptor = _anonymous(name)
        self._claim = threading.Lock()
        self._map: mmap.mmap | None = None
        # Memory that a GPU may write to directly; the reference keeps it mapped.
        self.pinned: memoryview | None = None

    def header(self) -> SegmentHeader | None:
        """Return the header of a complete snapshot; None where there is none."""
        header = decode_header(os.pread(self._descriptor, HEADER_BYTES, 0))
        return header if header is not None and header.end <= self.size_bytes else None

    @property
    def size_bytes(self) -> int:
        """The memory it holds, used or not."""
        return os.fstat(self._descriptor).st_size

    def wipe(self) -> None:
        """Invalidate the snapshot: from now on the segment holds none."""
        if self.size_bytes:
            os.pwrite(self._descriptor, BLANK, 0)

    def seal(self, header: SegmentHeader) -> None:
        """Write the header, after everything else: from now on the segment holds a snapshot."""
        os.pwrite(self._descriptor, encode_header(header), 0)

    def reserve(self, size_bytes: int) -> memoryview:
        """Return its bytes, at least `size_bytes` of them; raises SystemFailure where there is not that much memory."""
        if self.size_bytes < size_bytes:
            try:
                # Not ftruncate: pages that cannot be allocated are an error here, and a SIGBUS when they are first
                # touched.
                os.posix_fallocate(self._descriptor, 0, size_bytes)
            except OSError as error:
                raise SystemFailure(_no_memory(size_bytes, error)) from error
        return self.view()

    def view(self) -> memoryview:
        """Return all of its bytes.

        The mapping is reused: faulting pages in again costs more than the copy into them.
        """
        size_bytes = self.size_bytes
        if self._map is None or len(self._map) < size_bytes:
            self._map = mmap.mmap(self._descriptor, size_bytes)
        return memoryview(self._map)

    @contextmanager
    def claimed(self) -> Iterator[bool]:
        """A context whose value is True when this thread of this process may write to the segment now.

        For segments that several threads or processes could write to.
        """
        is_claimed = self._claim.acquire(blocking=False)
        try:
            yield is_claimed and self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            if is_claimed:
                self._lock(fcntl.LOCK_UN)
                self._claim.release()

    def _lock(self, how: int) -> bool:
        # A record lock: unlike flock's it belongs to the process and not to the descriptor that all of them share.
        with suppress(OSError):
            fcntl.lockf(self._descriptor, how)
            return True
        return False

    def close(self) -> None:
        """Close the descriptor; mappings in use stay valid."""
        self._map = None
        os.close(self._descriptor)


def _anonymous(name: str) -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(f"phalanx-{name}", os.MFD_CLOEXEC)
    folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    # Mode 0600, and removed from the folder at once.
    descriptor, path = tempfile.mkstemp(prefix="phalanx-", dir=folder)
    os.unlink(path)
    return descriptor


def _no_memory(size_bytes: int, error: OSError) -> Problem:
    return Problem(
        where="checkpoint.memory_every",
        what=f"no {size_bytes:,} bytes of host memory for a copy of the state: {error.strerror or error}",
        why="a rank that fails is restored from copies of the last steps; checkpoints on disk are written from one",
        fix="memory_every = 0 for checkpoints on disk alone (one copy instead of three), or fewer ranks on this host",
    )


# The newest step that every rank has, one that some have, one being written: docs/in-memory-checkpoints.md,
# "Memory".
BUFFERS = 3


class ReplicaStore:
    """All segments of a host, made by the agent before it forks; its ranks inherit them.

    Empty segments cost a descriptor and no memory. `guests` is the number of ranks of another host that may have a
    replica here: the most slots that any host of the job has.
    """

    def __init__(self, slots: int, guests: int | None = None) -> None:
        self.slots = slots
        self.guests = slots if guests is None else guests
        places = {"own": range(slots), "guest": range(self.guests)}
        self._segments = {
            (kind, slot, buffer): MemorySegment(f"{kind}-{slot}-{buffer}")
            for kind in KINDS
            for slot in places[kind]
            for buffer in range(BUFFERS)
        }

    def segment(self, kind: Kind, slot: int, buffer: int) -> MemorySegment:
        """Return one segment; raises KeyError when there is no such slot."""
        return self._segments[kind, slot, buffer]

    def buffers(self, kind: Kind, slot: int) -> tuple[MemorySegment, ...]:
        """Return all buffers of a slot; raises KeyError when there is no such slot."""
        return tuple(self.segment(kind, slot, buffer) for buffer in range(BUFFERS))

    def held(self) -> list[ReplicaInfo]:
        """Return every complete snapshot, from headers alone: 10 µs each, however large they are."""
        return list(self._held())

    def _held(self) -> Iterator[ReplicaInfo]:
        for (kind, slot, buffer), segment in self._segments.items():
            header = segment.header()
            if header is not None:
                yield ReplicaInfo(
                    rank=header.rank,
                    world=header.world,
                    generation=header.generation,
                    step=header.step,
                    slot=slot,
                    kind=kind,
                    buffer=buffer,
                    tensors=header.tensors,
                    size_bytes=header.data_bytes,
                )

    def close(self) -> None:
        """Release all memory, once no process has it mapped."""
        for segment in self._segments.values():
            segment.close()


# The buffer of a slot that the next snapshot may overwrite. A snapshot is needed while the newest step that every
# rank has may be that one, or lie before it. A rank learns that step, the held one, only with the numbers of the
# next step; until then it must keep what it has.


@dataclass(frozen=True, kw_only=True, slots=True)
class NeededReplicas:
    """The snapshots that must stay: of this generation, and the (generation, step) it was restored from.

    Of both only those from step `held` on stay: the newest step of this generation that all ranks hold, -1 while there
    is none.
    """

    generation: int
    restored: tuple[int, int] | None
    held: int

    def keeps(self, header: SegmentHeader) -> bool:
        """True when the snapshot with this header must stay."""
        is_in_use = header.generation == self.generation or (header.generation, header.step) == self.restored
        return is_in_use and header.step >= self.held


def next_free_buffer(
    segments: Sequence[MemorySegment], needs: NeededReplicas, *, busy: Collection[int] = ()
) -> int | None:
    """Return the buffer to overwrite; None when all of them are needed. Those in `busy` are being written."""
    headers = [segment.header() for segment in segments]
    free = [
        place
        for place, header in enumerate(headers)
        if place not in busy and (header is None or not needs.keeps(header))
    ]

    def order(place: int) -> tuple[int, int, int]:
        """Order by size, so that a third buffer takes memory only when two are not enough; then the oldest first."""
        header = headers[place]
        return segments[place].size_bytes, -(header.sequence if header is not None else 0), -place

    return max(free, key=order, default=None)


def next_sequence_number(segments: Sequence[MemorySegment]) -> int:
    """Return a number above those of all snapshots in a slot."""
    return max((header.sequence for segment in segments if (header := segment.header()) is not None), default=0) + 1
