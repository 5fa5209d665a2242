"""A sweep on Slurm or Kubernetes: its runs are launched as one group, and their results read from their records later.

Each run is an ordinary job on one device. The command is repeated to collect: finished runs become results under the
hash of their inputs, waiting and training runs are left alone, and only missing runs are submitted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from phalanx.api.launch_results import LaunchResult
from phalanx.api.launching import launch, queue, requeue
from phalanx.api.results import Tell
from phalanx.errors import PhalanxError, mistake
from phalanx.io.values import at, text
from phalanx.job.load import ResolvedJob
from phalanx.job.schema import Job, Parallel
from phalanx.launch.resource_request import LaunchRequest
from phalanx.launch.system import CANCELLED, DONE, FAILED, OVER, QueuedJob
from phalanx.plan.plan import Plan
from phalanx.record.events import read_events
from phalanx.record.run import Run
from phalanx.scale.run_points import read_run_losses
from phalanx.scale.sweep_store import DIVERGED, SweepFolder, SweepOutcome
from phalanx.units import plural

WHERE = "phalanx scale sweep"
SYSTEMS = ("slurm", "k8s")
# Added to a run's time limit: imports, the first step, the last checkpoint and the evaluation.
START_S = 600.0
# Kind of an incident in which every process lives and the numbers are wrong.
ASTRAY = "Astray"
# Nats above ln(vocabulary) from which a finished run has learned nothing, as in train.lone_rank.
ABOVE_NOTHING = 0.5


def refuse_launch(on: str, *, method: str, parallel: int | None) -> None:
    """Raise UserError for options that a sweep on a cluster does not support."""
    if on not in SYSTEMS:
        fix = "use slurm or k8s; without --on the sweep is packed on this machine"
        raise mistake(f"--on {on[:40]}", "is no system a sweep can be launched on", fix=fix)
    if method == "wsd":
        raise mistake(
            "--method wsd",
            f"shares steps between runs, and on {on} each run is a job of its own",
            fix="use --method isoflop, which gives the same losses, or sweep on one machine without --on",
        )
    if parallel is not None:
        fix = f"leave it out; limit running jobs in {on}'s own queue"
        raise mistake("--parallel", f"is for this machine, and {on} decides how many jobs run", fix=fix)


def one_device_job(job: Job, base: Path) -> Job:
    """Return the job as one rank on one device, evaluated at its end; `base` is the job file's folder."""
    from phalanx.hardware.cluster import resolve_cluster
    from phalanx.job.run_sections import ClusterChoice

    target = job.cluster.target
    cluster = resolve_cluster(target, base=base)
    spec = "local-cpu:1" if cluster.accelerator.family == "cpu" else f"1x{cluster.accelerator.name}"
    return replace(
        job,
        cluster=ClusterChoice(spec="local:1" if target.startswith("local") and spec != "local-cpu:1" else spec),
        parallel=Parallel(mode="fixed", data=1, zero=0),
        train=replace(job.train, evaluate_every=0, samples=0),
        checkpoint=replace(job.checkpoint, path="checkpoints"),
        fault=replace(job.fault, digest_every=0, spares=0, on_loss="rebuild"),
        rules=(),
    )


def launch_group(
    outcomes: list[SweepOutcome],
    plans: Sequence[Plan],
    folder: SweepFolder,
    resolved: ResolvedJob,
    *,
    on: str,
    queue_name: str | None,
    group: str,
    dry_run: bool,
    tell: Tell,
) -> LaunchResult | None:
    """Collect ended runs and submit missing ones, replacing `outcomes`; return None if nothing is submitted.

    All missing runs are submitted together, or none of them.
    """
    collect_results(outcomes, folder, keep=not dry_run)
    alive = {} if dry_run else _known_jobs(on, group, tell)
    missing, elsewhere = [], []
    for number, outcome in enumerate(outcomes):
        if outcome.is_final:
            continue
        queued_job = alive.get(outcome.folder) if outcome.folder else None
        if queued_job is not None and queue_name and queued_job.queue not in ("", queue_name):
            if queued_job.state in OVER and not any((folder.runs / outcome.folder / "checkpoints").glob("*")):
                # No progress is lost: submitted again, to the queue that is named now.
                queued_job = None
            else:
                elsewhere.append(queued_job)
        if queued_job is None or queued_job.state == DONE:
            missing.append(number)
        elif queued_job.state in OVER:
            requeue(queued_job.id)  # it continues from its newest checkpoint
            outcomes[number] = replace(outcome, state="waiting", message=f"was {queued_job.state}: submitted again")
        else:
            outcomes[number] = replace(outcome, state=queued_job.state, message=queued_job.id)
    if elsewhere:
        tell(
            f"{plural(len(elsewhere), 'run')} ({elsewhere[0].id} first) stay in {elsewhere[0].queue}, where an earlier "
            f"call submitted them; phalanx cancel ends one that waits, and the same command then submits it to "
            f"{queue_name}"
        )
    if not missing:
        return None
    # One time limit for all: requests that differ only in their run become one array job.
    time_s = max(plans[number].duration.wall_s_high for number in missing) + START_S

    def keep_folders(requests: Sequence[LaunchRequest]) -> None:
        """Store the run folders' names before submission.

        If this process is killed later, the next call finds its runs in the queue by them.
        """
        for number, request in zip(missing, requests, strict=True):
            name = request.run.rsplit("/", 1)[-1]
            folder.keep(replace(outcomes[number], state="stopped", folder=name, message="", cached=False))

    result = launch(
        [replace(resolved, job=plans[number].job) for number in missing],
        on=on,
        queue=queue_name,
        group=group,
        time_s=time_s,
        runs=folder.runs,
        dry_run=dry_run,
        share_hosts=True,  # each uses one device
        # The folder that contains --out, so that the dataset fits next to it.
        volume=folder.runs.absolute().parent.parent,
        before_submit=keep_folders,
        # Warnings of the training specification for each of many small runs are noise.
        check=False,
        progress=lambda line: None,
    )
    if not dry_run:
        for number, id_, request in zip(missing, result.ids, result.requests, strict=True):
            name = request.run.rsplit("/", 1)[-1]
            outcomes[number] = replace(outcomes[number], state="waiting", folder=name, message=id_, cached=False)
        tell(f"{plural(len(missing), 'run')} submitted to {on} as group {group}; phalanx queue --group {group}")
    return result


def collect_results(outcomes: list[SweepOutcome], folder: SweepFolder, *, keep: bool = True) -> None:
    """Turn runs that are done according to their record into results."""
    for number, outcome in enumerate(outcomes):
        if outcome.is_final or not outcome.folder:
            continue
        try:
            losses = read_run_losses(folder.runs / outcome.folder, counted="total")
        except (PhalanxError, OSError):
            continue  # nothing recorded yet
        if losses.state == "failed" and (reason := _divergence(folder.runs / outcome.folder)):
            outcomes[number] = replace(outcome, state=DIVERGED, loss=None, message=reason)
        elif losses.state != "done" or not losses.evaluated:
            continue
        elif math.isfinite(loss := losses.losses[-1]) and loss <= math.log(outcome.run.job.model.vocab) + ABOVE_NOTHING:
            outcomes[number] = replace(outcome, state="done", loss=loss, message="")
        else:
            outcomes[number] = replace(outcome, state=DIVERGED, loss=None, message=f"ended at {loss:.4g} nats")
        if keep:
            folder.keep(outcomes[number])


def _divergence(run: Path) -> str:
    """Return the reason why a failed run diverged; empty if it failed otherwise and may succeed when continued.

    A run diverged if it went back to an earlier step and its gradients broke again at the same step: a third attempt
    would not differ.
    """
    try:
        events, _ = read_events(Run(path=run).supervisor)
    except (PhalanxError, OSError):
        return ""
    broke = [event for event in events if event["event"] == "incident"][-2:]
    causes = [at(event, "cause") for event in broke]
    if len(broke) < 2 or any(text(cause, "kind") != ASTRAY for cause in causes) or broke[0]["step"] != broke[1]["step"]:
        return ""
    return f"step {broke[1]['step']}: {text(causes[1], 'message')}, twice"


def _known_jobs(on: str, group: str, tell: Tell) -> dict[str, QueuedJob]:
    """Return the jobs of the group by the name of their run folder; the newest of each."""
    jobs_by_folder: dict[str, QueuedJob] = {}
    table = queue(group=group, on=on)
    for queued_job in table.jobs:
        name = queued_job.run.rstrip("/").rsplit("/", 1)[-1]
        if name not in jobs_by_folder or jobs_by_folder[name].state in (FAILED, CANCELLED, DONE):
            jobs_by_folder[name] = queued_job
    for note in table.notes:
        tell(note)
    return jobs_by_folder
