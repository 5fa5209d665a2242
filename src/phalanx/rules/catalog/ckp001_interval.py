"""CKP001: the checkpoint interval is near Daly's optimum, and a last save fits into the grace of a SIGTERM."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.plan.plan import Plan
from phalanx.plan.reliability import checkpoint_overhead, daly_interval
from phalanx.rules.catalog.intervals import ALONE, SaveCost, interval_edits
from phalanx.rules.catalog.shared import is_rate_given, job_s, unmeasured_rate, unstated_key, without_measurement
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Edit, Impact, Outcome, exempt, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule
from phalanx.units import format_seconds, plural

if TYPE_CHECKING:
    from phalanx.rules.facts.log_facts import LogFacts, Spread

KEY = "checkpoint.interval_s"


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """The numbers that determine the optimum: from the plan, or measured where possible."""

    blocking_s: float  # δ, seconds that training stands still for a checkpoint
    mtbf_s: float  # M, mean time between failures
    lag_s: float  # lower bound of the optimum: the checkpoint before must be on disk
    persist_s: float  # seconds until a checkpoint is written
    interval_s: float
    length_s: float  # of the job; no interval is longer
    delta: str  # text that states δ
    # Text that states M.
    rate: str

    @property
    def best_s(self) -> float:
        """Daly's optimal interval in seconds, at least `lag_s`."""
        return max(daly_interval(self.blocking_s, self.mtbf_s), self.lag_s)


def check(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    """Check the interval, with measured numbers where they exist, and the grace time."""
    plan, log = evidence.the_plan, evidence.log
    numbers = planned_numbers(plan)
    if log is not None:
        numbers = measured_numbers(evidence, log, limits) or numbers
    if missing := unstated_key(evidence, KEY, f"how often {evidence.practice.trainer} saves"):
        return (missing, *_judge_grace(evidence, limits))
    if evidence.practice.saves is False:
        return (_checkpoints_off(evidence, numbers), *_judge_grace(evidence, limits))
    return (_judge_interval(evidence, limits, numbers), *_judge_grace(evidence, limits))


def planned_numbers(plan: Plan) -> Numbers:
    """Return the numbers of the plan."""
    r = plan.reliability
    return Numbers(
        blocking_s=r.blocking_s,
        mtbf_s=r.mtbf_s,
        lag_s=r.persist_s if plan.job.checkpoint.asynchronous else 0.0,
        persist_s=r.persist_s,
        interval_s=r.interval_s,
        length_s=job_s(plan),
        delta=f"δ = {r.blocking_s:.3g} s",
        rate=f"M = 86400 / ({plural(r.hosts, 'host')} × {r.failures_per_host_day:.3g} failures per host and day) = "
        f"{r.mtbf_s:,.0f} s",
    )


def measured_numbers(evidence: Evidence, log: LogFacts, limits: Limits) -> Numbers | None:
    """Return the numbers of the run; None while it has too few saves."""
    checkpoints, planned, min_saves = log.checkpoints, planned_numbers(evidence.the_plan), limits.number("least_saves")
    if checkpoints is None or checkpoints.blocked_s is None or checkpoints.interval_saves < min_saves:
        return None
    interval = evidence.the_job.checkpoint.interval_s
    # With "auto", the trainer follows its own measurement; the rule uses the measured interval.
    if isinstance(interval, str):
        if checkpoints.interval_s is None or checkpoints.interval_s.count < min_saves:
            return None
        interval = checkpoints.interval_s.p50
    # A rank restored from a copy in memory lost one step; a checkpoint on disk would not have helped. Failures of a
    # drill were injected.
    count = 0 if log.is_drill else sum(incident.source != "memory" for incident in log.incidents)
    wall_s, mtbf_s, rate = log.wall_s or 0.0, planned.mtbf_s, planned.rate
    if count >= limits.number("least_failures") and wall_s > 0:
        mtbf_s = wall_s / count
        rate = (
            f"M = {wall_s:,.0f} s / {plural(count, 'failure')} of this run that memory did not mend = {mtbf_s:,.0f} s"
        )
    return Numbers(
        blocking_s=checkpoints.blocked_s.p50,
        mtbf_s=mtbf_s,
        lag_s=checkpoints.persist_s.p50 if checkpoints.persist_s is not None else planned.lag_s,
        persist_s=checkpoints.persist_s.p95 if checkpoints.persist_s is not None else planned.persist_s,
        interval_s=float(interval),
        length_s=max(planned.length_s, wall_s),
        delta=f"δ = {checkpoints.blocked_s.p50:.3g} s measured",
        rate=rate,
    )


def _judge_interval(evidence: Evidence, limits: Limits, n: Numbers) -> Outcome:
    if n.mtbf_s == math.inf:
        return exempt("no failure is expected: the last checkpoint is enough")
    if not (n.blocking_s >= 0 and n.mtbf_s > 0 and 0 <= n.interval_s < math.inf and 0 <= n.length_s < math.inf):
        return unknown("a time in the plan is negative or not a number", fix="plan the job again: phalanx plan JOB")
    best_s, interval_s = n.best_s, min(n.interval_s, n.length_s)
    if not math.isfinite(best_s) or n.length_s <= best_s:
        return exempt(f"the job ends in {format_seconds(n.length_s)}, before a checkpoint pays: the last one is enough")
    if best_s <= 0 or interval_s <= 0:
        return exempt("a checkpoint that costs nothing has no best interval")
    if n.rate == planned_numbers(evidence.the_plan).rate and (missing := unmeasured_rate(evidence)) is not None:
        return missing
    ratio = interval_s / best_s
    # Too long and too short count alike.
    deviation = max(ratio, 1 / ratio)
    formula = (
        n.rate,
        f"τ* = Daly({n.delta}, M) = {_span_text(best_s)};  τ/τ* = {ratio:.2f}",
        *_small_jobs(evidence, limits, n),
    )
    message = f"interval {_span_text(interval_s)} is {ratio:.2f}x the optimum {_span_text(best_s)}"
    if interval_s < n.interval_s:
        message = (
            f"interval {_span_text(n.interval_s)} is longer than the run: its one save, at the end, comes after "
            f"{ratio:.2f}x the optimum {_span_text(best_s)}"
        )
    if deviation <= limits.number("warn_ratio"):
        return passed(message, formula=formula, value=ratio, threshold=limits.number("warn_ratio"), unit="x")
    overhead, best_overhead = (checkpoint_overhead(n.blocking_s, tau_s, n.mtbf_s) for tau_s in (interval_s, best_s))
    is_error = deviation > limits.number("error_ratio")
    persist_s = n.persist_s
    cost = SaveCost(blocked_s=n.blocking_s, persist_s=persist_s, mtbf_s=n.mtbf_s, lag_s=n.lag_s)
    edits = interval_edits(evidence, cost, "Daly's optimum")
    return failed(
        message,
        formula=(*formula, f"overhead δ/τ + τ/2M now {min(1.0, overhead):.1%}, at the optimum {best_overhead:.1%}"),
        value=ratio,
        threshold=limits.number("error_ratio" if is_error else "warn_ratio"),
        unit="x",
        at="checkpoint.interval_s",
        severity="error" if is_error else "warning",
        impact=evidence.loses(overhead - best_overhead, "checkpoints and work redone, beside those at the optimum"),
        fix=""
        if edits
        else f"{ALONE}faster storage or a faster copy to host memory; the optimum is {_span_text(best_s)}",
        edits=edits,
    )


def _checkpoints_off(evidence: Evidence, n: Numbers) -> Outcome:
    """Return the failure for a job without checkpoints: a failure costs all work so far, and the end saves nothing."""
    message = "checkpoints are off: a failure costs all work so far, and the end keeps nothing"
    setting_name = evidence.their_keys.get(KEY)
    turn_on = f"turn them on ({setting_name})" if setting_name else "turn them on"
    if not (n.mtbf_s > 0 and 0 <= n.length_s < math.inf and math.isfinite(n.best_s)):
        note = Impact(note="how long the job takes, or how often a host fails, is not a number")
        return failed(message, at=KEY, severity="warning", impact=note, fix=turn_on)
    length_s, best_s = n.length_s, n.best_s
    now = checkpoint_overhead(0.0, length_s, n.mtbf_s)
    return failed(
        message,
        formula=(
            n.rate,
            f"{format_seconds(length_s)} of work; half of it at a failure: {min(1.0, now):.2%} of the time",
        ),
        value=length_s,
        threshold=best_s,
        unit="s",
        at=KEY,
        severity="error" if length_s > best_s else "warning",
        impact=evidence.loses(now, "work redone from the start"),
        fix=f"{turn_on}; the optimum is every {_span_text(best_s)}" if length_s > best_s else turn_on,
    )


def _small_jobs(evidence: Evidence, limits: Limits, n: Numbers) -> tuple[str, ...]:
    """Return a line on the higher failure rate of small jobs; empty if the rate is the user's own or measured."""
    is_own_rate = is_rate_given(evidence.the_plan) or n.rate != planned_numbers(evidence.the_plan).rate
    if is_own_rate or not evidence.profile.is_gpu or evidence.devices > limits.number("small_devices"):
        return ()
    factor = limits.number("small_factor")
    best_s = max(daly_interval(n.blocking_s, n.mtbf_s / factor), n.lag_s)
    return (
        f"the rate is of large jobs; up to {limits.number('small_devices'):,.0f} devices Meta saw {factor:g} times as "
        f"many failures, with which τ* = {_span_text(best_s)}: measure yours (fault.failures_per_host_day)",
    )


def _span_text(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def _judge_grace(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    """Check that the current step and a save fit into fault.grace_s; not known for another trainer."""
    key, grace_s = "fault.grace_s", evidence.the_job.fault.grace_s
    if not evidence.stated(key):
        return ()
    if (missing := without_measurement(evidence, "how long a step and a save take")) is not None:
        return (missing,)
    need_s, formula = _needed_seconds(evidence.the_plan, evidence.log)
    if not math.isfinite(need_s):
        return (unknown("how long a save takes is not a number", fix="plan the job again: phalanx plan JOB", at=key),)
    room = limits.number("grace_room")
    message = f"step and save take {_span_text(need_s)} of the {grace_s:g} s after a SIGTERM"
    if need_s * room <= grace_s:
        return (passed(message, formula=(formula,), value=need_s, threshold=grace_s, unit="s", at=key),)
    half_s = min(evidence.the_plan.reliability.interval_s, job_s(evidence.the_plan)) / 2
    return (
        failed(
            f"{message}: the last checkpoint is cut off",
            formula=(formula,),
            value=need_s,
            threshold=grace_s / room,
            unit="s",
            at=key,
            severity="warning",
            impact=Impact(
                note=f"{format_seconds(half_s)} of all devices at every preemption, half an interval; how often the "
                "scheduler preempts is not known"
            ),
            edits=(
                Edit(
                    key=key,
                    value=math.ceil(1.2 * need_s * room),
                    safe=False,  # it states how long the scheduler waits, which no edit of this file changes
                    note="a fifth more than they take; tell the scheduler too (Slurm: KillWait)",
                ),
            ),
        ),
    )


def _needed_seconds(plan: Plan, log: LogFacts | None) -> tuple[float, str]:
    r, checkpoints = plan.reliability, log.checkpoints if log is not None else None
    # The time of a save at a SIGTERM is estimated from such saves as well as from those that were due.
    blocked = _slowest_save(checkpoints.blocked_s, checkpoints.final_blocked_s) if checkpoints is not None else None
    persist = _slowest_save(checkpoints.persist_s, checkpoints.final_persist_s) if checkpoints is not None else None
    if log is None or blocked is None or persist is None:
        step_s, blocked_s, persist_s, source = plan.prediction.step_s, r.blocking_s, r.persist_s, "predicted"
        blocked_s = (
            blocked_s if plan.job.checkpoint.asynchronous else 0.0
        )  # a synchronous save blocks for as long as it writes, which is counted below
    else:
        steady = log.steps.duration_s if log.steps is not None else None
        step_s = steady.p95 if steady is not None else plan.prediction.step_s
        blocked_s, persist_s, source = blocked, persist, "measured"
        blocked_s = blocked_s if plan.job.checkpoint.asynchronous else 0.0
    total_s = step_s + blocked_s + persist_s
    parts = f"step {step_s:.3g} s + staging {blocked_s:.3g} s + writing {persist_s:.3g} s"
    return total_s, f"{parts} = {total_s:.3g} s, {source}"


def _slowest_save(*spreads: Spread | None) -> float | None:
    return max((spread.p95 for spread in spreads if spread is not None), default=None)


RULE = Rule(
    id="CKP001",
    slug="interval-daly",
    severity="error",
    requires="JP",
    uses="L",
    requirement="The interval between checkpoints is near the optimum for this hardware and this job.",
    why="""
Too often costs time to save, too rarely costs work redone after a failure. The optimum is √(2δM) to first order, with
δ the seconds that training stands still for a checkpoint and M the mean time between failures. The curve is flat:
twice the optimum costs 25 % more overhead, four times 112 % more, ((x + 1/x)/2). And a job that is asked to leave
(SIGTERM) can save what it knows, if a step and a save fit into the time it is given.

Failure rates come from large jobs. On RSC-1 small ones failed more often than that: every 7.9 h in place of 28.8 h on
1,024 GPUs, every 47.7 days in place of 154 on 8, about 3.5 times (arXiv:2410.21680). Up to 1,024 devices the rule
therefore tells what the optimum would be with that; it does not judge by it, since the curve is flat (√3.5 is 1.9) and
your own rate, `fault.failures_per_host_day`, is better than either.
""",
    how="""
`τ* = √(2δM)·[1 + ⅓√(δ/2M) + δ/(18M)] − δ`, `M = 86400 / (hosts · λ)`, never shorter than a checkpoint takes to be
written. A warning where τ/τ* leaves [½, 2], an error where it leaves [¼, 4]; τ is never longer than the job, and a job
shorter than τ* needs its last checkpoint only. In a run δ is what it measured (from three saves on that were due: one
that a Ctrl-C, a SIGTERM, the end or a change of members made says nothing of the interval), M what it saw (from five
failures on that copies in memory did not mend). A warning where step + staging + writing > `fault.grace_s`.
""",
    limits={
        "warn_ratio": Limit(value=2.0, unit="x", note="25 % more overhead than at the optimum: computed"),
        "error_ratio": Limit(value=4.0, unit="x", note="112 % more overhead than at the optimum: computed"),
        "least_saves": Limit(value=3, note="saves of a run before their median replaces the prediction: our choice"),
        "least_failures": Limit(
            value=5, note="failures, not mended from memory, before a run's own rate counts: our choice"
        ),
        "small_devices": Limit(value=1_024, unit="devices", note="sizes at which Meta's RSC-1 saw more failures"),
        "small_factor": Limit(
            value=3.5, unit="x", note="7.9 h seen where 28.8 h were predicted, 1,024 GPUs: arXiv:2410.21680; only told"
        ),
        "grace_room": Limit(value=1.0, unit="x", note="the grace over step and save: computed, they must fit"),
    },
    bad="""
[checkpoint]
interval_s = 86400
""",
    good="""
[checkpoint]
interval_s = "auto"
""",
    fix='`interval_s = "auto"` lets the plan compute it; `--fix` writes the optimum as a number.',
    waive="Storage that is shared and rationed, or a measured failure rate that the cluster file does not know.",
    references=(
        Reference(text="Young, CACM 1974; Daly, FGCS 2006", mark="recalled"),
        Reference(text="failure rates: Llama 3, arXiv:2407.21783 table 5; Meta RSC, arXiv:2410.21680", mark="read"),
    ),
    check=check,
    softer_in=("S1",),
)
