"""Election on a disk that all hosts share: a file for each term in `coordinator.terms/` of the run folder.

Only one process can make the file of a term (a hard link). Its holder increments a counter in it; a process that wants
the next term watches that counter with its own clock, so that clocks of different hosts are never compared. A dead
holder is noticed at once on its own machine, where the kernel releases its lock; other machines wait for the lease.
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

# Files of older terms that stay for processes that still watch them.
KEPT_TERMS = 2
RELEASED = "released"
# For the second process to report whether it was kept from a lock.
CHECK_S = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """A process's observation of a term: its counter, and since when the counter has stood still.

    `since_s` is of the monotonic clock, which all processes of a machine share. An agent passes this to the
    coordinator it starts, which then need not watch for a whole lease again.
    """

    term: int
    count: int
    since_s: float

    @classmethod
    def parse(cls, text: str) -> Watched | None:
        """Parse the text that `str` returns; None for anything else.

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
    """An election whose terms are files."""

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
        """Become the coordinator, unless another process shows that it lives."""
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
        """Make the file of a term, complete and locked; False when another process was first."""
        folder = self._run.path / "coordinator.terms"
        draft = folder / f".{secrets.token_hex(8)}"
        self._file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            # A file system without locks: the lease is enough.
            with suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._write_count()
            # Fails where the file exists, also between hosts.
            os.link(draft, folder / f"{term:08d}")
        except FileExistsError:
            os.close(self._file)
            return False
        finally:
            draft.unlink(missing_ok=True)
        self.term, self._renewed_s = term, self._clock()
        return True

    def _is_alive(self, term: int) -> bool:
        """True when the holder of a term lives.

        On its own machine the lock shows at once that it is dead; elsewhere, or when it is frozen, its counter stands
        still.
        """
        path, count = self._run.path / "coordinator.terms" / f"{term:08d}", _read_count(self._run, term)
        since_s, known = self._clock(), self._watched
        if known is not None and (known.term, known.count) == (term, count):
            since_s = min(since_s, known.since_s)
        if is_free(path):
            return False
        until_s = since_s + self._lease_s
        while self._clock() < until_s:
            self._sleep(min(self._renew_s, max(0.0, until_s - self._clock())))
            if newest_term(self._run) > term or _read_count(self._run, term) != count:
                return not is_free(path)
        return False

    def renew(self) -> None:
        """Increment the counter and check for a newer term, at most once in `renew_s`; raises Deposed."""
        now = self._clock()
        if now - self._renewed_s >= self._renew_s:
            self.check()
            self._renewed_s = now
            self._write_count()

    def check(self) -> None:
        """Raise Deposed when another process holds a newer term."""
        if newest_term(self._run) > self.term:
            raise Deposed(f"term {self.term} is over")

    def _write_count(self) -> None:
        self._count += 1
        os.pwrite(self._file, json.dumps({"count": self._count, "machine": _machine()}).encode() + b"\n", 0)
        os.fsync(self._file)

    def release(self) -> None:
        """Mark the term as released, so that the next holder need not wait."""
        if self._file >= 0:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps({RELEASED: True}).encode() + b"\n", 0)
            os.close(self._file)
            self._file = -1

    def is_held(self) -> bool:
        """True when some process coordinates; one on another machine must increment its counter within 1.5 renewals."""
        newest = newest_term(self._run)
        path = self._run.path / "coordinator.terms" / f"{newest:08d}"
        if not newest or is_free(path):
            return False
        before = _read_term(path)
        if before.get("machine") == _machine():
            return True
        self._sleep(1.5 * self._renew_s)
        return _read_term(path) != before


def newest_term(run: Run) -> int:
    """Return the number of the newest term; 0 before the first."""
    return max(_terms(run), default=0)


def read_sign(run: Run) -> tuple[int, int]:
    """Return the newest term and its counter, which changes as long as its holder lives."""
    term = newest_term(run)
    return term, _read_count(run, term)


def is_free(path: Path) -> bool:
    """True when a term was released, or its holder has died on this machine."""
    body = _read_term(path)
    if body.get(RELEASED):
        return True
    if body.get("machine") != _machine():
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
        body = load_json(path)
        return body if isinstance(body, dict) else {}
    return {}


def _machine() -> str:
    """Return an id of this machine since its boot: file locks work between its processes."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()


# ---- the test of the file system
# --------------------------------------------------------------------------------------

# Run in a second process with the paths of a locked file and of one that exists; it prints what it could do with
# them.
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
    """Raise ElectionUnavailable where a test with a second process shows that locks or links do not work in a folder.

    Both processes are on this machine: that a lock also holds between machines is not shown by this.
    """
    stem = folder / f".election-{secrets.token_hex(8)}"
    paths = [stem.with_name(f"{stem.name}.{name}") for name in ("locked", "taken", "draft")]
    locked = paths[0]
    try:
        for path in paths:
            path.touch(exist_ok=False)
        with open(locked, "r+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            command = [sys.executable, "-I", "-S", "-c", _OTHER_PROCESS, *(str(path) for path in paths)]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as checker:
                assert checker.stdin is not None and checker.stdout is not None  # noqa: PT018
                answers = [checker.stdout.readline().strip() for _ in range(2)]
                fcntl.flock(file, fcntl.LOCK_UN)
                rest, _ = checker.communicate("\n", timeout=CHECK_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ElectionUnavailable(f"files cannot be locked in {folder}: {error}") from error
    finally:
        for path in paths:
            with suppress(OSError):
                path.unlink(missing_ok=True)
    for fault, is_right, answer in (
        ("a lock does not keep another process out", answers[0] == "held", answers[0]),
        ("a hard link replaces a file instead of failing", answers[1] == "held", answers[1]),
        ("a lock that was given back stays taken", rest.strip() == "free", rest.strip()),
    ):
        if not is_right:
            raise ElectionUnavailable(f"on the file system of {folder} {fault} ({answer or 'no answer'})")
