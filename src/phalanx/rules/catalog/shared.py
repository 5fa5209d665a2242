"""Helpers of several rules: values that are not stated, length of a job, margins, and missing measurements."""

from __future__ import annotations

import math

from phalanx.errors import Problem
from phalanx.plan import reliability
from phalanx.plan.plan import Plan
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Outcome, Severity, unknown
from phalanx.rules.rule import Limit, Limits


def unstated_key(evidence: Evidence, key: str, what: str) -> Outcome | None:
    """Return `unknown` where the job's value of a key is only our default, and None where the value counts."""
    if evidence.stated(key):
        return None
    return unknown(f"it is not known {what}", fix=how_to_say(evidence, key), at=key)


def refusal_text(problem: Problem) -> str:
    """Return why there is no plan as a sentence; a refusal about a configuration needs its subject added."""
    silent = problem.what.startswith(("does not say", "trains a part"))
    return f"the configuration {problem.what}" if silent else problem.what.removeprefix("no layout can run: ")


def how_to_say(evidence: Evidence, key: str) -> str:
    """Return how to state a value: in the trainer's file, or with --set."""
    trainer = evidence.practice.trainer
    if setting_name := evidence.their_keys.get(key):
        return f"say it in the file ({setting_name}), or give --set {key}=…"
    if evidence.their_keys:
        return f"a file of {trainer} has no key for it: give --set {key}=…"
    return f"write {key} into the job, as {trainer} has it"


# Trainers that `accelerate launch --config_file` can shard without a setting in their own file.
LAUNCHED = ("axolotl", "llama-factory")
SHARDING = ("deepspeed", "fsdp", "fsdp_config", "fsdp_version", "fsdp_config.fsdp_version", "dp_shard_size")


def launcher_may_shard(evidence: Evidence) -> bool:
    """Return whether no setting of another trainer's file shards the weights, while its launcher may do so."""
    if evidence.practice.trainer not in LAUNCHED or any(name.startswith(SHARDING) for name in evidence.settings):
        return False
    origin = evidence.origins.get("parallel.zero")
    return origin is None or origin.kind != "set"


# The length of a job, for rules that compare an interval or a failure rate with it.


def job_s(plan: Plan) -> float:
    """Return the seconds of training, without failures.

    The expected wall time is not used: bad settings lengthen it, without bound where failures come faster than
    progress.
    """
    return plan.duration.training_s


def capped_s(plan: Plan) -> float:
    """Return the effective interval between checkpoints: at most the job, which always has its last checkpoint."""
    return min(plan.reliability.interval_s, job_s(plan))


def failure_chance(plan: Plan) -> float:
    """Return the probability of at least one failure in the job; 0 where the plan has no usable times."""
    mtbf_s, length_s = plan.reliability.mtbf_s, job_s(plan)
    # expm1 keeps the digits of a small probability, which 1 − exp(−x) loses.
    return -math.expm1(-length_s / mtbf_s) if mtbf_s > 0 and length_s >= 0 else 0.0


# A value slightly beyond a threshold is a warning: no threshold of the specification is exact to the last per cent.


MARGIN = Limit(value=0.10, note="beyond a threshold by up to this share is a warning, more is an error: our choice")


def severity_above(value: float, most: float, limits: Limits) -> Severity | None:
    """Return the severity of a value above its threshold: a warning within the margin, else None (the rule's own)."""
    return "warning" if value <= most * (1 + limits.number("margin")) else None


def beyond_count(count: int, most: float, limits: Limits) -> Severity | None:
    """Return the same for whole numbers, for which one more is always within the margin."""
    return "warning" if count <= max(most + 1, most * (1 + limits.number("margin"))) else None


def severity_below(value: float, least: float, limits: Limits) -> Severity | None:
    """Return the severity of a share below its target, such as effective time; the margin is of the allowed loss."""
    return "warning" if 1 - value <= (1 - least) * (1 + limits.number("margin")) else None


# Hardware without published figures (the profile `custom`) is judged only by measurements, never by tables.


def without_measurement(evidence: Evidence, what: str) -> Outcome | None:
    """Return `unknown` where the verdict needs seconds that no probe, calibration or run has measured, else None."""
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
    """Return `unknown` where the verdict would need a failure rate that the user has not given; else None."""
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
    """Return whether the job or the cluster's file gives a failure rate, so that it is not the table's."""
    own = plan.reliability.failures_per_host_day != plan.cluster.failures_per_host_day
    return own or reliability.is_rate_given(plan.cluster, plan.job.fault)


def site_interval(interval: tuple[float, float] | None) -> tuple[float, float] | None:
    """Return the range if its values are usable, else None; a plan file may contain anything."""
    if interval is None or len(interval) != 2 or not all(math.isfinite(rate) and rate >= 0 for rate in interval):
        return None
    return interval
