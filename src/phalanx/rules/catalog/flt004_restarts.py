"""FLT004: crash loops end."""

from __future__ import annotations

from phalanx.rules.catalog.flt_shared import newest_drill
from phalanx.rules.catalog.shared import MARGIN, beyond_count
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Edit, Impact, Outcome, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule
from phalanx.units import plural


def check(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    """Check the limit of restarts, the failures of the run, and the drill of a crash loop."""
    return (_judge_limit(evidence, limits), *_judge_log(evidence, limits), *_judge_drill(evidence))


def _judge_limit(evidence: Evidence, limits: Limits) -> Outcome:
    max_in_a_row, practice = limits.number("in_a_row"), evidence.practice
    is_stated = evidence.stated("fault.restarts")
    count = evidence.the_job.fault.restarts if is_stated else practice.bounded_restarts
    if count is None:
        return unknown(
            f"after how many failures in a row {practice.trainer} gives up is not known",
            fix="bound it in the launcher: torchrun --max-restarts 3",
        )
    message = f"{practice.trainer} gives up after {plural(count, 'failure')} in a row without a step"
    if 0 <= count <= max_in_a_row:
        return passed(
            message, value=count, threshold=max_in_a_row, unit="failures", at="fault.restarts" if is_stated else ""
        )
    return failed(
        message if count >= 0 else f"{practice.trainer} never gives up",
        formula=(f"fault.restarts = {count} > {max_in_a_row:g}",),
        value=count,
        threshold=max_in_a_row,
        unit="failures",
        at="fault.restarts" if is_stated else "",
        severity=beyond_count(count, max_in_a_row, limits) if count >= 0 else None,
        impact=Impact(note="time and money of all devices until somebody looks; one job at Meta was requeued 35 times"),
        edits=(Edit(key="fault.restarts", value=int(max_in_a_row), safe=True, note="NVIDIA's bound"),)
        if is_stated
        else (),
        fix="" if is_stated else "bound it in the launcher: torchrun --max-restarts 3",
    )


def _judge_log(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    log = evidence.log
    if log is None or not log.incidents:
        return ()
    # n failures in a row have n − 1 restarts between them.
    idle, max_in_a_row = max(0, log.most_in_a_row - 1), limits.number("in_a_row")
    if idle > max_in_a_row:
        return (_crash_loop(evidence, idle, limits),)
    without_cause = sum(not incident.what for incident in log.incidents)
    if without_cause:
        return (_without_cause(without_cause, len(log.incidents)),)
    message = f"of {plural(len(log.incidents), 'failure')} at most {plural(idle, 'restart')} in a row brought no step"
    return (passed(message, value=idle, threshold=max_in_a_row, unit="restarts"),)


def _crash_loop(evidence: Evidence, idle: int, limits: Limits) -> Outcome:
    allowed, max_in_a_row = evidence.the_job.fault.restarts, limits.number("in_a_row")
    return failed(
        f"{plural(idle, 'restart')} in a row brought no step",
        formula=(f"{plural(idle + 1, 'failure')} without a step between = {idle} idle restarts > {max_in_a_row:g}",),
        value=idle,
        threshold=max_in_a_row,
        unit="restarts",
        at="fault.restarts",
        severity=beyond_count(idle, max_in_a_row, limits),
        impact=evidence.loses_once(idle * evidence.the_job.fault.restart_s, "starts that came to nothing"),
        edits=(Edit(key="fault.restarts", value=int(max_in_a_row), safe=True, note="NVIDIA's bound"),)
        if allowed > max_in_a_row
        else (),
        fix="" if allowed > max_in_a_row else "look at what started the run again: fault.restarts of the job is lower",
    )


def _without_cause(count: int, total: int) -> Outcome:
    return failed(
        f"{count} of {total} failures have no cause on record",
        value=count,
        threshold=0,
        unit="failures",
        impact=Impact(note="what is not known happens again"),
        fix="look into logs/ and errors/ of the run; supervisor.jsonl should name the rank and its cause",
    )


def _judge_drill(evidence: Evidence) -> tuple[Outcome, ...]:
    """Return the outcome of a drilled crash loop: passed if the run gave up with a reason; empty without a drill."""
    drill = newest_drill(evidence, "crash-loop")
    if drill is None:
        return ()
    if drill.clean:
        return (passed(f"a crash loop was drilled, and the run gave up with a reason: {drill.statement}"),)
    return (
        failed(
            f"a crash loop was drilled and the oracle found: {'; '.join(drill.wrong[:2]) or 'something'}",
            value=drill.path,
            impact=Impact(note="a crash loop may go on for ever"),
            fix=f"phalanx drill --read-record {drill.path}",
        ),
    )


RULE = Rule(
    id="FLT004",
    slug="bounded-restarts",
    severity="error",
    requires="J",
    uses="LD",
    requirement="Crash loops stop: at most three failures in a row without a new step, each with its cause on record.",
    why="""
A job that fails at its start fails again at the next one, at the price of all its devices. NVIDIA's resiliency
extension stops after 3 cycles without progress; at Meta one job was requeued 35 times and caused 548 preemptions of
others (arXiv:2410.21680).
""",
    how="""
`fault.restarts <= 3` (failures in a row, without a step between, before giving up). In a run: at most 3 restarts in a
row that brought no step (one less than the failures), and every incident names a cause. One more than 3 is a warning.
A drilled crash loop must have ended.
""",
    limits={
        "in_a_row": Limit(value=3, unit="restarts", note="NVIDIA resiliency extension: 3 cycles without progress"),
        "margin": MARGIN,
    },
    bad="""
[fault]
restarts = 1000
""",
    good="""
[fault]
restarts = 3
""",
    fix="`fault.restarts = 3`. A failure that a step follows does not count; `fault.max_lost` limits those.",
    waive="A chaos drill, in which by chance more faults follow each other (phalanx drill --chaos takes 10).",
    references=(
        Reference(text="NVIDIA/nvidia-resiliency-ext: stops after 3 cycles without progress", mark="read"),
        Reference(text="Meta RSC, arXiv:2410.21680: 35 requeues", mark="secondary"),
    ),
    check=check,
    softer_in=("S1",),
)
