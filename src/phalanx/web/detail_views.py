"""The ranks: all of them over time, and one of them with its peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

from phalanx.io.values import at, integer, number, printable, text
from phalanx.plan.layout import Layout
from phalanx.record.account.memberships import plan_at_step
from phalanx.record.account.rank_places import AXES, rank_places
from phalanx.record.account.stragglers import find_stragglers
from phalanx.record.account.timeline import StepSpan, measured_spans, predicted_spans
from phalanx.record.events import Event
from phalanx.units import format_seconds
from phalanx.web.answer import AnswerParts, Json
from phalanx.web.run_store import RunStore
from phalanx.web.run_views import launch_of

MOST_PEERS = 4096  # of an axis


class NoRankError(Exception):
    """The run has no such rank."""


def mesh_view(store: RunStore, name: str, *, series: str, columns: int, first: int | None, last: int | None) -> Json:
    """One series of every rank; a row per rank, a column per range of steps."""
    parts, run = AnswerParts(), store.run(name)
    plan = parts.read("plan.json", run.plan, {})
    with store.history(name) as history:
        missing = series not in history.names()
        drawn = None if missing else history.mesh(series, columns=columns, first=first, last=last)
        where = rank_places(plan, parts.read("supervisor.jsonl", history.supervisor, []))
        ranks = history.ranks
        slow = parts.read("stragglers", lambda: find_stragglers(history), [])
        parts.note(parts.read("events", history.damage, ()))
    ranks = ranks if drawn is None else drawn.ranks
    return {
        "name": series,
        "unit": drawn.unit if drawn else "",
        "missing": missing,
        "ranks": ranks,
        "places": [where.place(rank) for rank in ranks],
        "hosts": [where.host(rank) for rank in ranks],
        "step": drawn.step if drawn else (),
        "t": drawn.t if drawn else (),
        "values": drawn.values if drawn else [[] for _ in ranks],
        "stragglers": slow,
        "damage": parts.damage,
    }


def rank_view(store: RunStore, name: str, number_: int) -> Json:
    """One rank: where it stands, who it talks to, and its newest numbers. Raises NoRankError."""
    parts, run = AnswerParts(), store.run(name)
    plan = parts.read("plan.json", run.plan, {})
    with store.history(name) as history:
        sizes = [max(1, integer(at(plan, "layout"), axis) or 1) for axis in AXES]
        world = run.world() or len(history.ranks) or prod(sizes)
        if number_ not in history.ranks and number_ >= world:
            raise NoRankError(f"there is no rank {number_}: this run has {world}")
        events = {kind: parts.read(kind, partial(history.latest, kind, number_)) or {} for kind in _LATEST}
        where = rank_places(plan, parts.read("supervisor.jsonl", history.supervisor, []))
    return {
        "rank": number_,
        "place": where.place(number_),
        "host": where.host(number_),
        "peers": parts.read("peers", lambda: rank_peers(number_, where.layout, world), {}),
        "latency": _latency_rows(events["peers"]),
        "latest": _event_numbers(events["step"]),
        "monitor": _event_numbers(events["monitor"]),
        "damage": parts.damage,
    }


_LATEST = ("step", "monitor", "peers")


def rank_peers(rank: int, layout: Mapping[str, Any], world: int) -> dict[str, list[int]]:
    """Ranks that differ from this one on a single axis, by axis; axes of one are left out.

    >>> rank_peers(5, {"tensor": 2, "data": 4}, 8)
    {'tensor': [4, 5], 'data': [1, 3, 5, 7]}
    """
    found, stride = {}, 1
    for axis in AXES:
        size = max(1, integer(layout, axis) or 1)
        if size > 1:
            first = rank - rank // stride % size * stride
            members = range(first, first + size * stride, stride)
            found[axis] = [one for one in members[:MOST_PEERS] if one < world]
        stride *= size
    return found


def _latency_rows(event: Event) -> list[Json]:
    pairs = event.get("pairs")
    found = []
    for one in pairs if isinstance(pairs, list) else ():
        if isinstance(one, dict) and (peer := integer(one, "peer")) is not None:
            times = {key: number(one, key) for key in ("p50_s", "p99_s")}
            counts = {key: integer(one, key) for key in ("count", "lost")}
            found.append({"peer": peer, "axis": text(one, "axis"), **times, **counts})
    return found


def _event_numbers(event: Event) -> Json:
    """The numbers and short texts of an event; lists and whatever a stranger put there stay out."""
    found: Json = {}
    for key in event:
        value = event[key]
        if isinstance(value, bool):
            found[key] = value
        elif isinstance(value, str):
            found[key] = text(event, key)
        elif isinstance(value, int | float):
            whole = integer(event, key)
            found[key] = number(event, key) if whole is None else whole
    return found


# ---- one step: the predicted timeline above the measured one ---------------------------------------------------------


MOST_SPANS = 4000
MOST_COLLECTIVES = 200


def step_view(store: RunStore, name: str, *, rank: int, step: int | None) -> Json:
    """The timeline of a step that was recorded: the one asked for, the nearest to it, or the newest."""
    parts, run = AnswerParts(), store.run(name)
    plan = parts.read("plan.json", run.plan, {})
    with store.history(name) as history:
        taken = parts.read("timelines", lambda: history.steps_with("timeline", rank), ())
        event = None
        if taken:
            nearest = taken[-1] if step is None else min(taken, key=lambda one: abs(one - step))
            event = parts.read("timeline", lambda: history.at_step("timeline", nearest, rank))
        parts.note(parts.read("events", history.damage, ()))
        if event is not None:  # the step may have been done in another layout than the newest
            plan = parts.read("plan.json", lambda: plan_at_step(run, history, integer(event, "step")), plan)
    guess = parts.read("prediction", lambda: predicted_spans(plan, rank), []) if plan else []
    return {
        "available": taken,
        "rank": rank,
        "step": None if event is None else integer(event, "step"),
        "measured": None if event is None else _measured_step(parts, event),
        "predicted": {"seconds": number(at(plan, "prediction"), "step_s"), "spans": _span_rows(guess)},
        "collectives": _collective_rows(event),
        "damage": parts.damage,
    }


def _measured_step(parts: AnswerParts, event: Event) -> Json:
    spans = parts.read("timeline", lambda: measured_spans(event), [])
    return {"seconds": number(event, "seconds"), "spans": _span_rows(spans), "dropped": integer(event, "dropped") or 0}


def _span_rows(spans: Sequence[StepSpan]) -> list[Json]:
    names = ("kind", "name", "start_s", "duration_s", "bytes", "group")
    return [{name: getattr(one, name) for name in names} for one in spans[:MOST_SPANS]]


def _collective_rows(event: Event | None) -> list[Json]:
    found: Any = (event or {}).get("collectives")
    rows = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    return [
        {"op": text(one, "op"), "group": text(one, "group"), "count": integer(one, "count")}
        | {name: number(one, name) for name in ("seconds", "bytes")}
        for one in rows[:MOST_COLLECTIVES]
    ]


# ---- the plan of a run: what was chosen, what was not, and why -------------------------------------------------------


# Parts of plan.json as they are. Not the job: it holds paths of the machine that trains.
PASSED = ("layout", "prediction", "memory", "mapping", "rank_order", "duration", "reliability", "bill", "search")
LISTED = ("alternatives", "pareto", "warnings")
MOST_REMARKS = 200


def plan_view(store: RunStore, name: str) -> Json:
    """Layout, prediction, memory and the alternatives."""
    parts, run = AnswerParts(), store.run(name)
    found = parts.read("plan.json", run.plan, {})
    lists = {key: found.get(key) if isinstance(found.get(key), list) else [] for key in LISTED}
    return {
        "layout_name": text(launch_of(run), "layout") or short_layout(found.get("layout")),
        "model": text(at(found, "job", "model"), "name"),
        "cluster": {key: at(found, "cluster").get(key) for key in ("name", "source", "domains", "domain_devices")},
        **{key: found.get(key) for key in PASSED},
        "pareto": [_named_value(one) for one in lists["pareto"]],
        "alternatives": [_named_value(one) for one in lists["alternatives"]],
        "reasons": [*_search_lines(at(found, "search")), *(one for one in lists["warnings"] if isinstance(one, str))],
        "damage": parts.damage,
    }


def _search_lines(search: Mapping[str, Any]) -> list[str]:
    legal, fitting, seconds = (number(search, key) for key in ("legal", "fitting", "seconds"))
    if not legal or fitting is None:
        return []
    spent = f", searched in {format_seconds(seconds)}" if seconds else ""
    return [f"the best of {legal:,.0f} valid layouts, of which {fitting:,.0f} fit into memory{spent}"]


def _named_value(one: Any) -> Any:
    return {**one, "name": short_layout(one.get("layout"))} if isinstance(one, dict) else one


def short_layout(layout: Any) -> str:
    """A layout in a few letters; empty when it is none."""
    try:
        return Layout(**layout).short
    except Exception:  # a plan of another version, or a damaged one
        return ""


def run_remarks(store: RunStore, name: str, parts: AnswerParts) -> list[Json]:
    """The warnings of a run's plan, and the places that were shut out while it went on."""
    run = store.run(name)
    warnings = parts.read("plan.json", run.plan, {}).get("warnings")
    with store.history(name) as history:
        shut_out = [
            one for one in parts.read("supervisor.jsonl", history.supervisor, []) if one["event"] == "quarantine"
        ]
    found = [
        _remark_view("plan", one) for one in (warnings if isinstance(warnings, list) else ()) if isinstance(one, str)
    ]
    found += [_remark_view("run", f"{text(one, 'host')}: {one.get('reason')}") for one in shut_out]
    return found[:MOST_REMARKS]


def _remark_view(source: str, rendered: str) -> Json:
    """A problem as it was written: what is wrong in its first line, then why and what to do."""
    what, *hints = [printable(line) for line in rendered.splitlines() if line.strip()] or [""]
    return {"source": source, "level": "warning", "what": what, "hints": [hint.strip() for hint in hints]}
