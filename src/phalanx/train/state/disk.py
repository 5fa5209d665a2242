"""Files of a checkpoint on a POSIX disk: written once and flushed, read with a bound, never through a link."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from pathlib import Path
from types import TracebackType

from phalanx.train.state.streams import CHUNK_BYTES

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


class Writer:
    """A new file, written from start to end; it is on the disk when the `with` block ends, and not before."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self.size_bytes = 0

    def write(self, data: memoryview) -> None:
        """Append all of `data`; raises OSError when the disk is full."""
        while data:
            written = os.write(self._descriptor, data[:CHUNK_BYTES])
            self._push(written)
            data = data[written:]

    def _push(self, written: int) -> None:
        """Have the kernel start on full chunks now, not at fsync: DONTNEED begins the write-back of dirty pages."""
        begin = self.size_bytes // CHUNK_BYTES * CHUNK_BYTES
        self.size_bytes += written
        end = self.size_bytes // CHUNK_BYTES * CHUNK_BYTES
        if end > begin:
            os.posix_fadvise(self._descriptor, begin, end - begin, os.POSIX_FADV_DONTNEED)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if kind is None:
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


def write_file(path: Path, data: bytes) -> None:
    """A small new file, on the disk when this returns."""
    with Writer(path) as writer:
        writer.write(memoryview(data))


def publish(path: Path, data: bytes) -> None:
    """A small file that a waiting reader sees whole or not at all. Not flushed: it is for the living only."""
    hidden = path.with_name(f".{path.name}")
    hidden.write_bytes(data)
    hidden.replace(path)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def exchange(one: Path, other: Path) -> bool:
    """Swap two names in one moment (Linux 3.15); False where the file system or the C library cannot."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code))


class Reader:
    """A plain file open for reading at any offset. Not a memory map: a failing disk must be an error, not a SIGBUS."""

    def __init__(self, path: Path) -> None:
        # O_NONBLOCK: opening a pipe somebody left here must not hang; it has no effect on plain files.
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode):
            os.close(self._descriptor)
            raise OSError(None, "it is not a plain file")
        self.size_bytes = found.st_size

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` with the bytes from `offset` on; raises OSError where the file ends early."""
        while buffer:
            count = os.preadv(self._descriptor, [buffer[:CHUNK_BYTES]], offset)
            if not count:
                raise OSError(None, f"it ends at byte {offset:,}")
            buffer, offset = buffer[count:], offset + count

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._descriptor)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
