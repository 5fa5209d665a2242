"""COM001 to COM004: algorithms, compression, buckets, timeouts. Boundaries are found by halving a rule's own value."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rules.kit import JOB, Case, Evidence, Flip, answers, evidence
from rules.logs import good_checkpoints, good_log, good_steps, spread

from phalanx.rules.evidence import ForeignSetting
from phalanx.rules.facts.host import HostFacts
from phalanx.rules.facts.trainers import Practice

# 1.5 billion parameters fit one GPU, so their gradients can be summed whole.
SMALL = (
    JOB.replace("llama-3-8b", "gpt2-xl")
    .replace("sequence = 8192", "sequence = 1024")
    .replace("global_sequences = 512", "global_sequences = 4096")
    .replace("zero = 3", "zero = 0")
)


def small(*sets: str, cluster: str | None = None, **changes: Any) -> Evidence:
    return evidence(*sets, text=SMALL, cluster=cluster, **changes)


def value(rule: str, found: Evidence) -> float:
    """The last number a rule compares."""
    held = answers(rule, found)[-1].outcome.value
    assert isinstance(held, int | float)
    return float(held)


def halve(above: Callable[[float], bool], low: float, high: float) -> tuple[float, float]:
    """Two neighbours, `above` false at the first and true at the second, whichever way round."""
    start = above(low)
    assert above(high) != start
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if above(middle) == start else (low, middle)
    return (high, low) if start else (low, high)


@functools.cache
def ring_limits() -> tuple[float, float]:
    """MiB of a bucket at which a ring over 16 nodes is just within, and just beyond, 1.10 of the best, less doubt."""
    return halve(lambda mib: value("COM001", ring(mib)) > 1.10, 25.0, 250.0)


def ring(mib: float, cluster: str = "8xH100:16") -> Evidence:
    found = small("comm.algorithm=ring", cluster=cluster)
    return replace(found, job=replace(found.the_job, comm=replace(found.the_job.comm, bucket_mib=mib)))


@functools.cache
def bucket_limits() -> tuple[float, float]:
    return halve(lambda mib: value("COM003", bucket(mib)) > 0.10, 64.0, 512.0)


def bucket(mib: float | str) -> Evidence:
    found = small()
    return replace(found, job=replace(found.the_job, comm=replace(found.the_job.comm, bucket_mib=mib)))


def short_run(steps: int) -> Evidence:
    """Small buckets in another trainer's file that trains so many steps."""
    said = {"max_steps": ForeignSetting(key="max_steps", value=steps, line=1)}
    return replace(bucket(1.0), their_keys={"optim.lr": "lr"}, settings=said)


@functools.cache
def wire_limits() -> tuple[float, float]:
    """Gb/s of a card at which int8 gradients just do not, and just do, save 5 % of the step."""
    return halve(lambda gbps: value("COM002", packed(gbps)) >= 0.05, 20.0, 400.0)


def packed(gbps: float, *, feedback: bool | None = True, kind: str = "int8") -> Evidence:
    found = small(f"parallel.compression={kind}", practice=Practice(trainer="any", error_feedback=feedback))
    cluster = replace(found.the_plan.cluster, nic_bytes_per_s=gbps * 1e9 / 8)
    return replace(found, plan=replace(found.the_plan, cluster=cluster))


def predicted(step_s: float, *sets: str, **changes: Any) -> Evidence:
    found = evidence(*sets, **changes)
    prediction = replace(found.the_plan.prediction, step_s=step_s, step_s_high=step_s)
    return replace(found, plan=replace(found.the_plan, prediction=prediction))


def measured(step_s: float, *sets: str) -> Evidence:
    return predicted(1.0, *sets, log=good_log(steps=good_steps(duration_s=spread(step_s))))


def flat(nodes: int) -> Evidence:
    """ZeRO-3 over every GPU of so many nodes, in one ring, of a model with small layers."""
    sets = (f"batch.global_sequences={nodes * 8}", f"parallel.shard={nodes * 8}", "parallel.zero=3")
    return small(*sets, cluster=f"8xH100:{nodes}")


def saving(persist_s: float, *sets: str) -> Evidence:
    """A job whose steps take 7.8 s at most, and whose synchronous saves take so long."""
    found = predicted(7.8, "checkpoint.async=false", *sets)
    plan = found.the_plan
    return replace(found, plan=replace(plan, reliability=replace(plan.reliability, persist_s=persist_s)))


CASES = [
    Case(rule="COM001", name="auto", verdict="pass", evidence=evidence, says="NCCL picks"),
    Case(rule="COM001", name="auto, whole gradients", verdict="pass", evidence=small),
    Case(
        rule="COM001",
        name="ring on two nodes",
        verdict="pass",
        evidence=lambda: ring(64, "8xH100:2"),
        says="ring is within 1.10x",
    ),
    Case(
        rule="COM001",
        name="ring on sixteen",
        verdict="fail",
        evidence=lambda: ring(25, "8xH100:16"),
        severity="warning",
        says="Ring takes 1.9x the time of Tree for all-reduce of 25 MiB",
        at="comm.algorithm",
    ),
    Case(rule="COM001", name="just near", verdict="pass", evidence=lambda: ring(ring_limits()[0]), boundary=True),
    Case(rule="COM001", name="just far", verdict="fail", evidence=lambda: ring(ring_limits()[1]), boundary=True),
    Case(
        rule="COM001",
        name="no tree for the scatters of another trainer",
        verdict="fail",
        evidence=lambda: evidence("comm.algorithm=tree", practice=Practice(trainer="megatron")),
        severity="error",
        says="there is no Tree for reduce-scatter between 8 ranks in one domain",
    ),
    Case(
        rule="COM001",
        name="no sum in the switch of two nodes",
        verdict="fail",
        evidence=lambda: small("comm.algorithm=nvls", cluster="8xH100:2"),
        says="there is no NVLS for all-reduce",
    ),
    Case(
        rule="COM001",
        name="one long ring",
        verdict="fail",
        evidence=lambda: flat(1024),
        severity="error",
        says="the time of two levels",
        at="parallel.shard",
    ),
    Case(rule="COM001", name="the same ring below 4,097", verdict="pass", evidence=lambda: flat(512), boundary=True),
    Case(
        rule="COM001",
        name="the environment",
        verdict="fail",
        evidence=lambda: evidence(host=HostFacts(name="n", source="this machine", environment={"NCCL_ALGO": "Ring"})),
        says="NCCL_ALGO = 'Ring' in the environment",
    ),
    Case(rule="COM001", name="gloo", verdict="pass", evidence=lambda: evidence(profile="cpu-gloo"), says="gloo"),
    Case(
        rule="COM001",
        name="gloo has no tree",
        verdict="fail",
        evidence=lambda: evidence("comm.algorithm=tree", profile="cpu-gloo"),
        says="has no effect",
    ),
    Case(rule="COM001", name="TPU", verdict="unknown", evidence=lambda: evidence(profile="tpu"), says="XLA"),
    Case(
        rule="COM001",
        name="unknown links",
        verdict="unknown",
        evidence=lambda: evidence("comm.algorithm=ring", profile="custom"),
    ),
    Case(rule="COM002", name="none", verdict="pass", evidence=evidence, says="as they are"),
    Case(rule="COM002", name="slow cards", verdict="pass", evidence=lambda: packed(5.0), says="save"),
    Case(
        rule="COM002",
        name="fast cards",
        verdict="fail",
        evidence=lambda: packed(400.0),
        severity="warning",
        says="less than 5%",
        at="parallel.compression",
    ),
    Case(rule="COM002", name="just pays", verdict="pass", evidence=lambda: packed(wire_limits()[1]), boundary=True),
    Case(rule="COM002", name="just not", verdict="fail", evidence=lambda: packed(wire_limits()[0]), boundary=True),
    Case(
        rule="COM002",
        name="no feedback",
        verdict="fail",
        evidence=lambda: packed(5.0, feedback=False),
        severity="error",
        says="does not feed their error back",
    ),
    Case(rule="COM002", name="feedback unknown", verdict="unknown", evidence=lambda: packed(5.0, feedback=None)),
    Case(
        rule="COM002",
        name="rounding needs none",
        verdict="pass",
        evidence=lambda: packed(5.0, feedback=False, kind="bf16"),
    ),
    Case(rule="COM003", name="blocks", verdict="pass", evidence=evidence, says="a block's gradients are 832 MiB"),
    Case(
        rule="COM003",
        name="the trainer's own, hidden",
        verdict="pass",
        evidence=small,
        says="backward hides all but 0.8%",
    ),
    Case(
        rule="COM003",
        name="tiny buckets",
        verdict="fail",
        evidence=lambda: bucket(1.0),
        severity="warning",
        says="45% of their time start-up",
        at="comm.bucket_mib",
    ),
    Case(rule="COM003", name="one bucket", verdict="fail", evidence=lambda: bucket(8000.0), says="fewer than 2"),
    Case(
        rule="COM003",
        name="just large enough",
        verdict="pass",
        evidence=lambda: bucket(bucket_limits()[0]),
        boundary=True,
    ),
    Case(
        rule="COM003", name="just too small", verdict="fail", evidence=lambda: bucket(bucket_limits()[1]), boundary=True
    ),
    Case(
        rule="COM003",
        name="blocks in one long ring",
        verdict="fail",
        evidence=lambda: flat(512),
        says="more than 10%",
        at="parallel.shard",
    ),
    Case(rule="COM003", name="one rank", verdict="pass", evidence=lambda: evidence(text=SMALL, cluster="1xH100:1")),
    Case(rule="COM004", name="auto", verdict="pass", evidence=evidence),
    Case(
        rule="COM004",
        name="the start in time",
        verdict="pass",
        evidence=lambda: evidence("comm.init_timeout_s=300"),
        boundary=True,
    ),
    Case(
        rule="COM004",
        name="the start too late",
        verdict="fail",
        evidence=lambda: evidence("comm.init_timeout_s=301"),
        boundary=True,
        severity="warning",
        at="comm.init_timeout_s",
    ),
    Case(
        rule="COM004",
        name="two minutes",
        verdict="pass",
        evidence=lambda: evidence("train.timeout_s=120"),
        boundary=True,
    ),
    Case(
        rule="COM004",
        name="more than two minutes",
        verdict="fail",
        evidence=lambda: evidence("train.timeout_s=121"),
        boundary=True,
        severity="warning",
        says="waits 121 s for another in a steady step, more than 120",
        at="train.timeout_s",
    ),
    Case(rule="COM004", name="half a minute", verdict="pass", evidence=lambda: predicted(2.0, "train.timeout_s=30")),
    Case(
        rule="COM004",
        name="less",
        verdict="fail",
        evidence=lambda: predicted(2.0, "train.timeout_s=29"),
        boundary=True,
        severity="error",
        says="less than 30",
    ),
    Case(
        rule="COM004",
        name="four steps and more than half a minute",
        verdict="fail",
        evidence=lambda: predicted(21.3, "train.timeout_s=100"),
        severity="warning",
        says="less than 106.5",
    ),
    Case(
        rule="COM004",
        name="gloo may be quicker",
        verdict="pass",
        evidence=lambda: predicted(0.5, "train.timeout_s=6", profile="cpu-gloo"),
    ),
    Case(
        rule="COM004",
        name="steps of five minutes",
        verdict="pass",
        evidence=lambda: predicted(300.0),
        says="waits 300 s",
    ),
    Case(
        rule="COM004",
        name="steps slower than planned",
        verdict="fail",
        evidence=lambda: measured(15.0, "train.timeout_s=30"),
        severity="warning",
        says="waits 30 s for another in a steady step, less than 75",
    ),
    Case(
        rule="COM004",
        name="steps as planned",
        verdict="pass",
        evidence=lambda: measured(6.0, "train.timeout_s=30"),
        boundary=True,
    ),
    Case(
        rule="COM004", name="auto follows the steps", verdict="pass", evidence=lambda: measured(15.0), says="waits 75 s"
    ),
    Case(rule="COM004", name="no plan", verdict="unknown", evidence=lambda: evidence(plan=None)),
    Case(
        rule="COM004",
        name="no plan and too long",
        verdict="fail",
        evidence=lambda: evidence("train.timeout_s=600", plan=None),
    ),
    Case(
        rule="COM004",
        name="a synchronous save that nobody waits for",
        verdict="fail",
        evidence=lambda: saving(82.0, "comm.init_timeout_s=60"),
        severity="warning",
        says="a rank waits 60 s for another, and a synchronous save takes 82 s (predicted)",
        at="comm.init_timeout_s",
        boundary=True,
    ),
    Case(
        rule="COM004",
        name="a synchronous save that a rest waits for",
        verdict="pass",
        evidence=lambda: saving(82.0, "train.timeout_s=39"),
        says="waits 39 s for another in a steady step, and 300 s across saves and evaluations",
        boundary=True,
    ),
    Case(
        rule="COM004",
        name="a measured save longer than anybody waits",
        verdict="fail",
        evidence=lambda: replace(
            saving(82.0), log=good_log(checkpoints=good_checkpoints(final_persist_s=spread(310.0, count=4)))
        ),
        severity="error",
        says="a synchronous save takes 310 s",
    ),
    Case(
        rule="COM004",
        name="another trainer's timeout and its save",
        verdict="fail",
        evidence=lambda: replace(saving(82.0, "train.timeout_s=60"), practice=Practice(trainer="torchtitan")),
        severity="warning",
        says="waits 60 s for another in a steady step, and a synchronous save takes 82 s (predicted)",
        at="train.timeout_s",
    ),
    Case(
        rule="COM004",
        name="an evaluation of an hour",
        verdict="fail",
        evidence=lambda: predicted(6.0, "train.evaluate_sequences=1000000"),
        says="an evaluation takes",
    ),
    Case(rule="COM004", name="TPU", verdict="pass", evidence=lambda: evidence("train.timeout_s=600", profile="tpu")),
]
FLIPS = [
    Flip(
        rule="COM001",
        limit="most_ratio",
        value=3.0,
        evidence=lambda: ring(25, "8xH100:16"),
        before="fail",
        after="pass",
    ),
    Flip(rule="COM001", limit="two_levels", value=True, evidence=lambda: flat(512), before="pass", after="fail"),
    Flip(rule="COM002", limit="saving", value=0.0, evidence=lambda: packed(400.0), before="fail", after="pass"),
    Flip(rule="COM002", limit="slow_saving", value=0.99, evidence=lambda: packed(5.0), before="pass", after="fail"),
    Flip(
        rule="COM002",
        limit="slow_gbps",
        value=1000.0,
        evidence=lambda: packed(wire_limits()[0]),
        before="fail",
        after="pass",
    ),
    Flip(
        rule="COM002",
        limit="biased",
        value=("bf16",),
        evidence=lambda: packed(5.0, feedback=False),
        before="fail",
        after="pass",
    ),
    Flip(rule="COM003", limit="latency_share", value=0.95, evidence=lambda: bucket(1.0), before="fail", after="pass"),
    Flip(rule="COM003", limit="few_steps", value=500, evidence=lambda: short_run(400), before="habit", after="pass"),
    Flip(rule="COM003", limit="least_buckets", value=1.0, evidence=lambda: bucket(8000.0), before="fail", after="pass"),
    Flip(rule="COM003", limit="block_share", value=0.99, evidence=lambda: flat(512), before="fail", after="pass"),
    Flip(rule="COM003", limit="least_loss", value=0.001, evidence=small, before="pass", after="fail"),
    Flip(
        rule="COM004",
        limit="init_most_s",
        value=60.0,
        evidence=evidence,
        before="pass",
        after="fail",
    ),
    Flip(
        rule="COM004",
        limit="train_most_s",
        value=60.0,
        evidence=lambda: evidence("train.timeout_s=120"),
        before="pass",
        after="fail",
    ),
    Flip(
        rule="COM004",
        limit="train_least_s",
        value=5.0,
        evidence=lambda: predicted(2.0, "train.timeout_s=29"),
        before="fail",
        after="pass",
    ),
    Flip(
        rule="COM004",
        limit="steps",
        value=2.0,
        evidence=lambda: measured(15.0, "train.timeout_s=30"),
        before="fail",
        after="pass",
    ),
]
