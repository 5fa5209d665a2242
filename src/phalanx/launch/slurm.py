"""Slurm as a launch system, through its own commands: sbatch, squeue, scontrol, sinfo, scancel."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from phalanx.elastic.local_launch import is_coordinated
from phalanx.errors import PhalanxError, Problem, SystemFailure, UserError, mistake, nearest
from phalanx.io.files import replace_text
from phalanx.io.path_probes import is_file
from phalanx.io.values import text
from phalanx.io.visible import one_line
from phalanx.launch.book import LaunchRecord, find_record, read_records
from phalanx.launch.folder_answer import RUN_STATES, explain_from_folder
from phalanx.launch.lost_script import slurm_seconds
from phalanx.launch.resource_request import LaunchRequest
from phalanx.launch.slurm_reasons import ENDS, explain_reason
from phalanx.launch.slurm_script import SlurmFacts, batch_script
from phalanx.launch.system import (
    CANCELLED,
    CONCLUDED,
    DONE,
    FAILED,
    OVER,
    RUNNING,
    WAITING,
    WANTS_TO_GO_ON,
    JobExplanation,
    QueuedJob,
    Submitted,
)
from phalanx.record.run import Run, open_run
from phalanx.units import first_few, format_seconds, plural

SCRIPT = "launch.sh"  # in the run folder
COMMAND_S = 60.0  # for one of Slurm's commands
GONE_S = 180.0  # for a cancelled job to leave its nodes
PRIVATE = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # folders that nodes of a cluster never share
NOT_USABLE = ("down", "drain", "fail", "maint", "unknown", "inval", "power", "reboot")
STATES = {
    **dict.fromkeys(("PENDING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "STOPPED"), WAITING),
    **dict.fromkeys(("RUNNING", "COMPLETING", "CONFIGURING", "STAGE_OUT", "SIGNALING", "RESIZING"), RUNNING),
    "COMPLETED": DONE,
    "CANCELLED": CANCELLED,
}
FORMAT = "%i|%T|%r|%P|%D|%j"
_JOB = re.compile(r"[0-9]{1,12}(_[0-9]{1,7})?")
_GPUS = re.compile(r"gpu(?::[^:(,]+)?:(\d+)")


class SlurmSystem:
    """Jobs of Slurm; an id is Slurm's own, such as 4711, or 4711_3 of an array."""

    name = "slurm"

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = dict(environ)
        self._facts = SlurmFacts()

    @property
    def is_here(self) -> bool:
        """True if Slurm's commands are on this machine."""
        return self._has_command("sbatch")

    def _has_command(self, name: str) -> bool:
        return shutil.which(name, path=self._environ.get("PATH")) is not None

    # ---- before a job is submitted ----------------------------------------------------------------------------------

    def check(self, requests: Sequence[LaunchRequest], *, submits: bool = True) -> list[str]:
        """Check the requests against partition, nodes, GPUs, time limit, storage and Python of the live cluster."""
        partitions = self.partitions()
        problems: list[Problem] = []
        remarks: list[str] = []
        for request in requests:
            queue = request.settings.queue or next(
                (name for name, partition in partitions.items() if partition.get("Default") == "YES"), ""
            )
            if queue not in partitions:
                problems.append(unknown_partition(queue, partitions))
                break
            new_problems, new_remarks = self._check_partition(request, queue, partitions[queue])
            problems += new_problems
            remarks += new_remarks
        if problems:
            raise UserError(list(dict.fromkeys(problems)))
        return list(dict.fromkeys(remarks))

    def partitions(self) -> dict[str, dict[str, str]]:
        """Return the values that scontrol shows for each partition."""
        lines = self.ask("scontrol", "show", "partition", "--oneliner").splitlines()
        return {
            partition["PartitionName"]: partition
            for partition in map(_key_values, lines)
            if "PartitionName" in partition
        }

    def _check_partition(
        self, request: LaunchRequest, name: str, partition: Mapping[str, str]
    ) -> tuple[list[Problem], list[str]]:
        nodes = self._nodes(name)
        where, problems, remarks = f"partition {name}", [], []
        if partition.get("State", "UP") != "UP":
            remarks.append(f"{where} is {partition['State'].lower()}: the job waits until it is up")
        max_nodes = min(len(nodes), _whole_number(partition.get("MaxNodes", ""), len(nodes)))
        if request.all_hosts > max_nodes:
            spare = f" ({request.spares} of them spare)" if request.spares else ""
            problems.append(
                Problem(
                    where=where,
                    what=f"{request.name} asks for {plural(request.all_hosts, 'node')}{spare}, "
                    f"but a job gets at most {max_nodes}",
                    fix="use fewer --hosts or --spares, or another --queue",
                )
            )
        usable = [node for node in nodes if not any(word in node["state"] for word in NOT_USABLE)]
        if len(usable) < request.all_hosts <= max_nodes:
            remarks.append(
                f"{where}: {len(usable)} of {plural(len(nodes), 'node')} can be used now: the job waits for more"
            )
        gpus = max((int(node["gpus"]) for node in nodes), default=0)
        if request.accelerator != "cpu" and gpus < request.devices_per_host:
            problems.append(
                Problem(
                    where=where,
                    what=f"its nodes have {plural(gpus, 'GPU')} each, but the plan needs {request.devices_per_host}",
                    fix="plan for what is there (--set cluster.spec=…), or spread the ranks over more hosts (--hosts)",
                )
            )
        problems += _check_storage(request, {node["hostname"] for node in nodes})
        problems += self._check_image(request.settings.image)
        limit = slurm_seconds(partition.get("MaxTime", ""))
        self._facts = SlurmFacts(leaf_nodes=self._leaf_nodes(), most_time_s=limit)
        if request.time_limit_s > limit:
            remarks.append(
                f"{where} ends jobs after {format_seconds(limit)}: "
                f"{request.name} saves a checkpoint, is requeued and resumes"
            )
        return problems, remarks

    def _check_image(self, image: str) -> list[Problem]:
        """Check that srun can start containers, and that an image file exists."""
        if not image:
            return []
        where = f"launch.image {image}"
        if "--container-image" not in self.ask("srun", "--help"):
            what = "srun of this cluster has no option --container-image"
            fix = "name a Python that all nodes see (launch.python) instead, or ask the operator for pyxis"
            return [Problem(where=where, what=what, why="pyxis and enroot add it", fix=fix)]
        if image.startswith(("/", "./", "../")) and not is_file(image):
            fix = "enroot import makes one; an image of a registry is written as registry.example#name:tag"
            return [Problem(where=where, what="there is no such file", fix=fix)]
        return []

    def _nodes(self, partition: str) -> list[dict[str, str]]:
        lines = self.ask("sinfo", "-h", "-N", "-p", partition, "-o", "%N|%T|%G|%n").splitlines()
        nodes = {}
        for name, state, gres, host in (line.split("|") for line in lines if line.count("|") == 3):
            gpus = sum(int(count) for count in _GPUS.findall(gres))
            nodes[name] = {"state": state.lower(), "gpus": str(gpus), "hostname": host or name}
        return list(nodes.values())

    def _leaf_nodes(self) -> int:
        """Return the number of nodes of the smallest leaf switch; 0 without a topology."""
        try:
            lines = self.ask("scontrol", "show", "topology").splitlines()
        except SystemFailure:
            return 0
        leaves = [switch.get("Nodes", "") for switch in map(_key_values, lines) if switch.get("Level") == "0"]
        counts = [len(self.ask("scontrol", "show", "hostnames", nodes).split()) for nodes in leaves[:64] if nodes]
        return min(counts, default=0)

    def render(self, requests: Sequence[LaunchRequest]) -> dict[str, str]:
        """Return the scripts: one per request, or one per set of requests that can share an array."""
        return {
            f"{array[0].group or array[0].name}{f'-{number}' if number else ''}.sh": batch_script(array, self._facts)
            for number, array in enumerate(_job_arrays(requests))
        }

    def submit(self, requests: Sequence[LaunchRequest]) -> list[Submitted]:
        """Run sbatch once per array; if a later one is refused, the earlier ones are cancelled."""
        for request in requests:
            logs = Path(request.run) / "logs"
            logs.mkdir(exist_ok=True)
            replace_text(Path(request.run) / SCRIPT, batch_script([request], self._facts))
        ids: dict[str, str] = {}
        submitted_jobs: list[str] = []
        try:
            for array in _job_arrays(requests):
                job = self._sbatch(batch_script(array, self._facts))
                submitted_jobs.append(job)
                for number, request in enumerate(array):
                    ids[request.run] = f"{job}_{number}" if len(array) > 1 else job
        except BaseException:
            for job in submitted_jobs:
                with suppress(PhalanxError):
                    self.ask("scancel", job)
            raise
        return [Submitted(id=ids[request.run], request=request) for request in requests]

    def _sbatch(self, script: str) -> str:
        answer = self.ask("sbatch", "--parsable", given=script).strip().splitlines()
        job = answer[-1].partition(";")[0] if answer else ""
        if not _JOB.fullmatch(job):
            raise SystemFailure(Problem(where="sbatch", what=f"answered {one_line(job)[:200]!r} instead of an id"))
        return job

    # ---- jobs that were submitted -----------------------------------------------------------------------------------

    def list_jobs(self, ids: Sequence[str] = ()) -> list[QueuedJob]:
        """Return the jobs launched from here, from Slurm, or from their run folders if Slurm has forgotten them."""
        records = [record for record in read_records(self._environ, system=self.name) if not ids or record.id in ids]
        rows = self._squeue()
        return [_queued_job(record, rows.get(record.id)) for record in records]

    def _squeue(self) -> dict[str, dict[str, str]]:
        names = ("id", "state", "reason", "queue", "hosts", "name")
        lines = self.ask("squeue", "-h", "-r", "-t", "all", "-u", str(os.getuid()), "-o", FORMAT).splitlines()
        rows = [dict(zip(names, line.split("|"), strict=True)) for line in lines if line.count("|") == 5]
        return {row["id"]: row for row in rows}

    def explain(self, job: str) -> JobExplanation:
        """Explain why a job waits, runs or has ended."""
        record = self._record(job)
        if not self._has_command("squeue"):
            ask = f"phalanx why {record.id} on a login node, or with Slurm's folder in PATH, asks Slurm"
            try:
                return explain_from_folder(record, unseen="Slurm's commands are not on this machine", ask=ask)
            except UserError as error:
                fix = "run this there: its run folder cannot be read from here either"
                raise no_slurm("squeue", fix=fix) from error
        row = self._squeue().get(record.id)
        queued_job = _queued_job(record, row)
        queue = queued_job.queue or record.queue or "its queue"
        if row is not None and queued_job.state == WAITING:
            reason, remedy = explain_reason(row["reason"], job=record.id, queue=queue)
        elif queued_job.state == RUNNING:
            reason, remedy = f"on {plural(queued_job.hosts, 'node')}", f"phalanx watch {record.run}"
            if lost_node := self._lost_script_node(record.id):
                reason += f"; {lost_node}, where its script ran, was lost, and another node does the rest"
                remedy += f" shows whether it goes on; if it does not, phalanx requeue {record.id}"
        elif queued_job.state == DONE:
            reason, remedy = "the training is complete", f"phalanx report {record.run}"
        else:
            reason, remedy = self._explain_end(record, row, queued_job.state)
        return JobExplanation(id=record.id, state=queued_job.state, reason=reason, cure=remedy)

    def _explain_end(self, record: LaunchRecord, row: Mapping[str, str] | None, state: str) -> tuple[str, str]:
        word = row["state"] if row is not None else self._accounted_state(record.id)
        log = _last_said(Path(record.run))
        if word in ENDS and (word != "CANCELLED" or state == CANCELLED):
            reason, remedy = (sentence.format(id=record.id) for sentence in ENDS[word])
            return reason, remedy
        resume_fix = f"phalanx logs {record.id} shows its last lines; phalanx requeue {record.id} resumes it"
        if log.startswith(CONCLUDED):  # our own last line, which includes the time limit
            return log.removeprefix(CONCLUDED).removeprefix("failed: "), resume_fix
        with suppress(PhalanxError):
            message_lines = text(open_run(record.run).status(), "message").splitlines()[:1]
            if message_lines and message_lines[0]:
                return message_lines[0], resume_fix
        return (log or f"Slurm says {word or 'nothing about it any more'}"), resume_fix

    def _accounted_state(self, job: str) -> str:
        """Return the state from Slurm's accounting, if the site runs it."""
        with suppress(PhalanxError):
            lines = self.ask("sacct", "-n", "-X", "-P", "-j", job, "-o", "State").split()
            return lines[0] if lines else ""
        return ""

    def logs(self, job: str) -> list[str]:
        """Return the output files of the script and the agents."""
        run = Path(self._record(job).run)
        return [*(str(path) for path in sorted((run / "logs").glob("slurm-*.log"))), str(run / "logs" / "agent.log")]

    def cancel(self, job: str) -> None:
        """Run scancel, and wait until the job's nodes are free."""
        record = self._record(job)
        if _queued_job(record, self._squeue().get(record.id)).state in OVER:
            raise mistake(job, "has already ended", fix=f"phalanx why {job} says how")
        self.ask("scancel", record.id)
        deadline = time.monotonic() + GONE_S
        while (row := self._squeue().get(record.id)) is not None and STATES.get(row["state"], FAILED) not in OVER:
            if time.monotonic() > deadline:
                raise SystemFailure(
                    Problem(
                        where=job, what=f"is still {row['state'].lower()} after {GONE_S:g} s", fix="ask again later"
                    )
                )
            time.sleep(0.5)
        with suppress(PhalanxError):
            run = open_run(record.run)
            if run.status().get("state") not in RUN_STATES:
                run.set_status("stopped", message="cancelled", exit_code=130)

    def requeue(self, job: str) -> str:
        """Requeue a job: a running one saves and restarts, a held one is released, an ended one is submitted again."""
        record = self._record(job)
        row = self._squeue().get(record.id)
        state, run = _queued_job(record, row).state, open_run(record.run)
        if state == DONE:
            raise mistake(job, "is done", fix="to train longer, raise data.tokens and launch the job again")
        if state == RUNNING and self._lost_script_node(record.id) and not is_coordinated(run):
            self.ask("scontrol", "requeue", record.id)  # no agent remains that would save
            return record.id
        if state == RUNNING:
            replace_text(run.stop_file, WANTS_TO_GO_ON + "\n")
            return record.id
        if state == WAITING and row is not None:
            # Only held jobs are released: JobHeldUser, JobHeldAdmin, launch_failed_requeued_held.
            if "eld" not in row["reason"]:
                raise mistake(job, "is already waiting", fix=f"phalanx why {job} says for what")
            self.ask("scontrol", "release", record.id)
            return record.id
        run.stop_file.unlink(missing_ok=True)
        return self._sbatch((run.path / SCRIPT).read_text(encoding="utf-8"))

    def _lost_script_node(self, job: str) -> str:
        """Return the node of a running job's script if the job has lost it (lost_script.py); otherwise empty."""
        node, _, names = self.ask("squeue", "-h", "-j", job, "-o", "%B|%N").strip().partition("|")
        remaining = self.ask("scontrol", "show", "hostnames", names).split() if names else []
        return node if remaining and node not in remaining else ""

    def _record(self, job: str) -> LaunchRecord:
        record = find_record(job, self._environ, system=self.name)
        if not _JOB.fullmatch(record.id):
            raise mistake(job, f"{record.id!r} is not a Slurm job id", fix="phalanx queue lists them")
        return record

    def ask(self, *command: str, given: str = "") -> str:
        """Run one of Slurm's commands and return its output.

        Raises UserError without Slurm, SystemFailure if the command fails.
        """
        if not self._has_command(command[0]):
            raise no_slurm(command[0])
        try:
            result = subprocess.run(
                command,
                input=given,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=COMMAND_S,
                # Slurm's messages and times are parsed, so they must not be translated.
                env={**self._environ, "LC_ALL": "C"},
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            what = f"did not answer within {COMMAND_S:g} s"
            raise SystemFailure(
                Problem(where=command[0], what=what, fix="ask whether slurmctld is up: scontrol ping")
            ) from error
        if result.returncode:
            message = one_line((result.stderr or result.stdout).strip())[:300]
            raise SystemFailure(
                Problem(
                    where=" ".join(command[:3]),
                    what=message or f"exit code {result.returncode}",
                    fix="scontrol ping says whether Slurm is up",
                )
            )
        return result.stdout


def no_slurm(command: str, *, fix: str = "run this there, or add Slurm's folder to PATH") -> UserError:
    """Return the error for a machine without Slurm."""
    return mistake(
        "--on slurm",
        f"Slurm's command {command} is not on this machine",
        why="a login node of the cluster has it",
        fix=fix,
    )


def _job_arrays(requests: Sequence[LaunchRequest]) -> list[list[LaunchRequest]]:
    """Group requests for the same nodes and time, which differ only in their run, to share an array."""
    arrays: dict[object, list[LaunchRequest]] = {}
    for request in requests:
        key = repr(
            (
                request.all_hosts,
                request.hosts,
                request.devices_per_host,
                request.time_limit_s,
                request.settings,
                request.agent,
                request.environ,
                request.shares_hosts,
            )
        )
        arrays.setdefault(key if request.group else request.run, []).append(request)
    return list(arrays.values())


def _queued_job(record: LaunchRecord, row: Mapping[str, str] | None) -> QueuedJob:
    run = Run(path=Path(record.run))
    run_state = str(run.status().get("state") or "")
    if row is None:
        state, term = RUN_STATES.get(run_state, FAILED), run_state or "forgotten by Slurm"
    else:
        state = STATES.get(row["state"], FAILED)
        state = CANCELLED if state == DONE and run_state != "done" else state
        # A job without its script (lost_script.py).
        if state == CANCELLED and run_state in ("done", "failed"):
            state = RUN_STATES[run_state]
        term = row["state"] + (f", {row['reason']}" if state == WAITING else "")
    try:
        restarts = max(0, len(run.launches()) - 1)
    except OSError:
        restarts = 0
    return QueuedJob(
        id=record.id,
        system="slurm",
        name=record.name,
        state=state,
        said=term,
        queue=row["queue"] if row is not None else record.queue,
        hosts=_whole_number(row["hosts"], 0) if row is not None else 0,
        run=record.run,
        group=record.group,
        restarts=restarts,
    )


def _check_storage(request: LaunchRequest, hostnames: Iterable[str]) -> list[Problem]:
    """Check that run folder, checkpoints, data and Python are on storage that other nodes see, as far as known here."""
    problems = []
    other_nodes = [name for name in hostnames if name.partition(".")[0] != platform.node().partition(".")[0]]
    python = request.agent[0]
    if not request.settings.image and not os.access(python, os.X_OK):
        problems.append(
            Problem(
                where=python,
                what="is not a Python interpreter on this machine",
                fix="set launch.python to one that all nodes see",
            )
        )
    places = [("--runs", request.run), ("checkpoint.path", request.checkpoint), *request.inputs]
    places += [] if request.settings.image else [("launch.python", python)]
    for name, path in places:
        if (
            other_nodes
            and "://" not in path
            and str(Path(path).absolute()).startswith(tuple(f"{folder}/" for folder in PRIVATE))
        ):
            problems.append(
                Problem(
                    where=f"{name} {path}",
                    what=f"is local to each node: {first_few(other_nodes, 3)} would not see it",
                    fix="use storage that all nodes share, such as a home or project folder",
                )
            )
    return problems


def unknown_partition(wanted: str, partitions: Mapping[str, object]) -> Problem:
    """Return the problem of a missing partition or default, with the nearest name."""
    partition_names = ", ".join(sorted(partitions))
    if not wanted:
        return Problem(
            where="--queue", what="this cluster has no default partition", fix=f"name one of {partition_names}"
        )
    suggestion = nearest(wanted, partitions)
    fix = (
        f"did you mean {suggestion}? the partitions are {partition_names}"
        if suggestion
        else f"the partitions are {partition_names}"
    )
    return Problem(where=f"--queue {wanted}", what="this cluster has no such partition", fix=fix)


def _key_values(line: str) -> dict[str, str]:
    """Parse `Key=Value Key=Value`, as scontrol prints it."""
    return dict(word.partition("=")[::2] for word in line.split() if "=" in word)


def _whole_number(word: str, default: int) -> int:
    return int(word) if word.isdecimal() else default


def _last_said(run: Path) -> str:
    """Return the last line of the batch script's output that describes a problem."""
    for path in sorted((run / "logs").glob("slurm-*.log"), reverse=True):
        with suppress(OSError):
            lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            # Indented lines explain the line above them; Slurm's own lines describe the end, not its cause.
            lines = [
                line for line in lines if not line.startswith((" ", "srun: error", "slurmstepd", "Terminated", "Try "))
            ]
            if lines:
                return one_line(lines[-1])[:300]
    return ""
