"""What the first review brought to light: settings too small to work, jobs too short to judge, false words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rules.cases.flt import run
from rules.kit import Case, Flip, evidence
from rules.logs import good_log, good_steps, spread
from rules.swap import swapped

from phalanx.plan.plan import CalibrationNote
from phalanx.rules.evidence import Evidence
from phalanx.rules.facts.log_facts import NoiseFacts
from phalanx.rules.facts.trainers import PHALANX

Found = Callable[[], Evidence]
STOP = "fault.recovery=stop"
SEEN = NoiseFacts(
    count=100, gap_steps=1.0, last=4.0, growth=1.0, has_parts=True, error=0.0
)  # sequences; the batch: 512
UNKNOWN = "8xV100:4"  # hardware of the profile custom
IN_FP16 = ("precision.compute=fp16", "model.preset=gpt2-xl", "data.sequence=1024")


def job(*sets: str, **changes: Any) -> Found:
    return lambda: evidence(*sets, **{"practice": PHALANX, **changes})


def lasting(seconds: float, *sets: str, **reliability: float) -> Found:
    """The good job, so short or so long; its expected wall clock without end, as bad settings make it."""

    def make() -> Evidence:
        found = evidence(*sets, practice=PHALANX)
        plan = found.the_plan
        duration = replace(plan.duration, training_s=seconds, wall_s=float("inf"))
        changed = replace(plan.reliability, **reliability)
        return replace(found, plan=replace(plan, duration=duration, reliability=changed))

    return make


def custom(*sets: str, measured: bool = False) -> Found:
    def make() -> Evidence:
        found = evidence(*IN_FP16, *sets, cluster=UNKNOWN, practice=PHALANX)
        note = CalibrationNote(file="calibration.json", scalars={}) if measured else None
        return replace(found, plan=replace(found.the_plan, calibration=note))

    return make


def early(steps: int) -> Found:
    return lambda: evidence(log=good_log(noise=SEEN, steps=good_steps(count=steps, last=steps - 1)))


def stopping(risk_s: float) -> Found:
    """A job that stops at its first failure, and lasts for so many mean times between failures."""
    mtbf_s = 1e6
    return lasting(risk_s * mtbf_s, STOP, mtbf_s=mtbf_s)


def memory_every(intervals: float, cluster: str = "8xH100:256") -> Found:
    """2,048 devices with a copy in memory after so many intervals of the disk."""

    def make() -> Evidence:
        found = evidence("batch.global_sequences=2048", cluster=cluster, practice=PHALANX)
        plan = found.the_plan
        steps = round(intervals * plan.reliability.interval_s / plan.prediction.step_s)
        plan = replace(plan, reliability=replace(plan.reliability, memory_every=steps))
        return swapped(replace(found, plan=plan), f"checkpoint.memory_every={steps}")

    return make


def fails(rule: str, name: str, found: Found, severity: str, **more: Any) -> Case:
    return Case(rule=rule, name=name, verdict="fail", evidence=found, severity=severity, **more)


def holds(rule: str, name: str, found: Found, **more: Any) -> Case:
    return Case(rule=rule, name=name, verdict="pass", evidence=found, **more)


def open_(rule: str, name: str, found: Found, **more: Any) -> Case:
    return Case(rule=rule, name=name, verdict="unknown", evidence=found, **more)


TOO_SMALL = [
    fails("FLT001", "less than four heartbeats", job("fault.dead_after_s=0.99"), "error", boundary=True),
    fails("FLT001", "less in a small job", job("fault.dead_after_s=0.5", cluster="8xH100:8"), "error"),
    holds("FLT001", "four heartbeats", job("fault.dead_after_s=1"), boundary=True),
    holds("FLT001", "who fell said so", lambda: run(detect_s=spread(0.0, count=2)), says="took no time"),
    fails("COM004", "a start of a second", job("comm.init_timeout_s=29.9"), "error", at="comm.init_timeout_s"),
    holds("COM004", "a start of half a minute", job("comm.init_timeout_s=30"), boundary=True),
    fails("PRC004", "every step is a spike", job("train.spike_factor=0.5"), "error", at="train.spike_factor"),
    holds("PRC004", "twice the median", job("train.spike_factor=2.0"), boundary=True),
    fails("PRC004", "a norm that bounds nothing", job("optim.clip=1e6"), "error", says="which is no bound"),
    holds("PRC004", "a norm of a hundred", job("optim.clip=100"), boundary=True),
    fails("TEL001", "a monitor that never rests", job("telemetry.interval_s=0.099"), "warning", boundary=True),
    holds("TEL001", "ten times a second", job("telemetry.interval_s=0.1"), boundary=True),
    fails("TEL001", "pings that never rest", job("telemetry.peers_every_s=0.0001"), "warning"),
]
MARGINS = [
    fails("FLT001", "a tenth beyond", job("fault.dead_after_s=33"), "warning", boundary=True),
    fails("FLT001", "more than a tenth", job("fault.dead_after_s=33.1"), "error", boundary=True),
    fails("FLT002", "a tenth late", lambda: run(recovery_s=spread(99.0, count=1)), "warning", boundary=True),
    fails("FLT002", "more than a tenth late", lambda: run(recovery_s=spread(99.1, count=1)), "error", boundary=True),
    fails("FLT004", "one more", job("fault.restarts=4"), "warning", boundary=True),
    fails("FLT004", "two more", job("fault.restarts=5"), "error", boundary=True),
    fails("COM004", "the start a tenth late", job("comm.init_timeout_s=330"), "warning", boundary=True),
    fails("COM004", "the start later", job("comm.init_timeout_s=331"), "error", boundary=True),
    fails("TEL001", "every 11 s", job("telemetry.interval_s=11"), "warning", boundary=True),
    fails("TEL001", "every 12 s", job("telemetry.interval_s=12"), "error", boundary=True),
    fails("PRC004", "twelve in a row", job("train.skipped_steps=12"), "error", boundary=True),
    fails("EFF001", "a tenth more lost", lambda: evidence(log=good_log(effective=0.946)), "warning", boundary=True),
    fails("EFF001", "more than that", lambda: evidence(log=good_log(effective=0.944)), "error", boundary=True),
]
ENDED = [
    fails(
        "EFF001",
        "the run failed",
        lambda: run(state="failed", message="step 26: rank 0: Astray"),
        "error",
        says="the run ended as failed: step 26: rank 0: Astray",
    ),
    holds("EFF001", "the run was stopped", lambda: run(state="stopped")),
    open_("FLT002", "done after what fell", lambda: run(recovery_s=None), says="no step was left to do"),
    fails("FLT003", "stops at the first failure", stopping(0.2), "error", at="fault.recovery", says="uses no spare"),
    holds("FLT003", "hardly ever", stopping(0.105), boundary=True),  # 1 - exp(-0.105) = 9.97 %
    fails("FLT003", "often enough", stopping(0.106), "error", boundary=True),
    fails("FLT003", "a small one is warned", job(STOP, cluster="8xH100:8"), "warning"),
]
SHORT = [
    holds("CKP001", "shorter than the optimum", lasting(13.0, interval_s=1e9), says="the last one"),
    fails(
        "CKP001",
        "no longer than the job",
        lasting(
            2_500.0, "checkpoint.interval_s=86400", optimal_interval_s=1e3, mtbf_s=1e6, blocking_s=0.5, persist_s=0.0
        ),
        "warning",
        says="its one save, at the end, comes after 2.50x the optimum",
    ),
    holds("CKP001", "nothing fails", job("fault.failures_per_host_day=0"), says="no failure is expected"),
    holds("EFF001", "shorter than its interval", lasting(1_000.0, interval_s=1e9, effective_time=0.0)),
    fails(
        "EFF001",
        "failures outrun a short job",
        lasting(10_000.0, interval_s=1e9, effective_time=0.0, mtbf_s=50_000.0),
        "error",
    ),
    holds("CKP004", "shorter than its interval", lasting(1_000.0, "checkpoint.interval_s=2000", blocking_s=1e3)),
    holds("CKP005", "one at the end", lasting(2_000.0, "checkpoint.interval_s=86400", optimal_interval_s=1e3)),
    holds(
        "CKP005", "by itself as often as it pays", lasting(9.0, interval_s=5.0, optimal_interval_s=4.0, memory_every=9)
    ),
    holds("CKP005", "as old as the disk's", memory_every(0.99), boundary=True),
    fails(
        "CKP005", "older than the disk's", memory_every(1.05), "error", boundary=True, says="where the disk gets one"
    ),
    fails("CKP005", "older, and not required", memory_every(1.05, "8xH100:16"), "warning"),
    holds("BAT003", "199 steps", early(199), boundary=True, says="reported, not judged before 200"),
    fails("BAT003", "200 steps", early(200), "warning", boundary=True),
]
HARDWARE = [
    fails("PRC003", "V100 has no bf16", job("precision.compute=bf16", *IN_FP16[1:], cluster=UNKNOWN), "error"),
    fails("PRC003", "T4 has none", job("precision.compute=bf16", *IN_FP16[1:], cluster="8xT4:16"), "error"),
    holds("PRC003", "V100 has fp16", custom(), boundary=True),
    open_("EFF001", "custom, and no rate", custom(), says="how often hosts of V100"),
    holds("EFF001", "custom, with a rate", custom("fault.failures_per_host_day=0.001")),
    open_("CKP001", "custom, and no rate", custom()),
    open_("FLT003", "custom, and no rate", custom()),
    *(open_(rule, "custom, not measured", custom()) for rule in ("COM001", "COM003", "COM004")),
    *(holds(rule, "custom, calibrated", custom(measured=True)) for rule in ("COM001", "COM004")),
    holds("SPC002", "the cluster's", job(), boundary=True),
    fails("SPC002", "softer limits", job("profile=cpu-gloo"), "warning", boundary=True, at="profile"),
    fails("SPC002", "by --profile", job(profile="tpu"), "warning", says="by the limits of tpu"),
    holds("SPC002", "hardware without a profile", lambda: replace(custom()(), profile=evidence().profile)),
]
WORDS = [
    holds("COM001", "tree for sums alone", job("comm.algorithm=tree", "parallel.shard=128"), says="within 1.10x"),
    Case(
        rule="PRC002",
        name="sums in fp16",
        verdict="fail",
        evidence=job("precision.compute=fp16", "precision.grad_reduce=bf16", practice=replace(PHALANX, sums_in="fp16")),
        says="gradients are summed in fp16 over",
    ),
]
CASES = [*TOO_SMALL, *MARGINS, *ENDED, *SHORT, *HARDWARE, *WORDS]


def flip(rule: str, limit: str, value: Any, found: Found, before: Any, after: Any) -> Flip:
    return Flip(rule=rule, limit=limit, value=value, evidence=found, before=before, after=after)


FLIPS = [
    flip("FLT001", "least_beats", 5, job("fault.dead_after_s=1"), "pass", "fail"),
    flip("COM004", "init_least_s", 20.0, job("comm.init_timeout_s=25"), "fail", "pass"),
    flip("PRC004", "least_factor", 1.2, job("train.spike_factor=1.5"), "fail", "pass"),
    flip("PRC004", "most_clip", 1e7, job("optim.clip=1e6"), "fail", "pass"),
    flip("TEL001", "least_s", 0.01, job("telemetry.interval_s=0.05"), "fail", "pass"),
    flip("FLT003", "stop_risk", 0.5, stopping(0.2), "fail", "pass"),
    flip("CKP005", "memory_ratio", 2.0, memory_every(1.05), "fail", "pass"),
    flip("BAT003", "least_steps", 100, early(150), "pass", "fail"),
    flip("PRC003", "without_bf16", ("turing",), job(*IN_FP16[1:], cluster=UNKNOWN), "fail", "pass"),
    flip("SPC002", "free", ("nvidia-h100",), job("profile=cpu-gloo"), "fail", "pass"),
]
