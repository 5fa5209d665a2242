"""TEL005: the log is complete and in order, and every line names its writer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.rules.catalog.tel_measured import file_of, finite_value, steps_of
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Impact, Outcome, Spot, exempt, failed, passed
from phalanx.rules.rule import Limit, Limits, Reference, Rule
from phalanx.units import plural

if TYPE_CHECKING:
    from phalanx.rules.facts.log_facts import LogFacts

UNTOLD = Impact(note="costs no time by itself: what is not in the log cannot be accounted for or checked")
MOST_NAMED = 6


def check(evidence: Evidence, limits: Limits) -> tuple[Outcome, ...]:
    """Check each kind of disorder; return a single pass if there is none."""
    log = evidence.the_log
    if not log.ranks and not steps_of(log):
        return (_empty_log(log),)
    outcomes = (
        *_judge_complete(log),
        *_judge_order(log),
        *_judge_readable(log, limits),
        *_judge_closed(log, limits),
        *_judge_clocks(log, limits),
    )
    if any(outcome.verdict == "fail" for outcome in outcomes):
        return tuple(outcome for outcome in outcomes if outcome.verdict == "fail")
    when = "complete" if log.is_over else "complete so far"
    read = log.ranks_read if log.ranks_read is not None else len(log.ranks)
    read_text = f" ({read:,} of them read, evenly spread)" if read < len(log.ranks) else ""
    return (passed(f"the log of {plural(len(log.ranks), 'rank')} is {when}, in order and readable{read_text}"),)


def _empty_log(log: LogFacts) -> Outcome:
    if not log.is_over:
        return exempt("no rank has written anything yet")
    ended = f"the run is over ({log.state})" if log.state else "the run is over"
    return failed(
        f"{ended}, and no rank left any event",
        value=0,
        threshold=max(1, log.world),
        unit="ranks",
        at=Spot(file=log.folder),
        impact=UNTOLD,
        fix="look at logs/ and errors/ of the run: it ended before its first step, or its event files are missing",
    )


def _judge_complete(log: LogFacts) -> tuple[Outcome, ...]:
    grammar, failures = log.grammar, []
    if grammar.missing:
        failures.append(_listed_items(log, f"the log lacks {_first_names(grammar.missing)}", grammar.missing))
    if grammar.repeated:
        failures.append(
            _listed_items(log, f"the log has {_first_names(grammar.repeated)} more than once", grammar.repeated)
        )
    if grammar.ranks_missing and not log.bytes_left:
        ranks = tuple(f"{rank}" for rank in grammar.ranks_missing)
        statement = (
            f"rank {ranks[0]} left no event"
            if len(ranks) == 1
            else f"{len(ranks):,} left no event: {_first_names(ranks)}"
        )
        failures.append(_listed_items(log, f"of {log.world:,} ranks, {statement}", ranks))
    return tuple(failures)


def _listed_items(log: LogFacts, statement: str, items: tuple[str, ...]) -> Outcome:
    return failed(
        statement,
        value=len(items),
        threshold=0,
        at=file_of(log),
        impact=UNTOLD,
        fix="keep the run folder whole when it is copied; "
        "where a rank was killed, phalanx train --resume continues the run",
    )


def _judge_order(log: LogFacts) -> tuple[Outcome, ...]:
    grammar = log.grammar
    if not grammar.out_of_order:
        return ()
    return (
        failed(
            f"{plural(grammar.out_of_order, 'event')} back in step or time without a restore between",
            value=grammar.out_of_order,
            threshold=0,
            unit="events",
            at=grammar.out_of_order_spot or file_of(log),
            impact=UNTOLD,
            fix="look for two processes that write one file, or a clock that was set: order is by (generation, step)",
        ),
    )


def _judge_readable(log: LogFacts, limits: Limits) -> tuple[Outcome, ...]:
    """Judge the lines that are not events: a killed process may tear its last line; more than that is damage."""
    grammar, torn = log.grammar, len(log.incidents) * limits.number("torn_per_incident")
    if grammar.unreadable <= torn:
        return ()
    return (
        failed(
            f"{grammar.unreadable:,} line{'s are no events' if grammar.unreadable != 1 else ' is no event'}",
            formula=(
                f"{grammar.unreadable:,} > {torn:g} = {plural(len(log.incidents), 'incident')} x"
                f" {limits.number('torn_per_incident'):g} torn lines",
            ),
            value=grammar.unreadable,
            threshold=torn,
            unit="lines",
            at=grammar.unreadable_spot or file_of(log),
            impact=UNTOLD,
            fix="look at the line: a full disk, a second writer, or a file that was edited",
        ),
    )


def _judge_closed(log: LogFacts, limits: Limits) -> tuple[Outcome, ...]:
    max_unclosed = limits.number("unclosed") if log.is_over else max(1.0, limits.number("unclosed"))
    if log.grammar.unclosed <= max_unclosed:
        return ()
    return (
        failed(
            f"after {plural(log.grammar.unclosed, 'incident')} neither a step nor an end was recorded",
            value=log.grammar.unclosed,
            threshold=max_unclosed,
            unit="incidents",
            at=Spot(file=f"{log.folder}/supervisor.jsonl"),
            impact=UNTOLD,
            fix="phalanx train --resume continues from the last checkpoint; a run that is over says so in its end",
        ),
    )


def _judge_clocks(log: LogFacts, limits: Limits) -> tuple[Outcome, ...]:
    skew, max_skew_s = finite_value(log.grammar.skew_s), limits.number("skew_s")
    if skew is None or skew <= max_skew_s:
        return ()
    return (
        failed(
            f"the clocks of the ranks differ by {skew:.1f} s",
            formula=(f"largest difference at the same step = {skew:.2f} s > {max_skew_s:g} s",),
            value=skew,
            threshold=max_skew_s,
            unit="s",
            severity="warning",
            at=file_of(log),
            impact=UNTOLD,
            fix="run chrony or ntpd on every host; durations stay right, the order between hosts does not",
        ),
    )


def _first_names(items: tuple[str, ...]) -> str:
    more = f" and {len(items) - MOST_NAMED:,} more" if len(items) > MOST_NAMED else ""
    return ", ".join(items[:MOST_NAMED]) + more


RULE = Rule(
    id="TEL005",
    slug="event-grammar",
    severity="error",
    requires="L",
    requirement="The log is complete and in order, and each of its events says who wrote it and when.",
    why="""
Every other verdict on a run rests on its log. MLPerf's compliance checker counts events (exactly one, at least one) and
their order for the same reason, and OPT-175B's 40 restarts in two weeks were kept by hand in a logbook. An incident
without an end hides how long the recovery took.
""",
    how="""
Events that must be there once are there once (`run_start` of a rank: once in a membership); every rank of the world
wrote; `(epoch, step)` and time go forward but for a restore; every incident is followed by a step or an end (the newest
one of a run that goes on may be open); lines that are no events: at most 8 an incident, since a process that is killed
tears its last line; clocks of ranks at the same step differ by at most 1 s (a warning: durations do not depend on it).
""",
    limits={
        "skew_s": Limit(value=1.0, unit="s", note="between clocks of ranks at the same step: our choice"),
        "torn_per_incident": Limit(
            value=8,
            unit="lines",
            note="one per rank of a lost host: whole lines are appended, docs/events.md; our choice",
        ),
        "unclosed": Limit(value=0, unit="incidents", note="without a step or an end after them, in a run that is over"),
    },
    bad="""
{"v":1,"event":"step","t":1794721414.5,"rank":0,"epoch":1,"step":12,"loss":4.43}
{"v":1,"event":"step","t":1794721411.2,"rank":0,"epoch":1,"step":7,"loss":4.61}
""",
    good="""
{"v":1,"event":"step","t":1794721414.5,"rank":0,"epoch":1,"step":12,"loss":4.43}
{"v":1,"event":"step","t":1794721414.7,"rank":0,"epoch":1,"step":13,"loss":4.42}
""",
    fix="Keep run folders whole, one writer per file; `phalanx report RUN` tells what is damaged.",
    waive="An old run whose files were lost: say which, and that its numbers are those of the rest.",
    references=(
        Reference(text="mlcommons/logging: compliance checker, EXACTLY_ONE and AT_LEAST_ONE", mark="read"),
        Reference(text="OPT-175B logbook", mark="secondary"),
    ),
    check=check,
)
