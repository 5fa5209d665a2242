"""Failures: their rate, the cost and optimal interval of checkpoints, spare hosts, and the effective training time.

Formulas: Young 1974, Daly 2006 (higher order), and the expected effective training time ratio
E[ETTR] = (1 - (D + R + W + τ/2) / M) / (1 + δ/τ) with detection D, restart R, persist lag W, interval τ, blocking
checkpoint cost δ and mean time between failures M. Rates, and their spread over sites: hardware/failures.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.hardware.failures import (
    SiteSpread,
    host_failure_spread,
    known_rate,
    middle_range,
    rate_source,
    recovery_spread,
    sample_sites,
)
from phalanx.hardware.failures import failures_per_host_day as usual_rate
from phalanx.hardware.types import Cluster
from phalanx.job.run_sections import Checkpoint, FaultSettings
from phalanx.plan.case_columns import HOST_LINK_BYTES_PER_S
from phalanx.plan.model_replicas import ReplicaLoss
from phalanx.units import DAY_S

# Barrier and bookkeeping of an asynchronous save in addition to the copy: PyTorch DCP blocked Llama-3-8B on 512 H100
# for under 0.5 s.
ASYNC_FLOOR_S = 0.5
# The same for CPU ranks on one machine: 3 to 13 ms in a run of two (tests/data/run-0.6). With the copy by each rank's
# core, 1 GB on two ranks takes 0.10 s; measured 0.11 s (benchmarks/2026-11-15-checkpoint-speed.md).
CPU_FLOOR_S = 0.02
# Checkpoint bandwidth per host where the cluster does not state one: Llama 3's store sustained 2 TB/s for 2,048 hosts
# (arXiv 2407.21783 section 3.3.1).
DISK_BYTES_PER_S = 1e9
# A failed host returns after a day: our own choice, without a published source.
REPAIR_S = DAY_S
# One core copies host memory at 6 to 7 GB/s (benchmarks/2026-11-15-in-memory-checkpoints.md).
HOST_COPY_BYTES_PER_S = 6e9
MEMORY_SHARE = 0.01  # share of the time that copies of the state to host memory may cost: our own choice
SITES = 256  # sampled for the interval of effective time
SPARE_CONFIDENCE = 0.99  # ByteRobust (arXiv 2509.16293) keeps the 99th percentile of simultaneous failures


@dataclass(frozen=True, kw_only=True, slots=True)
class Reliability:
    """The effect of failures on a run. `interval_costs` are (multiple of the interval, share of time lost to it).

    The `_interval`s hold 80 % of sites; None where the value is the user's own, or the plan is older than the field.
    """

    hosts: int
    failures_per_host_day: float
    failures_per_day: float
    mtbf_s: float
    checkpoint_bytes: float
    blocking_s: float  # training stops this long for each checkpoint
    persist_s: float  # until the checkpoint is safe on disk
    optimal_interval_s: float
    interval_s: float
    interval_costs: tuple[tuple[float, float], ...]
    memory_every: int = 1  # steps between copies in host memory; 0 is never
    lost_s: float  # per failure, besides work redone: detection, restart, and the save that was not yet on disk
    effective_time: float  # share of wall-clock time spent training
    spares: int
    rate_source: str = ""  # of failures_per_host_day
    failures_per_host_day_interval: tuple[float, float] | None = None
    recovery_s_interval: tuple[float, float] | None = None  # detection and restart
    effective_time_interval: tuple[float, float] | None = None
    replica_loss: ReplicaLoss | None = None  # both recoveries from a lost rank; None with one model replica


def predict_reliability(
    cluster: Cluster, *, checkpoint: Checkpoint, fault: FaultSettings, state_bytes: float, devices: int, step_s: float
) -> Reliability:
    """Predict the effect of failures on `devices` devices that checkpoint `state_bytes` of state together."""
    hosts = max(1, math.ceil(devices / cluster.host_devices))
    rate = cluster.failures_per_host_day if fault.failures_per_host_day is None else fault.failures_per_host_day
    mtbf_s = DAY_S / (hosts * rate) if rate > 0 else math.inf
    per_host = state_bytes / hosts
    persist_s = per_host / (cluster.disk_bytes_per_s or DISK_BYTES_PER_S)
    on_cores = cluster.accelerator.family == "cpu"
    copy_s = state_bytes / devices / (HOST_COPY_BYTES_PER_S if on_cores else HOST_LINK_BYTES_PER_S)
    floor_s = CPU_FLOOR_S if on_cores and hosts == 1 else ASYNC_FLOOR_S
    blocking_s = floor_s + copy_s if checkpoint.asynchronous else persist_s
    lag_s = persist_s if checkpoint.asynchronous else 0.0
    best_s = max(daly_interval(blocking_s, mtbf_s), lag_s)
    interval_s = best_s if checkpoint.interval_s == "auto" else float(checkpoint.interval_s)
    lost_s = fault.detect_s + fault.restart_s + lag_s
    rates, recoveries = site_rates(cluster, fault), site_recoveries(fault)
    effective = effective_time(blocking_s, interval_s, mtbf_s, lost_s=lost_s)
    costs = tuple((x, checkpoint_overhead(blocking_s, best_s * x, mtbf_s)) for x in (0.25, 0.5, 1.0, 2.0, 4.0))
    return Reliability(
        hosts=hosts,
        failures_per_host_day=rate,
        failures_per_day=hosts * rate,
        mtbf_s=mtbf_s,
        checkpoint_bytes=state_bytes,
        blocking_s=blocking_s,
        persist_s=persist_s,
        optimal_interval_s=best_s,
        interval_s=interval_s,
        interval_costs=costs,
        memory_every=(
            _memory_every(cluster, state_bytes / devices, step_s)
            if checkpoint.memory_every == "auto"
            else checkpoint.memory_every
        ),
        lost_s=lost_s,
        effective_time=effective,
        spares=spare_hosts(hosts, -math.expm1(-rate * REPAIR_S / DAY_S))
        if fault.spares == "auto"
        else int(fault.spares),
        rate_source=_rate_source(cluster, fault),
        failures_per_host_day_interval=rates.interval if rates.log_spread else None,
        recovery_s_interval=recoveries.interval if recoveries.log_spread else None,
        effective_time_interval=_effective_interval(
            effective, rates, recoveries, hosts=hosts, blocking_s=blocking_s, interval_s=interval_s, lag_s=lag_s
        ),
    )


def is_rate_given(cluster: Cluster, fault: FaultSettings) -> bool:
    """Return whether the job or the cluster file states a failure rate, so that the table's is not used."""
    usual = usual_rate(cluster.accelerator, cluster.host_devices)
    return fault.failures_per_host_day is not None or cluster.failures_per_host_day != usual


def is_recovery_given(fault: FaultSettings) -> bool:
    """Return whether the job states how long detecting a failure and restarting take."""
    usual = FaultSettings()
    return (fault.detect_s, fault.restart_s) != (usual.detect_s, usual.restart_s)


def site_rates(cluster: Cluster, fault: FaultSettings) -> SiteSpread:
    """Return failures per host and day: the user's own rate without spread, else the spread of published sites."""
    if is_rate_given(cluster, fault):
        job_rate = fault.failures_per_host_day
        return known_rate(cluster.failures_per_host_day if job_rate is None else job_rate)
    return host_failure_spread(cluster.accelerator, cluster.host_devices)


def site_recoveries(fault: FaultSettings) -> SiteSpread:
    """Return seconds from a failure to the next step: the user's own value, else the spread of published sites."""
    return known_rate(fault.detect_s + fault.restart_s) if is_recovery_given(fault) else recovery_spread()


def _rate_source(cluster: Cluster, fault: FaultSettings) -> str:
    if fault.failures_per_host_day is not None:
        return "fault.failures_per_host_day of the job"
    if is_rate_given(cluster, fault):
        return "failures_per_host_day of the cluster"
    return rate_source(cluster.accelerator)


def _effective_interval(
    effective: float,
    rates: SiteSpread,
    recoveries: SiteSpread,
    *,
    hosts: int,
    blocking_s: float,
    interval_s: float,
    lag_s: float,
) -> tuple[float, float] | None:
    """Return the effective time of this plan at 80 % of sites; the interval includes the expected value."""
    if not (rates.log_spread or recoveries.log_spread) or not rates.median or not math.isfinite(interval_s):
        return None
    shares = [
        exact_effective_time(blocking_s, interval_s, DAY_S / (hosts * rate), lost_s=recovery_s + lag_s)
        for rate, recovery_s in sample_sites(rates, recoveries, count=SITES)
    ]
    low, high = middle_range(shares)
    return min(low, effective), max(high, effective)


def _memory_every(cluster: Cluster, rank_bytes: float, step_s: float) -> int:
    """Return the least number of steps between copies to host memory that keeps their share of the time."""
    on_cpu = cluster.accelerator.family == "cpu"
    copy_s = rank_bytes / (HOST_COPY_BYTES_PER_S if on_cpu else HOST_LINK_BYTES_PER_S)
    return max(1, math.ceil(copy_s / (MEMORY_SHARE * step_s)))


def daly_interval(blocking_s: float, mtbf_s: float) -> float:
    """Return Daly's optimal interval between checkpoints, in seconds.

    >>> round(daly_interval(10.0, 86400 / (2048 * 3.8e-3)) / 60, 1)  # minutes, 16,384 GPUs, 10 s per checkpoint
    7.7
    """
    if not math.isfinite(mtbf_s):
        return math.inf
    if blocking_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = blocking_s / (2 * mtbf_s)
    return math.sqrt(2 * blocking_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - blocking_s


def checkpoint_overhead(blocking_s: float, interval_s: float, mtbf_s: float) -> float:
    """Return the share of time lost to taking checkpoints and to redone work, to first order."""
    if not math.isfinite(interval_s):
        return 0.0
    return blocking_s / interval_s + interval_s / (2 * mtbf_s)


def effective_time(blocking_s: float, interval_s: float, mtbf_s: float, *, lost_s: float) -> float:
    """Return the expected share of wall-clock time spent training; 0 when failures come faster than recovery.

    >>> mtbf_s = 86400 / (2048 * 3.8e-3)
    >>> round(effective_time(10.0, daly_interval(10.0, mtbf_s), mtbf_s, lost_s=90.0), 3)
    0.951
    """
    failure_share = (lost_s + interval_s / 2) / mtbf_s if math.isfinite(mtbf_s) else 0.0
    return max(0.0, (1 - failure_share) / (1 + blocking_s / interval_s))


def exact_effective_time(blocking_s: float, interval_s: float, mtbf_s: float, *, lost_s: float) -> float:
    """Return Daly's exact expected share of time, where a failure during a recovery restarts it; always positive.

    >>> mtbf_s = 86400 / (2048 * 3.8e-3)
    >>> round(exact_effective_time(10.0, daly_interval(10.0, mtbf_s), mtbf_s, lost_s=600.0), 3)
    0.908
    """
    exponent = (lost_s + interval_s + blocking_s) / mtbf_s
    if exponent > 700.0:  # math.exp overflows beyond about 709
        return 0.0
    return interval_s / (mtbf_s * math.exp(lost_s / mtbf_s) * math.expm1((interval_s + blocking_s) / mtbf_s))


def spare_hosts(hosts: int, probability: float) -> int:
    """Return the number of spare hosts that covers 99 % of cases when each host is down with this probability.

    >>> [spare_hosts(n, 1.25e-3) for n in (128, 256, 512, 1024)]  # ByteRobust, table 5
    [2, 2, 3, 4]
    """
    if probability <= 0:
        return 0
    if probability >= 1:
        return hosts
    log_term = hosts * math.log1p(-probability)
    total, down = math.exp(log_term), 0
    while total < SPARE_CONFIDENCE and down < hosts:
        log_term += math.log((hosts - down) / (down + 1)) + math.log(probability) - math.log1p(-probability)
        down += 1
        total += math.exp(log_term)
    return down
