"""A segment: anonymous memory behind a descriptor, with a snapshot in it or none.

    header | tensors | index        the header is wiped first and written last, so half a snapshot is none

The agent makes segments before it forks, and every rank inherits them: a rank that dies leaves its segment readable.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from phalanx.elastic import vault_header as header_bytes
from phalanx.elastic.vault_header import BLANK, HEADER_BYTES, Header
from phalanx.errors import Problem, SystemFailure

SHARED_MEMORY = Path("/dev/shm")  # where files are memory, on a Linux without memfd


class Segment:
    """One generation of one slot. It grows and never shrinks: a reader's mapping stays good."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._descriptor = _anonymous(name)
        self._claim = threading.Lock()
        self._map: mmap.mmap | None = None
        self.pinned: memoryview | None = None  # what a GPU may write to directly; held, so that it stays mapped

    def header(self) -> Header | None:
        """What a complete snapshot says of itself; None where there is none."""
        found = header_bytes.decode(os.pread(self._descriptor, HEADER_BYTES, 0))
        return found if found is not None and found.end <= self.size_bytes else None

    @property
    def size_bytes(self) -> int:
        """Memory it holds, used or not."""
        return os.fstat(self._descriptor).st_size

    def wipe(self) -> None:
        """From now on it holds nothing."""
        if self.size_bytes:
            os.pwrite(self._descriptor, BLANK, 0)

    def seal(self, header: Header) -> None:
        """Everything else is written: from now on it holds a snapshot."""
        os.pwrite(self._descriptor, header_bytes.encode(header), 0)

    def reserve(self, size_bytes: int) -> memoryview:
        """Its bytes, at least `size_bytes` of them; raises SystemFailure where there is not that much memory."""
        if self.size_bytes < size_bytes:
            try:
                # Not ftruncate: pages that cannot be had are an error here, and a SIGBUS when they are first touched.
                os.posix_fallocate(self._descriptor, 0, size_bytes)
            except OSError as error:
                raise SystemFailure(_no_memory(size_bytes, error)) from error
        return self.view()

    def view(self) -> memoryview:
        """All of its bytes. The mapping is kept: faulting pages in again costs more than the copy into them."""
        size_bytes = self.size_bytes
        if self._map is None or len(self._map) < size_bytes:
            self._map = mmap.mmap(self._descriptor, size_bytes)
        return memoryview(self._map)

    @contextmanager
    def claimed(self) -> Iterator[bool]:
        """Whether this thread of this process may write to it now; for segments more than one could write to."""
        mine = self._claim.acquire(blocking=False)
        try:
            yield mine and self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            if mine:
                self._lock(fcntl.LOCK_UN)
                self._claim.release()

    def _lock(self, how: int) -> bool:
        # A record lock: unlike flock's it belongs to the process and not to the descriptor that all of them share.
        with suppress(OSError):
            fcntl.lockf(self._descriptor, how)
            return True
        return False

    def close(self) -> None:
        """Give the descriptor back; mappings in use stay good."""
        self._map = None
        os.close(self._descriptor)


def _anonymous(name: str) -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(f"phalanx-{name}", os.MFD_CLOEXEC)
    folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    descriptor, path = tempfile.mkstemp(prefix="phalanx-", dir=folder)  # mode 0600, and gone from the folder at once
    os.unlink(path)
    return descriptor


def _no_memory(size_bytes: int, error: OSError) -> Problem:
    return Problem(
        where="checkpoint.memory_every",
        what=f"no {size_bytes:,} bytes of host memory for a snapshot: {error.strerror or error}",
        why="a rank that falls is restored from it without losing a step",
        fix="memory_every = 0 for checkpoints on disk alone, or fewer ranks on this host",
    )
