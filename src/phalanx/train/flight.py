"""A rank's flight recorder, written down when its membership ends badly: before anything is aborted, and quickly.

torch records the newest collectives of every process group in a ring (TORCH_FR_BUFFER_SIZE), of gloo and of NCCL
apart, and gives them out as JSON. Kept is what tells who waits for whom: per group the newest few, and all that have
not ended. record/account/incidents.py makes a sentence of all ranks' files.
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

RECORDED = 512  # collectives in the ring: several groups, and the others go on for a while when one rank hangs
# torch reads the first name, and the second where there is none (2.11 to 2.13).
BUFFER_NAMES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
KEPT, MOST_KEPT = 8, 64  # entries of a group; in all: 16,000 ranks write one file each
PATIENCE_S = 0.5  # for the recorder: the driver may be what hangs
_MESSAGE = re.compile(r"(send|recv)\D*(\d+)\s*(?:->|<-)\s*(\d+)")


class FlightRecord:
    """Writes the recorder of one rank in one membership down, once."""

    def __init__(self, run: Run, *, rank: int, generation: int) -> None:
        self._run, self._rank, self._generation = run, rank, generation
        self._began_ns = time.time_ns()  # the ring also holds what this process did in memberships before
        self._lock, self._is_begun = threading.Lock(), False

    def __call__(self) -> None:
        """Write it, unless that was done; whatever goes wrong, nobody waits longer than half a second."""
        with self._lock:
            if self._is_begun:
                return
            self._is_begun = True
        # In a thread: torch asks the driver whether kernels have ended.
        writing = threading.Thread(target=self._write_record, name="flight-record", daemon=True)
        writing.start()
        writing.join(PATIENCE_S)

    def _write_record(self) -> None:
        with suppress(Exception):  # a rank that leaves is not to fail at telling why
            groups = group_table()
            recorded = recorded_entries()
            entries = trim_entries([one for one in recorded if one.get("time_created_ns", 0) >= self._began_ns], groups)
            if not entries:
                return
            path = self._run.flight(self._generation, self._rank)
            path.parent.mkdir(exist_ok=True)
            data = {"v": 1, "t": round(time.time(), 3), "rank": self._rank, "groups": groups, "entries": entries}
            replace_text(path, json.dumps(data) + "\n")


def recorded_entries() -> list[dict[str, Any]]:
    """What torch recorded, of NCCL and of gloo; never its pickled form."""
    from torch._C import _distributed_c10d as c10d

    found: list[dict[str, Any]] = []
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):  # the first only where torch has NCCL
        dump = getattr(c10d, name, None)
        if dump is not None:
            with suppress(RuntimeError, ValueError, TypeError, KeyError):
                found += json.loads(dump())["entries"]
    return found


def group_table() -> dict[str, dict[str, Any]]:
    """The process groups of this rank by torch's name: what they are for, and their global ranks."""
    import torch.distributed as dist

    world = dist.distributed_c10d._world
    found = {}
    for group, name in list(world.pg_names.items()):
        label = str(getattr(group, "group_desc", "") or name).removeprefix("mesh_")
        ranks = sorted(world.pg_group_ranks.get(group, {}))
        found[str(name)] = {"label": {"default_pg": "world"}.get(label, label), "ranks": ranks}
    return found


def trim_entries(entries: Iterable[Mapping[str, Any]], groups: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of torch's entries, oldest first, those that are kept, in the form of record/account/incidents.py."""
    found: list[dict[str, Any]] = []
    for entry in entries:
        name = (entry.get("process_group") or ["", ""])[0]
        op = str(entry.get("profiling_name") or "?").partition(":")[2] or str(entry.get("profiling_name") or "?")
        message, is_message = _MESSAGE.search(op), bool(entry.get("is_p2p"))
        number = entry.get("p2p_seq_id" if is_message else "collective_seq_id")
        if not isinstance(number, int):
            continue
        one: dict[str, Any] = {
            "group": str(name),
            "op": message.group(1) if message else op,
            "number": number,
            "is_message": is_message,
            "is_done": entry.get("state") == "completed" or entry.get("retired") is True,
            "sizes": str(entry.get("input_sizes") or ""),
        }
        ranks = groups.get(str(name), {}).get("ranks") or []
        if message and int(message.group(3)) < len(ranks):
            one["peer"] = ranks[int(message.group(3))]
        found.append(one)
    newest: dict[tuple[str, bool], int] = {}
    kept = []
    for one in reversed(found):
        place = one["group"], one["is_message"]
        newest[place] = newest.get(place, 0) + 1
        if newest[place] <= KEPT or not one["is_done"]:
            kept.append(one)
    waiting = [one for one in kept if not one["is_done"]][-MOST_KEPT:]  # the oldest that have not ended tell most
    rest = [one for one in kept if one["is_done"]][: MOST_KEPT - len(waiting)]
    return [*reversed(rest), *reversed(waiting)]


# What a rank that leaves a membership can still say: whether a peer is to blame, and which collective was the last.


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error only says that another rank went away."""
    return isinstance(error, Exception) and failure_of(0, error, step=-1).is_consequence


def last_collective() -> str:
    """The last collective this rank began, as torch's flight recorder knows it; empty when it recorded none."""
    try:
        entries = recorded_entries()
    except (ImportError, AttributeError):
        return ""
    entries.sort(key=lambda entry: int(entry.get("time_created_ns") or 0))  # NCCL's and gloo's are recorded apart
    return _entry_name(entries[-1]) if entries else ""


def _entry_name(entry: dict[str, Any]) -> str:
    group, sizes = entry.get("process_group") or ["", ""], entry.get("input_sizes") or []
    number = entry.get("collective_seq_id") or entry.get("p2p_seq_id")
    return f"{entry.get('profiling_name', '?')} number {number} of group {group[-1] or group[0]}, sizes {sizes}"
