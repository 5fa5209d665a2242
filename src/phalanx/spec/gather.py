"""From a path to Evidence: a job file, a plan, a run folder, or another trainer's configuration."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from phalanx.errors import Problem, UserError, mistake
from phalanx.hardware.cluster import resolve
from phalanx.hardware.types import Cluster
from phalanx.job.load import ResolvedJob, load
from phalanx.plan.kept import kept_plan
from phalanx.plan.plan import Plan
from phalanx.record.run import Run, open_run, read_json
from phalanx.spec.evidence import Evidence, Unmapped
from phalanx.spec.facts.drill import DrillFacts
from phalanx.spec.facts.host import HostFacts
from phalanx.spec.facts.look import this_host
from phalanx.spec.facts.practice import Practice
from phalanx.spec.facts.practices import practice_of
from phalanx.spec.facts.records import find_drills
from phalanx.spec.log.stream import read_log
from phalanx.spec.profiles import PROFILES, Profile, find_profile, profile_of
from phalanx.spec.scaling import scaling_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the caller named beside the target."""

    overrides: tuple[str, ...] = ()
    cluster: str | None = None
    profile: str | None = None
    drills: tuple[Path, ...] = ()
    look: bool = True  # at this machine, where the job runs on it
    source: str = ""  # trainer a configuration is of, as "megatron"; empty recognises it


def gather(target: str, request: Request, *, today: date, environ: dict[str, str] | None = None) -> Evidence:
    """All evidence about a target; raises UserError when it is nothing that can be checked."""
    environ = dict(os.environ) if environ is None else environ
    path = Path(target)
    if path.is_dir():
        return of_run(open_run(target), request, today=today, environ=environ)
    if not path.exists():
        raise mistake(target, "there is no such file or folder", fix="name a job file, a plan, or the folder of a run")
    if _is_plan(path):
        return of_plan(path, request, today=today, environ=environ)
    from phalanx.spec.foreign.detect import kind_of

    if kind := request.source or kind_of(path):
        return of_foreign(path, kind, request, today=today, environ=environ)
    resolved = load(path, overrides=request.overrides)
    return of_job(resolved, request, today=today, environ=environ)


def _is_plan(path: Path) -> bool:
    """Whether a file is a plan as `phalanx plan --out` writes it; its schema stands in its first line."""
    if path.suffix != ".json":
        return False
    with path.open("rb") as file:
        return b'"phalanx.plan/' in file.read(200)


def of_job(
    resolved: ResolvedJob,
    request: Request,
    *,
    today: date,
    environ: dict[str, str],
    practice: Practice | None = None,
    unmapped: tuple[Unmapped, ...] = (),
    made: Plan | None = None,
) -> Evidence:
    """A job, planned where it can be; `made` is its plan where the caller has it already."""
    refusals: tuple[Problem, ...] = ()
    plan, cluster = made, made.cluster if made is not None else None
    if plan is None:
        plan, refusals, cluster = _planned(resolved, request, environ)
    profile = _profile(request, resolved.job.profile, cluster)
    devices = plan.layout.devices if plan is not None else (cluster.devices if cluster is not None else 1)
    return Evidence(
        target=str(resolved.path),
        job=resolved.job,
        practice=practice or practice_of(resolved.job.parallel.framework),
        profile=profile,
        scaling=scaling_of(devices),
        today=today,
        origins=resolved.origins,
        job_file=str(resolved.path),
        plan=plan,
        refusals=refusals,
        host=_host(request, cluster),
        drills=_drills(request, environ),
        unmapped=unmapped,
    )


def _planned(
    resolved: ResolvedJob, request: Request, environ: dict[str, str]
) -> tuple[Plan | None, tuple[Problem, ...], Cluster | None]:
    """The plan, or why there is none; a cluster nobody can find is the caller's mistake."""
    target = request.cluster or resolved.job.cluster.target
    cluster = resolve(target, base=None if request.cluster else resolved.path.parent)
    try:
        return kept_plan(resolved, cluster, environ=environ), (), cluster
    except UserError as error:
        return None, error.problems, cluster


def of_plan(path: Path, request: Request, *, today: date, environ: dict[str, str]) -> Evidence:
    """A plan file: the job is in it, without lines."""
    plan = Plan.from_dict(read_json(path), where=str(path))
    return Evidence(
        target=str(path),
        job=plan.job,
        practice=practice_of(plan.job.parallel.framework),
        profile=_profile(request, plan.job.profile, plan.cluster),
        scaling=scaling_of(plan.layout.devices),
        today=today,
        plan=plan,
        plan_file=str(path),
        host=_host(request, plan.cluster),
        drills=_drills(request, environ),
    )


def of_run(run: Run, request: Request, *, today: date, environ: dict[str, str]) -> Evidence:
    """A run folder: its resolved job, its plan, and everything its ranks wrote."""
    resolved, plan = _job_of(run), _plan_of(run)
    job = resolved.job if resolved is not None else (plan.job if plan is not None else None)
    log = read_log(run)
    cluster = plan.cluster if plan is not None else None
    return Evidence(
        target=str(run.path),
        job=job,
        practice=practice_of(job.parallel.framework if job is not None else "phalanx"),
        profile=_profile(request, job.profile if job is not None else "auto", cluster),
        scaling=scaling_of(max(1, log.world)),
        today=today,
        origins=resolved.origins if resolved is not None else {},
        job_file=str(run.job_toml) if resolved is not None else "",
        plan=plan,
        plan_file=str(run.plan_json) if plan is not None else "",
        log=log,
        host=_host(request, cluster),
        drills=_drills(request, environ, beside=run.path.parent),
    )


def _job_of(run: Run) -> ResolvedJob | None:
    try:
        return load(run.job_toml)
    except UserError:  # an older run, or a damaged one: the plan may still have the job
        return None


def _plan_of(run: Run) -> Plan | None:
    try:
        return Plan.from_dict(run.plan(), where=str(run.plan_json))
    except UserError:
        return None


def of_foreign(path: Path, kind: str, request: Request, *, today: date, environ: dict[str, str]) -> Evidence:
    """Another trainer's configuration, as far as the job schema has words for it."""
    from phalanx.spec.foreign.convert import convert

    found = convert(path, kind, cluster=request.cluster, overrides=request.overrides)
    return of_job(
        found.resolved, request, today=today, environ=environ, practice=found.practice, unmapped=found.unmapped
    )


def _profile(request: Request, wanted: str, cluster: Cluster | None) -> Profile:
    if request.profile:
        return find_profile(request.profile)
    if wanted != "auto":
        return find_profile(wanted)
    return profile_of(cluster) if cluster is not None else PROFILES["custom"]


def _host(request: Request, cluster: Cluster | None) -> HostFacts | None:
    """This machine, where the job is to run on it: of another cluster it says nothing."""
    if not request.look or cluster is None or not cluster.name.startswith("local"):
        return None
    return this_host()


def _drills(request: Request, environ: dict[str, str], beside: Path | None = None) -> tuple[DrillFacts, ...]:
    roots: Sequence[Path] = (*request.drills, *([beside] if beside is not None else []))
    return find_drills(roots, environ=environ)
