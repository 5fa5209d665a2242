"""Launching: submit planned jobs to this machine or a cluster, and query them afterwards."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from phalanx.api.jobs import AnyJob, override_texts
from phalanx.api.launch_results import JobAction, LaunchResult, LogText, QueueTable, WhyResult, state_text
from phalanx.api.results import Overrides, Tell, silent, teller
from phalanx.api.train_inputs import TrainCall, check_call, plan_call, ready_to_start
from phalanx.errors import mistake
from phalanx.io.path_probes import is_file, resolve_path
from phalanx.job.load import ResolvedJob
from phalanx.plan.plan import Plan
from phalanx.record.run import Run
from phalanx.units import first_few, format_seconds, plural

if TYPE_CHECKING:
    from phalanx.launch.resource_request import LaunchRequest
    from phalanx.launch.system import LaunchSystem, QueuedJob, Submitted

WHERE = "phalanx launch"
# Seconds between two queries of the system by --wait: a scheduler serves thousands of users.
POLL_S = 2.0
MOST_LOG_BYTES = 1 << 20
# Bytes at the end of a rank's event file that are searched for a step.
MOST_EVENT_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prepared:
    plan: Plan
    resolved: ResolvedJob
    call: TrainCall
    name: str


def launch(
    jobs: AnyJob | Sequence[AnyJob],
    *,
    on: str | None = None,
    queue: str | None = None,
    flavour: str | None = None,
    hosts: int | None = None,
    spares: int = 0,
    group: str = "",
    time_s: float | None = None,
    overrides: Overrides = (),
    cluster: str | None = None,
    steps: int | None = None,
    runs: str | Path = "runs",
    name: str | None = None,
    again: bool = False,
    dry_run: bool = False,
    submit: bool = True,
    out: str | Path | None = None,
    wait: bool = False,
    check: bool = True,
    allow_code: bool = False,
    share_hosts: bool = False,
    volume: str | Path | None = None,
    before_submit: Callable[[Sequence[LaunchRequest]], None] | None = None,
    progress: bool | Tell = True,
) -> LaunchResult:
    """Launch jobs in the background: on this machine, or on the cluster's own scheduler (`on="slurm"`).

    Each job gets a run folder in `runs`, which all hosts must see. Job, plan and the live system are checked first;
    either all jobs are submitted or none. `hosts` deals the ranks to that many hosts instead of the plan's, `spares`
    are additional hosts. `dry_run` submits nothing and returns what would be submitted; `out` writes it into a folder.
    `submit=False` makes the run folders and writes Kubernetes manifests into them, for kubectl. `wait` returns when
    the jobs have ended. With `share_hosts` jobs may share a host of Slurm's. On Kubernetes the claim is mounted at
    `volume`, a folder above `runs` (default: `runs` itself). `before_submit` receives the requests when their run
    folders exist and nothing is submitted yet. A job that is queued or running already is refused, unless `again` is
    given.

    Defaults come from [launch] of the job, then from launch.toml in ~/.config/phalanx and /etc/xdg/phalanx.

    >>> launched = launch("job.toml", on="slurm", time_s=3600)  # doctest: +SKIP
    >>> print(launched)  # doctest: +SKIP
    """
    from dataclasses import replace

    from phalanx.launch.book import job_digest
    from phalanx.launch.settings import launch_settings

    job_list: list[AnyJob] = list(jobs) if isinstance(jobs, list | tuple) else [cast(AnyJob, jobs)]
    tell = teller(progress)
    _check_launch(job_list, name=name, group=group, spares=spares)
    prepared = [
        _plan_job(job, overrides, cluster, steps, Path(runs), name, check=check, allow_code=allow_code, tell=tell)
        for job in job_list
    ]
    chosen = {"on": on, "queue": queue, "flavour": flavour, "hosts": hosts, "time_s": time_s}
    settings = [launch_settings(job_plan.plan.job.launch, os.environ, **chosen) for job_plan in prepared]
    if len({setting.on for setting in settings}) > 1:
        raise mistake(
            WHERE, "the jobs name several launch systems", fix="launch them separately, or choose one with --on"
        )
    if flavour and settings[0].on != "k8s":
        problem = f"is a way to launch on Kubernetes, and this goes to {settings[0].on}"
        raise mistake(f"--flavour {flavour}", problem, fix="add --on k8s, or leave it out")
    system = _open_system(settings[0].on)
    write_only = _manifest_writer(system, wait=wait) if not submit else None
    digests = [job_digest(job_plan.plan.to_dict()["job"]) for job_plan in prepared]
    if not again and not dry_run:
        _refuse_double(system, [job_plan.plan.job.name for job_plan in prepared], digests)

    def requests_for(folders: Sequence[Path]) -> list[LaunchRequest]:
        from phalanx.launch.resource_request import launch_request

        return [
            launch_request(
                job_plan.plan,
                setting,
                run=folder,
                python=sys.executable,
                name=job_plan.name,
                group=group,
                spares=spares,
                allow_code=allow_code,
                inputs=_input_places(job_plan),
                shares_hosts=share_hosts,
                volume=str(Path(volume).absolute()) if volume is not None else "",
            )
            for job_plan, setting, folder in zip(prepared, settings, folders, strict=True)
        ]

    planned_folders = [(Path(runs) / f"{job_plan.name}-DATE").absolute() for job_plan in prepared]
    requests = requests_for(planned_folders)
    _tell_requests(prepared, requests, tell)
    if system.is_here or not dry_run:
        for remark in system.check(requests, submits=submit and not dry_run):
            tell(remark)
    else:
        tell(f"{system.name} cannot be reached from this machine: partition, nodes and storage were not checked")
    if dry_run:
        return _launch_result(system, (), requests, out)
    created_runs = _make_runs(prepared)
    requests = requests_for([run.path for run in created_runs])
    try:
        if before_submit is not None:
            before_submit(requests)
        submitted = system.submit(requests) if write_only is None else write_only(requests)
    except BaseException:
        for run in created_runs:  # no rank has trained in them
            shutil.rmtree(run.path, ignore_errors=True)
        raise
    _record_launches(system, submitted, digests)
    result = replace(
        _launch_result(system, [submission.id for submission in submitted], requests, out), submitted=submit
    )
    return result if not wait else _wait_for(system, result, tell)


def queue(*, group: str = "", on: str | None = None, progress: bool | Tell = False) -> QueueTable:
    """Return launched jobs with their states: all, those of one `group`, or of one system `on`.

    >>> for job in queue(on="slurm").jobs:  # doctest: +SKIP
    ...     print(job.id, job.state)
    """
    from phalanx.errors import PhalanxError
    from phalanx.launch.book import read_records

    records = read_records(os.environ, group=group)
    if group and not records and (all_records := read_records(os.environ)):
        groups = sorted({record.group for record in all_records if record.group})
        fix = f"the groups are {first_few(groups, 8)}" if groups else "phalanx launch JOB… --group NAME makes one"
        raise mistake(f"--group {group}", "no launched job is in this group", fix=fix)
    names = [on] if on else sorted({record.system for record in records})
    jobs: list[QueuedJob] = []
    notes = []
    for name in names:
        try:
            jobs += _open_system(name).list_jobs()
        except PhalanxError as error:
            if on:
                raise
            notes.append(f"{name}: {error.problems[0].what}")
    selected = [job for job in jobs if not group or job.group == group]
    steps = {job.id: done for job in selected if (done := _steps_done(Path(job.run))) is not None}
    return QueueTable(jobs=tuple(selected), steps=steps, notes=tuple(notes))


def why(job: str) -> WhyResult:
    """Explain why a launched job waits or ended, with a remedy; `job` is its id or its run folder.

    >>> print(why("4711"))  # doctest: +SKIP
    """
    system, id_ = _find_job(job)
    return WhyResult(explanation=system.explain(id_))


def logs(job: str, *, rank: int | None = None, lines: int = 50) -> LogText:
    """Return the last lines of a launched job's output: of its script and agents, or of one rank.

    >>> print(logs("4711", rank=3, lines=20))  # doctest: +SKIP
    """
    from phalanx.launch.book import find_record
    from phalanx.record.run import open_run

    if rank is not None:
        path = open_run(find_record(job, os.environ).run).log(rank)
        if rank < 0 or not is_file(path):
            raise mistake(job, f"rank {rank} has no log", fix=f"phalanx logs {job} shows the output of the launch")
        return LogText(files={str(path): _last_lines(path, lines)})
    system, id_ = _find_job(job)
    files = {name: _last_lines(Path(name), lines) for name in system.logs(id_) if is_file(name)}
    if not files:
        raise mistake(job, "has no output yet", fix=f"phalanx why {job} says what it waits for")
    return LogText(files=files)


def cancel(job: str) -> JobAction:
    """End a launched job and all of its processes; its run folder stays.

    >>> cancel("4711")  # doctest: +SKIP
    """
    system, id_ = _find_job(job)
    system.cancel(id_)
    return _job_action(id_, "cancelled")


def requeue(job: str) -> JobAction:
    """Start a launched job again from its newest checkpoint.

    >>> requeue("4711")  # doctest: +SKIP
    """
    from dataclasses import replace

    from phalanx.launch.book import find_record, record_launch

    system, id_ = _find_job(job)
    record = find_record(id_, os.environ)
    now = system.requeue(id_)
    if now != id_:
        record_launch(replace(record, id=now, submitted_s=0.0), os.environ)
    return _job_action(now, "requeued")


# ---- helpers ---------------------------------------------------------------------------------------------------------


def _check_launch(jobs: Sequence[AnyJob], *, name: str | None, group: str, spares: int) -> None:
    from phalanx.record.run import require_name

    if not jobs:
        raise mistake(WHERE, "no job file is named", fix="phalanx launch job.toml; phalanx init writes one")
    if name is not None and len(jobs) > 1:
        raise mistake(WHERE, "--name names one run, and there are several jobs", fix="use --group for all of them")
    if group:
        require_name(group)
    if not 0 <= spares <= 10**5:
        raise mistake(WHERE, f"--spares {spares} must be 0 or more", fix="use 0 to 100,000")


def _plan_job(
    job: AnyJob,
    overrides: Overrides,
    cluster: str | None,
    steps: int | None,
    runs: Path,
    name: str | None,
    *,
    check: bool,
    allow_code: bool,
    tell: Tell,
) -> _Prepared:
    """Plan a job and check it against the training specification; no folder is created yet."""
    from phalanx.api.checking import check_before_training
    from phalanx.train.prepare import need_torch

    call = TrainCall(
        job=job,
        overrides=tuple(override_texts(overrides)),
        cluster=cluster,
        steps=steps,
        runs=runs.absolute(),
        name=name,
        check=check,
        allow_code=allow_code,
        tell=tell,
    )
    check_call(call)
    need_torch()
    plan, resolved, _ = plan_call(call, here=False)
    check_before_training(resolved, plan, refuse=check, tell=silent if not check else tell)
    return _Prepared(plan=plan, resolved=resolved, call=call, name=name or plan.job.name)


def _input_places(one: _Prepared) -> list[tuple[str, str]]:
    """Return the inputs that every host reads in addition to the run folder, by the job key that names each."""
    from phalanx.job.dataset import cache_folder, corpus_folder

    job, base = one.plan.job, one.resolved.path.parent
    places = [("data.path", str(resolve_path(base / path))) for path in job.data.paths]
    if job.data.corpus and not places:
        cached = corpus_folder(job.data.corpus, cache_folder(os.environ), vocab=job.model.vocab)
        places.append(("data.corpus", str(cached.absolute())))
    if job.train.weights:
        places.append(("train.weights", str(resolve_path(base / job.train.weights))))
    return places


def _open_system(name: str) -> LaunchSystem:
    """Return the launch system of a name; raise UserError if it is not available on this machine."""
    from phalanx.launch.systems import open_system

    return open_system(name, os.environ)


def _find_job(job: str) -> tuple[LaunchSystem, str]:
    from phalanx.launch.book import find_record

    record = find_record(job, os.environ)
    return _open_system(record.system), record.id


def _manifest_writer(system: LaunchSystem, *, wait: bool) -> Callable[[Sequence[LaunchRequest]], list[Submitted]]:
    """Return the function that `--no-submit` calls to write manifests; raise UserError if it cannot be used."""
    from phalanx.launch.k8s import KubernetesSystem

    if not isinstance(system, KubernetesSystem):
        raise mistake("--no-submit", f"is for --on k8s, not {system.name}", fix="--dry-run --out DIR writes the texts")
    if wait:
        raise mistake("--no-submit", "leaves nothing to --wait for", fix="leave one of them out")
    return system.write


def _refuse_double(system: LaunchSystem, names: Sequence[str], digests: Sequence[str]) -> None:
    """Raise UserError if the same job is launched twice at once, which is usually a mistake."""
    from phalanx.launch.book import read_records
    from phalanx.launch.system import OVER

    doubled = [name for name, count in Counter(digests).items() if count > 1]
    if doubled:
        raise mistake(WHERE, f"job {names[digests.index(doubled[0])]} is named twice", fix="name each job once")
    same = {record.id: record for record in read_records(os.environ, system=system.name) if record.digest in digests}
    alive = (
        [queued_job for queued_job in system.list_jobs(sorted(same)) if queued_job.state not in OVER] if same else []
    )
    if alive:
        first = alive[0]
        raise mistake(
            WHERE,
            f"job {first.name} is already {first.state}, as {first.id}",
            why="a second run of it would cost as much again",
            fix=f"phalanx cancel {first.id} ends it; --again launches a second run",
        )


def _tell_requests(prepared: Sequence[_Prepared], requests: Sequence[LaunchRequest], tell: Tell) -> None:
    from phalanx.launch.resource_request import placement_cost

    for job_plan, request in zip(prepared, requests, strict=True):
        spare = f" and {plural(request.spares, 'spare')}" if request.spares else ""
        tell(
            f"{request.name}: {plural(request.hosts, 'host')}{spare} × {request.devices_per_host} "
            f"{request.accelerator}, {job_plan.plan.layout.short}, time limit {format_seconds(request.time_limit_s)}"
        )
        if cost := placement_cost(job_plan.plan):
            tell(f"  placement: {cost}")


def _make_runs(prepared: Sequence[_Prepared]) -> list[Run]:
    """Create a run folder per job, with its data found or built."""
    from phalanx.api.training import make_run_folder

    run_folders: list[Run] = []
    try:
        for job_plan in prepared:
            started = time.time()
            plan, data_s = ready_to_start(job_plan.plan, job_plan.resolved, job_plan.call, checked=True)
            run_folders.append(make_run_folder(plan, job_plan.call, None, started=started, data_s=data_s))
    except BaseException:
        for run in run_folders:
            shutil.rmtree(run.path, ignore_errors=True)
        raise
    return run_folders


def _record_launches(system: LaunchSystem, submitted: Sequence[Any], digests: Sequence[str]) -> None:
    from phalanx.launch.book import LaunchRecord, record_launch

    for submission, digest in zip(submitted, digests, strict=True):
        request = submission.request
        record_launch(
            LaunchRecord(
                id=submission.id,
                system=system.name,
                name=request.name,
                run=request.run,
                group=request.group,
                queue=request.settings.queue,
                digest=digest,
            ),
            os.environ,
        )


def _launch_result(
    system: LaunchSystem, ids: Sequence[str], requests: Sequence[LaunchRequest], out: str | Path | None
) -> LaunchResult:
    from phalanx.io.files import write_text

    texts = system.render(requests)
    if out is not None:
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_text(folder / name, text)
    return LaunchResult(system=system.name, ids=tuple(ids), requests=tuple(requests), texts=texts)


def _wait_for(system: LaunchSystem, result: LaunchResult, tell: Tell) -> LaunchResult:
    """Query the jobs until all have ended, and print changes of state. Ctrl-C does not affect the jobs."""
    from dataclasses import replace

    from phalanx.launch.system import OVER

    last_states: dict[str, str] = {}
    while True:
        now = {queued_job.id: queued_job for queued_job in system.list_jobs(result.ids)}
        for job, queued_job in now.items():
            if last_states.get(job) != queued_job.state:
                last_states[job] = queued_job.state
                tell(f"{job}: {state_text(queued_job)}")
        if len(now) == len(result.ids) and all(queued_job.state in OVER for queued_job in now.values()):
            return replace(result, final=tuple(now[job] for job in result.ids))
        time.sleep(POLL_S)


def _steps_done(run: Path) -> int | None:
    """Return the steps done according to rank 0's events, or to the newest checkpoint if there are none."""
    from phalanx.record.events import parse_event

    with suppress(OSError):
        for line in reversed(_file_end(Run(path=run).events(0), MOST_EVENT_BYTES).split(b"\n")):
            if b'"event":"step"' in line and (event := parse_event(line)) is not None:
                return int(event["step"]) + 1
    with suppress(OSError):
        return max(Run(path=run).saved_steps(), default=None)
    return None


def _file_end(path: Path, most: int) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - most))
        return file.read()


def _last_lines(path: Path, lines: int) -> str:
    text = _file_end(path, MOST_LOG_BYTES).decode(errors="replace")
    return "\n".join(text.splitlines()[-max(1, lines) :]) + "\n"


def _job_action(job: str, done: str) -> JobAction:
    from phalanx.launch.book import find_record

    return JobAction(id=job, done=done, run=find_record(job, os.environ).run)
