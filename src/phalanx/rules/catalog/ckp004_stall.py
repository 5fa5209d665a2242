"""CKP004: saving is cheap, and saves do not pile up."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from phalanx.rules.catalog.intervals import SaveCost, interval_edits, planned_cost, suits_rules
from phalanx.rules.catalog.shared import job_s, unstated_key
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Edit, Impact, Outcome, exempt, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule
from phalanx.units import format_bytes, plural

if TYPE_CHECKING:
    from phalanx.rules.facts.log_facts import CheckpointFacts


def check(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    """Check stall and backlog, measured after enough saves, then space on disk and in host memory."""
    checkpoints = evidence.log.checkpoints if evidence.log is not None else None
    missing = unstated_key(evidence, "checkpoint.interval_s", f"how often {evidence.practice.trainer} saves")
    if missing is not None:
        return (missing, *_judge_disk(evidence, limits, checkpoints), *_judge_memory(evidence, limits))
    if evidence.practice.saves is False:
        return (exempt("checkpoints are off, and nothing waits for them: CKP001 says what that costs"),)
    times = _measured_times(checkpoints, limits) or _planned_times(evidence)
    if times is None:
        time_outcomes: tuple[Outcome, ...] = (
            exempt("the job ends before its first interval: only the last checkpoint is taken"),
        )
    elif not all(math.isfinite(seconds) for seconds in times[:3]):
        time_outcomes = (unknown("a time in the plan is not a number", fix="plan the job again: phalanx plan JOB"),)
    else:
        time_outcomes = (_judge_stall(evidence, limits, *times), _judge_backlog(evidence, limits, *times))
    return (
        *time_outcomes,
        *_judge_saves(evidence, checkpoints),
        *_judge_disk(evidence, limits, checkpoints),
        *_judge_memory(evidence, limits),
    )


# Blocked, persist and interval in seconds, and the source of the numbers.
Times = tuple[float, float, float, str]


def _planned_times(evidence: Evidence) -> Times | None:
    r = evidence.the_plan.reliability
    if not math.isfinite(r.interval_s) or r.interval_s <= 0 or job_s(evidence.the_plan) <= r.interval_s:
        return None
    return r.blocking_s, r.persist_s, r.interval_s, "predicted"


def _measured_times(seen: CheckpointFacts | None, limits: Limits) -> Times | None:
    if seen is None or seen.blocked_s is None or seen.interval_s is None:
        return None
    if seen.interval_s.count < limits.number("least_saves") or seen.interval_s.p50 <= 0:
        return None
    persist_s = seen.persist_s.p95 if seen.persist_s is not None else 0.0
    return seen.blocked_s.p50, persist_s, seen.interval_s.p50, "measured"


def _judge_stall(
    evidence: Evidence, limits: Limits, blocked_s: float, persist_s: float, interval_s: float, how: str
) -> Outcome:
    share, max_stall = blocked_s / interval_s, limits.number("most_stall")
    formula = (f"δ/τ = {blocked_s:.3g} s / {interval_s:,.0f} s = {share:.2%}, {how}",)
    message = f"training stands still for checkpoints {share:.2%} of the time"
    if share <= max_stall:
        return passed(message, formula=formula, value=share, threshold=max_stall, at="checkpoint.interval_s")
    edits = _cheaper_saves(evidence, _save_cost(evidence, blocked_s, persist_s))
    return failed(
        f"{message}, more than {max_stall:.0%}",
        formula=formula,
        value=share,
        threshold=max_stall,
        at=edits[0].key if edits else "checkpoint.interval_s",
        severity="warning",
        impact=evidence.loses(share - max_stall, "beyond the share that a checkpoint may cost"),
        fix="" if edits else "a faster copy to host memory, or fewer bytes per host: more hosts",
        edits=edits,
    )


def _save_cost(evidence: Evidence, blocked_s: float, persist_s: float) -> SaveCost:
    """Return the costs of the saves that were judged."""
    lag_s = persist_s if evidence.the_job.checkpoint.asynchronous else 0.0
    mtbf_s = evidence.the_plan.reliability.mtbf_s
    return SaveCost(blocked_s=blocked_s, persist_s=persist_s, mtbf_s=mtbf_s, lag_s=lag_s)


def _cheaper_saves(evidence: Evidence, cost: SaveCost) -> tuple[Edit, ...]:
    """Return edits for asynchronous saves with a suitable interval, or else for a longer interval."""
    checkpoint = evidence.the_job.checkpoint
    if checkpoint.asynchronous:
        return interval_edits(evidence, cost, "near Daly's optimum")
    make_async = Edit(key="checkpoint.async", value=True, safe=True, note="write while training goes on")
    async_cost = planned_cost(evidence, asynchronous=True)
    if isinstance(checkpoint.interval_s, str) or suits_rules(evidence, async_cost, checkpoint.interval_s):
        return (make_async,)
    interval_edit = interval_edits(evidence, async_cost, "Daly's optimum for that")
    return (make_async, *interval_edit) if interval_edit else ()


def _judge_backlog(
    evidence: Evidence, limits: Limits, blocked_s: float, persist_s: float, interval_s: float, how: str
) -> Outcome:
    share, max_persist = persist_s / interval_s, limits.number("most_persist")
    formula = (f"W/τ = {persist_s:.3g} s / {interval_s:,.0f} s = {share:.2f}, {how}",)
    message = f"a checkpoint takes {persist_s:,.3g} s to be on disk, every {interval_s:,.0f} s"
    if share <= max_persist:
        return passed(
            message, formula=formula, value=share, threshold=max_persist, unit="x", at="checkpoint.interval_s"
        )
    edits = interval_edits(evidence, _save_cost(evidence, blocked_s, persist_s), "near Daly's optimum")
    return failed(
        f"{message}: the next one begins before it is written",
        formula=formula,
        value=share,
        threshold=max_persist,
        unit="x",
        at="checkpoint.interval_s",
        impact=evidence.loses(
            (persist_s - max_persist * interval_s) / persist_s, "training waits for the disk, save after save"
        ),
        fix="" if edits else "faster storage, or fewer bytes per host: more hosts",
        edits=edits,
    )


def _judge_saves(evidence: Evidence, seen: CheckpointFacts | None) -> tuple[Outcome, ...]:
    """Return failures for saves that failed, or that began before the previous one was committed."""
    outcomes = []
    if seen is not None and seen.errors:
        outcomes.append(
            failed(
                f"{plural(seen.errors, 'save')} failed",
                value=seen.errors,
                threshold=0,
                at=seen.error_spot or "",
                severity="warning",
                impact=_exposed_work(evidence, seen.errors),
                fix="the event says why: mostly a full disk or a lost mount",
            )
        )
    if seen is not None and seen.overlapping:
        outcomes.append(
            failed(
                f"{plural(seen.overlapping, 'save')} began while the one before was not committed",
                value=seen.overlapping,
                threshold=0,
                at=seen.disorder_spot or "",
                severity="warning",
                impact=evidence.loses(0.0, "none by itself: the newest checkpoint is older than the interval says"),
                fix="a longer checkpoint.interval_s, or faster storage",
            )
        )
    return tuple(outcomes)


def _exposed_work(evidence: Evidence, count: int) -> Impact:
    """Return the impact of failed saves.

    A failure in the interval after a failed save costs that interval too: τ, with the probability τ/M.
    """
    r = evidence.the_plan.reliability
    if not (r.mtbf_s > 0 and math.isfinite(r.interval_s)):
        return Impact(note="the newest checkpoint was older than the interval allows")
    return evidence.loses_once(
        count * r.interval_s**2 / r.mtbf_s, "failed saves × τ²/M: work that a failure would redo"
    )


def _judge_disk(evidence: Evidence, limits: Limits, seen: CheckpointFacts | None) -> tuple[Outcome, ...]:
    """Check that the disk has space for the kept checkpoints and the one being written, where the space is known."""
    size, free_space, existing = _disk_space(evidence, seen)
    if (
        free_space is None
        or not math.isfinite(free_space)
        or not math.isfinite(size)
        or "://" in evidence.the_job.checkpoint.path
    ):
        return ()
    keep = evidence.the_job.checkpoint.keep
    need = max(0.0, keep + limits.number("drafts") - existing) * size
    formula = (
        f"({keep} kept + {limits.number('drafts'):.0f} being written − {existing} there) × {format_bytes(size)} = "
        f"{format_bytes(need)}; free {format_bytes(free_space)}",
    )
    if need <= free_space:
        message = f"{format_bytes(free_space)} are free, checkpoints take {format_bytes(need)}"
        return (passed(message, formula=formula, value=need, threshold=free_space, unit="B", at="checkpoint.path"),)
    return (
        failed(
            f"checkpoints take {format_bytes(need)}, and {format_bytes(free_space)} are free",
            formula=formula,
            value=need,
            threshold=free_space,
            unit="B",
            at="checkpoint.path",
            impact=Impact(note="no new checkpoint once it is full: a failure then costs all work since"),
            fix="a larger disk, or a smaller checkpoint.keep (not below 2: CKP003)",
        ),
    )


def _disk_space(evidence: Evidence, seen: CheckpointFacts | None) -> tuple[float, float | None, int]:
    """Return bytes of a checkpoint, free bytes (None: not known), and the number of existing checkpoints."""
    planned = evidence.the_plan.reliability.checkpoint_bytes
    if seen is not None and seen.free_bytes is not None:
        return seen.bytes or planned, seen.free_bytes, seen.kept or 0
    return planned, evidence.host.disk_free_bytes if evidence.host is not None else None, 0


def _judge_memory(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    """Check the host memory for staging: two generations, so that one is complete while the other is written."""
    plan, r = evidence.the_plan, evidence.the_plan.reliability
    have, need = plan.cluster.host_memory_bytes, limits.number("copies") * r.checkpoint_bytes / max(1, r.hosts)
    if not have or not math.isfinite(need) or not plan.job.checkpoint.asynchronous:
        return ()
    formula = (f"{limits.number('copies'):.0f} × {format_bytes(r.checkpoint_bytes)} / {plural(r.hosts, 'host')}",)
    message = f"staging takes {format_bytes(need)} of the {format_bytes(have)} of a host"
    if need <= have:
        return (passed(message, formula=formula, value=need, threshold=have, unit="B", at="plan:reliability"),)
    return (
        failed(
            message,
            formula=formula,
            value=need,
            threshold=have,
            unit="B",
            at="plan:reliability",
            severity="warning",
            impact=Impact(
                note="a host that runs out of memory while it saves is a failure of its own making, every interval"
            ),
            fix="more hosts, hosts with more memory, or checkpoint.async = false",
        ),
    )


RULE = Rule(
    id="CKP004",
    slug="stall-and-backlog",
    severity="error",
    requires="JP",
    uses="LH",
    requirement="A checkpoint stops training for at most a hundredth of the time, is written before the "
    "next begins, and has room.",
    why="""
ByteRobust saves every step and loses 0.3 to 0.9 % of its utilization by it, with two buffers in host memory; BLOOM
lost 0.37 %. A checkpoint that is not written when the next is due either blocks training or is dropped, and the
newest one on disk grows older than the interval says. A disk that fills up ends saving altogether.
""",
    how="""
`δ/τ ≤ 1 %` (a warning; 5 % on a CPU), `W ≤ τ`, free space ≥ (keep + 1 − those there) · size where somebody looked
(this machine, or the run's own disk), host memory ≥ 2 · state / hosts. In a run δ, W and τ are its own from three
intervals on, and saves that failed or overlapped are counted.
""",
    limits={
        "most_stall": Limit(
            value=0.01,
            note="of the time: ByteRobust 0.3 to 0.9 % per step, arXiv:2509.16293 table 8; cpu 0.05: our choice",
            profiles={"cpu-gloo": 0.05},
        ),
        "most_persist": Limit(value=1.0, unit="x", note="writing over the interval: computed, more piles up"),
        "drafts": Limit(value=1, note="checkpoints beside those kept: the one being written"),
        "copies": Limit(value=2, note="generations staged in host memory: ByteRobust's dual buffer"),
        "least_saves": Limit(value=3, note="intervals of a run before they replace the prediction: our choice"),
    },
    bad="""
[checkpoint]
interval_s = 10
async = false
""",
    good="""
[checkpoint]
interval_s = "auto"
async = true
""",
    fix="`async = true`, an interval no shorter than writing takes, and room for one more checkpoint than are kept.",
    waive="A job of hours whose every save is wanted whole before it goes on (a benchmark, a proof).",
    references=(
        Reference(text="ByteRobust, arXiv:2509.16293 table 8 and section 6.3", mark="read"),
        Reference(text="BLOOM: 0.37 % of the time", mark="secondary"),
    ),
    check=check,
    softer_in=("S1",),
)
