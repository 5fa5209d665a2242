"""Writes a rank's flight record, its newest collectives, when its membership ends with an error.

It is written before anything is aborted, and quickly. torch records the newest collectives of every process group in
a ring buffer (TORCH_FR_BUFFER_SIZE), of gloo and of NCCL separately, and returns them as JSON. Kept are the entries
that show which rank waits for which: the newest few of each group, and all that have not ended.
record/account/incidents.py makes a sentence of all ranks' files.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from phalanx.elastic.failure import failure_of
from phalanx.io.files import replace_text
from phalanx.record.run import Run

# Entries of the ring buffer, for all groups; while one rank hangs the other ranks continue for a while.
RECORDED = 512
# torch reads the first variable, and the second if the first is not set (2.11 to 2.13).
BUFFER_NAMES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
# Entries per group and in all; few, since 16,000 ranks write one file each.
KEPT, MOST_KEPT = 8, 64
# Limit for the recorder, which calls the driver: the driver itself may hang.
PATIENCE_S = 0.5
_MESSAGE = re.compile(r"(send|recv)\D*(\d+)\s*(?:->|<-)\s*(\d+)")


class FlightRecord:
    """Writes the flight record of one rank in one membership, once."""

    def __init__(self, run: Run, *, rank: int, generation: int) -> None:
        self._run, self._rank, self._generation = run, rank, generation
        # The ring also holds entries of earlier memberships of this process.
        self._began_ns = time.time_ns()
        self._lock, self._is_begun = threading.Lock(), False

    def __call__(self) -> None:
        """Write the record, unless that was done; errors are ignored, and the caller waits at most half a second."""
        with self._lock:
            if self._is_begun:
                return
            self._is_begun = True
        # In a thread: torch asks the driver whether kernels have ended.
        writing = threading.Thread(target=self._write_record, name="flight-record", daemon=True)
        writing.start()
        writing.join(PATIENCE_S)

    def _write_record(self) -> None:
        with suppress(Exception):  # an error here must not keep the rank from leaving
            groups = group_table()
            recorded = recorded_entries()
            entries = trim_entries(
                [entry for entry in recorded if entry.get("time_created_ns", 0) >= self._began_ns], groups
            )
            if not entries:
                return
            path = self._run.flight(self._generation, self._rank)
            path.parent.mkdir(exist_ok=True)
            data = {"v": 1, "t": round(time.time(), 3), "rank": self._rank, "groups": groups, "entries": entries}
            replace_text(path, json.dumps(data) + "\n")


def recorded_entries() -> list[dict[str, Any]]:
    """Return torch's recorded entries, of NCCL and of gloo; read as JSON, never as pickle."""
    from torch._C import _distributed_c10d as c10d

    entries: list[dict[str, Any]] = []
    # The first exists only where torch has NCCL.
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(c10d, name, None)
        if dump is not None:
            with suppress(RuntimeError, ValueError, TypeError, KeyError):
                entries += json.loads(dump())["entries"]
    return entries


def group_table() -> dict[str, dict[str, Any]]:
    """Return the process groups of this rank by torch's name: their purpose and global ranks."""
    import torch.distributed as dist

    world = dist.distributed_c10d._world
    table = {}
    for group, name in list(world.pg_names.items()):
        label = str(getattr(group, "group_desc", "") or name).removeprefix("mesh_")
        ranks = sorted(world.pg_group_ranks.get(group, {}))
        table[str(name)] = {"label": {"default_pg": "world"}.get(label, label), "ranks": ranks}
    return table


def trim_entries(entries: Iterable[Mapping[str, Any]], groups: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries that are kept, in the form that record/account/incidents.py reads.

    `entries` are torch's, oldest first.
    """
    records: list[dict[str, Any]] = []
    for entry in entries:
        name = (entry.get("process_group") or ["", ""])[0]
        op = str(entry.get("profiling_name") or "?").partition(":")[2] or str(entry.get("profiling_name") or "?")
        message, is_message = _MESSAGE.search(op), bool(entry.get("is_p2p"))
        number = entry.get("p2p_seq_id" if is_message else "collective_seq_id")
        if not isinstance(number, int):
            continue
        record: dict[str, Any] = {
            "group": str(name),
            "op": message.group(1) if message else op,
            "number": number,
            "is_message": is_message,
            "is_done": entry.get("state") == "completed" or entry.get("retired") is True,
            "sizes": str(entry.get("input_sizes") or ""),
        }
        ranks = groups.get(str(name), {}).get("ranks") or []
        if message and int(message.group(3)) < len(ranks):
            record["peer"] = ranks[int(message.group(3))]
        records.append(record)
    newest: dict[tuple[str, bool], int] = {}
    kept_records = []
    for record in reversed(records):
        place = record["group"], record["is_message"]
        newest[place] = newest.get(place, 0) + 1
        if newest[place] <= KEPT or not record["is_done"]:
            kept_records.append(record)
    # The oldest unfinished entries are the most informative.
    waiting = [record for record in kept_records if not record["is_done"]][-MOST_KEPT:]
    done = [record for record in kept_records if record["is_done"]][: MOST_KEPT - len(waiting)]
    return [*reversed(done), *reversed(waiting)]


def is_lost_peer(error: BaseException) -> bool:
    """Return True if the error is only a consequence of the loss of another rank."""
    return isinstance(error, Exception) and failure_of(0, error, step=-1).is_consequence


def last_collective() -> str:
    """Return the last collective that this rank began, from torch's flight recorder; "" if none is recorded."""
    try:
        entries = recorded_entries()
    except (ImportError, AttributeError):
        return ""
    # NCCL's and gloo's are recorded apart.
    entries.sort(key=lambda entry: int(entry.get("time_created_ns") or 0))
    return _entry_name(entries[-1]) if entries else ""


def _entry_name(entry: dict[str, Any]) -> str:
    group, sizes = entry.get("process_group") or ["", ""], entry.get("input_sizes") or []
    number = entry.get("collective_seq_id") or entry.get("p2p_seq_id")
    return f"{entry.get('profiling_name', '?')} number {number} of group {group[-1] or group[0]}, sizes {sizes}"
