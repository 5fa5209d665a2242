"""A sweep on Slurm or Kubernetes: its runs launched as one group, and what they gave, read from their records later.

Each run is an ordinary job on one device. The command is repeated to collect: finished runs become results under the
hash of what decides them, those that wait or train are left alone, and only what is missing is submitted.
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
START_S = 600.0  # of a run: imports, the first step, the last checkpoint and the evaluation
ASTRAY = "Astray"  # kind of an incident in which every process lives and the numbers are wrong
ABOVE_NOTHING = 0.5  # nats above ln(vocabulary), from which a finished run has learned nothing: as train.lone_rank says


def refuse_launch(on: str, *, method: str, parallel: int | None) -> None:
    """Raise UserError for what a sweep cannot do on a cluster."""
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
    """The job as one rank on one device of its own cluster, evaluated at its end; `base` is the job file's folder."""
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
    """Collect what has ended and submit what is missing; entries of `outcomes` are replaced. None: nothing to submit.

    All missing runs are submitted together, or none of them.
    """
    collect_results(outcomes, folder, keep=not dry_run)
    alive = {} if dry_run else _known_jobs(on, group, tell)
    missing, elsewhere = [], []
    for number, one in enumerate(outcomes):
        if one.is_final:
            continue
        known = alive.get(one.folder) if one.folder else None
        if known is not None and queue_name and known.queue not in ("", queue_name):
            if known.state in OVER and not any((folder.runs / one.folder / "checkpoints").glob("*")):
                known = None  # nothing would be lost: submitted anew, to the queue that is named now
            else:
                elsewhere.append(known)
        if known is None or known.state == DONE:
            missing.append(number)
        elif known.state in OVER:
            requeue(known.id)  # it goes on from its newest checkpoint
            outcomes[number] = replace(one, state="waiting", message=f"was {known.state}: submitted again")
        else:
            outcomes[number] = replace(one, state=known.state, message=known.id)
    if elsewhere:
        tell(
            f"{plural(len(elsewhere), 'run')} ({elsewhere[0].id} first) stay in {elsewhere[0].queue}, where an earlier "
            f"call submitted them; phalanx cancel ends one that waits, and the same command then submits it to "
            f"{queue_name}"
        )
    if not missing:
        return None
    # One time limit for all: requests that differ in their run alone become one array.
    time_s = max(plans[number].duration.wall_s_high for number in missing) + START_S

    def keep_folders(requests: Sequence[LaunchRequest]) -> None:
        """Before anything is submitted: killed after that, the next call finds its runs in the queue by these."""
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
        share_hosts=True,  # of one device each
        volume=folder.runs.absolute().parent.parent,  # where --out lies: there the dataset has room beside it
        before_submit=keep_folders,
        check=False,  # warnings of a training specification on each of many small runs are noise
        progress=lambda line: None,
    )
    if not dry_run:
        for number, id_, request in zip(missing, result.ids, result.requests, strict=True):
            name = request.run.rsplit("/", 1)[-1]
            outcomes[number] = replace(outcomes[number], state="waiting", folder=name, message=id_, cached=False)
        tell(f"{plural(len(missing), 'run')} submitted to {on} as group {group}; phalanx queue --group {group}")
    return result


def collect_results(outcomes: list[SweepOutcome], folder: SweepFolder, *, keep: bool = True) -> None:
    """Runs whose record says that they are done become results."""
    for number, one in enumerate(outcomes):
        if one.is_final or not one.folder:
            continue
        try:
            found = read_run_losses(folder.runs / one.folder, counted="total")
        except (PhalanxError, OSError):
            continue  # nothing recorded yet
        if found.state == "failed" and (why := _divergence(folder.runs / one.folder)):
            outcomes[number] = replace(one, state=DIVERGED, loss=None, message=why)
        elif found.state != "done" or not found.evaluated:
            continue
        elif math.isfinite(loss := found.losses[-1]) and loss <= math.log(one.run.job.model.vocab) + ABOVE_NOTHING:
            outcomes[number] = replace(one, state="done", loss=loss, message="")
        else:
            outcomes[number] = replace(one, state=DIVERGED, loss=None, message=f"ended at {loss:.4g} nats")
        if keep:
            folder.keep(outcomes[number])


def _divergence(run: Path) -> str:
    """Why a failed run diverged; empty where it failed for another reason, and may do better when it goes on.

    It went back to an earlier step and its gradients broke again at the same one: a third time would be no different.
    """
    try:
        events, _ = read_events(Run(path=run).supervisor)
    except (PhalanxError, OSError):
        return ""
    broke = [one for one in events if one["event"] == "incident"][-2:]
    causes = [at(one, "cause") for one in broke]
    if len(broke) < 2 or any(text(cause, "kind") != ASTRAY for cause in causes) or broke[0]["step"] != broke[1]["step"]:
        return ""
    return f"step {broke[1]['step']}: {text(causes[1], 'message')}, twice"


def _known_jobs(on: str, group: str, tell: Tell) -> dict[str, QueuedJob]:
    """Jobs of the group by the name of their run folder; the newest of each."""
    found: dict[str, QueuedJob] = {}
    table = queue(group=group, on=on)
    for one in table.jobs:
        name = one.run.rstrip("/").rsplit("/", 1)[-1]
        if name not in found or found[name].state in (FAILED, CANCELLED, DONE):
            found[name] = one
    for note in table.notes:
        tell(note)
    return found
