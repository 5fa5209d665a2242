"""TEL006: every second of the run is in exactly one account."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from phalanx.rules.catalog.tel_measured import file_of, finite_value, still_reading
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Impact, Outcome, exempt, failed, passed, unknown
from phalanx.rules.rule import Limit, Limits, Reference, Rule

if TYPE_CHECKING:
    from phalanx.record.account.ledger import Ledger
    from phalanx.rules.facts.log_facts import LogFacts

LOST_TRACK = Impact(note="costs no time by itself: time in no account cannot be won back")


def check(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    """Check that the accounts add up to the wall time, and that telemetry costs little."""
    log = evidence.the_log
    if log.ledger is None:
        missing = still_reading(log, "the end of the walk over the record")
        return (missing or unknown("the run has no ledger", fix="its launch.json and events must be readable"),)
    if not finite_value(log.ledger.wall_s) or log.ledger.wall_s <= 0:
        return (exempt("no time has passed on record"),)
    return (_judge_ledger(log, log.ledger, limits), *_judge_cost(evidence, limits))


def _judge_ledger(log: LogFacts, ledger: Ledger, limits: Limits) -> Outcome:
    wall_s, max_gap = ledger.wall_s, limits.number("gap")
    total_s = float(sum(asdict(ledger.accounts).values()))
    steps = ledger.steps + ledger.steps_lost
    allowed_s = max(limits.number("unexplained") * wall_s, limits.number("unexplained_step_s") * steps)
    parts = (
        (abs(total_s - wall_s), max_gap * wall_s, f"|{total_s:,.1f} s in accounts - {wall_s:,.1f} s on the clock|"),
        (ledger.overlap_s, max_gap * wall_s, "seconds that two marks claim"),
        (ledger.accounts.other, allowed_s, "seconds that no event explains"),
    )
    formula = tuple(f"{text} = {value:,.2f} s; at most {bound:,.2f} s" for value, bound, text in parts)
    for value, bound, text in parts:
        if not value <= bound:  # written so that NaN fails
            return failed(
                f"the ledger does not close: {text} = {value:,.1f} s of {wall_s:,.1f} s",
                formula=formula,
                value=value / wall_s,
                threshold=bound / wall_s,
                at=file_of(log),
                impact=LOST_TRACK,
                fix="phalanx report RUN names the accounts; look for a clock that jumped, or files that were cut",
            )
    return passed(
        f"{wall_s:,.1f} s in {len(asdict(ledger.accounts))} accounts, {ledger.accounts.other / wall_s:.1%} unexplained",
        formula=formula,
        value=abs(total_s - wall_s) / wall_s,
        threshold=max_gap,
    )


def _judge_cost(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    share, max_telemetry = finite_value(evidence.the_log.telemetry_share), limits.number("telemetry")
    if share is None:
        # Not every log has it; the time is part of the steps in the ledger either way.
        return ()
    statement = f"telemetry takes {share:.2%} of the step time"
    if share <= max_telemetry:
        return (
            passed(statement, formula=(f"{share:.4f} <= {max_telemetry:g}",), value=share, threshold=max_telemetry),
        )
    return (
        failed(
            statement,
            formula=(f"{share:.4f} > {max_telemetry:g}",),
            value=share,
            threshold=max_telemetry,
            severity="warning",
            at="telemetry.timeline_every",
            impact=evidence.loses(share - max_telemetry, "telemetry beyond its allowance"),
            fix="record timelines less often: raise telemetry.timeline_every, or fault.digest_every",
        ),
    )


RULE = Rule(
    id="TEL006",
    slug="ledger-closes",
    severity="error",
    requires="L",
    requirement="Every second between launch and end is in exactly one account, and telemetry itself costs little.",
    why="""
Effective training time is only as honest as what it is divided by. Google's goodput library names the accounts (start,
data, checkpoints, recovery, work lost, other) so that nothing falls between them. MegaScale calls the cost of its own
always-on monitoring negligible; 1 % is our reading of that word.
""",
    how="""
`|Σ accounts - wall| <= 1 %` of the wall clock; seconds claimed twice `<= 1 %`; seconds that no event explains `<= 5 %`,
or 30 ms for each step where that is more (ten real runs of 10 to 150 steps on two busy cores had 3 to 24 ms, so short
steps are allowed them). Where the log tells what telemetry took: `<= 1 %` of the step time, a warning beyond.
""",
    limits={
        "gap": Limit(value=0.01, note="in no account or in two, of the wall clock: our choice"),
        "unexplained": Limit(value=0.05, note="without an event, of the wall clock: our choice, from ten runs of ours"),
        "unexplained_step_s": Limit(value=0.03, unit="s", note="the same for each step, where more: ten runs of ours"),
        "telemetry": Limit(value=0.01, note="of the step time: our choice"),
    },
    bad='{"wall_s": 3600.0, "accounts": {"stepping": 2900.0, "other": 0.0}, "overlap_s": 0.0}',
    good='{"wall_s": 3600.0, "accounts": {"stepping": 3480.0, "starting": 60.0, "other": 60.0}, "overlap_s": 0.0}',
    fix="`phalanx report RUN` shows the accounts; a second that is missing is a mark that a rank did not write.",
    waive="A run of another trainer whose log has no marks beside its steps.",
    references=(
        Reference(text="AI-Hypercomputer/ml-goodput-measurement: badput types", mark="read"),
        Reference(text="MegaScale, arXiv:2402.15627", mark="read"),
    ),
    check=check,
)
