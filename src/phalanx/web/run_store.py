"""The runs that a dashboard shows, and a cache of slow answers that are recomputed in the background as runs grow."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.errors import UserError, mistake
from phalanx.io.path_probes import is_file, is_folder, resolve_path
from phalanx.io.values import text
from phalanx.record.account.ledger import walk_ledger
from phalanx.record.account.summary import Summary, summarize_run
from phalanx.record.account.time_accounts import Effective, from_trail
from phalanx.record.archive.history import RunHistory, list_runs, run_in
from phalanx.record.host_file import stat_events
from phalanx.record.run import Run, open_run
from phalanx.record.run_lock import is_run_over
from phalanx.rules.live_check import LiveCheck, Verdicts

MOST_ANSWERS = 512
# An answer that took one second is recomputed at most every ten: a growing run costs a tenth of a core.
REST = 10.0
LEAST_REST_S = 1.0
# The work is Python code: a second thread would only compete with the first one and with the requests.
MOST_WORKERS = 1


class NotYetError(Exception):
    """The answer is still being computed, or the server is closing; ask again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Order:
    mark: Hashable
    work: Callable[[], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    mark: Hashable
    value: Any
    error: Exception | None
    took_s: float
    at_s: float


class AnswerMemo:
    """Caches answers by key.

    The first request waits; later requests get the previous answer while a new one is computed.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()  # guards all attributes below
        self._answers: OrderedDict[Hashable, _Answer] = OrderedDict()
        # Not started yet; the last one is next.
        self._orders: OrderedDict[Hashable, _Order] = OrderedDict()
        self._busy: set[Hashable] = set()
        self._workers = 0
        self._closed = False

    def get(self, key: Hashable, mark: Hashable, work: Callable[[], Any], *, wait_s: float, now: bool = False) -> Any:
        """Return the answer for `key`; raise the exception that `work` raised.

        `mark` changes when the source data has changed.

        With `now`, a changed answer is waited for as well: for a run that is over, the final answer matters.
        """
        until_s = self._clock() + wait_s
        with self._changed:
            while True:
                answer = self._answers.get(key)
                if self._is_due(answer, mark, now=now) and key not in self._busy and not self._closed:
                    self._place_order(key, _Order(mark=mark, work=work))
                if answer is not None and (answer.mark == mark or not now):
                    break
                remaining_s = until_s - self._clock()
                if remaining_s <= 0 or self._closed:
                    raise NotYetError
                self._changed.wait(remaining_s)
            self._answers.move_to_end(key)
        if answer.error is not None:
            # Otherwise every raise would extend the traceback of the same exception.
            raise answer.error.with_traceback(None)
        return answer.value

    def close(self) -> None:
        """Release all waiting requests, and start no more work."""
        with self._changed:
            self._closed = True
            self._orders.clear()
            self._changed.notify_all()

    def _is_due(self, answer: _Answer | None, mark: Hashable, *, now: bool) -> bool:
        if answer is None or answer.mark == mark:
            return answer is None
        return now or self._clock() - answer.at_s >= max(LEAST_REST_S, REST * answer.took_s)

    def _place_order(self, key: Hashable, order: _Order) -> None:
        # The newest request comes first, because a user is waiting for it; a long list of runs may wait.
        self._orders[key] = order
        self._orders.move_to_end(key)
        if self._workers < MOST_WORKERS:
            self._workers += 1
            # A daemon thread: Ctrl-C does not wait for an answer that no client will read.
            threading.Thread(target=self._work_off, daemon=True, name="phalanx-memo").start()

    def _work_off(self) -> None:
        while True:
            with self._changed:
                if not self._orders:
                    self._workers -= 1
                    return
                key, order = self._orders.popitem()
                self._busy.add(key)
            answer = self._make_answer(order)
            with self._changed:
                self._answers[key] = answer
                self._busy.discard(key)
                while len(self._answers) > MOST_ANSWERS:
                    self._answers.popitem(last=False)
                self._changed.notify_all()

    def _make_answer(self, order: _Order) -> _Answer:
        value, error = None, None
        began_s = self._clock()
        try:
            value = order.work()
        except Exception as caught:  # a damaged run: raised again in the request
            error = caught
        now_s = self._clock()
        return _Answer(mark=order.mark, value=value, error=error, took_s=now_s - began_s, at_s=now_s)


# ---- verdicts on runs: the position in the log of each, read in bounded turns ----------------------------------------

# Runs whose logs are open; a run that is dropped is read again from its start.
MOST_CHECKS = 8


class Checks:
    """The open log readers of runs that are being checked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the table
        self._open: OrderedDict[tuple[str, int], LogReader] = OrderedDict()

    def turns(self, run: Run) -> LogReader:
        """Return the reader of a run; a run of the same name in a new folder gets a new reader."""
        key = (run.name, run.path.stat().st_ino)
        with self._lock:
            reader = self._open.get(key)
            if reader is None:
                reader = self._open[key] = LogReader(run)
            self._open.move_to_end(key)
            while len(self._open) > MOST_CHECKS:
                self._open.popitem(last=False)
        return reader


class LogReader:
    """Reads a log in bounded turns; `number` changes while there is more, so that the next request continues."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._check: LiveCheck | None = None
        self._lock = threading.Lock()
        self.number = 0

    def take(self) -> Verdicts:
        """Read one turn, a part of the log or all that is new, and return the verdicts."""
        with self._lock:
            if self._check is None:  # created on first use, because it opens files
                self._check = LiveCheck(self._run)
            verdicts = self._check.look()
            if not verdicts.is_settled:
                self.number += 1
            return verdicts


# ---- the runs of a dashboard: found by name in one folder, opened once, refreshed as they grow -----------------------


# Open histories: ten runs for comparison, and some viewed before.
MOST_OPEN = 24
# The files of ranks other than 0 do not affect the mark; they are read at most this often.
FRESH_S = 0.4

Mark = tuple[tuple[int, int], ...]


@dataclass(slots=True)
class _Opened:
    folder_id: int  # inode: a run that was deleted and created again is a different one
    history: RunHistory | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    mark: Mark = ()
    read_s: float = 0.0


class RunStore:
    """Opens runs by name; thread-safe."""

    def __init__(self, root: Path, *, only: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self.root = root
        self.memo = AnswerMemo()
        self.checks = Checks()
        self._only = only
        self._clock = clock
        self._lock = threading.Lock()
        self._opened: OrderedDict[str, _Opened] = OrderedDict()

    @property
    def title(self) -> str:
        """The folder's name, without its path."""
        return self._only or resolve_path(self.root).name

    @property
    def is_one_run(self) -> bool:
        """True if a single run is shown, and other runs in its folder are hidden."""
        return bool(self._only)

    def runs(self) -> list[Run]:
        """Return the runs, newest first."""
        return [self.run(self._only)] if self._only else list_runs(self.root)

    def run(self, name: str) -> Run:
        """Return a run by its name; raise UserError if the name is invalid, unknown, or a link."""
        if self._only and name != self._only:
            raise _unknown_run(name)
        try:
            return run_in(self.root, name)
        except UserError as error:
            raise _unknown_run(name) from error

    @contextmanager
    def history(self, name: str) -> Iterator[RunHistory]:
        """Lock and return the history of a run, read up to now."""
        run = self.run(name)
        opened = self._shelf_place(run)
        with opened.lock:
            yield self._read_history(run, opened)

    def _read_history(self, run: Run, opened: _Opened) -> RunHistory:
        # Before reading: an answer cached under this mark contains at least that much.
        now = run_stamp(run)
        # Takes a second for a large run; only requests for this run wait.
        if opened.history is None:
            opened.history = RunHistory.open(run)
        elif now == opened.mark and self._clock() - opened.read_s < FRESH_S:
            return opened.history
        else:
            opened.history.refresh()
        opened.mark, opened.read_s = now, self._clock()
        return opened.history

    def _shelf_place(self, run: Run) -> _Opened:
        """Return the run's entry; the least recently used runs are dropped."""
        folder_id = os.stat(run.path).st_ino
        with self._lock:
            entry = self._opened.get(run.name)
            if entry is None or entry.folder_id != folder_id:
                entry = self._opened[run.name] = _Opened(folder_id=folder_id)
            self._opened.move_to_end(run.name)
            while len(self._opened) > MOST_OPEN:
                self._opened.popitem(last=False)
        return entry


def _unknown_run(name: str) -> UserError:
    return mistake("", f"there is no run called {name[:100]!r} here")


GOING = ("created", "launching", "running")


def state_of(run: Run) -> tuple[str, bool]:
    """Return the state in the run's status, and True if the run is really going."""
    state = text(run.status(), "state") or "unknown"
    return state, state in GOING and not is_run_over(run)


def run_stamp(run: Run) -> Mark:
    """Return size and time of the files that every run keeps writing; the result changes whenever the run has grown."""
    files = (run.events(0), run.supervisor, run.path / "status.json", run.plan_json, run.path / "launch.json")
    return tuple(_file_stamp(path) for path in files)


def _file_stamp(path: Path) -> tuple[int, int]:
    file_stat = stat_events(path)
    return (file_stat.size, file_stat.mtime_ns) if file_stat is not None else (0, 0)


def open_run_store(path: str | Path) -> RunStore:
    """Open a folder of runs, or one run; raise UserError if it is neither."""
    folder = Path(path)
    if is_file(folder / "plan.json"):
        run_path = resolve_path(folder)
        store = RunStore(run_path.parent, only=run_path.name)
        store.run(run_path.name)
        return store
    if not is_folder(folder):
        try:
            open_run(folder)  # raises with suggestions of similar names
        except UserError as error:
            message = error.problems[0].what.replace("such run", "such folder of runs")
            raise mistake(str(folder), message, fix=error.problems[0].fix) from error
    return RunStore(folder)


# ---- results that need a walk over all steps: computed once for all requests, cached until the run grows -------------


EFFECTIVE_POINTS = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class RunAccount:
    """The final results of a run: the summary with ledger and cost, and the effective training time over the run."""

    summary: Summary
    effective: Effective


def run_account(store: RunStore, run: Run, *, wait_s: float) -> RunAccount:
    """Return the results of a run.

    Raise NotYetError if they take longer than `wait_s`; the next request finds them cached.
    """
    over = not state_of(run)[1]
    account: RunAccount = store.memo.get(
        ("story", run.name), run_stamp(run), lambda: _account_of(run), wait_s=wait_s, now=over
    )
    return account


def account_soon(store: RunStore, run: Run, *, wait_s: float) -> RunAccount | None:
    """Return `run_account`, or None while it is being computed."""
    try:
        return run_account(store, run, wait_s=wait_s)
    except NotYetError:
        return None


def _account_of(run: Run) -> RunAccount:
    # A separate history: a walk over 100,000 steps takes seconds, during which the page must be able to draw.
    history = RunHistory.open(run)
    walked = walk_ledger(run, history)
    summary = summarize_run(run, history, walked)
    return RunAccount(summary=summary, effective=from_trail(walked.trail, EFFECTIVE_POINTS))
