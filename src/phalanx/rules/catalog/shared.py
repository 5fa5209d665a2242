"""What several rules share: values nobody stated, how long a job lasts, margins, and what must be measured first."""

from __future__ import annotations

import math

from phalanx.errors import Problem
from phalanx.plan import reliability
from phalanx.plan.plan import Plan
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Outcome, Severity, unknown
from phalanx.rules.rule import Limit, Limits


def unstated_key(evidence: Evidence, key: str, what: str) -> Outcome | None:
    """The answer of a rule where the job's value of a key is no more than our default; None where it counts."""
    if evidence.stated(key):
        return None
    return unknown(f"it is not known {what}", fix=how_to_say(evidence, key), at=key)


def refusal_text(problem: Problem) -> str:
    """Why there is no plan, as a sentence: what a configuration does not say lacks its subject."""
    silent = problem.what.startswith(("does not say", "trains a part"))
    return f"the configuration {problem.what}" if silent else problem.what.removeprefix("no layout can run: ")


def how_to_say(evidence: Evidence, key: str) -> str:
    """Where a value is said: in the trainer's own words, or beside its file."""
    trainer = evidence.practice.trainer
    if theirs := evidence.their_keys.get(key):
        return f"say it in the file ({theirs}), or give --set {key}=…"
    if evidence.their_keys:
        return f"a file of {trainer} has no key for it: give --set {key}=…"
    return f"write {key} into the job, as {trainer} has it"


# Trainers that `accelerate launch --config_file` can shard without a word in their own file.
LAUNCHED = ("axolotl", "llama-factory")
SHARDING = ("deepspeed", "fsdp", "fsdp_config", "fsdp_version", "fsdp_config.fsdp_version", "dp_shard_size")


def launcher_may_shard(evidence: Evidence) -> bool:
    """Whether nothing in another trainer's file says how weights are sharded, and its launcher may say it."""
    if evidence.practice.trainer not in LAUNCHED or any(name.startswith(SHARDING) for name in evidence.settings):
        return False
    said = evidence.origins.get("parallel.zero")
    return said is None or said.kind != "set"


# How long a job is, for rules that hold an interval or a failure rate against it.


def job_s(plan: Plan) -> float:
    """Seconds of training, without failures.

    The expected wall clock is no measure: bad settings stretch it, without end where failures outrun them.
    """
    return plan.duration.training_s


def capped_s(plan: Plan) -> float:
    """The interval between checkpoints as it comes to pass: a job that ends before has only its last one."""
    return min(plan.reliability.interval_s, job_s(plan))


def failure_chance(plan: Plan) -> float:
    """The chance of at least one failure in the job; 0 where the plan does not say."""
    mtbf_s, length_s = plan.reliability.mtbf_s, job_s(plan)
    return -math.expm1(-length_s / mtbf_s) if mtbf_s > 0 and length_s >= 0 else 0.0


# A little beyond a threshold is a warning: no threshold of the specification is exact to the last per cent.


MARGIN = Limit(value=0.10, note="beyond a threshold by up to this share is a warning, more is an error: our choice")


def severity_above(value: float, most: float, limits: Limits) -> Severity | None:
    """Of a value above its threshold: a warning within the margin, else the rule's own severity."""
    return "warning" if value <= most * (1 + limits.number("margin")) else None


def beyond_count(count: int, most: float, limits: Limits) -> Severity | None:
    """The same of whole numbers, of which one more is always within the margin."""
    return "warning" if count <= max(most + 1, most * (1 + limits.number("margin"))) else None


def severity_below(value: float, least: float, limits: Limits) -> Severity | None:
    """Of a share below its target, as of effective time: the margin is of what may be lost."""
    return "warning" if 1 - value <= (1 - least) * (1 + limits.number("margin")) else None


# Hardware of which nothing is published (the profile `custom`) is judged by measurements alone, never by tables.


def without_measurement(evidence: Evidence, what: str) -> Outcome | None:
    """`unknown` where the verdict would rest on seconds that no probe, calibration or run has measured."""
    plan, log = evidence.plan, evidence.log
    if not evidence.profile.must_measure or plan is None:
        return None
    ran = log is not None and log.steps is not None and log.steps.duration_s is not None
    if ran or plan.calibration is not None or plan.cluster.matmul_flops > 0:
        return None
    return unknown(
        f"{what} is not judged by tables on {plan.cluster.accelerator.name}: the profile custom must be measured",
        fix="phalanx probe measures a machine, phalanx calibrate RUN a plan's seconds; --profile names a known kind",
    )


def unmeasured_rate(evidence: Evidence) -> Outcome | None:
    """`unknown` where the verdict would rest on a rate of failures that nobody gave."""
    plan = evidence.plan
    if not evidence.profile.must_measure or plan is None:
        return None
    if is_rate_given(plan):
        return None
    name = plan.cluster.accelerator.name
    return unknown(
        f"how often hosts of {name} fail is not published: the profile custom must be measured",
        fix="give your own rate: fault.failures_per_host_day, or failures_per_host_day in a cluster file",
        at="fault.failures_per_host_day",
    )


def is_rate_given(plan: Plan) -> bool:
    """Whether the job or the cluster's file names a rate of failures, so that it is not the table's."""
    own = plan.reliability.failures_per_host_day != plan.cluster.failures_per_host_day
    return own or reliability.is_rate_given(plan.cluster, plan.job.fault)


def site_interval(interval: tuple[float, float] | None) -> tuple[float, float] | None:
    """A range of sites that can be reckoned with, whatever a plan file says."""
    if interval is None or len(interval) != 2 or not all(math.isfinite(one) and one >= 0 for one in interval):
        return None
    return interval
