"""Read a W&B offline file back: LevelDB's log format, and W&B's own protobuf inside. Run as a program: prints JSON.

A process of its own, since importing W&B warns, and warnings are failures here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

BLOCK, HEADER, FULL, LAST = 32 * 1024, 7, 1, 4


def records(data: bytes) -> Iterator[bytes]:
    """Whole records, put together from their parts; the first seven bytes are W&B's own."""
    at, parts = 7, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:  # no header fits: the rest of the block is filled with zeros
            at += BLOCK - at % BLOCK
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + HEADER : at + HEADER + size]
        at += HEADER + size
        if kind in (FULL, LAST):
            yield parts
            parts = b""


if __name__ == "__main__":
    from wandb.proto.wandb_internal_pb2 import Record

    rows = []
    for raw in records(Path(sys.argv[1]).read_bytes()):
        record = Record.FromString(raw)
        if record.WhichOneof("record_type") == "history":
            rows.append(
                {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            )
    print(json.dumps(rows))
