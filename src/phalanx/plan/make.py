"""Make a Plan from a job and a cluster: search the layouts, then derive every prediction from the best one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from phalanx.errors import Problem, UserError, mistake
from phalanx.hardware.cluster import resolve_cluster
from phalanx.hardware.cpu_steps import CpuStep, cpu_times
from phalanx.hardware.types import Cluster
from phalanx.io.packages import installed_version
from phalanx.job.load import ResolvedJob, load
from phalanx.job.parameter_counts import count_parameters
from phalanx.job.schema import Batch, Job
from phalanx.plan.auto_settings import compression_pays
from phalanx.plan.bill import run_bill
from phalanx.plan.compute import element_bytes
from phalanx.plan.cpu_step import step_columns
from phalanx.plan.host_memory import offload_problem
from phalanx.plan.layout import Layout
from phalanx.plan.mapping import RANK_ORDER, map_axes, with_messages
from phalanx.plan.model_replicas import ReplicaLoss, price_loss
from phalanx.plan.plan import SCHEMA, CalibrationNote, ParetoPoint, Plan, SearchStats
from phalanx.plan.prediction import Duration, Prediction, predict_layout, run_duration, token_budget
from phalanx.plan.reasons import explain_alternative
from phalanx.plan.reliability import Reliability, effective_time, predict_reliability
from phalanx.plan.request import PlanRequest, request_from_job, trains_with_phalanx
from phalanx.plan.score import price_layouts
from phalanx.plan.search import SearchResult
from phalanx.plan.search_or_shrink import search_or_shrink
from phalanx.plan.trainable import attention_remarks, trainer_problems
from phalanx.units import DAY_S, HOUR_S, format_count, format_seconds, plural

LONGEST_S = 365.0 * DAY_S  # runs predicted to take longer get a warning
BEARABLE_S = 90.0 * DAY_S  # BLOOM-176B took about 3.5 months (arXiv 2211.05100)
POOR_PROGRESS = 0.5  # below this share of effective training time, half the cost is wasted


def make_plan(
    job: Job | ResolvedJob | str | Path,
    cluster: Cluster | str | Path | None = None,
    *,
    calibration: CalibrationNote | str | Path | None = None,
    allow_unfinishable: bool = False,
    earlier: Layout | None = None,
) -> Plan:
    """Plan a job, or the job in a file, on a cluster (by default the one the job names).

    `calibration` is a file that `phalanx calibrate` wrote. With the layout `earlier` of a run that is resumed, a
    number of devices that no layout divides evenly gets that layout with fewer data ranks. `print(plan)` prints the
    page of `phalanx plan`. Raises UserError if no legal layout fits, and, unless `allow_unfinishable` is true, if the
    run would never finish.

    >>> import phalanx
    >>> job = phalanx.load("examples/llama-3-8b-64xH100.toml")          # doctest: +SKIP
    >>> phalanx.plan(job, "8xH100:4").layout.name                       # doctest: +SKIP
    'TP1·CP1·PP1·DP32 (ZeRO-3, EP1) mbs1 no-recompute'
    """
    if isinstance(job, str | Path):
        job = load(job)
    if not isinstance(job, Job | ResolvedJob):
        raise mistake(
            "phalanx.plan",
            f"job = {str(job)[:60]!r} is of type {type(job).__name__}",
            fix="pass the result of phalanx.load, or a path",
        )
    if isinstance(calibration, str | Path):
        # Imports scipy, so only where a calibration is used.
        from phalanx.plan.calibrate import read_calibration

        calibration = read_calibration(Path(calibration))
    asked = job.job if isinstance(job, ResolvedJob) else job
    job_folder = job.path.parent if isinstance(job, ResolvedJob) else None
    if cluster is None:
        cluster = resolve_cluster(asked.cluster.target, base=job_folder, ranks_per_gpu=asked.train.ranks_per_gpu)
    elif not isinstance(cluster, Cluster):
        cluster = resolve_cluster(cluster, ranks_per_gpu=asked.train.ranks_per_gpu)
    origins = {key: origin.where for key, origin in job.origins.items()} if isinstance(job, ResolvedJob) else {}
    job_warnings = job.warnings if isinstance(job, ResolvedJob) else ()

    def plan_on(asked: Job, where: Cluster, earlier: Layout | None = None) -> Plan:
        request, advice = request_from_job(asked, where, origins=origins)
        return _make_plan(
            asked,
            _with_calibration(request, calibration),
            noted=(*job_warnings, *advice),
            calibration=calibration,
            allow_unfinishable=allow_unfinishable,
            earlier=earlier,
        )

    if cluster.sites:
        from phalanx.plan.site_plan import plan_sites  # only a cluster of sites needs it

        return plan_sites(asked, cluster, plan_on)
    if asked.sync.has_peers:
        from phalanx.plan.site_plan import plan_peer

        return plan_peer(asked, cluster, plan_on)
    return plan_on(asked, cluster, earlier)


def _with_calibration(request: PlanRequest, note: CalibrationNote | None) -> PlanRequest:
    if note is None:
        return request
    # Imports scipy, so only where a calibration is used.
    from phalanx.plan.calibrate import Calibration

    return replace(request, calibration=Calibration(**note.scalars))


def _make_plan(
    job: Job,
    request: PlanRequest,
    *,
    noted: Sequence[Problem],
    calibration: CalibrationNote | None,
    allow_unfinishable: bool,
    earlier: Layout | None,
) -> Plan:
    cluster = request.cluster
    started = time.perf_counter()
    result = search_or_shrink(request, earlier, reproducible=job.numerics.reproducible)
    seconds = time.perf_counter() - started
    layout = result.best.layout
    prediction, memory = predict_layout(request, layout)
    state_bytes = checkpoint_bytes(request, layout)
    reliability = predict_reliability(
        cluster,
        checkpoint=job.checkpoint,
        fault=job.fault,
        state_bytes=state_bytes,
        devices=layout.devices,
        step_s=prediction.step_s,
    )
    reliability = replace(reliability, replica_loss=_price_loss(job, cluster, layout, reliability, prediction))
    if reliability.effective_time <= 0 and not allow_unfinishable:
        raise _never_finishes(request, reliability)
    budget = token_budget(job.data.tokens, prediction.parameters)
    duration, uneven = run_duration(
        request,
        layout,
        batch=job.batch,
        tokens=budget,
        step_s=prediction.step_s,
        effective_time=reliability.effective_time,
        step_interval_s=(prediction.step_s_low, prediction.step_s_high),
        effective_interval=reliability.effective_time_interval,
    )
    bill = run_bill(
        cluster,
        cost=job.cost,
        wall_s=duration.wall_s,
        wall_interval_s=(duration.wall_s_low, duration.wall_s_high),
        spares=reliability.spares,
        devices=layout.devices,
        where=request.place("cost.region"),
    )
    warnings = (
        *noted,
        *result.warnings,
        *uneven,
        *_slow_progress(request, reliability),
        *_too_long(request, duration, layout),
        *([memory_problem] if (memory_problem := offload_problem(request, layout)) else []),
        *_trainer_problems(job, request, layout),
        *attention_remarks(job.model, job.data.sequence, ours=trains_with_phalanx(job)),
        *(
            [compression_problem]
            if (compression_problem := compression_pays(request, layout, where=request.place("parallel.compression")))
            else []
        ),
    )
    price_usd = bill.usd_per_device_hour[1] if bill.usd_per_device_hour else None
    return Plan(
        schema=SCHEMA,
        version=installed_version("phalanx") or "unknown",
        job=job,
        cluster=cluster,
        layout=layout,
        prediction=prediction,
        memory=memory,
        rank_order=RANK_ORDER,
        mapping=with_messages(job, cluster, layout, map_axes(request, layout)),
        duration=duration,
        reliability=reliability,
        bill=bill,
        alternatives=tuple(explain_alternative(request, layout, alternative) for alternative in result.others),
        pareto=_pareto_points(request, result, batch=job.batch, tokens=budget, price_usd=price_usd),
        search=SearchStats(
            legal=result.legal,
            fitting=result.fitting,
            seconds=seconds,
            fastest=result.fastest.layout,
            fastest_step_s=result.fastest.step_s,
            fastest_memory_bytes=result.fastest.memory_bytes,
        ),
        calibration=calibration,
        warnings=tuple(problem.render() for problem in warnings),
    )


def _price_loss(
    job: Job, cluster: Cluster, layout: Layout, trouble: Reliability, prediction: Prediction
) -> ReplicaLoss | None:
    """Return the cost of a lost rank when all ranks rebuild and when only its model replica is left out."""
    step_s = prediction.step_s
    lag_s = trouble.persist_s if job.checkpoint.asynchronous else 0.0
    redone_s = trouble.memory_every * step_s / 2 if trouble.memory_every else lag_s + trouble.interval_s / 2
    reduced = job.precision.compute not in ("fp32", "fp64") and job.precision.grad_reduce == "bf16"
    return price_loss(
        layout,
        cluster,
        job.fault,
        step_s=step_s,
        tokens_per_s=prediction.tokens_per_s,
        state_bytes=trouble.checkpoint_bytes,
        gradient_bytes=prediction.parameters * (2.0 if reduced else 4.0),
        redone_s=redone_s if math.isfinite(trouble.mtbf_s) else 0.0,
    )


def checkpoint_bytes(request: PlanRequest, layout: Layout) -> float:
    """Return the bytes of weights and optimizer state of the whole model, which a restart has to load."""
    table, _, _ = price_layouts(request, [layout])
    weights = float(np.max(element_bytes(table)))
    bytes_per_parameter = weights + float(np.max(request.memory.optimizer_bytes)) + request.packed_bytes
    tables = request.model.vocab * request.model.hidden * (1 if request.model.tied else 2)
    return count_parameters(request.model).total * bytes_per_parameter + tables * float(
        np.max(request.memory.table_optimizer_bytes)
    )


def _pareto_points(
    request: PlanRequest, found: SearchResult, *, batch: Batch, tokens: int, price_usd: float | None
) -> tuple[ParetoPoint, ...]:
    """Return the Pareto front with its time and cost to the token budget, following the same batch ramp as the plan."""
    points = []
    for candidate in found.pareto:
        duration, _ = run_duration(
            request, candidate.layout, batch=batch, tokens=tokens, step_s=candidate.step_s, effective_time=1.0
        )
        hours = duration.training_s / HOUR_S
        points.append(
            ParetoPoint(
                layout=candidate.layout,
                devices=candidate.layout.devices,
                step_s=candidate.step_s,
                training_s=duration.training_s,
                usd=hours * candidate.layout.devices * price_usd if price_usd is not None else None,
                memory_bytes=candidate.memory_bytes,
            )
        )
    return tuple(points)


def _at_best(trouble: Reliability) -> float:
    """Return the effective time at the optimal checkpoint interval."""
    return effective_time(trouble.blocking_s, trouble.optimal_interval_s, trouble.mtbf_s, lost_s=trouble.lost_s)


def _never_finishes(request: PlanRequest, trouble: Reliability) -> UserError:
    """Return the error for a run whose failures come faster than it recovers from them."""
    lost_text, redone_text = format_seconds(trouble.lost_s), format_seconds(trouble.interval_s / 2)
    total_text = format_seconds(trouble.lost_s + trouble.interval_s / 2)
    interval_helps = _at_best(trouble) > 0
    rate = f"failures_per_host_day = {trouble.failures_per_host_day:g} over {plural(trouble.hosts, 'host')}"
    host_fix = f"check {rate}; shorten fault.detect_s and fault.restart_s, or use fewer hosts"
    return mistake(
        request.place("checkpoint.interval_s") if interval_helps else request.cluster.name,
        f"the run never finishes: a failure every {format_seconds(trouble.mtbf_s)} costs {total_text}",
        why=f"{lost_text} to detect, restart and save, and on average {redone_text} of work redone",
        fix=_better_interval(trouble) if interval_helps else host_fix,
    )


def _better_interval(trouble: Reliability) -> str:
    best_s = trouble.optimal_interval_s
    setting = f"use checkpoint.interval_s = {max(1, round(best_s))}, or leave it out" if math.isfinite(best_s) else ""
    return f"{setting or 'leave checkpoint.interval_s out'}: then {_at_best(trouble):.0%} of the time is spent training"


def _slow_progress(request: PlanRequest, trouble: Reliability) -> tuple[Problem, ...]:
    if trouble.effective_time >= POOR_PROGRESS:
        return ()
    if _at_best(trouble) >= POOR_PROGRESS:
        return (_bad_interval(request, trouble),)
    return (
        Problem(
            where=request.cluster.name,
            what=f"only {trouble.effective_time:.0%} of the time is spent training: a failure every "
            f"{trouble.mtbf_s / 60:.0f} min",
            fix="shorten fault.detect_s and fault.restart_s (warm spares restart in about 60 s), or use fewer hosts",
        ),
    )


def _bad_interval(request: PlanRequest, trouble: Reliability) -> Problem:
    """Return the warning for a checkpoint interval, rather than failures, that takes most of the time."""
    return Problem(
        where=request.place("checkpoint.interval_s"),
        what=f"only {trouble.effective_time:.0%} of the time is spent training: checkpoint.interval_s = "
        f"{trouble.interval_s:g}, "
        f"training waits {format_seconds(trouble.blocking_s)} for each checkpoint, and each failure undoes "
        f"{format_seconds(trouble.interval_s / 2)} of work on average",
        fix=_better_interval(trouble),
    )


def _too_long(request: PlanRequest, lasting: Duration, layout: Layout) -> tuple[Problem, ...]:
    """Warn of a run that takes more than a year, with the number of devices that would finish it in 90 days."""
    if not LONGEST_S < lasting.wall_s < float("inf"):
        return ()
    unit = request.cluster.domain_devices
    needed = math.ceil(layout.devices * lasting.wall_s / BEARABLE_S / unit) * unit
    return (
        Problem(
            where=request.cluster.name,
            what=f"{format_seconds(lasting.wall_s)} for {format_count(lasting.tokens)} tokens is longer than a year",
            fix=f"{format_seconds(BEARABLE_S)} would take about {needed:,} such devices at the same efficiency; "
            "otherwise use a smaller model or fewer tokens",
        ),
    )


def _trainer_problems(job: Job, request: PlanRequest, layout: Layout) -> tuple[Problem, ...]:
    """Return the settings of this plan that Phalanx's trainer would reject; empty for other frameworks."""
    if not trains_with_phalanx(job):
        return ()
    return tuple(
        replace(problem, what=f"`phalanx train` cannot run this plan: {problem.what}")
        for problem in trainer_problems(job, layout, request.cluster)
    )


# Plan for this machine's own cores, and time the chosen layout before the plan is shown.
#
# Cores differ more from each other than a formula can predict, and a few seconds of the real step show by how much.
# Where the timing makes another layout look better, that one is timed too.


ROUNDS = 3  # layouts timed for one plan at most
STEP_S = 0.6  # micro-batches are left out until a step is this short, five of which are timed
LONGEST_TIMED_S = 12.0  # a step that takes longer with the fewest micro-batches is not timed


def plan_here(
    make: Callable[[], Plan], target: str, *, environ: Mapping[str, str], tell: Callable[[str], None]
) -> Plan:
    """Return the plan of `make`, with timings of this machine where `target` means its cores."""
    # Not at the top: discovery, NVML and worker processes are nothing a plan for another cluster needs.
    from phalanx.hardware.step_probe import measure_first, time_layout

    measure_first(target, environ=environ, tell=tell)
    plan = make()
    for _ in range(ROUNDS):
        step = _timed_step(plan)
        if step is None:
            break
        if not time_layout(step, plan.to_json(), environ=environ, tell=tell, name=plan.layout.name):
            break
        plan = make()
    return plan


def _timed_step(plan: Plan) -> CpuStep | None:
    """Return the step to time for a plan, with fewer micro-batches where it would be long.

    None if it cannot be timed as it will be trained, or takes longer than LONGEST_TIMED_S.
    """
    rates = plan.cluster.cpu
    if rates is None or plan.job.model.module or plan.job.parallel.recompute_layers != "auto":
        return None
    request, _ = request_from_job(plan.job, plan.cluster)
    columns, _, _ = price_layouts(request, [plan.layout])
    columns_of_step = step_columns(columns)
    full_step = CpuStep(
        **{name: float(np.ravel(getattr(columns_of_step, name))[0]) for name in CpuStep.__dataclass_fields__}
    )
    count = int(full_step.count)
    # A pipeline has to fill.
    min_count = min(count, 2 * int(full_step.pp) * max(1, int(full_step.vpp)))
    while count > min_count and float(cpu_times(replace(full_step, count=float(count)), rates).step) > STEP_S:
        count = max(min_count, count // 2)
    step = replace(full_step, count=float(count))
    return step if float(cpu_times(step, rates).step) <= LONGEST_TIMED_S else None
