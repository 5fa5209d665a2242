"""FLT006: a step is committed by all live replicas or by none, and ranks of an older generation are kept out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from phalanx.rules.catalog.flt_shared import how_to_see, newest_drill, no_drill, with_ranks
from phalanx.rules.evidence import Evidence
from phalanx.rules.facts.drill_facts import DrillFacts
from phalanx.rules.outcome import Impact, Outcome, exempt, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule
from phalanx.units import plural

if TYPE_CHECKING:
    from phalanx.rules.facts.log_facts import DigestFacts, LogFacts

RARE = Impact(note="work since the last intact checkpoint whenever it happens; how often is not published")
# Faults after which a rank of an older generation could act.
CHANGES = ("partition", "freeze", "host", "hang", "kill")


def check(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    """Check the trainer's known behaviour, the log, and the drills."""
    if evidence.devices < 2:
        return (exempt("one rank commits alone"),)
    outcomes = (_judge_trainer(evidence), *_judge_log(evidence, limits), *_judge_drills(evidence, limits))
    return tuple(outcome for outcome in outcomes if outcome is not None)


def _judge_trainer(evidence: Evidence) -> Outcome | None:
    """Judge the trainer's known behaviour before a run; None once a log has digests."""
    practice = evidence.practice
    if evidence.log is not None and evidence.log.digests is not None:
        return None
    if practice.step_transaction is None:
        return unknown(
            f"whether {practice.trainer} fences ranks of an earlier membership is not known",
            fix="check the log of a run that lost a rank",
        )
    if practice.step_transaction:
        return passed(f"{practice.trainer} numbers its generations, and refuses a commit of an older one")
    return failed(
        f"{practice.trainer} has no generations: a rank that wakes up late may overwrite newer work",
        severity="warning",  # a launcher that ends all ranks before it restarts them keeps old ranks out too
        impact=RARE,
        fix="end all processes of a job before it is started again, and write checkpoints to a new folder each time",
    )


def _judge_log(evidence: Evidence, limits: Limits) -> tuple[Outcome | None, ...]:
    log = evidence.log
    if log is None:
        return ()
    digests = log.digests
    if digests is None:
        return (_without_digests(evidence, log),)
    first = _one_digest(evidence, digests, limits) if digests.compared else _without_digests(evidence, log)
    return (first, _no_past(evidence, digests, limits))


def _without_digests(evidence: Evidence, log: LogFacts) -> Outcome | None:
    """Return the outcome for a log in which no digests were compared; exempt if the members never changed."""
    if log.memberships is not None and log.memberships <= 1:
        return exempt("the membership never changed: no rank could act on an old one")
    if log.digests is not None and log.digests.alone:
        return exempt(
            f"nobody holds a copy of these weights: {plural(log.digests.alone, 'digest')}, none to compare with"
        )
    if newest_drill(evidence, *CHANGES) is not None:
        return None
    reason = "the members of the run changed" if log.memberships else "the log does not say who took part"
    return unknown(
        f"{reason}, no digest was compared, and {no_drill(evidence)}",
        fix=f'fault.digest_every = "auto" for the next run; {how_to_see(evidence)}',
    )


def _one_digest(evidence: Evidence, digests: DigestFacts, limits: Limits) -> Outcome:
    message = f"{digests.differing} of {digests.compared} compared steps have more than one digest"
    if digests.differing <= limits.number("differing"):
        return passed(message, value=digests.differing, threshold=limits.number("differing"), unit="steps")
    return failed(
        message,
        value=digests.differing,
        threshold=limits.number("differing"),
        unit="steps",
        at=digests.differing_spot or "",
        impact=_a_checkpoint(evidence),
        fix="go back to a checkpoint before that step: phalanx train --resume RUN after removing newer ones",
    )


def _no_past(evidence: Evidence, digests: DigestFacts, limits: Limits) -> Outcome:
    message = f"a generation that was over committed {plural(digests.stale, 'step')}"
    if digests.stale <= limits.number("stale"):
        return passed(message, value=digests.stale, threshold=limits.number("stale"), unit="steps")
    return failed(
        message,
        value=digests.stale,
        threshold=limits.number("stale"),
        unit="steps",
        at=digests.stale_spot or "",
        impact=_a_checkpoint(evidence),
        fix="the fence needs a file system on which flock works between hosts (docs/recovery.md, limits)",
    )


def _judge_drills(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    """Return the outcome of the newest drill that changed the members; the largest jobs must have one."""
    drill = newest_drill(evidence, *CHANGES)
    if drill is None:
        if not limits.flag("must_drill"):
            return ()
        message = f"{evidence.devices:,} devices lose a rank all the time, and {no_drill(evidence)}"
        return (unknown(message, fix=how_to_see(evidence)),)
    if drill.clean and drill.bitwise:
        return (
            passed(
                f"{_drill_text(evidence, drill)}: every step has the bits of a run without faults: {drill.statement}"
            ),
        )
    if drill.clean:
        return (passed(f"{_drill_text(evidence, drill)}: the oracle found nothing: {drill.statement}"),)
    return (
        failed(
            f"a drill found: {'; '.join(drill.wrong[:2]) or 'something'}",
            value=drill.path,
            impact=RARE,
            fix=f"phalanx drill --read-record {drill.path}",
        ),
    )


def _drill_text(evidence: Evidence, one: DrillFacts) -> str:
    return f"drilled{with_ranks(evidence, (one,))} ({', '.join(one.fired)})"


def _a_checkpoint(evidence: Evidence) -> Impact:
    """Return the impact of going back one checkpoint, at most the time that the run took."""
    interval_s = evidence.plan.reliability.interval_s if evidence.plan is not None else 3600.0
    ran_s = evidence.log.wall_s if evidence.log is not None and evidence.log.wall_s is not None else math.inf
    lost_s = min(interval_s, ran_s)
    if not math.isfinite(lost_s):
        return Impact(note="all work since the last intact checkpoint, if somebody notices")
    return evidence.loses_once(lost_s, "work since the last intact checkpoint, if somebody notices")


RULE = Rule(
    id="FLT006",
    slug="step-transaction",
    severity="error",
    requires="J",
    uses="PLD",
    requirement="A step is committed on all live replicas or on none, and ranks of an older membership are refused.",
    why="""
When somebody is lost in the middle of a step, some ranks have updated and others have not; a rank that was only slow
comes back and writes over newer work. Both leave weights that no step explains, and nothing fails. torchft commits a
step by a vote of those that are alive; at 100,000 devices, with a failure every 18 minutes (arXiv:2602.00277), this
happens all day.
""",
    how="""
One digest per (generation, step) over all ranks that hold the same weights (shards of ZeRO and experts have no copy,
and are not compared). No rank may record a step for a generation older than one it had reported, and nobody one more
than 5 s after the next generation began, except for the step it was in. A drill of this code and profile that changed
the members (kill, hang, host, freeze, partition) must be clean; from 32,769 devices on there must be one. Before a run
the trainer's own promise counts (none is a warning).
""",
    limits={
        "differing": Limit(
            value=0, unit="steps", note="steps with two digests: none, or the replicas are not replicas"
        ),
        "stale": Limit(value=0, unit="steps", note="commits from the past: none"),
        "must_drill": Limit(
            value=False,
            note="whether a drill is demanded: from S5 on, where the specification makes elastic steps mandatory",
            classes={"S5": True},
        ),
    },
    bad="""
{"event":"step","t":1794750000.0,"rank":0,"epoch":3,"step":4000,"digest":"5f1c00000000000000000000000000aa"}
{"event":"step","t":1794750000.1,"rank":1,"epoch":3,"step":4000,"digest":"5f1c00000000000000000000000000ab"}
""",
    good="""
{"event":"step","t":1794750000.0,"rank":0,"epoch":3,"step":4000,"digest":"5f1c00000000000000000000000000aa"}
{"event":"step","t":1794750000.1,"rank":1,"epoch":3,"step":4000,"digest":"5f1c00000000000000000000000000aa"}
""",
    fix="`phalanx train` refuses commits of older generations. Where a digest differs, resume from a checkpoint before "
    "that step, and run `phalanx drill`.",
    waive="Asynchronous or local-SGD training, in which replicas differ by design.",
    references=(
        Reference(text="torchft: commit by the living, quorum per step", mark="read"),
        Reference(text="FT-HSDP, arXiv:2602.00277: a failure every 18 minutes at 100,000 GPUs", mark="secondary"),
    ),
    check=check,
)
