"""The safetensors header of a rank's file: written from its pieces, and compared with its index when it is read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from phalanx.train.state.dtypes import KINDS

RESERVED = "__metadata__"  # safetensors keeps this key for itself


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One tensor of the file: torch's name of its dtype, its local shape and its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


def header_of(rows: Iterable[Row]) -> bytes:
    """The one header of these tensors, in file order: eight bytes of length and a table, padded to eight."""
    table: dict[str, object] = {RESERVED: {"format": "pt"}}
    end = 0
    for row in rows:
        begin, end = end, end + row.size_bytes
        table[row.name] = {"dtype": KINDS[row.dtype].tag, "shape": list(row.shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
