"""Failures of a run and its recovery from them: the coordinator's events combined with the steps of the ranks."""

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
    """A failure, and the recovery from it."""

    t: float  # Unix time at which it was detected
    rank: int
    host: str
    what: str  # its cause; empty if none is recorded
    step: int  # steps done when it happened, as far as the coordinator knew
    world: int | None  # ranks that continued
    source: str  # source of the restored state: memory, disk, or the start
    restored_step: int | None
    # From the end of the last step to the end of the next one, with detection; None if no step followed.
    recovery_s: float | None
    # From the flight recorders of the ranks: the collective, and the ranks that did not enter it.
    finding: str = ""


def supervisor_events(run: Run) -> list[Event]:
    """Return all events of the coordinator; empty for a run without one."""
    return read_events(run.supervisor)[0]


def read_incidents(run: Run, walked: LedgerWalk | None = None, events: Sequence[Event] | None = None) -> list[Incident]:
    """Return every incident of a run, in order; `walked` and `events` save reading them again."""
    coordinator_events = supervisor_events(run) if events is None else events
    incident_events = [
        event for event in coordinator_events if event["event"] == "incident" and number(event, "t") is not None
    ]
    if not incident_events:
        return []
    recoveries = (walked or walk_ledger(run)).recoveries
    spans: list[Recovery | None] = [*recoveries, *[None] * len(incident_events)]
    return [
        _make_incident(run, event, coordinator_events, span)
        for event, span in zip(incident_events, spans, strict=False)
    ]


def incident_text(event: Event) -> str:
    """Return the rank, host and cause of an incident in one line."""
    host = printable(event.get("host"), most=100)
    return f"rank {integer(event, 'rank')} on {host}: {_cause_text(at(event, 'cause')) or 'no cause on record'}"


def _recorded_finding(run: Run, fell_in: int, events: Sequence[Event]) -> str:
    """Return the coordinator's finding for a membership; if it had no time for one, analyze the flight records now."""
    evidence = [event for event in events if event["event"] == "evidence" and integer(event, "epoch") == fell_in]
    if finding := next((text(event, "finding") for event in evidence if event.get("finding")), ""):
        return printable(finding, most=500)
    culprit = find_culprit(read_flights(run, fell_in))
    return printable(culprit.sentence, most=500) if culprit is not None else ""


def _make_incident(run: Run, event: Event, events: Sequence[Event], span: Recovery | None) -> Incident:
    fell_in = integer(event, "epoch") or 0
    later = [later_event for later_event in events if (integer(later_event, "epoch") or 0) > fell_in]
    generation = next((later_event for later_event in later if later_event["event"] == "epoch"), {})
    restore = next((later_event for later_event in later if later_event["event"] == "restore"), {})
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
    """Return the cause in one line; empty if none is recorded."""
    if cause.get("signal"):
        return f"killed by signal {printable(cause['signal'], most=20)}"
    lines = str(cause.get("message") or "").splitlines() or [""]
    first = printable(lines[0])
    if not cause.get("kind") and not first.strip():
        return ""
    kind = printable(cause.get("kind") or "failed", most=60)
    return first if kind in ("Silence", "HostLost", "Astray", "Deadlock") else f"{kind}: {first}"
