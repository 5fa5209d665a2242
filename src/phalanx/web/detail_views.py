"""The views of details: all ranks over time, one rank with its peers, one step, and the plan of a run."""

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
    """The run does not have this rank."""


def mesh_view(store: RunStore, name: str, *, series: str, columns: int, first: int | None, last: int | None) -> Json:
    """Return one series of every rank: a row per rank, a column per range of steps."""
    parts, run = AnswerParts(), store.run(name)
    plan = parts.read("plan.json", run.plan, {})
    with store.history(name) as history:
        missing = series not in history.names()
        mesh = None if missing else history.mesh(series, columns=columns, first=first, last=last)
        where = rank_places(plan, parts.read("supervisor.jsonl", history.supervisor, []))
        ranks = history.ranks
        slow = parts.read("stragglers", lambda: find_stragglers(history), [])
        parts.note(parts.read("events", history.damage, ()))
    ranks = ranks if mesh is None else mesh.ranks
    return {
        "name": series,
        "unit": mesh.unit if mesh else "",
        "missing": missing,
        "ranks": ranks,
        "places": [where.place(rank) for rank in ranks],
        "hosts": [where.host(rank) for rank in ranks],
        "step": mesh.step if mesh else (),
        "t": mesh.t if mesh else (),
        "values": mesh.values if mesh else [[] for _ in ranks],
        "stragglers": slow,
        "damage": parts.damage,
    }


def rank_view(store: RunStore, name: str, number_: int) -> Json:
    """Return one rank: its place, its peers, and its newest numbers. Raises NoRankError."""
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
    """Return the ranks that differ from this one on a single axis, by axis; axes of size 1 are left out.

    >>> rank_peers(5, {"tensor": 2, "data": 4}, 8)
    {'tensor': [4, 5], 'data': [1, 3, 5, 7]}
    """
    peers, stride = {}, 1
    for axis in AXES:
        size = max(1, integer(layout, axis) or 1)
        if size > 1:
            first = rank - rank // stride % size * stride
            members = range(first, first + size * stride, stride)
            peers[axis] = [member for member in members[:MOST_PEERS] if member < world]
        stride *= size
    return peers


def _latency_rows(event: Event) -> list[Json]:
    pairs = event.get("pairs")
    rows = []
    for pair in pairs if isinstance(pairs, list) else ():
        if isinstance(pair, dict) and (peer := integer(pair, "peer")) is not None:
            times = {key: number(pair, key) for key in ("p50_s", "p99_s")}
            counts = {key: integer(pair, key) for key in ("count", "lost")}
            rows.append({"peer": peer, "axis": text(pair, "axis"), **times, **counts})
    return rows


def _event_numbers(event: Event) -> Json:
    """Return the numbers and texts of an event; lists and tables are left out."""
    numbers: Json = {}
    for key in event:
        value = event[key]
        if isinstance(value, bool):
            numbers[key] = value
        elif isinstance(value, str):
            numbers[key] = text(event, key)
        elif isinstance(value, int | float):
            whole_number = integer(event, key)
            numbers[key] = number(event, key) if whole_number is None else whole_number
    return numbers


# ---- one step: the predicted timeline above the measured one ---------------------------------------------------------


MOST_SPANS = 4000
MOST_COLLECTIVES = 200


def step_view(store: RunStore, name: str, *, rank: int, step: int | None) -> Json:
    """Return a recorded timeline: of the requested step, of the nearest one to it, or of the newest."""
    parts, run = AnswerParts(), store.run(name)
    plan = parts.read("plan.json", run.plan, {})
    with store.history(name) as history:
        recorded_steps = parts.read("timelines", lambda: history.steps_with("timeline", rank), ())
        event = None
        if recorded_steps:
            nearest = (
                recorded_steps[-1] if step is None else min(recorded_steps, key=lambda candidate: abs(candidate - step))
            )
            event = parts.read("timeline", lambda: history.at_step("timeline", nearest, rank))
        parts.note(parts.read("events", history.damage, ()))
        # The layout of this step may differ from the newest one.
        if event is not None:
            plan = parts.read("plan.json", lambda: plan_at_step(run, history, integer(event, "step")), plan)
    guess = parts.read("prediction", lambda: predicted_spans(plan, rank), []) if plan else []
    return {
        "available": recorded_steps,
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
    return [{name: getattr(span, name) for name in names} for span in spans[:MOST_SPANS]]


def _collective_rows(event: Event | None) -> list[Json]:
    collectives: Any = (event or {}).get("collectives")
    rows = [row for row in collectives if isinstance(row, dict)] if isinstance(collectives, list) else []
    return [
        {"op": text(row, "op"), "group": text(row, "group"), "count": integer(row, "count")}
        | {name: number(row, name) for name in ("seconds", "bytes")}
        for row in rows[:MOST_COLLECTIVES]
    ]


# ---- the plan of a run: the chosen layout, its alternatives, and the reasons -----------------------------------------


# Parts of plan.json that are passed on unchanged. Not the job: it contains paths of the training machine.
PASSED = ("layout", "prediction", "memory", "mapping", "rank_order", "duration", "reliability", "bill", "search")
LISTED = ("alternatives", "pareto", "warnings")
MOST_REMARKS = 200


def plan_view(store: RunStore, name: str) -> Json:
    """Return layout, prediction, memory and alternatives of a run's plan."""
    parts, run = AnswerParts(), store.run(name)
    plan = parts.read("plan.json", run.plan, {})
    lists = {key: plan.get(key) if isinstance(plan.get(key), list) else [] for key in LISTED}
    return {
        "layout_name": text(launch_of(run), "layout") or short_layout(plan.get("layout")),
        "model": text(at(plan, "job", "model"), "name"),
        "cluster": {key: at(plan, "cluster").get(key) for key in ("name", "source", "domains", "domain_devices")},
        **{key: plan.get(key) for key in PASSED},
        "pareto": [_named_value(layout_entry) for layout_entry in lists["pareto"]],
        "alternatives": [_named_value(alternative) for alternative in lists["alternatives"]],
        "reasons": [
            *_search_lines(at(plan, "search")),
            *(warning for warning in lists["warnings"] if isinstance(warning, str)),
        ],
        "damage": parts.damage,
    }


def _search_lines(search: Mapping[str, Any]) -> list[str]:
    legal, fitting, seconds = (number(search, key) for key in ("legal", "fitting", "seconds"))
    if not legal or fitting is None:
        return []
    search_time = f", searched in {format_seconds(seconds)}" if seconds else ""
    return [f"the best of {legal:,.0f} valid layouts, of which {fitting:,.0f} fit into memory{search_time}"]


def _named_value(one: Any) -> Any:
    return {**one, "name": short_layout(one.get("layout"))} if isinstance(one, dict) else one


def short_layout(layout: Any) -> str:
    """Return a layout's short name; empty if it is not a valid layout."""
    try:
        return Layout(**layout).short
    except Exception:  # a plan of another version, or a damaged one
        return ""


def run_remarks(store: RunStore, name: str, parts: AnswerParts) -> list[Json]:
    """Return the warnings of a run's plan, and the hosts that were quarantined during the run."""
    run = store.run(name)
    warnings = parts.read("plan.json", run.plan, {}).get("warnings")
    with store.history(name) as history:
        shut_out = [
            event for event in parts.read("supervisor.jsonl", history.supervisor, []) if event["event"] == "quarantine"
        ]
    remarks = [
        _remark_view("plan", warning)
        for warning in (warnings if isinstance(warnings, list) else ())
        if isinstance(warning, str)
    ]
    remarks += [_remark_view("run", f"{text(event, 'host')}: {event.get('reason')}") for event in shut_out]
    return remarks[:MOST_REMARKS]


def _remark_view(source: str, rendered: str) -> Json:
    """Split a rendered problem into its first line, the problem itself, and hints: the reason and the fix."""
    problem, *hints = [printable(line) for line in rendered.splitlines() if line.strip()] or [""]
    return {"source": source, "level": "warning", "what": problem, "hints": [hint.strip() for hint in hints]}
