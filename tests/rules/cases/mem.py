"""MEM001, MEM002: the plan's own memory, moved to the edge; and what a run said of it."""

from __future__ import annotations

from dataclasses import replace

from rules.kit import Case, Flip, evidence
from rules.logs import good_cpu_log, good_log, good_monitor, incident

from phalanx.rules.facts.trainers import Practice


def filled(share: float, *, profile: str | None = None):
    """The good job on a device that its tensors fill to this share."""

    def made():
        found = evidence(profile=profile)
        memory = replace(found.the_plan.memory, total_bytes=share * found.the_plan.memory.device_bytes)
        return replace(found, plan=replace(found.the_plan, memory=memory))

    return made


def ran(*, profile: str | None = None, incidents=(), log=good_log, **monitor):
    """A run whose peak is what the plan said, unless told otherwise."""

    def made():
        found = evidence(profile=profile)
        total = found.the_plan.memory.total_bytes
        both = {"memory_peak_bytes": total, "held_bytes": 1.05 * total}
        return replace(found, log=log(monitor=good_monitor(**{**both, **monitor}), incidents=incidents))

    return made


def peak(times: float):
    def made():
        found = ran()()
        peak_bytes = found.the_plan.memory.total_bytes / times
        monitor = replace(found.the_log.monitor, memory_peak_bytes=peak_bytes, held_bytes=peak_bytes)
        return replace(found, log=replace(found.the_log, monitor=monitor))

    return made


def held(times: float | None):
    def made():
        found = ran()()
        monitor = found.the_log.monitor
        held_bytes = None if times is None else times * monitor.memory_peak_bytes
        return replace(found, log=replace(found.the_log, monitor=replace(monitor, held_bytes=held_bytes)))

    return made


def on_cpu(share: float | None, source: str = "psi-host"):
    return ran(
        profile="cpu-gloo", log=good_cpu_log, allocation_retries=None, pressure_mean=share, pressure_source=source
    )


TOO_SMALL = ("parallel.zero=1", "parallel.recompute=none", "parallel.offload=none", "batch.micro=2")
CASES = [
    Case(rule="MEM001", name="the good job", verdict="pass", evidence=evidence),
    Case(
        rule="MEM001",
        name="just a tenth free",
        verdict="pass",
        evidence=filled(0.8999),
        boundary=True,
        says="less than 6% below what is usable: phalanx trace JOB --against-plan decides",
    ),
    Case(
        rule="MEM001",
        name="less than a tenth free",
        verdict="fail",
        evidence=filled(0.9001),
        boundary=True,
        severity="error",
        says="more than 90%",
        at="plan:memory",
    ),
    Case(rule="MEM001", name="a CPU's share", verdict="fail", evidence=filled(0.81, profile="cpu-gloo"), boundary=True),
    Case(rule="MEM001", name="a TPU", verdict="pass", evidence=filled(0.915, profile="tpu"), boundary=True),
    Case(
        rule="MEM001",
        name="nothing fits",
        verdict="fail",
        evidence=lambda: evidence(*TOO_SMALL),
        says="does not fit",
    ),
    Case(
        rule="MEM001",
        name="refused for something else",
        verdict="unknown",
        evidence=lambda: evidence("parallel.data=256"),
        says="there is no plan",
    ),
    Case(rule="MEM001", name="a device nobody knows", verdict="unknown", evidence=filled(float("nan"))),
    Case(rule="MEM002", name="a good run", verdict="pass", evidence=ran()),
    Case(rule="MEM002", name="no run", verdict="unknown", evidence=evidence, says="no evidence from the run log"),
    Case(rule="MEM002", name="no samples", verdict="unknown", evidence=lambda: evidence(log=good_log(monitor=None))),
    Case(
        rule="MEM002",
        name="one retry",
        verdict="fail",
        evidence=ran(allocation_retries=1),
        severity="warning",
        says="retried 1 time",
        boundary=True,
    ),
    Case(rule="MEM002", name="nobody counted", verdict="unknown", evidence=ran(allocation_retries=None)),
    Case(
        rule="MEM002",
        name="out of memory",
        verdict="fail",
        evidence=ran(incidents=(incident(what="OutOfMemoryError: CUDA out of memory"),)),
        says="first rank 77 at step 4,000",
    ),
    Case(rule="MEM002", name="9 % too much was predicted", verdict="pass", evidence=peak(1.09), boundary=True),
    Case(
        rule="MEM002",
        name="11 % too much was predicted",
        verdict="fail",
        evidence=peak(1.11),
        boundary=True,
        at="plan:memory",
    ),
    Case(rule="MEM002", name="hardly in pieces", verdict="pass", evidence=held(1.149), boundary=True),
    Case(rule="MEM002", name="in pieces", verdict="fail", evidence=held(1.151), boundary=True, says="holds 1.15x"),
    Case(rule="MEM002", name="nobody said what is held", verdict="unknown", evidence=held(None)),
    Case(rule="MEM002", name="a CPU under no pressure", verdict="pass", evidence=on_cpu(0.009), boundary=True),
    Case(rule="MEM002", name="a CPU under pressure", verdict="fail", evidence=on_cpu(0.011), boundary=True),
    Case(rule="MEM002", name="a kernel that keeps none", verdict="pass", evidence=on_cpu(None, "")),
]
FLIPS = [
    Flip(
        rule="MEM001",
        limit="doubtful",
        value=0.9,
        evidence=lambda: replace(filled(0.95)(), practice=Practice(trainer="megatron"), their_keys={"optim.lr": "lr"}),
        before="info",
        after="error",
    ),
    Flip(rule="MEM001", limit="most_share", value=0.5, evidence=filled(0.6), before="pass", after="fail"),
    Flip(
        rule="MEM002",
        limit="most_retries",
        value=1,
        evidence=ran(allocation_retries=1),
        before="fail",
        after="pass",
    ),
    Flip(rule="MEM002", limit="most_held", value=1.3, evidence=held(1.2), before="fail", after="pass"),
    Flip(rule="MEM002", limit="most_stalled", value=0.02, evidence=on_cpu(0.011), before="fail", after="pass"),
    Flip(rule="MEM002", limit="most_error", value=0.2, evidence=peak(1.11), before="fail", after="pass"),
    Flip(rule="MEM002", limit="judge_prediction", value=False, evidence=peak(2.0), before="fail", after="pass"),
]
