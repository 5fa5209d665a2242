"""From a job and a cluster to a Plan: search, then everything that follows from the winner."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

import numpy as np

from phalanx.arch.counts import count_parameters
from phalanx.errors import Problem
from phalanx.hardware.cluster import resolve
from phalanx.hardware.types import Cluster
from phalanx.job.load import ResolvedJob
from phalanx.job.schema import Job
from phalanx.plan import ask as asking
from phalanx.plan.ask import Ask
from phalanx.plan.bill import bill
from phalanx.plan.compute import element_bytes
from phalanx.plan.layout import Layout
from phalanx.plan.mapping import RANK_ORDER, mapping
from phalanx.plan.plan import SCHEMA, CalibrationNote, ParetoPoint, Plan, SearchStats
from phalanx.plan.prediction import Duration, duration, predict, token_budget
from phalanx.plan.reasons import explain
from phalanx.plan.reliability import Reliability, reliability
from phalanx.plan.score import price
from phalanx.plan.search import SearchResult, search
from phalanx.units import DAY_S, HOUR_S, format_count, format_seconds

LONGEST_S = 365.0 * DAY_S  # nobody keeps a cluster on one run for longer
BEARABLE_S = 90.0 * DAY_S  # BLOOM-176B took about 3.5 months (arXiv 2211.05100)
POOR_PROGRESS = 0.5  # below this share of effective time a run is a way to heat the hall


def plan(
    job: Job | ResolvedJob, cluster: Cluster | str | None = None, *, calibration: CalibrationNote | None = None
) -> Plan:
    """Plan a job on a cluster (the job's own by default). Raises UserError when nothing legal fits.

    >>> import phalanx
    >>> job = phalanx.load("examples/llama-3-8b-64xH100.toml")          # doctest: +SKIP
    >>> phalanx.plan(job, "8xH100:4").layout.name                       # doctest: +SKIP
    'TP1·CP1·PP1·DP32 (ZeRO-3, EP1) mbs1 no-recompute'
    """
    asked = job.job if isinstance(job, ResolvedJob) else job
    base = job.path.parent if isinstance(job, ResolvedJob) else None
    if cluster is None:
        cluster = resolve(asked.cluster.target, base=base)
    elif isinstance(cluster, str):
        cluster = resolve(cluster)
    origins = {key: origin.where for key, origin in job.origins.items()} if isinstance(job, ResolvedJob) else {}
    noted = job.warnings if isinstance(job, ResolvedJob) else ()
    ask, advice = asking.from_job(asked, cluster, origins=origins)
    return _plan(asked, _with_calibration(ask, calibration), noted=(*noted, *advice), calibration=calibration)


def _with_calibration(ask: Ask, note: CalibrationNote | None) -> Ask:
    if note is None:
        return ask
    from phalanx.plan.calibrate import Calibration  # imports scipy: only when asked for

    return replace(ask, calibration=Calibration(**note.scalars))


def _plan(job: Job, ask: Ask, *, noted: Sequence[Problem], calibration: CalibrationNote | None) -> Plan:
    cluster = ask.cluster
    started = time.perf_counter()
    found = search(ask)
    seconds = time.perf_counter() - started
    layout = found.best.layout
    prediction, memory = predict(ask, layout)
    state = checkpoint_bytes(ask, layout)
    trouble = reliability(
        cluster, checkpoint=job.checkpoint, fault=job.fault, state_bytes=state, devices=layout.devices
    )
    budget = token_budget(job.data.tokens, prediction.parameters)
    lasting, uneven = duration(
        ask,
        layout,
        batch=job.batch,
        tokens=budget,
        step_s=prediction.step_s,
        effective_time=trouble.effective_time,
    )
    costs = bill(
        cluster,
        cost=job.cost,
        wall_s=lasting.wall_s,
        spares=trouble.spares,
        devices=layout.devices,
        where=ask.place("cost.region"),
    )
    warnings = (
        *noted,
        *found.warnings,
        *uneven,
        *_slow_progress(ask, trouble),
        *_too_long(ask, lasting, layout),
        *_host_memory(ask, layout),
    )
    price_usd = costs.usd_per_device_hour[1] if costs.usd_per_device_hour else None
    return Plan(
        schema=SCHEMA,
        version=_version(),
        job=job,
        cluster=cluster,
        layout=layout,
        prediction=prediction,
        memory=memory,
        rank_order=RANK_ORDER,
        mapping=mapping(ask, layout),
        duration=lasting,
        reliability=trouble,
        bill=costs,
        alternatives=tuple(explain(ask, layout, other) for other in found.others),
        pareto=_points(found, steps=budget / job.batch.global_tokens, price_usd=price_usd),
        search=SearchStats(
            legal=found.legal,
            fitting=found.fitting,
            seconds=seconds,
            fastest=found.fastest.layout,
            fastest_step_s=found.fastest.step_s,
        ),
        calibration=calibration,
        warnings=tuple(problem.render() for problem in warnings),
    )


def checkpoint_bytes(ask: Ask, layout: Layout) -> float:
    """Bytes of weights and optimizer state of the whole model: what a restart needs."""
    table, _, _ = price(ask, [layout])
    weights = float(np.max(element_bytes(table)))
    return count_parameters(ask.model).total * (weights + float(np.max(ask.memory.optimizer_bytes)))


def _points(found: SearchResult, *, steps: float, price_usd: float | None) -> tuple[ParetoPoint, ...]:
    points = []
    for one in found.pareto:
        hours = one.step_s * steps / HOUR_S
        points.append(
            ParetoPoint(
                layout=one.layout,
                devices=one.layout.devices,
                step_s=one.step_s,
                training_s=one.step_s * steps,
                usd=hours * one.layout.devices * price_usd if price_usd is not None else None,
                memory_bytes=one.memory_bytes,
            )
        )
    return tuple(points)


def _slow_progress(ask: Ask, trouble: Reliability) -> tuple[Problem, ...]:
    if trouble.effective_time >= POOR_PROGRESS:
        return ()
    return (
        Problem(
            where=ask.cluster.name,
            what=f"only {trouble.effective_time:.0%} of the time trains: a failure every {trouble.mtbf_s / 60:.0f} min",
            fix="shorten fault.detect_s and fault.restart_s (warm spares restart in about 60 s), or use fewer hosts",
        ),
    )


def _too_long(ask: Ask, lasting: Duration, layout: Layout) -> tuple[Problem, ...]:
    """A run nobody will wait for, and how many devices would make it one they might."""
    if not LONGEST_S < lasting.wall_s < float("inf"):
        return ()
    unit = ask.cluster.domain_devices
    needed = math.ceil(layout.devices * lasting.wall_s / BEARABLE_S / unit) * unit
    return (
        Problem(
            where=ask.cluster.name,
            what=f"{format_seconds(lasting.wall_s)} for {format_count(lasting.tokens)} tokens is longer than a year",
            fix=f"{format_seconds(BEARABLE_S)} would take about {needed:,} such devices at the same efficiency; "
            "otherwise a smaller model or fewer tokens",
        ),
    )


def _host_memory(ask: Ask, layout: Layout) -> tuple[Problem, ...]:
    """Offloaded state must fit in the hosts."""
    if layout.offload != "optimizer":
        return ()
    state = count_parameters(ask.model).total * float(np.max(ask.memory.optimizer_bytes))
    room = ask.cluster.host_memory_bytes * ask.cluster.hosts
    if state * 1.2 <= room:
        return ()
    what = f"offloaded optimizer state of {state / 1e12:.1f} TB does not fit the hosts' {room / 1e12:.1f} TB"
    return (Problem(where=ask.cluster.name, what=what, fix="use more hosts"),)


def _version() -> str:
    try:
        return version("phalanx")
    except PackageNotFoundError:
        return "unknown"
