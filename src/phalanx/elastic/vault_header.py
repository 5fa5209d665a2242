"""The first bytes of a segment: whose snapshot it holds, of which step, and where in it index and data lie."""

from __future__ import annotations

import struct
import zlib
from dataclasses import astuple, dataclass
from typing import Any

MAGIC = b"PHXVLT01"
DATA_AT = 4096  # one page for the header, so that tensors begin on a page
_FIELDS = struct.Struct("<8sQqqqqQQQQI")
_CRC = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CRC.size
BLANK = bytes(HEADER_BYTES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """A complete snapshot of one rank. `sequence` grows with every snapshot of a slot, whatever its step."""

    sequence: int
    epoch: int
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
        """Bytes a segment must have to hold all of this."""
        return self.index_at + self.index_bytes


def encode(header: Header) -> bytes:
    """The bytes of a header, with their own checksum at the end."""
    fields = _FIELDS.pack(MAGIC, *astuple(header))
    return fields + _CRC.pack(zlib.crc32(fields))


def decode(data: bytes) -> Header | None:
    """The header in these bytes; None when there is none, or only a part of one."""
    if len(data) != HEADER_BYTES or data[: len(MAGIC)] != MAGIC:
        return None
    if _CRC.unpack(data[_FIELDS.size :])[0] != zlib.crc32(data[: _FIELDS.size]):
        return None
    _, *values = _FIELDS.unpack(data[: _FIELDS.size])
    return _named(values)


def _named(values: list[Any]) -> Header:
    names = Header.__dataclass_fields__
    return Header(**dict(zip(names, values, strict=True)))
