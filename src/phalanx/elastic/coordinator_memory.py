"""What the next coordinator must know, in files of the run folder: `coordinator.json`, and who is which rank."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from phalanx.elastic.coordinator_state import SavedState
from phalanx.elastic.fence import current_generation
from phalanx.io.files import load_json, replace_text
from phalanx.record.run import Run

Address = tuple[str, int]


class CoordinatorMemory:
    """Written by whoever holds the newest term, read by whoever holds the next.

    Who is which rank changes with the membership alone, and is in a file of its own (two in turn, so that a process
    that dies in between leaves a pair that fits): what is written every second is small for any number of ranks.
    """

    def __init__(self, run: Run, *, started_s: float) -> None:
        self._run, self._started_s = run, started_s
        self._members: tuple[Any, ...] = ()  # as last written
        self._members_file = ""

    def save(self, saved: SavedState, address: Address, *, term: int) -> None:
        """Write it down, and where we listen; who is which rank only where that has changed."""
        members = (saved.membership, saved.pids, saved.peers)
        if not self._members or any(one is not other for one, other in zip(members, self._members, strict=True)):
            number = 1 - int(self._members_file == "coordinator-members-1.json")
            self._members_file, self._members = f"coordinator-members-{number}.json", members
            text = orjson.dumps(saved.members_json(), option=orjson.OPT_APPEND_NEWLINE).decode()
            replace_text(self._run.path / self._members_file, text)
        body = {"address": list(address), "started": self._started_s, "term": term}
        body |= {"members": self._members_file, **saved.progress_json()}
        replace_text(self._run.path / "coordinator.json", json.dumps(body) + "\n")

    def load(self) -> SavedState:
        """What the coordinator before us knew, if it was one of the same launch; nothing otherwise."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            body = load_json(self._run.path / "coordinator.json")
            if float(body["started"]) == self._started_s:
                name = Path(str(body["members"])).name
                self._members_file = name  # the next is written into the other one
                members = orjson.loads((self._run.path / name).read_bytes())
                saved = SavedState.from_json({**body, **members})
                self._members = (saved.membership, saved.pids, saved.peers)  # what is there need not be written again
                return saved
        return SavedState(generation=current_generation(self._run))


def known_coordinator(run: Run) -> tuple[Address, int] | None:
    """Where the last coordinator that is known listens, and its term."""
    try:
        body = load_json(run.path / "coordinator.json")
        host, port = body["address"]
        return (str(host), int(port)), int(body.get("term", 0))
    except (OSError, ValueError, KeyError, TypeError):
        return None
