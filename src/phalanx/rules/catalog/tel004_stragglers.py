"""TEL004: every rank has a straggler score, and slow ranks are named."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

from phalanx.rules.catalog.tel_measured import file_of, finite_value, steps_of, still_reading
from phalanx.rules.evidence import Evidence
from phalanx.rules.facts.drill_facts import counted_records
from phalanx.rules.outcome import Impact, Outcome, Spot, exempt, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule

if TYPE_CHECKING:
    from phalanx.record.account.stragglers import Straggler
    from phalanx.rules.facts.log_facts import LogFacts


def check(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    """Check that ranks have scores, that no rank is far behind, and that a drill named the right rank."""
    log = evidence.the_log
    if max(log.world, len(log.ranks)) < 2:
        return (exempt("one rank waits for nobody"),)
    scores = _judge_scores(log, limits)
    drill_outcomes = _drilled(evidence)
    return (
        scores,
        *((_judge_slowest(evidence, log, limits),) if scores.verdict == "pass" and scores.applies else ()),
        *drill_outcomes,
    )


def _judge_scores(log: LogFacts, limits: Limits) -> Outcome:
    world, scored_ranks = max(log.world, len(log.ranks)), log.straggler_scores
    if steps_of(log) < limits.number("within_steps") and not scored_ranks:
        return exempt(f"scores are due within {limits.number('within_steps'):g} steps; the run has {steps_of(log):,}")
    if scored_ranks is None:
        return still_reading(log, "the ranks' own times") or unknown(
            "no rank has a score", fix="every rank writes compute_s and wait_s with every step (docs/events.md)"
        )
    share, min_ranks_share = scored_ranks / world, limits.number("ranks_share")
    statement = f"{scored_ranks:,} of {world:,} ranks have a score"
    if share >= min_ranks_share:
        return passed(
            statement, formula=(f"{share:.1%} >= {min_ranks_share:.0%}",), value=share, threshold=min_ranks_share
        )
    return still_reading(log, "the ranks' own times") or failed(
        statement,
        formula=(f"{scored_ranks:,} / {world:,} = {share:.1%} < {min_ranks_share:.0%}",),
        value=share,
        threshold=min_ranks_share,
        at=file_of(log),
        impact=Impact(note="costs no time by itself: who holds up the others stays unknown"),
        fix="every rank writes compute_s and wait_s with every step; look for ranks without events",
    )


def _judge_slowest(evidence: Evidence, log: LogFacts, limits: Limits) -> Outcome:
    min_score = limits.number("score")
    # The record's score is own time over that of the peers; the rule's is its inverse.
    ratios = [
        (1 / straggler.score, straggler) for straggler in log.stragglers if (finite_value(straggler.score) or 0.0) > 0.0
    ]
    if not ratios:
        return passed("nobody stands out in the last 100 steps", threshold=min_score)
    relative, worst = min(ratios, key=lambda pair: pair[0])
    if relative >= min_score:
        return passed(_straggler_text(worst, relative), value=relative, threshold=min_score)
    return _slow_rank(evidence, worst, relative, min_score)


def _slow_rank(evidence: Evidence, worst: Straggler, relative: float, least: float) -> Outcome:
    where = f"rank {worst.rank}" + (f" on {worst.host}" if worst.host else "")
    return failed(
        _straggler_text(worst, relative),
        formula=(f"score = peers' time / own time = 1 / {worst.score:.2f} = {relative:.2f} < {least:g}",),
        value=relative,
        threshold=least,
        at=file_of(evidence.the_log, worst.rank),
        impact=evidence.loses(1 - relative, "all ranks wait for the slowest, at most this much"),
        fix=f"look at {where} (temperature, clocks, other processes, its links) before shutting it out: uneven stages "
        "and sequence lengths explain more slow jobs than slow machines do",
    )


def _straggler_text(worst: Straggler, relative: float) -> str:
    return f"{worst.text} (score {relative:.2f})"


def _drilled(evidence: Evidence) -> tuple[Outcome, ...]:
    """Return the outcome of the newest drill with a slowed rank; empty without one."""
    counted = counted_records(evidence.drills, profile=evidence.profile.name)
    tried = [drill for drill in counted if drill.named_right is not None][:1]  # the newest
    wrong_drills = [drill for drill in tried if not drill.named_right]
    if wrong_drills:
        return (
            failed(
                f"a drill slowed a rank down and another one was named: {PurePath(wrong_drills[0].path).name}",
                value=len(wrong_drills),
                threshold=0,
                unit="drills",
                at=Spot(file=wrong_drills[0].path),
                impact=Impact(note="costs no time by itself: the wrong host would be shut out"),
                fix="phalanx drill JOB --suite again, with more steps; if it stays, the scores are wrong",
            ),
        )
    return (passed(f"a drill named the rank that was slowed down: {tried[0].statement}"),) if tried else ()


RULE = Rule(
    id="TEL004",
    slug="stragglers-named",
    severity="warning",
    requires="L",
    uses="D",
    requirement="Every rank's own time and wait are known, and ranks far behind their peers are named.",
    why="""
All ranks wait for the slowest. MegaScale found about 0.5 % of its machines slow, some by 10 % (arXiv:2402.15627), but
of 3,079 jobs at ByteDance only 1.7 % of those that straggled did so because of a slow machine: uneven stages and
sequences did the rest (arXiv:2505.05713). So: measure per rank, compare only ranks that do the same work, and attribute
before shutting anybody out.
""",
    how="""
`score = median time of its peers / own time` over the last 100 steps. At least 99 % of the ranks have one, and none is
below 0.75, NVRx's threshold; on cpu-gloo 0.5, since ranks share cores and the scheduler favours some (our choice). A
drill that slows a rank down must see exactly that one named. What uneven work of the whole group costs is judged by
EFF003.
""",
    limits={
        "score": Limit(
            value=0.75,
            profiles={"cpu-gloo": 0.5},
            note="least score of a rank: NVRx, read; cpu-gloo 0.5: our choice, ranks share cores",
        ),
        "ranks_share": Limit(value=0.99, note="of ranks with a score: our choice, as in TEL001"),
        "within_steps": Limit(
            value=100, unit="steps", note="until scores are due: NVRx reports in that order, our choice"
        ),
    },
    bad='{"event": "step", "rank": 5, "step": 90, "duration_s": 6.6, "compute_s": 6.4, "wait_s": 0.1}',
    good='{"event": "step", "rank": 5, "step": 90, "duration_s": 6.6, "compute_s": 4.2, "wait_s": 2.3}',
    fix="Look at the named rank's host; `phalanx web RUN`, Mesh, shows it beside its peers.",
    waive="Machines of two kinds in one job, on purpose: the plan then spreads the work, and the scores differ.",
    references=(
        Reference(text="NVIDIA/nvidia-resiliency-ext: straggler threshold 0.75", mark="read"),
        Reference(text="MegaScale, arXiv:2402.15627 section 5.1", mark="read"),
        Reference(text="stragglers at ByteDance, arXiv:2505.05713", mark="secondary"),
    ),
    check=check,
)
