"""One step: the predicted timeline above the measured one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.io.values import at, integer, number, text
from phalanx.record.account.memberships import plan_at_step
from phalanx.record.account.timeline import Span, measured, predicted
from phalanx.record.events import Event
from phalanx.web.answer import Json, Parts
from phalanx.web.shelf import Shelf

MOST_SPANS = 4000
MOST_COLLECTIVES = 200


def step(shelf: Shelf, name: str, *, rank: int, step: int | None) -> Json:
    """The timeline of a step that was recorded: the one asked for, the nearest to it, or the newest."""
    parts, run = Parts(), shelf.run(name)
    plan = parts.read("plan.json", run.plan, {})
    with shelf.history(name) as history:
        taken = parts.read("timelines", lambda: history.steps_with("timeline", rank), ())
        event = (
            parts.read("timeline", lambda: history.at_step("timeline", _nearest(taken, step), rank)) if taken else None
        )
        parts.note(parts.read("events", history.damage, ()))
        if event is not None:  # the step may have been done in another layout than the newest
            plan = parts.read("plan.json", lambda: plan_at_step(run, history, integer(event, "step")), plan)
    guess = parts.read("prediction", lambda: predicted(plan, rank), []) if plan else []
    return {
        "available": taken,
        "rank": rank,
        "step": None if event is None else integer(event, "step"),
        "measured": None if event is None else _measured(parts, event),
        "predicted": {"seconds": number(at(plan, "prediction"), "step_s"), "spans": _spans(guess)},
        "collectives": _collectives(event),
        "damage": parts.damage,
    }


def _nearest(steps: Sequence[int], asked: int | None) -> int:
    return steps[-1] if asked is None else min(steps, key=lambda one: abs(one - asked))


def _measured(parts: Parts, event: Event) -> Json:
    spans = parts.read("timeline", lambda: measured(event), [])
    return {"seconds": number(event, "seconds"), "spans": _spans(spans), "dropped": integer(event, "dropped") or 0}


def _spans(spans: Sequence[Span]) -> list[Json]:
    names = ("kind", "name", "start_s", "duration_s", "bytes", "group")
    return [{name: getattr(one, name) for name in names} for one in spans[:MOST_SPANS]]


def _collectives(event: Event | None) -> list[Json]:
    found: Any = (event or {}).get("collectives")
    rows = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    return [
        {"op": text(one, "op"), "group": text(one, "group"), "count": integer(one, "count")}
        | {name: number(one, name) for name in ("seconds", "bytes")}
        for one in rows[:MOST_COLLECTIVES]
    ]
