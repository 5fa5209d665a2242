"""A run: one folder with the resolved job, the plan, the events and logs of every rank, and the checkpoints.

runs/first-run-20261115-054500/
├── job.toml  job.json       the job, every value resolved
├── plan.json                layout and prediction
├── run_id                   a number of its own, which its checkpoints carry
├── SHA256SUMS               digests of the four, compared before anything trains with them
├── launch.json              what the launcher adds: data, ranks, baselines
├── status.json              state of the run as the supervisor sees it
├── events-00000.jsonl …     what each rank did (docs/events.md); closed parts are events-00000-0001.jsonl …
├── events-00000.index …     where to find it quickly (docs/record.md)
├── logs/rank-00000.log …    what each rank printed
│                            from 1,024 ranks on one file for the ranks of a host: events-host-NAME.jsonl and .index,
│                            logs/host-NAME.log (host_file.py)
├── errors/rank-00000.json … why a rank failed
├── flight/epoch-00001-rank-00000.json … which collectives a rank was in when its membership ended badly
├── checkpoints/
└── stop                     create this file to stop the run at the next step
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from phalanx.errors import Problem, SystemFailure, UserError, mistake, nearest
from phalanx.io.checksums import (
    CHECKSUMS,
    add_checksums,
    compare_digest,
    file_sha256,
    read_checksums,
    text_digest,
    write_checksums,
)
from phalanx.io.files import FileTooLargeError, open_regular, read_bounded, replace_text
from phalanx.io.values import at, finite, integer, number
from phalanx.record.events import SETTLED_NS, EventReader
from phalanx.record.host_file import (
    Session,
    find_session,
    has_bytes,
    host_file_name,
    host_files,
    session_counts,
    stat_events,
    total_bytes,
)

if TYPE_CHECKING:
    from phalanx.record.account.summary import Summary

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
EVENTS = re.compile(r"events-(\d{5}|[1-9]\d{5,6})(?:-(\d{4,9}))?\.jsonl")
PLAN = re.compile(r"plan(?:-\d{1,9})?\.json")
BEYOND = 10**9  # more ranks than any run has
COMMIT = re.compile(r"step-(\d{8,18})")
SETTINGS = ("job.toml", "job.json", "plan.json")  # what a run is trained with
RUN_ID = "run_id"
DIGEST = "sha256"  # in launch.json, of everything else in it
ID = re.compile(r"[0-9a-f]{32}")
WHY_CHANGED = "the run would go on with settings that nobody asked for"
MOST_JSON_BYTES = 64 * 2**20  # plans of the largest jobs are below 1 MB
GLANCE_S = 0.2  # a look at a lock takes microseconds
MOST_TRIES = 1000  # runs of one name started within one second


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run folder; every path in it has one name, here."""

    path: Path

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.path.name

    def __str__(self) -> str:
        """The page that `phalanx train` prints at the end."""
        from phalanx.record.report.render import render_text

        return render_text(self.summary())

    def __repr__(self) -> str:
        return f"<Run: {self.path}, {self.status().get('state', 'created')}>"

    def _repr_html_(self) -> str:
        from phalanx.io.notebook import document_as_html
        from phalanx.record.report.html import render_html
        from phalanx.record.report.run_report import read_run_report

        return document_as_html(render_html(read_run_report(self), made=str(self.path)))

    def summary(self) -> Summary:
        """What the run came to, as far as it went: measured beside predicted."""
        from phalanx.record.account.summary import summarize
        from phalanx.record.report.run_report import with_lost_processes

        return with_lost_processes(self, summarize(self))

    def frame(self, *names: str, rank: int | None = None, first: int | None = None, last: int | None = None) -> Any:
        """Numbers by step, as `run.frame("loss", "tokens_per_s")`; without names, all that were recorded.

        A pandas DataFrame indexed by step, or a dict of numpy columns with `step` where pandas is not installed. `rank`
        is the lowest one with a record, unless given. Steps that were done again count once.
        """
        from phalanx.io.notebook import as_frame
        from phalanx.record.archive.history import RunHistory

        return as_frame(RunHistory.open(self).by_step(names, rank=rank, first=first, last=last), index="step")

    def plot(self, *names: str, rank: int | None = None) -> RunPlot:
        """Curves over the steps, as `run.plot("loss", "tokens_per_s")`: an SVG each, which a notebook shows."""
        from phalanx.io.svg import PlotLine, axis_format, line_plot
        from phalanx.record.archive.history import RunHistory

        history = RunHistory.open(self)
        drawn = []
        for name in names or ("loss",):
            curve = history.curve(name, rank=rank)
            line = PlotLine(label=name, x=curve.step, mean=curve.mean, low=curve.low, high=curve.high, style="1")
            drawn.append(line_plot(name, [line], show=axis_format(curve.unit)))
        return RunPlot(names=names or ("loss",), svgs=tuple(drawn))

    @property
    def job_toml(self) -> Path:
        """The job with every value resolved."""
        return self.path / "job.toml"

    @property
    def plan_json(self) -> Path:
        """Layout and prediction."""
        return self.path / "plan.json"

    @property
    def checkpoints(self) -> Path | str:
        """Where checkpoints are kept: the job's checkpoint.path, seen from the run; a text is an object store's URL.

        There each run has a prefix of its own, or the next run of the same job would go on where this one ended.
        """
        try:
            path = str(self.plan()["job"]["checkpoint"]["path"])
        except (UserError, KeyError, TypeError):
            path = "checkpoints"
        return f"{path.rstrip('/')}/{self.name}" if "://" in path else self.path / path

    def saved_steps(self) -> list[int]:
        """Steps with a committed checkpoint, oldest first; a commit is a folder whose manifest was written last.

        Of an object store: those that rank 0 reported, since it takes the trainer's libraries to ask the store itself.
        """
        root = self.checkpoints
        if isinstance(root, str):
            return sorted(self._reported())
        found = [(COMMIT.fullmatch(path.parent.name), path) for path in root.glob("step-*/manifest.json")]
        return sorted(int(match.group(1)) for match, _ in found if match)

    def saved_at(self, step: int) -> float:
        """Unix time at which the checkpoint of a step was committed; 0 when that cannot be told."""
        root = self.checkpoints
        if isinstance(root, str):
            return self._reported().get(step, 0.0)
        try:
            return (root / f"step-{step:08d}" / "manifest.json").stat().st_mtime
        except OSError:
            return 0.0

    def _reported(self) -> dict[int, float]:
        """Commits in the events of rank 0, with their times; the newest as many as are kept."""
        found: dict[int, float] = {}
        for event in EventReader(self.events(0)).stream(only=(b'"checkpoint"',)):
            step, time_s = integer(event, "step"), number(event, "t")
            if event["event"] == "checkpoint" and event.get("path") and step is not None and time_s is not None:
                found[step] = time_s
        keep = integer(at(self.plan(), "job", "checkpoint"), "keep") or 0  # unknown: all
        return {step: found[step] for step in sorted(found)[-keep:]}

    @property
    def stop_file(self) -> Path:
        """The kill switch: while it exists the run stops at its next step."""
        return self.path / "stop"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Be the only one who trains in this folder; raises UserError when somebody else does."""
        with open(self.path / "lock", "a+", encoding="utf-8") as file:
            if not _lock(file, patience_s=GLANCE_S):
                file.seek(0)
                raise mistake(
                    str(self.path),
                    f"this run is going on: process {file.read(20).strip() or 'unknown'} trains in it",
                    why="two would write the same steps and checkpoints",
                    fix="wait, or stop it: Ctrl-C there, or make a file called stop in the folder",
                )
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield

    @property
    def is_held(self) -> bool:
        """Whether a process trains in this folder now."""
        try:
            with open_regular(self.path / "lock") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # for a moment: see `_lock`
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return False

    def events(self, rank: int) -> Path:
        """The events of one rank."""
        return self.path / f"events-{rank:05d}.jsonl"

    def host_events(self, host: str) -> Path:
        """The events of all ranks of a host, in a run of very many."""
        return self.path / f"events-host-{host_file_name(host)}.jsonl"

    def host_log(self, host: str) -> Path:
        """What all ranks of a host printed, in a run of very many."""
        return self.path / "logs" / f"host-{host_file_name(host)}.log"

    def rank_log(self, rank: int) -> Path:
        """What one rank printed, where it has a log of its own."""
        return self.path / "logs" / f"rank-{rank:05d}.log"

    def log(self, rank: int) -> Path:
        """What one rank printed; in a run of very many, with what others of its host printed."""
        own = self.rank_log(rank)
        session = None if own.exists() else find_session(self.events(rank))
        if session is None:
            return own
        return self.path / "logs" / f"{Path(session.path).stem.removeprefix('events-')}.log"

    def rank_stack(self, rank: int) -> Path:
        """Where a rank that hangs was, if it has a file of its own for that."""
        return self.rank_log(rank).with_suffix(".stack")

    def host_stack(self, host: str) -> Path:
        """Where ranks of a host were that hung, in a run of very many; written when one does."""
        return self.host_log(host).with_suffix(".stack")

    def stack(self, rank: int) -> Path:
        """Where a rank that hangs was; in a run of very many, with others of its host."""
        return self.log(rank).with_suffix(".stack")

    def error(self, rank: int) -> Path:
        """Why one rank failed."""
        return self.path / "errors" / f"rank-{rank:05d}.json"

    def flight(self, epoch: int, rank: int) -> Path:
        """The collectives a rank had begun last, when a membership ended badly (record/account/incidents.py)."""
        return self.path / "flight" / f"epoch-{epoch:05d}-rank-{rank:05d}.json"

    @property
    def supervisor(self) -> Path:
        """The events of the supervisor: hosts, epochs, incidents."""
        return self.path / "supervisor.jsonl"

    def event_files(self) -> list[Path]:
        """The event files of all ranks, by rank; closed parts go with the one that grows (`events.parts`)."""
        return [self.events(rank) for rank in self.event_parts()]

    def event_parts(self) -> dict[int, list[int]]:
        """Every rank of which there are events, in order, with the numbers of the closed parts of its file.

        Files of ranks that no plan and no launch of this run ever had are left out (`stray_files`).
        """
        return self._listed_parts()[0]

    def stray_files(self) -> int:
        """How many event files there are of ranks that the run never had."""
        return self._listed_parts()[1]

    def _listed_parts(self) -> tuple[dict[int, list[int]], int]:
        try:
            names = _listed_names(self.path)
        except OSError:
            return {}, 0
        parts, counts = names.parts, names.counts
        if sessions := session_counts(self.path):
            parts, counts = _with_sessions(names, sessions)
        most = self._most_ranks(names.settings)
        if not parts or next(reversed(parts)) < most:
            return parts, 0
        found = {rank: closed for rank, closed in parts.items() if rank < most}
        strays = sum(counts[rank] for rank in parts if rank >= most)
        return found, strays

    def _most_ranks(self, names: Sequence[str]) -> int:
        """The largest world of any plan or launch; beyond all ranks where one of them cannot be read."""
        worlds = [_world_in(self.path / name) for name in names if PLAN.fullmatch(name)]
        if "launch.json" in names:
            worlds.append(_world_in(self.path / "launch.json"))
        return max(worlds) if worlds and "plan.json" in names else BEYOND

    def recorded(self) -> Iterator[int]:
        """Ranks whose events are more than a name, in order."""
        folder = os.fspath(self.path)
        shared: dict[int, list[Session]] | None = None
        for rank, closed in self.event_parts().items():
            if closed:
                yield rank
                continue
            name = f"{folder}/events-{rank:05d}.jsonl"  # texts: of 16,384 ranks paths take half a second
            try:
                own = os.stat(name)
                is_recorded = bool(own.st_size) and stat.S_ISREG(own.st_mode)
            except OSError:
                if shared is None:
                    shared = host_files(folder).sessions()
                is_recorded = any(map(has_bytes, shared.get(rank, ())))
            if is_recorded:
                yield rank

    def event_bytes(self) -> int:
        """Bytes of the events of all ranks."""
        try:
            with os.scandir(self.path) as entries:
                found = [entry.stat(follow_symlinks=False) for entry in entries if EVENTS.fullmatch(entry.name)]
        except OSError:
            return 0
        return sum(one.st_size for one in found if stat.S_ISREG(one.st_mode)) + total_bytes(self.path)

    def plan(self) -> dict[str, Any]:
        """plan.json as JSON values."""
        return read_json(self.plan_json)

    def plan_text(self) -> str:
        """plan.json for whoever trains with it: raises UserError unless it is what was written, down to the bit."""
        try:
            text = read_bounded(self.plan_json, MOST_JSON_BYTES).decode("utf-8")
        except (OSError, FileTooLargeError, ValueError) as error:
            what = f"cannot be read: {getattr(error, 'strerror', None) or error}"
            raise mistake(str(self.plan_json), what, why="the run is damaged") from error
        self._refuse_changed({self.plan_json.name: text_digest(text)})
        return text

    def check_settings(self) -> None:
        """Raise UserError naming job and plan files that are not what was written; those of 0.6 are not known."""
        digests = {}
        for name in (*SETTINGS, *([RUN_ID] if (self.path / RUN_ID).exists() else [])):
            try:
                digests[name] = file_sha256(self.path / name)
            except OSError:
                digests[name] = "a file that cannot be read"
        self._refuse_changed(digests)

    def _refuse_changed(self, digests: Mapping[str, str]) -> None:
        try:
            known = read_checksums(self.path)
        except FileNotFoundError:  # a run of 0.6
            return
        fix = (
            "put it back from a copy; to change a setting: phalanx train --resume "
            f"{self.path} --set KEY=VALUE; to keep the file as it is: delete {self.path / CHECKSUMS}"
        )
        found = [compare_digest(self.path, name, digest, known, fix=fix) for name, digest in digests.items()]
        if problems := [replace(one, why=one.why or WHY_CHANGED) for one in found if one is not None]:
            raise UserError(problems)

    @property
    def run_id(self) -> str:
        """What tells this run from every other, whatever its folder is called; empty in a run of 0.6."""
        try:
            found = read_bounded(self.path / RUN_ID, 64).decode("ascii", "replace").strip()
        except (OSError, FileTooLargeError):
            return ""
        return found if ID.fullmatch(found) else ""

    def committed_step(self) -> int | None:
        """The newest step that rank 0 reported as saved, of those it did not go back behind since."""
        saved: set[int] = set()
        for event in EventReader(self.events(0)).stream(only=(b'"checkpoint"', b'"ready"')):
            step = integer(event, "step")
            if step is None:
                continue
            if event["event"] == "checkpoint" and event.get("path"):
                saved.add(step)
            elif event["event"] == "ready":
                saved = {one for one in saved if one <= step}
        return max(saved, default=None)

    def launch(self) -> dict[str, Any]:
        """launch.json: what the launcher knew and the plan does not; raises UserError unless it is what was written.

        One of 0.6, or that a person wrote, has no digest, and is taken as it is.
        """
        values = read_json(self.path / "launch.json")
        said = values.pop(DIGEST, None)
        if said is not None and said != _values_digest(values):
            what = f"has changed since it was written: {DIGEST} in it is of other values"
            fix = f"put it back from a copy; to keep it as it is, delete {DIGEST} from it"
            raise mistake(str(self.path / "launch.json"), what, why=WHY_CHANGED, fix=fix)
        return values

    def set_launch(self, **values: Any) -> None:
        """Replace launch.json; it carries a digest of its own, since it is written at every launch."""
        self._write("launch.json", {**values, DIGEST: _values_digest(values)})

    def launches(self) -> list[float]:
        """When each launch began, in order, as far as launch.json tells: an old one tells of the last alone."""
        try:
            launch = self.launch()
        except UserError:
            return []
        earlier = launch.get("earlier")
        known = [finite(one) for one in earlier] if isinstance(earlier, list) else []
        known.append(number(launch, "launched") or number(launch, "started"))
        return sorted({one for one in known if one})

    def world(self) -> int | None:
        """Ranks by launch.json, or by the plan where that has fewer devices or alone tells; None when nobody does."""
        known = [planned] if (planned := self.planned_world()) is not None else []
        try:
            reported = integer(self.launch(), "world")
        except UserError:
            reported = None
        return (
            max(0, min([*known, reported if reported is not None else known[0]]))
            if known or reported is not None
            else None
        )

    def planned_world(self) -> int | None:
        """Devices of the plan's layout."""
        try:
            layout = at(self.plan(), "layout")
        except UserError:
            return None
        return _layout_world(layout)

    def status(self) -> dict[str, Any]:
        """status.json; empty before the run was launched or when it is damaged."""
        try:
            return read_json(self.path / "status.json")
        except UserError:
            return {}

    def set_status(self, state: str, **values: Any) -> None:
        """Replace status.json: `state` is created, running, done, stopped or failed."""
        self._write("status.json", {"state": state, "t": round(time.time(), 3), **values})

    def replan(self, *, job_toml: str, job: Mapping[str, Any], plan_json: str) -> None:
        """Put another plan in place; the one before is kept as plan-1.json, plan-2.json and so on."""
        if self.plan() == json.loads(plan_json):
            if not (self.path / CHECKSUMS).exists():  # a run of 0.6
                self._fill(job_toml=job_toml, job=job, plan_json=plan_json)
            return
        count = self.plan_count()
        _write_file(
            self.path / f"plan-{count}.json", self.plan_json.read_text(encoding="utf-8")
        )  # a copy: a run has a plan
        self._fill(job_toml=job_toml, job=job, plan_json=plan_json)

    def plan_count(self) -> int:
        """Plans this run has had; the newest is plan.json, kept under this number once another takes its place."""
        try:
            return 1 + sum(name.startswith("plan-") for name in _listed_names(self.path).settings)
        except OSError:
            return 1

    def _fill(self, *, job_toml: str, job: Mapping[str, Any], plan_json: str) -> None:
        """Write the settings. Their digests first: a process that dies between leaves nothing that looks damaged."""
        job_json = json.dumps(job, indent=1, ensure_ascii=False) + "\n"
        texts = dict(zip(SETTINGS, (job_toml, job_json, plan_json), strict=True))
        if known := self.run_id:
            texts[RUN_ID] = f"{known}\n"
        digests = {name: text_digest(text) for name, text in texts.items()}
        try:
            add_checksums(self.path, digests)
            for name, text in texts.items():
                _write_file(self.path / name, text)
            write_checksums(self.path, digests)
        except OSError as error:
            raise _cannot_write(self.path / CHECKSUMS, error) from error

    def _write(self, name: str, values: Mapping[str, Any]) -> None:
        _write_file(self.path / name, json.dumps(values, indent=1, ensure_ascii=False) + "\n")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlot:
    """Curves of a run."""

    names: tuple[str, ...]
    svgs: tuple[str, ...]  # empty texts where nothing was recorded

    def __repr__(self) -> str:
        return f"<RunPlot: {', '.join(self.names)}>"

    def _repr_html_(self) -> str:
        from phalanx.io.notebook import document_as_html
        from phalanx.io.style import REPORT_CSS

        figures = "".join(
            f"<figure><figcaption><b>{name}</b></figcaption>{svg}</figure>"
            for name, svg in zip(self.names, self.svgs, strict=True)
        )
        return document_as_html(f'<style>{REPORT_CSS}</style><div class="plots">{figures}</div>', height=320)


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedNames:
    """What the folder of a run holds, as far as its names tell. Nobody changes it."""

    parts: dict[int, list[int]]  # of every rank with events, in order, the numbers of closed parts
    counts: dict[int, int]  # event files of each
    settings: tuple[str, ...]  # plans and launch.json
    live: frozenset[int] = frozenset()  # ranks with a file of their own that grows


def _with_sessions(names: ListedNames, sessions: Mapping[int, int]) -> tuple[dict[int, list[int]], dict[int, int]]:
    """Parts and counts, those in the files of hosts included: every session but the newest is a closed part."""
    parts, counts = dict(names.parts), dict(names.counts)
    for rank, count in sessions.items():
        closed = count - (rank not in names.live)
        known = parts.get(rank)
        parts[rank] = sorted({*known, *range(1, closed + 1)}) if known else list(range(1, closed + 1))
        counts[rank] = counts.get(rank, 0) + count
    return dict(sorted(parts.items())), counts


def _listed_names(folder: Path) -> ListedNames:
    """A folder that has not changed for a while is listed once, however often it is asked for."""
    found = os.stat(folder)
    is_settled = time.time_ns() - found.st_mtime_ns > SETTLED_NS
    listed = _list_names if is_settled else _list_names.__wrapped__
    return listed(os.fspath(folder), found.st_ino, found.st_mtime_ns)


@lru_cache(maxsize=4)
def _list_names(folder: str, inode: int, changed_ns: int) -> ListedNames:
    names = os.listdir(folder)
    found: dict[int, list[int]] = {}
    counts: dict[int, int] = {}
    live: set[int] = set()
    for name in names:
        if not name.startswith("events-") or (match := EVENTS.fullmatch(name)) is None:
            continue
        rank = int(match.group(1))
        closed = found.setdefault(rank, [])
        counts[rank] = counts.get(rank, 0) + 1
        if match.group(2):
            closed.append(int(match.group(2)))
        else:
            live.add(rank)
    settings = tuple(name for name in names if name == "launch.json" or PLAN.fullmatch(name))
    parts = {rank: sorted(found[rank]) for rank in sorted(found)}
    return ListedNames(parts=parts, counts=counts, settings=settings, live=frozenset(live))


def _world_in(path: Path) -> int:
    """The ranks that a plan or launch tells of; BEYOND where it tells none."""
    try:
        found = path.stat()
    except OSError:
        return BEYOND
    return _read_world(str(path), found.st_ino, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=256)  # of a file as it is: whoever follows a run asks twice a second
def _read_world(path: str, inode: int, changed_ns: int, size: int) -> int:
    try:
        values = read_json(Path(path))
    except UserError:
        return BEYOND
    if Path(path).name == "launch.json":
        return max(0, integer(values, "world") or 0)
    return _layout_world(at(values, "layout")) or BEYOND


def _layout_world(layout: Any) -> int | None:
    axes = ("data", "tensor", "context", "pipeline")
    return math.prod(max(1, integer(layout, axis) or 1) for axis in axes) if integer(layout, "data") else None


def _lock(file: TextIO, *, patience_s: float) -> bool:
    """Take a lock; somebody who only looks whether it is taken holds it for a moment."""
    until_s = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.monotonic() > until_s:
                return False
        time.sleep(0.01)


def create_run(
    root: Path, name: str, *, job_toml: str, job: Mapping[str, Any], plan_json: str, now_s: float | None = None
) -> Run:
    """A new folder `root/name-<UTC time>`; an existing one is never touched."""
    require_name(name)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now_s))
    run = Run(path=_new_folder(root, f"{name}-{stamp}"))
    for folder in ("logs", "errors", "checkpoints"):
        (run.path / folder).mkdir()
    _write_file(run.path / RUN_ID, f"{secrets.token_hex(16)}\n")
    run._fill(job_toml=job_toml, job=job, plan_json=plan_json)
    run.set_status("created")
    return run


def require_name(name: str) -> None:
    """Raise UserError for what cannot be the first part of a run folder's name."""
    if not NAME.fullmatch(name):
        fix = "use letters, digits, '.', '_' and '-', at most 100, not starting with a sign"
        raise mistake("run name", f"{name[:60]!r} is not a name", why="it names a folder under --runs", fix=fix)


def _new_folder(root: Path, stem: str) -> Path:
    try:
        root.mkdir(parents=True, exist_ok=True)
        for count in range(1, MOST_TRIES):
            path = root / (stem if count == 1 else f"{stem}-{count}")
            try:
                path.mkdir()  # fails when it exists: two runs of one second get two folders
                return path
            except FileExistsError:
                continue
    except OSError as error:
        what = f"cannot hold a run: {error.strerror or error}"
        raise SystemFailure(
            Problem(where=str(root), what=what, fix="name a writable folder with --runs DIR")
        ) from error
    raise SystemFailure(
        Problem(where=str(root), what=f"holds {MOST_TRIES} runs named {stem}", fix="use another --runs")
    )


def open_run(path: str | Path) -> Run:
    """The run in a folder; raises UserError when it is none."""
    folder = Path(path)
    if not folder.is_dir():
        close = nearest(folder.name, _folder_names(folder.parent))
        fix = f"did you mean {folder.parent / close}?" if close else "name a folder under runs/, as phalanx train made"
        raise mistake(str(folder), "there is no such run", fix=fix)
    if not (folder / "plan.json").is_file():
        inside = [name for name in _folder_names(folder) if (folder / name / "plan.json").is_file()]
        fix = f"name a run in it, such as {folder / inside[-1]}" if inside else "name a folder that phalanx train made"
        raise mistake(str(folder), "is not a run: it has no plan.json", fix=fix)
    return Run(path=folder)


def list_runs(root: Path) -> list[Run]:
    """The runs of a folder, newest first; links and names that `phalanx train` would not make are left out."""
    found = []
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                if _is_run(entry):
                    found.append((_start_time(Path(entry.path)), entry.name))
    except OSError:
        return []
    return [Run(path=root / name) for _, name in sorted(found, reverse=True)]


def run_in(root: Path, name: str) -> Run:
    """The run of that name in a folder; raises UserError for any name that is none, or leads elsewhere."""
    path = root / name if NAME.fullmatch(name) else None
    if path is None or path.is_symlink() or not (path / "plan.json").is_file():
        close = nearest(name[:100], [run.name for run in list_runs(root)])
        fix = f"did you mean {close}?" if close else "name a folder that phalanx train made"
        raise mistake(str(root), f"has no run called {name[:60]!r}", fix=fix)
    return Run(path=path)


def _is_run(entry: os.DirEntry[str]) -> bool:
    try:
        is_folder = entry.is_dir(follow_symlinks=False)
    except OSError:
        return False
    return is_folder and bool(NAME.fullmatch(entry.name)) and (Path(entry.path) / "plan.json").is_file()


def _start_time(folder: Path) -> float:
    """When a run was made, as far as its files tell: the plan is written first, and hardly ever again."""
    try:
        return (folder / "plan.json").stat().st_mtime
    except OSError:
        return 0.0


def _folder_names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    except OSError:
        return []


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object in a file of a run; raises UserError when it is missing or damaged."""
    try:
        if not path.is_file() and path.exists():  # a pipe would be waited for for ever
            raise mistake(str(path), "is not a file", why="the run is damaged")
        data = json.loads(read_bounded(path, MOST_JSON_BYTES).decode())
    except OSError as error:
        raise mistake(str(path), f"cannot be read: {error.strerror or error}", why="the run is damaged") from error
    except FileTooLargeError as error:
        raise mistake(str(path), str(error), why="the run is damaged") from error
    except (ValueError, RecursionError) as error:
        raise mistake(str(path), "is not JSON", why="the run is damaged") from error
    if not isinstance(data, dict):
        raise mistake(str(path), "is not a JSON object", why="the run is damaged")
    return data


def _values_digest(values: Mapping[str, Any]) -> str:
    """Of JSON values, however they were written; those that were read again give the same."""
    return text_digest(json.dumps(json.loads(json.dumps(values)), sort_keys=True))


def _write_file(path: Path, text: str) -> None:
    try:
        replace_text(path, text)
    except OSError as error:
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: OSError) -> SystemFailure:
    what = f"cannot be written: {error.strerror or error}"
    return SystemFailure(Problem(where=str(path), what=what, fix="free some space, or use another --runs"))


# ---- whether anything more is to come --------------------------------------------------------------------------------


ENDED = ("done", "stopped", "failed")  # states that a run gives itself at its end
# The lock of a run is not seen on every host (flock is not shared by all file systems), so it is believed only where
# nobody writes either: ranks tell of themselves every few seconds, from a thread of their own.
SILENT_S = 120.0


def is_run_over(run: Run, *, heard_s: float = 0.0, now_s: float | None = None) -> bool:
    """Ended, or gone without a word: nobody holds it, and nothing was written for SILENT_S.

    `heard_s`: when the caller saw it grow, by its own clock, which may not be the one of the disk.
    """
    if run.status().get("state") in ENDED:
        return True
    now_s = time.time() if now_s is None else now_s
    return now_s - max(heard_s, last_written(run)) >= SILENT_S and not run.is_held


def last_written(run: Run) -> float:
    """Unix time at which one of the files that every run keeps writing last grew; 0 when there is none."""
    times = [0.0]
    for path in (run.events(0), run.supervisor, run.path / "status.json", run.path / "launch.json", run.plan_json):
        found = stat_events(path)
        if found is not None and found.size:
            times.append(found.mtime_ns / 1e9)
    return max(times)
