"""Answers that take long to work out: kept, and worked out again in the background once the run has grown."""

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
# An answer that took a second is made anew at most every ten: a run that grows costs a tenth of a core.
REST = 10.0
LEAST_REST_S = 1.0
MOST_WORKERS = 1  # the work is Python: a second thread would only take turns with the first, and with the requests


class NotYetError(Exception):
    """The answer is still being worked out, or the server is closing; ask again."""


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
    """Keeps answers by key. Whoever asks first waits; whoever asks while it is made anew gets the one before."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()  # guards everything below
        self._answers: OrderedDict[Hashable, _Answer] = OrderedDict()
        self._orders: OrderedDict[Hashable, _Order] = OrderedDict()  # not begun yet; the last one is next
        self._busy: set[Hashable] = set()
        self._workers = 0
        self._closed = False

    def get(self, key: Hashable, mark: Hashable, work: Callable[[], Any], *, wait_s: float, now: bool = False) -> Any:
        """The answer for `key`; raises what `work` raised. `mark` tells whether what it was made of has changed.

        With `now`, an answer that changed is waited for, too: of a run that is over, the last word counts.
        """
        until_s = self._clock() + wait_s
        with self._changed:
            while True:
                answer = self._answers.get(key)
                if self._is_due(answer, mark, now=now) and key not in self._busy and not self._closed:
                    self._place_order(key, _Order(mark=mark, work=work))
                if answer is not None and (answer.mark == mark or not now):
                    break
                left_s = until_s - self._clock()
                if left_s <= 0 or self._closed:
                    raise NotYetError
                self._changed.wait(left_s)
            self._answers.move_to_end(key)
        if answer.error is not None:
            raise answer.error.with_traceback(None)  # or every raise would add to the same one
        return answer.value

    def close(self) -> None:
        """Let everybody go who waits; nothing more is begun."""
        with self._changed:
            self._closed = True
            self._orders.clear()
            self._changed.notify_all()

    def _is_due(self, answer: _Answer | None, mark: Hashable, *, now: bool) -> bool:
        if answer is None or answer.mark == mark:
            return answer is None
        return now or self._clock() - answer.at_s >= max(LEAST_REST_S, REST * answer.took_s)

    def _place_order(self, key: Hashable, order: _Order) -> None:
        # What was asked for last is looked at by somebody now; a long list of runs may wait.
        self._orders[key] = order
        self._orders.move_to_end(key)
        if self._workers < MOST_WORKERS:
            self._workers += 1
            # A daemon: Ctrl-C does not wait for an answer nobody is going to read.
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
        except Exception as caught:  # a damaged run: whoever asked says so
            error = caught
        now_s = self._clock()
        return _Answer(mark=order.mark, value=value, error=error, took_s=now_s - began_s, at_s=now_s)


# ---- runs that are being judged: how far the log of each is read, a bounded turn at a time ---------------------------

MOST_CHECKS = 8  # runs whose logs are read on; one that makes room is read again from its start


class Checks:
    """Runs that are being judged: where the reading of each log stands."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of the table
        self._open: OrderedDict[tuple[str, int], LogReader] = OrderedDict()

    def turns(self, run: Run) -> LogReader:
        """Of one run; another run of the same name, in a new folder, begins afresh."""
        key = (run.name, run.path.stat().st_ino)
        with self._lock:
            found = self._open.get(key)
            if found is None:
                found = self._open[key] = LogReader(run)
            self._open.move_to_end(key)
            while len(self._open) > MOST_CHECKS:
                self._open.popitem(last=False)
        return found


class LogReader:
    """Reads a log a turn at a time; `number` changes while there is more to read, so that the next question goes on."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._check: LiveCheck | None = None
        self._lock = threading.Lock()
        self.number = 0

    def take(self) -> Verdicts:
        """One turn: some of the log, or all that is new."""
        with self._lock:
            if self._check is None:  # opens files: not before somebody waits for it
                self._check = LiveCheck(self._run)
            found = self._check.look()
            if not found.is_settled:
                self.number += 1
            return found


# ---- the runs a dashboard shows: found by name under one folder, opened once, read on as they grow -------------------


MOST_OPEN = 24  # histories; ten runs beside each other, and some that were just looked at
FRESH_S = 0.4  # the files of other ranks than 0, which the mark does not show, are read on at most this often

Mark = tuple[tuple[int, int], ...]


@dataclass(slots=True)
class _Opened:
    folder_id: int  # inode: a run that was deleted and made again is another one
    history: RunHistory | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    mark: Mark = ()
    read_s: float = 0.0


class RunStore:
    """Opens runs; safe to use from many threads."""

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
        """What the folder is called, without where it is."""
        return self._only or resolve_path(self.root).name

    @property
    def is_one_run(self) -> bool:
        """Whether a single run is shown: what lies beside it in its folder is nobody's business."""
        return bool(self._only)

    def runs(self) -> list[Run]:
        """Newest first."""
        return [self.run(self._only)] if self._only else list_runs(self.root)

    def run(self, name: str) -> Run:
        """A run by its name; raises UserError for a name that is none, or leads elsewhere."""
        if self._only and name != self._only:
            raise _unknown_run(name)
        try:
            return run_in(self.root, name)
        except UserError as error:
            raise _unknown_run(name) from error

    @contextmanager
    def history(self, name: str) -> Iterator[RunHistory]:
        """The history of a run, read up to now; nobody else uses it meanwhile."""
        run = self.run(name)
        opened = self._shelf_place(run)
        with opened.lock:
            yield self._read_history(run, opened)

    def _read_history(self, run: Run, opened: _Opened) -> RunHistory:
        now = run_stamp(run)  # before reading: whoever keeps an answer under this mark has at least what it stands for
        if opened.history is None:  # takes a second for a large run, in which only those who want it wait
            opened.history = RunHistory.open(run)
        elif now == opened.mark and self._clock() - opened.read_s < FRESH_S:
            return opened.history
        else:
            opened.history.refresh()
        opened.mark, opened.read_s = now, self._clock()
        return opened.history

    def _shelf_place(self, run: Run) -> _Opened:
        """The run's place on the shelf; those that nobody looked at for longest make room."""
        folder_id = os.stat(run.path).st_ino
        with self._lock:
            found = self._opened.get(run.name)
            if found is None or found.folder_id != folder_id:
                found = self._opened[run.name] = _Opened(folder_id=folder_id)
            self._opened.move_to_end(run.name)
            while len(self._opened) > MOST_OPEN:
                self._opened.popitem(last=False)
        return found


def _unknown_run(name: str) -> UserError:
    return mistake("", f"there is no run called {name[:100]!r} here")


GOING = ("created", "launching", "running")


def state_of(run: Run) -> tuple[str, bool]:
    """What the run says of itself, and whether it really goes on."""
    state = text(run.status(), "state") or "unknown"
    return state, state in GOING and not is_run_over(run)


def run_stamp(run: Run) -> Mark:
    """Changes whenever the run has grown: size and time of the files that every run keeps writing."""
    files = (run.events(0), run.supervisor, run.path / "status.json", run.plan_json, run.path / "launch.json")
    return tuple(_file_stamp(path) for path in files)


def _file_stamp(path: Path) -> tuple[int, int]:
    found = stat_events(path)
    return (found.size, found.mtime_ns) if found is not None else (0, 0)


def open_run_store(path: str | Path) -> RunStore:
    """A folder of runs, or one run; raises UserError when it is neither."""
    folder = Path(path)
    if is_file(folder / "plan.json"):
        whole = resolve_path(folder)
        store = RunStore(whole.parent, only=whole.name)
        store.run(whole.name)
        return store
    if not is_folder(folder):
        try:
            open_run(folder)  # knows the near misses
        except UserError as error:
            what = error.problems[0].what.replace("such run", "such folder of runs")
            raise mistake(str(folder), what, fix=error.problems[0].fix) from error
    return RunStore(folder)


# ---- what takes a walk over all steps to know: made once for all who ask, kept until the run grows -------------------


EFFECTIVE_POINTS = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class RunAccount:
    """A run as told at its end: the summary, with ledger and bill, and the effective training time over the run."""

    summary: Summary
    effective: Effective


def run_account(store: RunStore, run: Run, *, wait_s: float) -> RunAccount:
    """The story of a run; raises NotYetError when it takes longer than `wait_s`, and is there the next time."""
    over = not state_of(run)[1]
    found: RunAccount = store.memo.get(
        ("story", run.name), run_stamp(run), lambda: _account_of(run), wait_s=wait_s, now=over
    )
    return found


def account_soon(store: RunStore, run: Run, *, wait_s: float) -> RunAccount | None:
    """`run_account`, or None while it is being worked out."""
    try:
        return run_account(store, run, wait_s=wait_s)
    except NotYetError:
        return None


def _account_of(run: Run) -> RunAccount:
    # A history of its own: a walk over 100,000 steps takes seconds, in which the page must be able to draw.
    history = RunHistory.open(run)
    walked = walk_ledger(run, history)
    summary = summarize_run(run, history, walked)
    return RunAccount(summary=summary, effective=from_trail(walked.trail, EFFECTIVE_POINTS))
