"""What befell a run and how it got over it: the supervisor's record beside the steps of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.record.events import Event, read_events
from phalanx.record.run import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """A failure, and what came after it."""

    t: float  # Unix time at which it was noticed
    rank: int
    host: str
    what: str
    step: int  # steps done when it happened, as far as the supervisor knew
    world: int | None  # ranks that went on
    source: str  # where their state came from: memory, disk, or the start
    restored_step: int | None
    recovery_s: float | None  # from the last step's end to the next one's, noticing included; None when none followed


def supervisor_events(run: Run) -> list[Event]:
    """Everything the supervisor wrote; empty for a run without one."""
    return read_events(run.supervisor)[0]


def incidents(run: Run) -> list[Incident]:
    """Every incident of a run, in order."""
    events = supervisor_events(run)
    noticed = [event for event in events if event["event"] == "incident"]
    if not noticed:
        return []
    ends = _step_ends(run)
    return [_incident(event, events, ends) for event in noticed]


def tell(event: Event) -> str:
    """One line for a person: what fell."""
    cause = event.get("cause") if isinstance(event.get("cause"), dict) else {}
    return f"rank {event.get('rank')} on {event.get('host')}: {_what(cause or {})}"


def _incident(event: Event, events: Sequence[Event], ends: Sequence[tuple[float, int]]) -> Incident:
    later = [one for one in events if int(one.get("epoch") or 0) > int(event.get("epoch") or 0)]
    epoch = next((one for one in later if one["event"] == "epoch"), None)
    restore = next((one for one in later if one["event"] == "restore"), None)
    before = max((t for t, _ in ends if t <= float(event["t"])), default=float(event["t"]))
    ended = min((t for t, epoch_done in ends if epoch_done > int(event.get("epoch") or 0)), default=None)
    return Incident(
        t=float(event["t"]),
        rank=int(event.get("rank") or 0),
        host=str(event.get("host", "")),
        what=_what(event.get("cause") or {}),
        step=int(event.get("step") or 0),
        world=int(epoch["world"]) if epoch is not None else None,
        source=str(restore["source"]) if restore is not None else "",
        restored_step=int(restore["step"]) if restore is not None else None,
        recovery_s=max(0.0, ended - before) if ended is not None else None,
    )


def _what(cause: dict[str, Any]) -> str:
    if cause.get("signal"):
        return f"killed by signal {cause['signal']}"
    lines = str(cause.get("message") or "").splitlines() or [""]
    kind = str(cause.get("kind") or "failed")
    return lines[0] if kind in ("Silence", "HostLost", "Astray", "Deadlock") else f"{kind}: {lines[0]}"


def _step_ends(run: Run) -> list[tuple[float, int]]:
    """When each step ended and in which epoch, as whoever was rank 0 wrote it."""
    events = read_events(run.events(0))[0]
    return [(float(one["t"]), int(one["epoch"])) for one in events if one["event"] == "step" and one.get("epoch")]
