"""EFF001 to EFF004."""

from __future__ import annotations

import math
from dataclasses import replace

from rules.cases.tel import Found, flip, on_cpus, with_log
from rules.kit import Case, evidence
from rules.logs import good_cpu_log, good_log, good_monitor, good_steps, spread

from phalanx.rules.evidence import Evidence
from phalanx.rules.facts.log_facts import GrammarFacts
from phalanx.rules.profiles import scaling_of


def predicted(share: float, *, devices: int = 128, profile: str | None = None) -> Found:
    """The good job with a plan that expects so much of the time to train."""

    def make() -> Evidence:
        found = evidence(profile=profile, scaling=scaling_of(devices))
        plan = found.the_plan
        return replace(found, plan=replace(plan, reliability=replace(plan.reliability, effective_time=share)))

    return make


def steps(**changes: object) -> Found:
    return with_log(steps=good_steps(**changes))


EFF001 = [
    Case(rule="EFF001", name="the good job", verdict="pass", evidence=evidence),
    Case(rule="EFF001", name="a run", verdict="pass", evidence=with_log()),
    Case(rule="EFF001", name="on the target", verdict="pass", evidence=predicted(0.95), boundary=True),
    Case(
        rule="EFF001",
        name="below the target",
        verdict="fail",
        evidence=predicted(0.949),
        boundary=True,
        severity="warning",
        says="94.9% of the time is predicted",
        at="fault.restart_s",
    ),
    Case(rule="EFF001", name="S4", verdict="pass", evidence=predicted(0.90, devices=16_384), boundary=True),
    Case(rule="EFF001", name="below S4", verdict="fail", evidence=predicted(0.89, devices=16_384), boundary=True),
    Case(rule="EFF001", name="S6", verdict="pass", evidence=predicted(0.80, devices=131_072)),
    Case(rule="EFF001", name="TPU", verdict="fail", evidence=predicted(0.92, profile="tpu")),
    Case(rule="EFF001", name="CPUs are not judged", verdict="pass", evidence=predicted(0.2, profile="cpu-gloo")),
    Case(rule="EFF001", name="a bad run", verdict="fail", evidence=with_log(effective=0.94), says="94.0% of 27.8 h"),
    Case(rule="EFF001", name="a short run", verdict="pass", evidence=with_log(effective=0.4, wall_s=3_000.0)),
    Case(rule="EFF001", name="a run on CPUs", verdict="pass", evidence=on_cpus(effective=0.4, wall_s=90_000.0)),
    Case(rule="EFF001", name="a bad hour", verdict="fail", evidence=with_log(lowest_hour=0.49), says="worst hour"),
    Case(
        rule="EFF001",
        name="an incident is open",
        verdict="pass",
        evidence=with_log(lowest_hour=0.3, grammar=GrammarFacts(unclosed=1)),
    ),
    Case(rule="EFF001", name="no ledger", verdict="unknown", evidence=with_log(effective=None, ledger=None)),
    Case(rule="EFF001", name="nothing", verdict="unknown", evidence=lambda: evidence(plan=None)),
    Case(
        rule="EFF001",
        name="the planner refuses",
        verdict="unknown",
        evidence=lambda: evidence("batch.global_sequences=500"),
        says="there is no plan: ",
    ),
    Case(rule="EFF001", name="not a number", verdict="unknown", evidence=predicted(math.nan)),
]


def on_tpu(mfu: float):
    """A run of the good job on 64 TPU v5p."""
    return lambda: evidence(cluster="64xTPU-v5p:1", log=good_log(mfu=mfu))


EFF002 = [
    Case(rule="EFF002", name="a run", verdict="pass", evidence=with_log()),
    Case(rule="EFF002", name="on the floor", verdict="pass", evidence=with_log(mfu=0.35), boundary=True),
    Case(
        rule="EFF002",
        name="below it",
        verdict="fail",
        evidence=with_log(mfu=0.349),
        boundary=True,
        severity="warning",
        says="floor of nvidia-h100 is 35%",
    ),
    Case(
        rule="EFF002",
        name="A100",
        verdict="fail",
        evidence=lambda: evidence(profile="nvidia-a100", log=good_log(mfu=0.39)),
    ),
    Case(
        rule="EFF002",
        name="8 bits",
        verdict="pass",
        evidence=lambda: evidence("precision.compute=fp8", log=good_log(mfu=0.31)),
    ),
    Case(rule="EFF002", name="CPUs are not judged", verdict="pass", evidence=on_cpus(mfu=0.01)),
    Case(
        rule="EFF002",
        name="MI300X is not judged",
        verdict="pass",
        evidence=lambda: evidence(profile="amd-mi300x", log=good_log(mfu=0.1)),
    ),
    Case(rule="EFF002", name="TPU v5 on its floor", verdict="pass", evidence=on_tpu(0.45), boundary=True),
    Case(rule="EFF002", name="TPU v5 below it", verdict="fail", evidence=on_tpu(0.44), boundary=True),
    Case(rule="EFF002", name="not known", verdict="unknown", evidence=with_log(mfu=None)),
    Case(
        rule="EFF002",
        name="a few steps",
        verdict="pass",
        evidence=with_log(mfu=0.01, steps=good_steps(last=18, count=19)),
    ),
]
EFF003 = [
    Case(rule="EFF003", name="steady", verdict="pass", evidence=with_log()),
    Case(rule="EFF003", name="CPUs", verdict="pass", evidence=on_cpus()),
    Case(
        rule="EFF003",
        name="a tenth",
        verdict="pass",
        evidence=steps(duration_s=spread(10.0, wide=1.0999)),
        boundary=True,
    ),
    Case(
        rule="EFF003",
        name="more than a tenth",
        verdict="fail",
        evidence=steps(duration_s=spread(10.0, wide=1.11)),
        boundary=True,
        severity="warning",
        says="p95 of the steps is 1.11x",
    ),
    Case(
        rule="EFF003",
        name="busy cores",
        verdict="fail",
        evidence=on_cpus(steps=good_steps(duration_s=spread(0.4, wide=1.6))),
    ),
    Case(rule="EFF003", name="five percent a day", verdict="pass", evidence=steps(drift=0.05), boundary=True),
    Case(rule="EFF003", name="slower every day", verdict="fail", evidence=steps(drift=0.06), says="+6.0%"),
    Case(
        rule="EFF003",
        name="a drift of hours",
        verdict="pass",
        evidence=with_log(steps=good_steps(drift=0.3), wall_s=80_000.0),
    ),
    Case(rule="EFF003", name="faster", verdict="pass", evidence=steps(drift=-0.3)),
    Case(rule="EFF003", name="slow data", verdict="fail", evidence=steps(data_share=0.021), says="waits for data"),
    Case(rule="EFF003", name="data", verdict="pass", evidence=steps(data_share=0.02), boundary=True),
    Case(rule="EFF003", name="uneven", verdict="fail", evidence=with_log(imbalance=1.2), says="uneven work (S = 1.20)"),
    Case(rule="EFF003", name="uneven on CPUs", verdict="pass", evidence=on_cpus(imbalance=1.8)),
    Case(
        rule="EFF003", name="a few steps", verdict="pass", evidence=steps(duration_s=spread(10.0, count=99, wide=9.0))
    ),
    Case(rule="EFF003", name="no durations", verdict="unknown", evidence=steps(duration_s=None)),
    Case(rule="EFF003", name="no steps", verdict="pass", evidence=with_log(steps=None)),
    Case(rule="EFF003", name="no time", verdict="pass", evidence=steps(duration_s=spread(0.0))),
]
EFF004 = [
    Case(rule="EFF004", name="NVML's counter", verdict="pass", evidence=with_log(), says="0.197 J per token"),
    Case(
        rule="EFF004",
        name="an estimate",
        verdict="fail",
        evidence=with_log(monitor=good_monitor(energy_sources=("estimate",))),
        severity="warning",
        says="from estimate",
    ),
    Case(
        rule="EFF004",
        name="one rank of two estimates",
        verdict="fail",
        evidence=with_log(monitor=good_monitor(energy_sources=("nvml", "estimate"))),
        boundary=True,
    ),
    Case(rule="EFF004", name="an estimate on CPUs", verdict="fail", evidence=on_cpus(), severity="info"),
    Case(
        rule="EFF004",
        name="RAPL",
        verdict="pass",
        evidence=on_cpus(monitor=replace(good_cpu_log().monitor, energy_sources=("rapl",))),
    ),
    Case(
        rule="EFF004",
        name="TPU",
        verdict="unknown",
        evidence=lambda: evidence(profile="tpu", log=good_log(monitor=good_monitor(energy_sources=()))),
    ),
    Case(rule="EFF004", name="nothing", verdict="fail", evidence=with_log(monitor=good_monitor(energy_sources=()))),
    Case(rule="EFF004", name="no samples", verdict="unknown", evidence=with_log(monitor=None)),
    Case(
        rule="EFF004",
        name="no joules",
        verdict="unknown",
        evidence=with_log(energy_j=None, monitor=good_monitor(energy_j=None)),
    ),
]
CASES = [*EFF001, *EFF002, *EFF003, *EFF004]
FLIPS = [
    flip("EFF001", "target", 0.98, with_log()),
    flip("EFF001", "hour", 0.94, with_log()),
    flip("EFF001", "least_wall_s", 60.0, with_log(effective=0.4, wall_s=3_000.0)),
    flip("EFF002", "floor", 0.5, with_log()),
    flip("EFF002", "floor_tpu_v5", 0.5, on_tpu(0.46)),
    flip("EFF002", "floor_low_bits", 0.35, lambda: evidence("precision.compute=fp8", log=good_log(mfu=0.32))),
    flip("EFF002", "least_steps", 5, with_log(mfu=0.01, steps=good_steps(last=18, count=19))),
    flip("EFF003", "spread", 1.02, with_log()),
    flip("EFF003", "drift", 0.001, with_log()),
    flip("EFF003", "drift_wall_s", 60.0, with_log(steps=good_steps(drift=0.3), wall_s=80_000.0)),
    flip("EFF003", "data", 0.001, with_log()),
    flip("EFF003", "waste", 0.3, with_log(imbalance=1.2), breaks=False),
    flip("EFF003", "least_steps", 5, steps(duration_s=spread(10.0, count=99, wide=9.0))),
    flip("EFF004", "counters", ("rapl",), with_log()),
]
