"""The runs a dashboard shows: found by name under one folder, opened once, read on as they grow."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.errors import UserError, mistake
from phalanx.record.archive.history import RunHistory, list_runs, run_in
from phalanx.record.run import Run, open_run
from phalanx.web.checks import Checks
from phalanx.web.memo import Memo

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


class Shelf:
    """Opens runs; safe to use from many threads."""

    def __init__(self, root: Path, *, only: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self.root = root
        self.memo = Memo()
        self.checks = Checks()
        self._only = only
        self._clock = clock
        self._lock = threading.Lock()
        self._opened: OrderedDict[str, _Opened] = OrderedDict()

    @property
    def title(self) -> str:
        """What the folder is called, without where it is."""
        return self._only or self.root.resolve().name

    def runs(self) -> list[Run]:
        """Newest first."""
        return [self.run(self._only)] if self._only else list_runs(self.root)

    def run(self, name: str) -> Run:
        """A run by its name; raises UserError for a name that is none, or leads elsewhere."""
        if self._only and name != self._only:
            raise _unknown(name)
        try:
            return run_in(self.root, name)
        except UserError as error:
            raise _unknown(name) from error

    @contextmanager
    def history(self, name: str) -> Iterator[RunHistory]:
        """The history of a run, read up to now; nobody else uses it meanwhile."""
        run = self.run(name)
        opened = self._place(run)
        with opened.lock:
            yield self._read(run, opened)

    def _read(self, run: Run, opened: _Opened) -> RunHistory:
        now = mark(run)  # before reading: whoever keeps an answer under this mark has at least what it stands for
        if opened.history is None:  # takes a second for a large run, in which only those who want it wait
            opened.history = RunHistory.open(run)
        elif now == opened.mark and self._clock() - opened.read_s < FRESH_S:
            return opened.history
        else:
            opened.history.refresh()
        opened.mark, opened.read_s = now, self._clock()
        return opened.history

    def _place(self, run: Run) -> _Opened:
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


def _unknown(name: str) -> UserError:
    return mistake("", f"there is no run called {name[:100]!r} here")


def mark(run: Run) -> Mark:
    """Changes whenever the run has grown: size and time of the files that every run keeps writing."""
    files = (run.events(0), run.supervisor, run.path / "status.json", run.plan_json, run.path / "launch.json")
    return tuple(_stamp(path) for path in files)


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0)
    return (found.st_size, found.st_mtime_ns)


def open_shelf(path: str | Path) -> Shelf:
    """A folder of runs, or one run; raises UserError when it is neither."""
    folder = Path(path)
    if (folder / "plan.json").is_file():
        whole = folder.resolve()
        shelf = Shelf(whole.parent, only=whole.name)
        shelf.run(whole.name)
        return shelf
    if not folder.is_dir():
        try:
            open_run(folder)  # knows the near misses
        except UserError as error:
            what = error.problems[0].what.replace("such run", "such folder of runs")
            raise mistake(str(folder), what, fix=error.problems[0].fix) from error
    return Shelf(folder)
