"""Files as a checkpoint sees them, wherever they lie. Whatever fails is an OSError."""

from __future__ import annotations

from typing import Protocol

# 32 MiB: long enough that the cost of a call vanishes, short enough that hashing and writing overlap.
CHUNK_BYTES = 2**25


class Reading(Protocol):
    """A file open for reading at any offset, by several threads."""

    size_bytes: int

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` with the bytes from `offset` on."""

    def close(self) -> None:
        """Give it back."""


class Writing(Protocol):
    """A new file, written from start to end: safe when its `with` block ends, not there when that ends in an error."""

    def write(self, data: memoryview) -> None:
        """Append all of `data`."""


def read_whole(file: Reading, *, most_bytes: int) -> bytes:
    """All of a small file, which is then closed; raises OSError when it is larger than it can honestly be."""
    try:
        if file.size_bytes > most_bytes:
            raise OSError(None, f"it has {file.size_bytes:,} bytes, more than the {most_bytes:,} such a file may have")
        data = bytearray(file.size_bytes)
        file.read_into(memoryview(data), 0)
        return bytes(data)
    finally:
        file.close()


def reason(error: OSError) -> str:
    """The plain words of an operating system's error."""
    return error.strerror or str(error)
