"""Turn the arguments of `train` into a plan that can start: files, rules, data and hosts are checked first."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from phalanx.api.checking import check_before_training
from phalanx.api.jobs import AnyJob, override_texts, read_job
from phalanx.api.results import Overrides, Tell, tell_stderr, warn
from phalanx.errors import mistake
from phalanx.io.limits import MAX_STEPS
from phalanx.io.path_probes import resolve_path
from phalanx.job.load import ResolvedJob
from phalanx.job.schema import Job
from phalanx.plan.plan import Plan
from phalanx.record.run import Run
from phalanx.units import format_bytes, format_count, format_seconds, number_text, plural

WHERE = "phalanx train"
# Arguments of `train` that are code.
PLUGIN_KEYS = ("callbacks", "loss", "optimizer", "data", "model", "metrics")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainCall:
    """The arguments of a `train` call."""

    job: AnyJob | None = None
    plan: str | Path | Plan | None = None
    resume: str | Path | Run | None = None
    cluster: str | None = None
    overrides: tuple[str, ...] = ()
    steps: int | None = None  # None: as many as data.tokens needs
    runs: Path = Path("runs")
    name: str | None = None
    hosts: int = 1
    spares: int = 0
    join: int = 0
    address: str | None = None
    measure: bool = False
    check: bool = True  # refuse to start if a rule of the specification fails with severity error
    allow_code: bool = False
    plugins: Mapping[str, Any] = field(default_factory=dict)
    tell: Tell = tell_stderr

    @property
    def consents(self) -> bool:
        """True if code that the job names may run; objects passed in by the caller count as consent."""
        return self.allow_code or bool(self.plugins)


def setting_texts(overrides: Overrides, ranks_per_gpu: int | None) -> tuple[str, ...]:
    """Return the overrides with the ranks that may share a GPU.

    As a setting of the job it is recorded and reaches every agent.
    """
    sharing = [f"train.ranks_per_gpu={ranks_per_gpu}"] if ranks_per_gpu is not None else []
    return (*override_texts(overrides), *sharing)


def given_plugins(**given: Any) -> dict[str, Any]:
    """Return the plug-ins that the caller gave; empty lists and None are dropped."""
    return {
        key: value
        for key, value in given.items()
        if value is not None and not (isinstance(value, list | tuple) and not value)
    }


def prepare_here(call: TrainCall) -> tuple[Plan, Run | None, float]:
    """Return the plan with its data, the run it continues, and the seconds the data took; for ranks started here."""
    from phalanx.metrics.prometheus import check_served

    plan, resolved, old = plan_call(call, here=not call.join)
    _check_hosts(plan, call)
    check_served(plan.job.telemetry)
    plan, data_s = ready_to_start(plan, resolved, call)
    return plan, old, data_s


def require_spec(cluster: object, where: str) -> None:
    """Raise UserError for a Cluster object: a job names its cluster as text, so that its run can be resumed."""
    if cluster is not None and not isinstance(cluster, str):
        message = f"cluster = {repr(cluster)[:60]} is of type {type(cluster).__name__}"
        reason = "a run keeps the name of its cluster, to be resumed by"
        raise mistake(
            where, message, why=reason, fix='give a spec such as "local:4", or the path of a cluster file, as text'
        )


def check_call(call: TrainCall) -> None:
    """Raise UserError for options that exclude each other or are out of range."""
    require_spec(call.cluster, "phalanx.train")
    job_sources = {"JOB": call.job, "--resume": call.resume}
    given_names = [name for name, value in job_sources.items() if value is not None]
    if not given_names and call.plan is None:
        raise mistake(WHERE, "no job file is named", fix="phalanx train job.toml; phalanx init writes one")
    if len(given_names) > 1:
        raise mistake(WHERE, f"{' and '.join(given_names)} exclude each other", fix="give one of them")
    if call.steps is not None and call.steps < 1:
        raise mistake(WHERE, f"--steps {call.steps} is below 1", fix="use 1 or more")
    if call.steps is not None and call.steps > MAX_STEPS:
        raise mistake(
            WHERE, f"--steps {number_text(call.steps)} is above {MAX_STEPS:,}", fix=f"use at most {MAX_STEPS:,}"
        )
    for name, least, value in (("hosts", 1, call.hosts), ("spares", 0, call.spares), ("join", 0, call.join)):
        if not least <= value <= 10**5:
            raise mistake(WHERE, f"--{name} {value} must be {least} or more", fix=f"use {least} to 100,000")
    if call.join and (call.join < 2 or call.hosts > 1):
        raise mistake(WHERE, f"--join {call.join} with --hosts {call.hosts}", fix="--join 2 or more, alone")
    if call.name is not None:
        from phalanx.record.run import require_name

        require_name(call.name)
    if call.plan is not None and (call.overrides or call.cluster or call.steps or call.resume):
        raise mistake(
            WHERE,
            "--plan is already settled: --set, --cluster, --steps and --resume cannot change it",
            fix="make another with phalanx plan JOB --set … --out FILE",
        )


def plan_call(call: TrainCall, *, here: bool) -> tuple[Plan, ResolvedJob, Run | None]:
    """Return the plan to launch, its job, and the run it continues; `here`: all its ranks run on this machine."""
    from phalanx.train import prepare
    from phalanx.train.attach_plugins import attach_plugins, without_plugins

    old: Run | None = None
    if call.resume is not None:
        from phalanx.record.run import open_run

        old = call.resume if isinstance(call.resume, Run) else open_run(call.resume)
        with old.held():
            # Another process may be training in it: raise before anything is planned or changed.
            pass
        plan, warnings = prepare.resumed_plan(
            old, overrides=call.overrides, cluster=call.cluster, steps=call.steps or 0
        )
        warn(warnings, call.tell)
        resolved = prepare.job_of(old, plan)
        # Objects given again replace those of the first start; only the others still need consent.
        plan = replace(plan, job=without_plugins(plan.job, call.plugins))
        remedy = "; or give the run the same objects again, in Python"
        prepare.check_code(plan.job, allowed=call.allow_code, or_else=remedy)
        plan = attach_plugins(plan, **call.plugins)
        _check_files(plan.job, resolved, call, old)
    else:
        plan, resolved = _fresh_plan(call)
        plan = attach_plugins(plan, **call.plugins)
    prepare.check_trainable(plan)
    if here:
        prepare.check_here(plan)
        from phalanx.elastic.transports import facts_here, transport_warnings

        facts = facts_here(plan, slots=plan.layout.devices)
        warn(transport_warnings(facts) if facts is not None else (), call.tell)
    return plan, resolved, old


def _fresh_plan(call: TrainCall) -> tuple[Plan, ResolvedJob]:
    """Return the plan and its job; relative paths in the job start at the job's folder.

    Files are checked first: measuring the machine takes 20 s, too long to wait for the report of a missing file.
    """
    from phalanx.elastic.launchers import find_rank
    from phalanx.train import prepare

    resolved = None
    if call.job is not None:
        resolved = _load_job(call.job, call)
    if call.plan is not None or resolved is None:
        assert call.plan is not None
        where = Path("plan.json") if isinstance(call.plan, Plan) else Path(call.plan)
        plan = _plan_in_memory(call.plan, resolved) if isinstance(call.plan, Plan) else None
        plan = plan or prepare.read_plan(str(where), resolved)
        resolved = resolved or prepare.job_in(plan, where)
        prepare.check_code(plan.job, allowed=call.allow_code)
        _check_files(plan.job, resolved, call)
        return plan, resolved
    requested, absolute_job = resolved, prepare.with_absolute_files(resolved).job
    prepare.check_code(absolute_job, allowed=call.allow_code)
    _check_files(absolute_job, requested, call)
    if not call.measure or find_rank(os.environ) is not None:
        return prepare.plan_for_run(requested), requested
    from phalanx.plan.make import plan_here

    target = str(requested.job.cluster.target)
    return plan_here(lambda: prepare.plan_for_run(requested), target, environ=os.environ, tell=call.tell), requested


def _load_job(job: AnyJob, call: TrainCall) -> ResolvedJob:
    """Return the job with the settings of the call; a job in memory is changed as its file would be."""
    from phalanx.train import prepare

    if isinstance(job, str | Path):
        return prepare.load_job(str(job), overrides=call.overrides, cluster=call.cluster, steps=call.steps or 0)
    resolved = read_job(job, where="phalanx.train")
    if call.overrides:
        raise mistake("phalanx.train", "overrides need a job file", fix="give them to phalanx.load")
    changed = resolved.job
    if call.cluster is not None:
        is_file = call.cluster.endswith(".toml")
        path = str(resolve_path(call.cluster)) if is_file else ""
        cluster = replace(changed.cluster, spec="" if is_file else call.cluster, file=path)
        changed = replace(changed, cluster=cluster)
    if call.steps:
        data = replace(changed.data, tokens=prepare.tokens_of(call.steps, changed.batch))
        changed = replace(changed, data=data)
    return replace(resolved, job=changed)


def _plan_in_memory(plan: Plan, resolved: ResolvedJob | None) -> Plan:
    """Return the plan with the job's files as absolute paths, relative to the job file's folder or the current one."""
    from phalanx.train import prepare

    if resolved is not None and (changed := prepare.changed_keys(plan.job, resolved.job)):
        message = f"the plan is of another job: {', '.join(changed[:3])} differ from {resolved.path}"
        raise mistake("phalanx.train", message, fix="plan that job: phalanx.plan(job)")
    base = resolved.path if resolved is not None else Path("job.toml")
    return replace(plan, job=prepare.with_absolute_files(prepare.job_in(plan, base)).job)


def _check_files(job: Job, resolved: ResolvedJob, call: TrainCall, old: Run | None = None) -> None:
    """Check that the job's inputs exist and its outputs can be written."""
    from phalanx.train import prepare

    prepare.check_inputs(job, resolved, _base_folder(call, resolved), fresh=old is None)
    prepare.check_writable(call.runs, job.checkpoint.path, run=old.path if old is not None else None)


def _base_folder(call: TrainCall, resolved: ResolvedJob) -> Path:
    """Return the folder of the job's relative paths; a run that is continued has absolute ones."""
    return Path() if call.resume is not None else resolved.path.parent


def ready_to_start(plan: Plan, resolved: ResolvedJob, call: TrainCall, *, checked: bool = False) -> tuple[Plan, float]:
    """Check the plan against the specification and prepare its data; return the plan, and the seconds the data took."""
    from phalanx.train import prepare

    _describe_plan(plan, call.tell)
    if not checked:
        check_before_training(resolved, plan, refuse=call.check, tell=call.tell)
    began = time.time()
    plan = prepare.with_data(plan, _base_folder(call, resolved))
    data_s = time.time() - began
    findings = prepare.check_inputs(plan.job, resolved, _base_folder(call, resolved), fresh=call.resume is None)
    if call.resume is None:
        prepare.check_weight_files(plan.job)
    for line in findings.remarks:
        call.tell(f"  {line}")
    warn((*findings.warnings, *prepare.check_data(plan)), call.tell)
    return plan, data_s


def _describe_plan(plan: Plan, tell: Tell) -> None:
    """Print the plan before the first step: what runs, the predictions, the warnings."""
    from phalanx.train.prepare import tell_sharing

    p, job = plan.prediction, plan.job
    tell(
        f"{job.name}: {job.model.name}, {format_count(p.parameters)} parameters, on {plan.cluster.name}: "
        f"{plan.layout.name}"
    )
    tell(
        f"  predicted: {format_seconds(p.step_s)} per step ({format_seconds(p.step_s_low)} to "
        f"{format_seconds(p.step_s_high)}), {format_count(p.tokens_per_s)} tokens/s, "
        f"{format_bytes(plan.memory.total_bytes)} per rank, {format_seconds(plan.duration.training_s)} for "
        f"{plural(plan.duration.steps, 'step')}"
    )
    for text in plan.warnings:
        tell(f"  warning: {text}")
    tell_sharing(plan, tell)


def _check_hosts(plan: Plan, call: TrainCall) -> None:
    """Check that every host has a rank, and that other hosts can reach the first one."""
    if call.address and not call.join:
        message = f"--address {call.address} without --join has no effect"
        raise mistake(WHERE, message, fix="add --join N, or leave it out")
    if call.join and not (call.address or plan.job.fault.interface):
        raise mistake(
            WHERE,
            f"--join {call.join} without --address",
            why="this host would listen at 127.0.0.1, where no other host reaches it",
            fix="--address with an address of this host that the others reach; --address 127.0.0.1 to try it on one "
            "machine",
        )
    count = max(call.hosts, call.join)
    if count > plan.layout.devices:
        raise mistake(
            WHERE,
            f"{plural(count, 'host')} for {plural(plan.layout.devices, 'rank')}",
            why="a host without a rank does nothing",
            fix=f"use at most {plan.layout.devices}; --spares adds spare slots",
        )
