"""This machine as a launch system: a launched job is a background process that outlives the terminal."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from phalanx.elastic.local_launch import ALLOW_CODE
from phalanx.elastic.preflight import MOST_RANKS_PER_CORE
from phalanx.errors import PhalanxError, Problem, SystemFailure, UserError, mistake
from phalanx.hardware.discover import discover
from phalanx.io.values import integer, text
from phalanx.launch.book import LaunchRecord, find_record, read_records
from phalanx.launch.resource_request import NODE_MODULE, LaunchRequest
from phalanx.launch.system import (
    CANCELLED,
    DONE,
    FAILED,
    RUNNING,
    WAITING,
    JobExplanation,
    QueuedJob,
    Submitted,
)
from phalanx.record.run import Run, open_run
from phalanx.record.run_files import read_json, write_json
from phalanx.units import plural

PROCESS = "launch-process.json"  # in the run folder: the process that runs its agents
STATES = {"done": DONE, "failed": FAILED, "stopped": CANCELLED}
END_S = 60.0  # to save and end after SIGTERM, before SIGKILL


class LocalSystem:
    """Jobs as processes of this machine; the id is the name of the run folder."""

    name = "local"
    is_here = True

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def check(self, requests: Sequence[LaunchRequest], *, submits: bool = True) -> list[str]:
        """Check that this machine has cores or GPUs for the largest request."""
        machine, problems = discover(), []
        for request in requests:
            ranks = request.all_hosts * request.devices_per_host
            max_ranks = (
                len(machine.gpus) if request.accelerator != "cpu" else MOST_RANKS_PER_CORE * machine.usable_cores
            )
            if ranks > max_ranks:
                kind = "GPU" if request.accelerator != "cpu" else "rank"
                problems.append(
                    Problem(
                        where=request.name,
                        what=f"asks for {plural(ranks, kind)}, spares included, but this machine can run {max_ranks}",
                        fix="launch it on a cluster (--on slurm), or plan it for this machine (--set cluster.spec=…)",
                    )
                )
        if problems:
            raise UserError(problems)
        return []

    def render(self, requests: Sequence[LaunchRequest]) -> dict[str, str]:
        """Return the command that is started."""
        return {
            f"{Path(request.run).name}.sh": shlex.join(self._command(request.run, _host_options(request))) + "\n"
            for request in requests
        }

    def submit(self, requests: Sequence[LaunchRequest]) -> list[Submitted]:
        """Start a process per request, in a separate session."""
        for request in requests:
            self._start(Run(path=Path(request.run)), _host_options(request), request.environ)
        return [Submitted(id=Path(request.run).name, request=request) for request in requests]

    def list_jobs(self, ids: Sequence[str] = ()) -> list[QueuedJob]:
        """Return jobs that were launched on this machine and whose folders still exist."""
        jobs = []
        for record in read_records(self._environ, system=self.name):
            if ids and record.id not in ids:
                continue
            with suppress(UserError):  # the folder was deleted
                jobs.append(self._describe(record, open_run(record.run)))
        return jobs

    def explain(self, job: str) -> JobExplanation:
        """Explain the state of a run on this machine from its own record."""
        record = find_record(job, self._environ, system=self.name)
        run = open_run(record.run)
        state, status = self._state(run), run.status()
        message_lines = text(status, "message").splitlines()[:1]
        if state in (RUNNING, WAITING):
            return JobExplanation(id=record.id, state=state, reason="on this machine", cure=f"phalanx watch {run.path}")
        if state == DONE:
            return JobExplanation(
                id=record.id, state=state, reason="the training is complete", cure=f"phalanx report {run.path}"
            )
        reason = message_lines[0] if message_lines else "its process ended without an error message"
        remedy = f"phalanx logs {record.id} shows its last lines; phalanx requeue {record.id} resumes it"
        return JobExplanation(id=record.id, state=state, reason=reason, cure=remedy)

    def logs(self, job: str) -> list[str]:
        """Return the output files of the background process and of the agents."""
        run = open_run(find_record(job, self._environ, system=self.name).run)
        return [str(run.path / "logs" / name) for name in ("launch.log", "agent.log")]

    def cancel(self, job: str) -> None:
        """Ask the process to save and end; kill it after a minute."""
        run = open_run(find_record(job, self._environ, system=self.name).run)
        process = _living_process(run)
        if process is None:
            raise mistake(job, "is not running", fix=f"phalanx why {job} says how it ended")
        run.stop_file.touch()  # a user wants it to end, so it must not be restarted
        os.kill(process, signal.SIGTERM)
        deadline = time.monotonic() + END_S
        while _living_process(run) is not None:
            if time.monotonic() > deadline:
                os.kill(process, signal.SIGKILL)  # its agents end with it
                # SIGKILL is sent again only if the process is still there a minute later.
                deadline += END_S
            time.sleep(0.1)

    def requeue(self, job: str) -> str:
        """Restart a job from its newest checkpoint."""
        record = find_record(job, self._environ, system=self.name)
        run = open_run(record.run)
        if _living_process(run) is not None:
            raise mistake(job, "is still running", fix=f"phalanx cancel {job} ends it first")
        if run.status().get("state") == "done":
            raise mistake(job, "is done", fix="to train longer, raise data.tokens and launch the job again")
        stored = read_json(run.path / PROCESS)
        shape = [str(word) for word in stored.get("shape", ())]
        run.stop_file.unlink(missing_ok=True)
        self._start(run, shape, {})
        return record.id

    def _command(self, run: str, shape: Sequence[str]) -> list[str]:
        return [sys.executable, "-P", "-m", NODE_MODULE, "local", run, *shape]

    def _start(self, run: Run, shape: Sequence[str], environ: Mapping[str, str]) -> None:
        (run.path / "logs").mkdir(exist_ok=True)
        command = self._command(str(run.path), shape)
        try:
            with open(run.path / "logs" / "launch.log", "ab") as log:
                # Not a subprocess object: the process outlives this one, which does not wait for it.
                pid = os.posix_spawn(
                    command[0],
                    command,
                    {**self._environ, **environ},
                    file_actions=[
                        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                        (os.POSIX_SPAWN_DUP2, log.fileno(), 1),
                        (os.POSIX_SPAWN_DUP2, log.fileno(), 2),
                    ],
                    setsid=True,
                )
        except OSError as error:
            raise SystemFailure(Problem(where=str(run.path), what=f"cannot be started: {error}")) from error
        write_json(run.path / PROCESS, {"pid": pid, "started": _start_ticks(pid), "shape": list(shape)})

    def _describe(self, record: LaunchRecord, run: Run) -> QueuedJob:
        state = self._state(run)
        return QueuedJob(
            id=record.id,
            system=self.name,
            name=record.name,
            state=state,
            said=str(run.status().get("state") or "created"),
            queue="",
            hosts=len(run.launch().get("hosts", ())) or 1,
            run=record.run,
            group=record.group,
            restarts=max(0, len(run.launches()) - 1),
        )

    def _state(self, run: Run) -> str:
        run_state = str(run.status().get("state") or "")
        if _living_process(run) is not None:
            return RUNNING if run_state else WAITING
        return STATES.get(run_state, FAILED)


def _host_options(request: LaunchRequest) -> list[str]:
    words = ["--hosts", str(request.hosts), "--spares", str(request.spares), "--slots", str(request.devices_per_host)]
    return words + ([ALLOW_CODE] if ALLOW_CODE in request.agent else [])


def _start_ticks(pid: int) -> int:
    """Return the start of a process in clock ticks since boot, which with its pid identifies it; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def _living_process(run: Run) -> int | None:
    """Return the pid of the process that runs a run's agents; None if it has ended."""
    stored: dict[str, Any] = {}
    with suppress(PhalanxError):
        stored = read_json(run.path / PROCESS)
    pid, started = integer(stored, "pid"), integer(stored, "started")
    if pid is None or pid < 1 or not started or _start_ticks(pid) != started or _is_zombie(pid):
        return None
    return pid


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "Z"
    except (OSError, IndexError):
        return True
