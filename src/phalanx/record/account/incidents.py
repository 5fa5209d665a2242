"""Failures of a run and how it recovered: the supervisor's record beside the steps of the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.io.values import at, integer, number, printable, text
from phalanx.record.account.flight_records import find_culprit, read_flights
from phalanx.record.account.ledger import LedgerWalk, walk_ledger
from phalanx.record.account.time_accounts import Recovery
from phalanx.record.events import Event, read_events
from phalanx.record.run import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """A failure, and what came after it."""

    t: float  # Unix time at which it was noticed
    rank: int
    host: str
    what: str  # its cause; empty where none is on record
    step: int  # steps done when it happened, as far as the supervisor knew
    world: int | None  # ranks that went on
    source: str  # where their state came from: memory, disk, or the start
    restored_step: int | None
    recovery_s: float | None  # from the last step's end to the next one's, noticing included; None when none followed
    finding: str = ""  # what the flight recorders of the ranks tell: the collective, and who did not enter it


def supervisor_events(run: Run) -> list[Event]:
    """Everything the supervisor wrote; empty for a run without one."""
    return read_events(run.supervisor)[0]


def read_incidents(run: Run, walked: LedgerWalk | None = None, events: Sequence[Event] | None = None) -> list[Incident]:
    """Every incident of a run, in order; `walked` and `events` spare reading them again."""
    reported = supervisor_events(run) if events is None else events
    noticed = [event for event in reported if event["event"] == "incident" and number(event, "t") is not None]
    if not noticed:
        return []
    known = (walked or walk_ledger(run)).recoveries
    spans: list[Recovery | None] = [*known, *[None] * len(noticed)]
    return [_make_incident(run, event, reported, span) for event, span in zip(noticed, spans, strict=False)]


def incident_text(event: Event) -> str:
    """One line for a person: what failed."""
    host = printable(event.get("host"), most=100)
    return f"rank {integer(event, 'rank')} on {host}: {_cause_text(at(event, 'cause')) or 'no cause on record'}"


def _recorded_finding(run: Run, fell_in: int, events: Sequence[Event]) -> str:
    """What the coordinator found in the recorders of a membership; where it had no time to look, what is there now."""
    reported = [one for one in events if one["event"] == "evidence" and integer(one, "epoch") == fell_in]
    if found := next((text(one, "finding") for one in reported if one.get("finding")), ""):
        return printable(found, most=500)
    found_now = find_culprit(read_flights(run, fell_in))
    return printable(found_now.sentence, most=500) if found_now is not None else ""


def _make_incident(run: Run, event: Event, events: Sequence[Event], span: Recovery | None) -> Incident:
    fell_in = integer(event, "epoch") or 0
    later = [one for one in events if (integer(one, "epoch") or 0) > fell_in]
    generation = next((one for one in later if one["event"] == "epoch"), {})
    restore = next((one for one in later if one["event"] == "restore"), {})
    took_s = span.after_s - span.before_s if span is not None and span.after_s is not None else None
    return Incident(
        t=number(event, "t") or 0.0,
        rank=integer(event, "rank") or 0,
        host=text(event, "host"),
        what=_cause_text(at(event, "cause")),
        step=integer(event, "step") or 0,
        world=integer(generation, "world"),
        source=text(restore, "source"),
        restored_step=integer(restore, "step"),
        recovery_s=max(0.0, took_s) if took_s is not None else None,
        finding=_recorded_finding(run, fell_in, events),
    )


def _cause_text(cause: Mapping[str, Any]) -> str:
    """The cause in one line; empty where none is on record."""
    if cause.get("signal"):
        return f"killed by signal {printable(cause['signal'], most=20)}"
    lines = str(cause.get("message") or "").splitlines() or [""]
    first = printable(lines[0])
    if not cause.get("kind") and not first.strip():
        return ""
    kind = printable(cause.get("kind") or "failed", most=60)
    return first if kind in ("Silence", "HostLost", "Astray", "Deadlock") else f"{kind}: {first}"
