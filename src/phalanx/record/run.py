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
│                            from 1,024 ranks on one file for the ranks of a host: events-host-NAME.jsonl, .index
│                            and .ranks (rank_table.py), logs/host-NAME.log (host_file.py)
├── errors/rank-00000.json … why a rank failed
├── flight/epoch-00001-rank-00000.json … which collectives a rank was in when its membership ended badly
├── checkpoints/
└── stop                     create this file to stop the run at the next step
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.errors import Problem, SystemFailure, UserError, mistake, nearest
from phalanx.io.checksums import CHECKSUMS
from phalanx.io.path_probes import is_file, is_folder, shown_path, unreachable
from phalanx.io.values import at, finite, integer, number
from phalanx.io.write_errors import write_failure
from phalanx.record.events import EventReader
from phalanx.record.host_extents import host_file_name
from phalanx.record.host_file import find_session, has_bytes, host_files, total_bytes
from phalanx.record.run_files import (
    EVENTS,
    layout_world,
    list_event_parts,
    list_names,
    read_json,
    write_json,
    write_run_file,
)
from phalanx.record.run_lock import hold_folder, is_folder_held
from phalanx.record.run_settings import (
    RUN_ID,
    check_settings,
    read_launch,
    read_plan_text,
    read_run_id,
    write_launch,
    write_settings,
)

if TYPE_CHECKING:
    from phalanx.record.account.summary import Summary
    from phalanx.record.run_plot import RunPlot

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
COMMIT = re.compile(r"step-(\d{8,18})")
MOST_TRIES = 1000  # runs of one name started within one second


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run folder; every path in it has one name, here.

    >>> run = phalanx.run("runs/first-run")  # doctest: +SKIP
    >>> run.name, run.status()["state"]  # doctest: +SKIP
    ('first-run', 'done')
    >>> run.frame("loss")  # doctest: +SKIP
    """

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
        from phalanx.record.account.summary import summarize_run
        from phalanx.record.report.run_report import with_lost_processes

        return with_lost_processes(self, summarize_run(self))

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
        from phalanx.record.run_plot import plot_run

        return plot_run(self, names or ("loss",), rank=rank)

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
            return sorted(self._reported_commits())
        found = [(COMMIT.fullmatch(path.parent.name), path) for path in root.glob("step-*/manifest.json")]
        return sorted(int(match.group(1)) for match, _ in found if match)

    def saved_at(self, step: int) -> float:
        """Unix time at which the checkpoint of a step was committed; 0 when that cannot be told."""
        root = self.checkpoints
        if isinstance(root, str):
            return self._reported_commits().get(step, 0.0)
        try:
            return (root / f"step-{step:08d}" / "manifest.json").stat().st_mtime
        except OSError:
            return 0.0

    def _reported_commits(self) -> dict[int, float]:
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

    def held(self) -> AbstractContextManager[None]:
        """Be the only one who trains in this folder; raises UserError when somebody else does."""
        return hold_folder(self.path)

    @property
    def is_held(self) -> bool:
        """Whether a process trains in this folder now."""
        return is_folder_held(self.path)

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

    def flight(self, generation: int, rank: int) -> Path:
        """The collectives a rank had begun last, when a membership ended badly (record/account/incidents.py)."""
        return self.path / "flight" / f"epoch-{generation:05d}-rank-{rank:05d}.json"

    @property
    def supervisor(self) -> Path:
        """The events of the supervisor: hosts, generations, incidents."""
        return self.path / "supervisor.jsonl"

    def event_files(self) -> list[Path]:
        """The event files of all ranks, by rank; closed parts go with the one that grows (`events.parts`)."""
        return [self.events(rank) for rank in self.event_parts()]

    def event_parts(self) -> dict[int, list[int]]:
        """Every rank of which there are events, in order, with the numbers of the closed parts of its file.

        Files of ranks that no plan and no launch of this run ever had are left out (`stray_files`).
        """
        return list_event_parts(self.path)[0]

    def stray_files(self) -> int:
        """How many event files there are of ranks that the run never had."""
        return list_event_parts(self.path)[1]

    def recorded(self) -> Iterator[int]:
        """Ranks whose events are more than a name, in order."""
        folder = os.fspath(self.path)
        shared = host_files(folder)
        known: frozenset[int] | None = None
        try:
            live = list_names(self.path).live
        except OSError:
            return
        for rank, closed in self.event_parts().items():
            if closed:
                yield rank
                continue
            own = None
            if rank in live:
                with suppress(OSError):
                    own = os.stat(f"{folder}/events-{rank:05d}.jsonl")  # not a Path: of 16,384 ranks half a second
            if own is not None:
                is_recorded = bool(own.st_size) and stat.S_ISREG(own.st_mode)
            else:
                if known is None:
                    known = shared.ranks_with_bytes()
                is_recorded = rank in known or any(map(has_bytes, shared.sessions_of(rank)))
            if is_recorded:
                yield rank

    def event_bytes(self, *, beyond: float = math.inf) -> int:
        """Bytes of the events of all ranks; no more files are looked at once they are more than `beyond`."""
        found = 0
        try:
            with os.scandir(self.path) as entries:
                for entry in entries:
                    if EVENTS.fullmatch(entry.name):
                        one = entry.stat(follow_symlinks=False)
                        found += one.st_size if stat.S_ISREG(one.st_mode) else 0
                        if found > beyond:
                            return found
        except OSError:
            return 0
        return found + total_bytes(self.path)

    def plan(self) -> dict[str, Any]:
        """plan.json as JSON values."""
        return read_json(self.plan_json)

    def plan_text(self) -> str:
        """plan.json for whoever trains with it: raises UserError unless it is what was written, down to the bit."""
        return read_plan_text(self.plan_json)

    def check_settings(self) -> None:
        """Raise UserError naming job and plan files that are not what was written; those of 0.6 are not known."""
        check_settings(self.path)

    @property
    def run_id(self) -> str:
        """What tells this run from every other, whatever its folder is called; empty in a run of 0.6."""
        return read_run_id(self.path)

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
        return read_launch(self.path / "launch.json")

    def set_launch(self, **values: Any) -> None:
        """Replace launch.json."""
        write_launch(self.path / "launch.json", values)

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
        return layout_world(layout)

    def status(self) -> dict[str, Any]:
        """status.json; empty before the run was launched or when it is damaged."""
        try:
            return read_json(self.path / "status.json")
        except UserError:
            return {}

    def set_status(self, state: str, **values: Any) -> None:
        """Replace status.json: `state` is created, running, done, stopped or failed."""
        write_json(self.path / "status.json", {"state": state, "t": round(time.time(), 3), **values})

    def replan(self, *, job_toml: str, job: Mapping[str, Any], plan_json: str) -> None:
        """Put another plan in place; the one before is kept as plan-1.json, plan-2.json and so on."""
        if self.plan() == json.loads(plan_json):
            if not (self.path / CHECKSUMS).exists():  # a run of 0.6
                write_settings(self.path, job_toml=job_toml, job=job, plan_json=plan_json)
            return
        write_run_file(
            # A copy: a run has a plan at any time.
            self.path / f"plan-{self.plan_count()}.json",
            self.plan_json.read_text(encoding="utf-8"),
        )
        write_settings(self.path, job_toml=job_toml, job=job, plan_json=plan_json)

    def plan_count(self) -> int:
        """Plans this run has had; the newest is plan.json, kept under this number once another takes its place."""
        try:
            return 1 + sum(name.startswith("plan-") for name in list_names(self.path).settings)
        except OSError:
            return 1


def create_run(
    root: Path, name: str, *, job_toml: str, job: Mapping[str, Any], plan_json: str, now_s: float | None = None
) -> Run:
    """A new folder `root/name-<UTC time>`; an existing one is never touched."""
    require_name(name)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now_s))
    run = Run(path=_new_folder(root, f"{name}-{stamp}"))
    for folder in ("logs", "errors", "checkpoints"):
        (run.path / folder).mkdir()
    write_run_file(run.path / RUN_ID, f"{secrets.token_hex(16)}\n")
    write_settings(run.path, job_toml=job_toml, job=job, plan_json=plan_json)
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
        raise write_failure(root, error, fix="name a writable folder with --runs DIR") from error
    raise SystemFailure(
        Problem(where=str(root), what=f"holds {MOST_TRIES} runs named {stem}", fix="use another --runs")
    )


def open_run(path: str | Path) -> Run:
    """The run in a folder; raises UserError when it is none."""
    folder = Path(path)
    if not is_folder(folder):
        close = nearest(folder.name, _folder_names(folder.parent))
        fix = f"did you mean {folder.parent / close}?" if close else "name a run folder, made by phalanx train"
        raise mistake(shown_path(folder), unreachable(folder) or "there is no such run", fix=fix)
    if not is_file(folder / "plan.json"):
        inside = [name for name in _folder_names(folder) if is_file(folder / name / "plan.json")]
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
    if path is None or path.is_symlink() or not is_file(path / "plan.json"):
        close = nearest(name[:100], [run.name for run in list_runs(root)])
        fix = f"did you mean {close}?" if close else "name a folder that phalanx train made"
        raise mistake(str(root), f"has no run called {name[:60]!r}", fix=fix)
    return Run(path=path)


def _is_run(entry: os.DirEntry[str]) -> bool:
    try:
        real_folder = entry.is_dir(follow_symlinks=False)
    except OSError:
        return False
    return real_folder and bool(NAME.fullmatch(entry.name)) and is_file(Path(entry.path) / "plan.json")


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
