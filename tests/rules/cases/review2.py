"""What the second review, by a maintainer, brought to light: costs nobody checked, and limits that nothing turned."""

from __future__ import annotations

from dataclasses import replace

from rules.cases.bat import noisy
from rules.cases.ckp import OURS
from rules.cases.com import predicted, small
from rules.cases.flt import job, lasting, run
from rules.cases.review import fails, flip, holds, stopping
from rules.cases.top import host
from rules.kit import Case, evidence
from rules.logs import good_checkpoints, good_cpu_log, good_log, good_monitor, good_steps, spread

from phalanx.rules.evidence import Evidence

MTBF_S = 1e6
WALL_S = 1e6
GUESSED = ("estimate",)


def plain(*sets: str, **facts: object) -> Evidence:
    """The good job with round numbers: a failure every million seconds, in a job of a million."""
    found = job(*sets, **facts)
    plan = found.the_plan
    reliability = replace(plan.reliability, mtbf_s=MTBF_S, hosts=10, failures_per_host_day=0.00864, interval_s=1e3)
    return replace(found, plan=replace(plan, reliability=reliability, duration=replace(plan.duration, wall_s=WALL_S)))


def inside(cluster: str, place: str) -> Evidence:
    """2,048 devices or so, whose copies in memory lie where a failure takes them too."""
    size = 2048 if cluster.startswith("8x") else 2304
    return evidence(
        f"batch.global_sequences={size}", cluster=cluster, practice=replace(OURS, memory_copies=place), log=None
    )


def saving(ratio: float) -> Evidence:
    best_s = evidence().the_plan.reliability.optimal_interval_s
    return evidence(f"checkpoint.interval_s={ratio * best_s!r}")


def guessed(profile: str | None = None) -> Evidence:
    log = good_cpu_log if profile else good_log
    return evidence(profile=profile, log=log(monitor=good_monitor(energy_sources=GUESSED)))


COSTS = [
    # Tokens at 1/(1 + B/B_simple): a batch of 3 times the noise scale needs twice the tokens of one at it.
    fails("BAT003", "twice the tokens", lambda: noisy(512 / 3), "warning", points=50.0),
    fails("BAT003", "a tenth more tokens", lambda: noisy(512 / 1.2), "warning", points=100 * (1 - 2 / 2.2)),
    fails("EFF002", "0.20 where 0.35 is due", lambda: run(mfu=0.20), "warning", points=100 * (1 - 0.20 / 0.35)),
    fails("TEL002", "0.6 where 0.8 is due", lambda: busy(0.6), "warning", points=25.0),
    fails("FLT001", "noticed late", lambda: plain("fault.dead_after_s=1030"), "error", points=0.1),
    fails(
        "CKP004",
        "two saves that failed",
        lambda: plain(log=good_log(checkpoints=good_checkpoints(errors=2))),
        "warning",
        points=100 * 2 * 1e3 * 1e3 / MTBF_S / WALL_S,
    ),
    fails("EFF003", "mean over median", lambda: jittery(), "warning", points=20.0),
    # One of two devices at half the rate of its card: its traffic takes twice as long.
    fails("TOP003", "half of the traffic at half the rate", lambda: far(), "warning", points=10.0),
]
PATIENCE = [
    holds("COM004", "auto and a silent rank", lambda: job("fault.dead_after_s=120"), boundary=True, says="waits 120 s"),
    fails("COM004", "auto waits for a silent rank", lambda: job("fault.dead_after_s=133"), "error", says="waits 133 s",
          at="fault.dead_after_s", boundary=True),
    holds("COM004", "a number does not", lambda: job("fault.dead_after_s=133", "train.timeout_s=60"), says="60 s for"),
    fails("COM004", "auto and a slow step", lambda: slow_step(), "error", at="train.timeout_s"),
]  # fmt: skip
COPIES = [
    fails("CKP005", "on the same host, 2,048", lambda: inside("8xH100:256", "other process"), "error"),
    fails("CKP005", "mostly the same rack, 2,304", lambda: inside("72xGB200:32", "other host"), "error"),
]
SWITCH = [
    fails("COM001", "a ring beside the switch", lambda: switched("ring"), "warning", says="1.4x the time of NVLS"),
    holds("COM001", "sums in the switch", lambda: switched("nvls")),
    holds("COM001", "a ring without a switch", lambda: switched("ring", "8xA100:1")),
    fails("COM001", "no switch that sums", lambda: switched("nvls", "8xA100:1"), "error", says="there is no NVLS"),
]
CASES: list[Case] = [*COSTS, *PATIENCE, *COPIES, *SWITCH]


def busy(utilization: float) -> Evidence:
    return run(monitor=good_monitor(utilization=utilization, lowest_hour=utilization))


def far() -> Evidence:
    """A fifth of the step is traffic over the cards that nothing hides."""
    found = evidence(host=host("PIX", "SYS"))
    plan = found.the_plan
    (one,) = (axis for axis in plan.mapping if "NIC" in axis.tier)
    mapping = (replace(one, shown_s=0.2 * plan.prediction.step_s),)
    return replace(found, plan=replace(plan, mapping=mapping))


def jittery() -> Evidence:
    """Half of the steps take 10 s, and a mean step 12.5."""
    return run(steps=good_steps(duration_s=replace(spread(10.0, wide=2.0), mean=12.5)))


def slow_step() -> Evidence:
    """Five predicted steps are longer than what the bound of a measured one allows."""
    return replace(predicted(150.0), log=good_log(steps=good_steps(duration_s=spread(10.0))))


def switched(algorithm: str, cluster: str = "8xH100:1") -> Evidence:
    return small(f"comm.algorithm={algorithm}", cluster=cluster)


FLIPS = [
    flip("CKP001", "error_ratio", 10.0, lambda: saving(6.0), "error", "warning"),
    flip("CKP005", "required", False, lambda: inside("8xH100:256", "other process"), "error", "warning"),
    flip("FLT007", "device_hours", 1e5, lambda: lasting(5e5, job("fault.digest_every=0")), "warning", "error"),
    flip("EFF004", "remark_only", False, lambda: guessed("cpu-gloo"), "info", "warning"),
    flip("FLT001", "margin", 0.0, lambda: job("fault.dead_after_s=31"), "warning", "error"),
    flip("FLT002", "margin", 0.0, lambda: run(recovery_s=spread(95.0, count=1)), "warning", "error"),
    flip("FLT004", "margin", 1.0, lambda: job("fault.restarts=6"), "error", "warning"),
    flip("COM004", "margin", 0.0, lambda: job("comm.init_timeout_s=310"), "warning", "error"),
    flip("PRC004", "margin", 1.0, lambda: job("train.skipped_steps=15"), "error", "warning"),
    flip("TEL001", "margin", 0.0, lambda: evidence("telemetry.interval_s=11"), "warning", "error"),
    flip("EFF001", "margin", 0.0, lambda: evidence(log=good_log(effective=0.946)), "warning", "error"),
    flip("FLT001", "late_is_error", False, lambda: job("fault.dead_after_s=600"), "error", "warning"),
    flip("FLT002", "late_is_error", False, lambda: run(recovery_s=spread(500.0, count=1)), "error", "warning"),
    flip("FLT003", "stop_is_error", False, stopping(0.2), "error", "warning"),
]
