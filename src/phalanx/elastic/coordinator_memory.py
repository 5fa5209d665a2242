"""The state that a coordinator leaves for the next one, in `coordinator.json` and a members file of the run."""

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
    """Reads and writes that state: the holder of the newest term writes it, the holder of the next term reads it.

    The assignment of ranks changes only with the membership, and is in a separate file (two in turn, so that a process
    that dies in between leaves a matching pair): what is written every second is small for any number of ranks.
    """

    def __init__(self, run: Run, *, started_s: float) -> None:
        self._run, self._started_s = run, started_s
        self._members: tuple[Any, ...] = ()  # as last written
        self._members_file = ""

    def save(self, saved: SavedState, address: Address, *, term: int) -> None:
        """Write the state and the address where this coordinator listens.

        The members' file is written only where it has changed.
        """
        members = (saved.membership, saved.pids, saved.peers)
        if not self._members or any(
            value is not written for value, written in zip(members, self._members, strict=True)
        ):
            number = 1 - int(self._members_file == "coordinator-members-1.json")
            self._members_file, self._members = f"coordinator-members-{number}.json", members
            text = orjson.dumps(saved.members_json(), option=orjson.OPT_APPEND_NEWLINE).decode()
            replace_text(self._run.path / self._members_file, text)
        body = {"address": list(address), "started": self._started_s, "term": term}
        body |= {"members": self._members_file, **saved.progress_json()}
        replace_text(self._run.path / "coordinator.json", json.dumps(body) + "\n")

    def load(self) -> SavedState:
        """Return the state of the previous coordinator of the same launch; an empty one when there is none."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            body = load_json(self._run.path / "coordinator.json")
            if float(body["started"]) == self._started_s:
                name = Path(str(body["members"])).name
                # The next write goes into the other file.
                self._members_file = name
                members = orjson.loads((self._run.path / name).read_bytes())
                saved = SavedState.from_json({**body, **members})
                # The present state need not be written again.
                self._members = (saved.membership, saved.pids, saved.peers)
                return saved
        return SavedState(generation=current_generation(self._run))


def known_coordinator(run: Run) -> tuple[Address, int] | None:
    """Return the address and term of the last coordinator that is known, or None."""
    try:
        body = load_json(run.path / "coordinator.json")
        host, port = body["address"]
        return (str(host), int(port)), int(body.get("term", 0))
    except (OSError, ValueError, KeyError, TypeError):
        return None
