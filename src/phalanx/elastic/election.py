"""Who coordinates a run, and what the next coordinator must know: one small interface, here on files of the run folder.

Whoever holds the newest term coordinates. A term is a number that only grows: the fencing number. Its holder shows that
it lives by counting on in the file of its term; whoever wants the next one watches that count with its own clock, so
that clocks of different hosts are never compared. A holder that is frozen (SIGSTOP, a host that swaps, a paused virtual
machine) stops counting and loses its lease; when it wakes up it finds a newer term, and ends before it does anything.

A holder that is dead is known at once on its own machine, where the kernel gives its lock back; other machines wait for
the lease, whatever their file system makes of locks.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import orjson

from phalanx.elastic.coordinator_state import SavedState
from phalanx.elastic.fence import current_generation
from phalanx.io.files import replace_text
from phalanx.record.run import Run

LEASE_S = 5.0  # without counting on, after which a holder has lost its term
RENEW_S = 1.0  # between two counts, and between two looks at those of another
KEPT_TERMS = 2  # files of older terms that stay for whoever still watches them
RELEASED = "released"
Address = tuple[str, int]


class Deposed(Exception):
    """Another process holds a newer term: this one must not write, send or end anything any more."""


class Election(Protocol):
    """Election and memory of coordinators. `term` is 0 before `take` has succeeded."""

    term: int

    def take(self) -> bool:
        """Become the coordinator; False when another is and shows that it lives, which may take `LEASE_S` to see."""
        ...

    def renew(self) -> None:
        """Show that we live, about every `RENEW_S`; raises Deposed."""
        ...

    def check(self) -> None:
        """Raises Deposed when another has become the coordinator."""
        ...

    def load(self) -> SavedState:
        """What the coordinator before us knew, if it was one of the same launch; nothing otherwise."""
        ...

    def save(self, saved: SavedState, address: Address) -> None:
        """Write down what the next one must know, and where we listen; raises Deposed."""
        ...

    def release(self) -> None:
        """Let the next one begin at once."""
        ...


class FileElection:
    """On a disk that all hosts share: `coordinator.terms/` for the terms, `coordinator.json` for the memory.

    Who is which rank changes with the membership alone, and is in a file of its own (two in turn, so that a process
    that dies in between leaves a pair that fits): what is written every second is small for any number of ranks.
    """

    def __init__(
        self,
        run: Run,
        *,
        started_s: float,
        lease_s: float = LEASE_S,
        renew_s: float = RENEW_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.term = 0
        self._run, self._started_s = run, started_s
        self._lease_s, self._renew_s, self._clock, self._sleep = lease_s, renew_s, clock, sleep
        self._file, self._count, self._renewed_s = -1, 0, -1e9
        self._members: tuple[Any, ...] = ()  # as last written
        self._members_file = ""

    def take(self) -> bool:
        """Become the coordinator, unless another shows that it lives."""
        folder = self._run.path / "coordinator.terms"
        folder.mkdir(exist_ok=True)
        while True:
            newest = newest_term(self._run)
            if newest and self._is_alive(newest):
                return False
            if self._claim(newest + 1):
                for number in _terms(self._run):
                    if number < self.term - KEPT_TERMS:
                        (folder / f"{number:08d}").unlink(missing_ok=True)
                return True

    def _claim(self, term: int) -> bool:
        """Make the file of a term, whole and locked; False when somebody else was quicker."""
        folder = self._run.path / "coordinator.terms"
        draft = folder / f".{secrets.token_hex(8)}"
        self._file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            with suppress(OSError):  # a file system without locks: the lease is enough
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._write_count()
            os.link(draft, folder / f"{term:08d}")  # fails where it exists, also between hosts
        except FileExistsError:
            os.close(self._file)
            return False
        finally:
            draft.unlink(missing_ok=True)
        self.term, self._renewed_s = term, self._clock()
        return True

    def _is_alive(self, term: int) -> bool:
        """Whether the holder of a term lives: its lock tells on its own machine if it is dead, its count if frozen."""
        path, until_s = self._run.path / "coordinator.terms" / f"{term:08d}", self._clock() + self._lease_s
        seen = _read_term(path)
        if is_free(path):
            return False
        while self._clock() < until_s:
            self._sleep(min(self._renew_s, max(0.0, until_s - self._clock())))
            if newest_term(self._run) > term or _read_term(path) != seen:
                return not is_free(path)
        return False

    def renew(self) -> None:
        """Count on and look for a newer term, at most once in `renew_s`; raises Deposed."""
        now = self._clock()
        if now - self._renewed_s >= self._renew_s:
            self.check()
            self._renewed_s = now
            self._write_count()

    def check(self) -> None:
        """Raises Deposed when somebody holds a newer term."""
        if newest_term(self._run) > self.term:
            raise Deposed(f"term {self.term} is over")

    def _write_count(self) -> None:
        self._count += 1
        os.pwrite(self._file, json.dumps({"count": self._count, "machine": _machine()}).encode() + b"\n", 0)
        os.fsync(self._file)

    def release(self) -> None:
        """The next one need not wait."""
        if self._file >= 0:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps({RELEASED: True}).encode() + b"\n", 0)
            os.close(self._file)
            self._file = -1

    # ---- the memory ------------------------------------------------------------------------------------------------

    def save(self, saved: SavedState, address: Address) -> None:
        """Write it down; who is which rank only where that has changed."""
        self.check()
        members = (saved.membership, saved.pids, saved.peers)
        if not self._members or any(one is not other for one, other in zip(members, self._members, strict=True)):
            number = 1 - int(self._members_file == "coordinator-members-1.json")
            self._members_file, self._members = f"coordinator-members-{number}.json", members
            text = orjson.dumps(saved.members_json(), option=orjson.OPT_APPEND_NEWLINE).decode()
            replace_text(self._run.path / self._members_file, text)
        body = {"address": list(address), "started": self._started_s, "term": self.term}
        body |= {"members": self._members_file, **saved.progress_json()}
        replace_text(self._run.path / "coordinator.json", json.dumps(body) + "\n")

    def load(self) -> SavedState:
        """What was written down last."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            body = json.loads((self._run.path / "coordinator.json").read_text(encoding="utf-8"))
            if float(body["started"]) == self._started_s:
                name = Path(str(body["members"])).name
                self._members_file = name  # the next is written into the other one
                members = json.loads((self._run.path / name).read_text(encoding="utf-8"))
                return SavedState.from_json({**body, **members})
        return SavedState(generation=current_generation(self._run))


def coordinator_address(run: Run) -> Address | None:
    """Where the last coordinator that is known listens."""
    try:
        host, port = json.loads((run.path / "coordinator.json").read_text(encoding="utf-8"))["address"]
        return str(host), int(port)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def newest_term(run: Run) -> int:
    """The number of the newest term; 0 before the first."""
    return max(_terms(run), default=0)


def is_coordinated(run: Run, *, wait_s: float = 1.5 * RENEW_S) -> bool:
    """Whether some process coordinates the run now; of one on another machine, whether it counts on within `wait_s`."""
    newest = newest_term(run)
    path = run.path / "coordinator.terms" / f"{newest:08d}"
    if not newest or is_free(path):
        return False
    seen = _read_term(path)
    if seen.get("machine") == _machine():
        return True
    time.sleep(wait_s)
    return _read_term(path) != seen


def is_free(path: Path) -> bool:
    """Whether a term was given back, or its holder has died on this machine."""
    told = _read_term(path)
    if told.get(RELEASED):
        return True
    if told.get("machine") != _machine():
        return False
    try:
        with open(path, encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _terms(run: Run) -> list[int]:
    try:
        return [int(name) for name in os.listdir(run.path / "coordinator.terms") if name.isdigit()]
    except FileNotFoundError:
        return []


def _read_term(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        told = json.loads(path.read_text(encoding="utf-8"))
        return told if isinstance(told, dict) else {}
    return {}


def _machine() -> str:
    """Names this machine since it was started: locks of a file work between its processes."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()
