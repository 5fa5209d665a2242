"""A run: one folder with the resolved job, the plan, the events and logs of every rank, and the checkpoints.

runs/first-run-20261115-054500/
├── job.toml  job.json       the job, every value resolved
├── plan.json                layout and prediction
├── run_id                   a random id, which its checkpoints carry
├── SHA256SUMS               digests of these four files, checked before training
├── launch.json              values that the launcher adds: data, ranks, baselines
├── status.json              state of the run as the coordinator sees it
├── events-00000.jsonl …     the events of each rank (docs/events.md); closed parts are events-00000-0001.jsonl …
├── events-00000.index …     their indexes (docs/record.md)
├── logs/rank-00000.log …    the output of each rank
│                            from 1,024 ranks on, one file for the ranks of a host: events-host-NAME.jsonl, .index
│                            and .ranks (rank_table.py), logs/host-NAME.log (host_file.py)
├── errors/rank-00000.json … the error of a rank that failed
├── flight/epoch-00001-rank-00000.json … the last collectives of a rank when its membership failed
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
    """A run folder, and the name of every path in it.

    >>> run = phalanx.run("runs/first-run")  # doctest: +SKIP
    >>> run.name, run.status()["state"]  # doctest: +SKIP
    ('first-run', 'done')
    >>> run.frame("loss")  # doctest: +SKIP
    """

    path: Path

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.name

    def __str__(self) -> str:
        """Return the report that `phalanx train` prints at the end."""
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
        """Return the results of the run so far: measured next to predicted values."""
        from phalanx.record.account.summary import summarize_run
        from phalanx.record.report.run_report import with_lost_processes

        return with_lost_processes(self, summarize_run(self))

    def frame(self, *names: str, rank: int | None = None, first: int | None = None, last: int | None = None) -> Any:
        """Return recorded values by step, as in `run.frame("loss", "tokens_per_s")`; without names, all values.

        The result is a pandas DataFrame indexed by step, or a dict of numpy columns with `step` if pandas is not
        installed. `rank` defaults to the lowest one with a record. Steps that were repeated count once.
        """
        from phalanx.io.notebook import as_frame
        from phalanx.record.archive.history import RunHistory

        return as_frame(RunHistory.open(self).by_step(names, rank=rank, first=first, last=last), index="step")

    def plot(self, *names: str, rank: int | None = None) -> RunPlot:
        """Plot values over the steps, as in `run.plot("loss", "tokens_per_s")`: one SVG each, for a notebook."""
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
        """The place of the checkpoints, by the job's checkpoint.path; a str is the URL of an object store.

        In an object store each run has its own prefix, so that the next run of the same job does not continue this
        one.
        """
        try:
            path = str(self.plan()["job"]["checkpoint"]["path"])
        except (UserError, KeyError, TypeError):
            path = "checkpoints"
        return f"{path.rstrip('/')}/{self.name}" if "://" in path else self.path / path

    def saved_steps(self) -> list[int]:
        """Return the steps with a committed checkpoint, oldest first: folders with a manifest, which is written last.

        For an object store, return the steps that rank 0 reported, since asking the store itself needs the libraries
        of the trainer.
        """
        root = self.checkpoints
        if isinstance(root, str):
            return sorted(self._reported_commits())
        manifests = [(COMMIT.fullmatch(path.parent.name), path) for path in root.glob("step-*/manifest.json")]
        return sorted(int(match.group(1)) for match, _ in manifests if match)

    def saved_at(self, step: int) -> float:
        """Return the Unix time at which the checkpoint of a step was committed; 0 if it is unknown."""
        root = self.checkpoints
        if isinstance(root, str):
            return self._reported_commits().get(step, 0.0)
        try:
            return (root / f"step-{step:08d}" / "manifest.json").stat().st_mtime
        except OSError:
            return 0.0

    def _reported_commits(self) -> dict[int, float]:
        """Return the newest `checkpoint.keep` commits in the events of rank 0, with their times."""
        commits: dict[int, float] = {}
        for event in EventReader(self.events(0)).stream(only=(b'"checkpoint"',)):
            step, time_s = integer(event, "step"), number(event, "t")
            if event["event"] == "checkpoint" and event.get("path") and step is not None and time_s is not None:
                commits[step] = time_s
        # 0, that is all, if the plan does not contain it.
        keep = integer(at(self.plan(), "job", "checkpoint"), "keep") or 0
        return {step: commits[step] for step in sorted(commits)[-keep:]}

    @property
    def stop_file(self) -> Path:
        """The stop request file: while it exists, the run stops at its next step."""
        return self.path / "stop"

    def held(self) -> AbstractContextManager[None]:
        """Hold the folder's lock while training; raise UserError if another process holds it."""
        return hold_folder(self.path)

    @property
    def is_held(self) -> bool:
        """True if a process trains in this folder now."""
        return is_folder_held(self.path)

    def events(self, rank: int) -> Path:
        """Return the path of the events of one rank."""
        return self.path / f"events-{rank:05d}.jsonl"

    def host_events(self, host: str) -> Path:
        """Return the path of the events of all ranks of a host, in a run with shared host files."""
        return self.path / f"events-host-{host_file_name(host)}.jsonl"

    def host_log(self, host: str) -> Path:
        """Return the path of the output of all ranks of a host, in a run with shared host files."""
        return self.path / "logs" / f"host-{host_file_name(host)}.log"

    def rank_log(self, rank: int) -> Path:
        """Return the path of the output of one rank, if it has its own log."""
        return self.path / "logs" / f"rank-{rank:05d}.log"

    def log(self, rank: int) -> Path:
        """Return the log that contains the output of a rank: its own, or the one that the ranks of its host share."""
        own = self.rank_log(rank)
        session = None if own.exists() else find_session(self.events(rank))
        if session is None:
            return own
        return self.path / "logs" / f"{Path(session.path).stem.removeprefix('events-')}.log"

    def rank_stack(self, rank: int) -> Path:
        """Return the path of the stack dump of a rank that hangs, if it has its own log."""
        return self.rank_log(rank).with_suffix(".stack")

    def host_stack(self, host: str) -> Path:
        """Return the path of the stack dumps of hanging ranks of a host, in a run with shared host files."""
        return self.host_log(host).with_suffix(".stack")

    def stack(self, rank: int) -> Path:
        """Return the file with the stack dump of a rank that hangs: its own, or the one its host's ranks share."""
        return self.log(rank).with_suffix(".stack")

    def error(self, rank: int) -> Path:
        """Return the path of the error report of a rank that failed."""
        return self.path / "errors" / f"rank-{rank:05d}.json"

    def flight(self, generation: int, rank: int) -> Path:
        """Return the path of a rank's last collectives, recorded at a failure (account/flight_records.py)."""
        return self.path / "flight" / f"epoch-{generation:05d}-rank-{rank:05d}.json"

    @property
    def supervisor(self) -> Path:
        """The events of the coordinator: hosts, generations, incidents."""
        return self.path / "supervisor.jsonl"

    def event_files(self) -> list[Path]:
        """Return the event files of all ranks, by rank; closed parts belong to the file that grows (`event_parts`)."""
        return [self.events(rank) for rank in self.event_parts()]

    def event_parts(self) -> dict[int, list[int]]:
        """Return every rank that has events, in order, with the numbers of the closed parts of its file.

        Files of ranks that no plan and no launch of this run ever had are left out (`stray_files`).
        """
        return list_event_parts(self.path)[0]

    def stray_files(self) -> int:
        """Return the number of event files of ranks that the run never had."""
        return list_event_parts(self.path)[1]

    def recorded(self) -> Iterator[int]:
        """Yield the ranks that have written at least one byte of events, in order."""
        folder = os.fspath(self.path)
        shared = host_files(folder)
        ranks_with_bytes: frozenset[int] | None = None
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
                    # os.stat of a string: with 16,384 ranks, Path objects take half a second.
                    own = os.stat(f"{folder}/events-{rank:05d}.jsonl")
            if own is not None:
                is_recorded = bool(own.st_size) and stat.S_ISREG(own.st_mode)
            else:
                if ranks_with_bytes is None:
                    ranks_with_bytes = shared.ranks_with_bytes()
                is_recorded = rank in ranks_with_bytes or any(map(has_bytes, shared.sessions_of(rank)))
            if is_recorded:
                yield rank

    def event_bytes(self, *, beyond: float = math.inf) -> int:
        """Return the bytes of the events of all ranks; stop counting once they are more than `beyond`."""
        total = 0
        try:
            with os.scandir(self.path) as entries:
                for entry in entries:
                    if EVENTS.fullmatch(entry.name):
                        file_stat = entry.stat(follow_symlinks=False)
                        total += file_stat.st_size if stat.S_ISREG(file_stat.st_mode) else 0
                        if total > beyond:
                            return total
        except OSError:
            return 0
        return total + total_bytes(self.path)

    def plan(self) -> dict[str, Any]:
        """Return plan.json as JSON values."""
        return read_json(self.plan_json)

    def plan_text(self) -> str:
        """Return plan.json for training with it; raise UserError unless its digest is the one that was written."""
        return read_plan_text(self.plan_json)

    def check_settings(self) -> None:
        """Raise UserError with the names of changed job and plan files; runs of 0.6 have no digests to compare."""
        check_settings(self.path)

    @property
    def run_id(self) -> str:
        """The random id of this run, whatever its folder is called; empty in a run of 0.6."""
        return read_run_id(self.path)

    def committed_step(self) -> int | None:
        """Return the newest step that rank 0 reported as saved and did not go back behind afterwards.

        Checkpoints that a roll-back set aside do not count, also where the run ended before it was ready again.
        """
        saved: dict[int, float] = {}
        for event in EventReader(self.events(0)).stream(only=(b'"checkpoint"', b'"ready"')):
            step = integer(event, "step")
            if step is None:
                continue
            if event["event"] == "checkpoint" and event.get("path"):
                saved[step] = number(event, "t") or 0.0
            elif event["event"] == "ready":
                saved = {saved_step: saved_s for saved_step, saved_s in saved.items() if saved_step <= step}
        for event in EventReader(self.supervisor).stream(only=(b'"rollback"',)):
            steps = event.get("set_aside") if event["event"] == "rollback" else None
            rolled_back_s = number(event, "t") or 0.0
            set_aside = steps if isinstance(steps, list) else []
            saved = {
                saved_step: saved_s
                for saved_step, saved_s in saved.items()
                if saved_step not in set_aside or saved_s > rolled_back_s
            }
        return max(saved, default=None)

    def launch(self) -> dict[str, Any]:
        """Return launch.json: the values that the launcher adds to the plan; raise UserError if its digest is wrong.

        A file of 0.6, or one that a person wrote, has no digest and is accepted.
        """
        return read_launch(self.path / "launch.json")

    def set_launch(self, **values: Any) -> None:
        """Replace launch.json."""
        write_launch(self.path / "launch.json", values)

    def launches(self) -> list[float]:
        """Return the start time of each launch, in order; an old launch.json holds only the last one."""
        try:
            launch = self.launch()
        except UserError:
            return []
        earlier = launch.get("earlier")
        launch_times = [finite(time_s) for time_s in earlier] if isinstance(earlier, list) else []
        launch_times.append(number(launch, "launched") or number(launch, "started"))
        return sorted({time_s for time_s in launch_times if time_s})

    def world(self) -> int | None:
        """Return the number of ranks: the smaller one of launch.json and plan, or the known one; None if unknown."""
        worlds = [planned] if (planned := self.planned_world()) is not None else []
        try:
            launched_world = integer(self.launch(), "world")
        except UserError:
            launched_world = None
        return (
            max(0, min([*worlds, launched_world if launched_world is not None else worlds[0]]))
            if worlds or launched_world is not None
            else None
        )

    def planned_world(self) -> int | None:
        """Return the number of devices in the plan's layout; None if it is unknown."""
        try:
            layout = at(self.plan(), "layout")
        except UserError:
            return None
        return layout_world(layout)

    def status(self) -> dict[str, Any]:
        """Return status.json; empty if the run was not launched yet or the file is damaged."""
        try:
            return read_json(self.path / "status.json")
        except UserError:
            return {}

    def set_status(self, state: str, **values: Any) -> None:
        """Replace status.json: `state` is created, running, done, stopped or failed."""
        write_json(self.path / "status.json", {"state": state, "t": round(time.time(), 3), **values})

    def replan(self, *, job_toml: str, job: Mapping[str, Any], plan_json: str) -> None:
        """Replace the plan; the previous one is kept as plan-1.json, plan-2.json and so on."""
        if self.plan() == json.loads(plan_json):
            if not (self.path / CHECKSUMS).exists():  # a run of 0.6
                write_settings(self.path, job_toml=job_toml, job=job, plan_json=plan_json)
            return
        write_run_file(
            # A copy, not a rename: the run has a plan.json at any time.
            self.path / f"plan-{self.plan_count()}.json",
            self.plan_json.read_text(encoding="utf-8"),
        )
        write_settings(self.path, job_toml=job_toml, job=job, plan_json=plan_json)

    def plan_count(self) -> int:
        """Return the number of plans this run has had; plan.json is saved under this number when it is replaced."""
        try:
            return 1 + sum(name.startswith("plan-") for name in list_names(self.path).settings)
        except OSError:
            return 1


def create_run(
    root: Path, name: str, *, job_toml: str, job: Mapping[str, Any], plan_json: str, now_s: float | None = None
) -> Run:
    """Create the folder `root/name-<UTC time>` with the run's settings; existing folders are never touched."""
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
    """Raise UserError if `name` cannot be the first part of a run folder's name."""
    if not NAME.fullmatch(name):
        fix = "use letters, digits, '.', '_' and '-', at most 100, not starting with a sign"
        raise mistake("run name", f"{name[:60]!r} is not a name", why="it names a folder under --runs", fix=fix)


def _new_folder(root: Path, stem: str) -> Path:
    try:
        root.mkdir(parents=True, exist_ok=True)
        for count in range(1, MOST_TRIES):
            path = root / (stem if count == 1 else f"{stem}-{count}")
            try:
                # mkdir fails if the folder exists, so two runs of the same second get two folders.
                path.mkdir()
                return path
            except FileExistsError:
                continue
    except OSError as error:
        raise write_failure(root, error, fix="name a writable folder with --runs DIR") from error
    raise SystemFailure(
        Problem(where=str(root), what=f"holds {MOST_TRIES} runs named {stem}", fix="use another --runs")
    )


def open_run(path: str | Path) -> Run:
    """Return the run in a folder; raise UserError if the folder is missing or not a run."""
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
    """Return the runs of a folder, newest first; skip links and names that `phalanx train` would not make."""
    runs = []
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                if _is_run(entry):
                    runs.append((_start_time(Path(entry.path)), entry.name))
    except OSError:
        return []
    return [Run(path=root / name) for _, name in sorted(runs, reverse=True)]


def run_in(root: Path, name: str) -> Run:
    """Return the run of that name in a folder; raise UserError if the name is invalid, unknown, or a link."""
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
    """Return the start time of a run by the age of plan.json, which is written first and rarely replaced."""
    try:
        return (folder / "plan.json").stat().st_mtime
    except OSError:
        return 0.0


def _folder_names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    except OSError:
        return []
