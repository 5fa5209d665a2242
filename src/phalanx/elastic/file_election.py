"""Election on a disk that all hosts share: a file for each term in `coordinator.terms/` of the run folder.

Only one process can make the file of a term (a hard link). Its holder counts on in it; whoever wants the next one
watches that count with its own clock, so that clocks of different hosts are never compared. A holder that is dead is
known at once on its own machine, where the kernel gives its lock back; other machines wait for the lease.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.elastic.election import LEASE_S, RENEW_S, Deposed, ElectionUnavailable
from phalanx.io.files import load_json
from phalanx.record.run import Run

KEPT_TERMS = 2  # files of older terms that stay for whoever still watches them
RELEASED = "released"
CHECK_S = 20.0  # for another process to say whether it was kept from a lock


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """What somebody on this machine has seen of a term: its count, and since when it has stood still.

    `since_s` is of the monotonic clock, which all processes of a machine share. An agent that watches hands this to the
    coordinator it starts, which then need not watch for a whole lease again.
    """

    term: int
    count: int
    since_s: float

    @classmethod
    def parse(cls, text: str) -> Watched | None:
        """The reverse of `str`; None for anything else.

        >>> Watched.parse(str(Watched(term=2, count=7, since_s=1.5)))
        Watched(term=2, count=7, since_s=1.5)
        """
        try:
            term, count, since_s = text.split(":")
            return cls(term=int(term), count=int(count), since_s=float(since_s))
        except ValueError:
            return None

    def __str__(self) -> str:
        return f"{self.term}:{self.count}:{self.since_s}"


class FileElection:
    """Terms as files."""

    def __init__(
        self,
        run: Run,
        *,
        lease_s: float = LEASE_S,
        renew_s: float = RENEW_S,
        watched: Watched | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.term = 0
        self._run, self._watched = run, watched
        self._lease_s, self._renew_s, self._clock, self._sleep = lease_s, renew_s, clock, sleep
        self._file, self._count, self._renewed_s = -1, 0, -1e9

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
        path, seen = self._run.path / "coordinator.terms" / f"{term:08d}", _read_count(self._run, term)
        since_s, known = self._clock(), self._watched
        if known is not None and (known.term, known.count) == (term, seen):
            since_s = min(since_s, known.since_s)
        if is_free(path):
            return False
        until_s = since_s + self._lease_s
        while self._clock() < until_s:
            self._sleep(min(self._renew_s, max(0.0, until_s - self._clock())))
            if newest_term(self._run) > term or _read_count(self._run, term) != seen:
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

    def is_held(self) -> bool:
        """Whether some process coordinates; of one on another machine, whether it counts on within 1.5 renewals."""
        newest = newest_term(self._run)
        path = self._run.path / "coordinator.terms" / f"{newest:08d}"
        if not newest or is_free(path):
            return False
        seen = _read_term(path)
        if seen.get("machine") == _machine():
            return True
        self._sleep(1.5 * self._renew_s)
        return _read_term(path) != seen


def newest_term(run: Run) -> int:
    """The number of the newest term; 0 before the first."""
    return max(_terms(run), default=0)


def read_sign(run: Run) -> tuple[int, int]:
    """The newest term and its count: what changes as long as its holder lives."""
    term = newest_term(run)
    return term, _read_count(run, term)


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


def _read_count(run: Run, term: int) -> int:
    count = _read_term(run.path / "coordinator.terms" / f"{term:08d}").get("count")
    return count if isinstance(count, int) else 0


def _read_term(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        told = load_json(path)
        return told if isinstance(told, dict) else {}
    return {}


def _machine() -> str:
    """Names this machine since it was started: locks of a file work between its processes."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()


# ---- whether this file system can do it ------------------------------------------------------------------------------

# In another process, told the paths of a locked file and of one that exists; it says what it could do with them.
_OTHER_PROCESS = """
import fcntl, os, sys
locked, taken, draft = sys.argv[1:]
def locks():
    with open(locked) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return "held"
    return "free"
def links():
    try:
        os.link(draft, taken)
    except FileExistsError:
        return "held"
    return "free"
def tell(call):
    try:
        print(call(), flush=True)
    except OSError as error:
        print(error.strerror or error, flush=True)
tell(locks)
tell(links)
sys.stdin.readline()
tell(locks)
"""


def check_locks(folder: Path) -> None:
    """Raises ElectionUnavailable where files of a folder cannot say who was first, tried with a second process.

    Both processes are on this machine: that a lock also holds between machines is not shown by this.
    """
    stem = folder / f".election-{secrets.token_hex(8)}"
    paths = [stem.with_name(f"{stem.name}.{what}") for what in ("locked", "taken", "draft")]
    locked = paths[0]
    try:
        for path in paths:
            path.touch(exist_ok=False)
        with open(locked, "r+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            command = [sys.executable, "-I", "-S", "-c", _OTHER_PROCESS, *(str(path) for path in paths)]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
                assert other.stdin is not None and other.stdout is not None  # noqa: PT018
                said = [other.stdout.readline().strip() for _ in range(2)]
                fcntl.flock(file, fcntl.LOCK_UN)
                rest, _ = other.communicate("\n", timeout=CHECK_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ElectionUnavailable(f"files cannot be locked in {folder}: {error}") from error
    finally:
        for path in paths:
            with suppress(OSError):
                path.unlink(missing_ok=True)
    for what, is_right, found in (
        ("a lock does not keep another process out", said[0] == "held", said[0]),
        ("a hard link replaces a file instead of failing", said[1] == "held", said[1]),
        ("a lock that was given back stays taken", rest.strip() == "free", rest.strip()),
    ):
        if not is_right:
            raise ElectionUnavailable(f"on the file system of {folder} {what} ({found or 'no answer'})")
