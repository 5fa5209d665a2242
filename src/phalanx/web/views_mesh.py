"""The ranks: all of them over time, and one of them with its peers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any

from phalanx.io.values import at, integer, number, text
from phalanx.record.account.stragglers import AXES, places, stragglers
from phalanx.record.events import Event
from phalanx.web.answer import Json, Parts
from phalanx.web.shelf import Shelf

MOST_PEERS = 4096  # of an axis


class NoRankError(Exception):
    """The run has no such rank."""


def mesh(shelf: Shelf, name: str, *, series: str, columns: int, first: int | None, last: int | None) -> Json:
    """One series of every rank; a row per rank, a column per range of steps."""
    parts, run = Parts(), shelf.run(name)
    plan = parts.read("plan.json", run.plan, {})
    with shelf.history(name) as history:
        missing = series not in history.names()
        drawn = None if missing else history.mesh(series, columns=columns, first=first, last=last)
        where = places(plan, parts.read("supervisor.jsonl", history.supervisor, []))
        ranks = history.ranks
        slow = parts.read("stragglers", lambda: stragglers(history), [])
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


def rank(shelf: Shelf, name: str, number_: int) -> Json:
    """One rank: where it stands, who it talks to, and its newest numbers. Raises NoRankError."""
    parts, run = Parts(), shelf.run(name)
    plan = parts.read("plan.json", run.plan, {})
    with shelf.history(name) as history:
        sizes = [max(1, integer(at(plan, "layout"), axis) or 1) for axis in AXES]
        world = run.world() or len(history.ranks) or prod(sizes)
        if number_ not in history.ranks and number_ >= world:
            raise NoRankError(f"there is no rank {number_}: this run has {world}")
        events = {kind: parts.read(kind, partial(history.latest, kind, number_)) or {} for kind in _LATEST}
        where = places(plan, parts.read("supervisor.jsonl", history.supervisor, []))
    return {
        "rank": number_,
        "place": where.place(number_),
        "host": where.host(number_),
        "peers": parts.read("peers", lambda: peers(number_, where.layout, world), {}),
        "latency": _latency(events["peers"]),
        "latest": _numbers(events["step"]),
        "monitor": _numbers(events["monitor"]),
        "damage": parts.damage,
    }


_LATEST = ("step", "monitor", "peers")


def peers(rank: int, layout: Mapping[str, Any], world: int) -> dict[str, list[int]]:
    """Ranks that differ from this one on a single axis, by axis; axes of one are left out.

    >>> peers(5, {"tensor": 2, "data": 4}, 8)
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


def _latency(event: Event) -> list[Json]:
    pairs = event.get("pairs")
    found = []
    for one in pairs if isinstance(pairs, list) else ():
        if isinstance(one, dict) and (peer := integer(one, "peer")) is not None:
            times = {key: number(one, key) for key in ("p50_s", "p99_s")}
            counts = {key: integer(one, key) for key in ("count", "lost")}
            found.append({"peer": peer, "axis": text(one, "axis"), **times, **counts})
    return found


def _numbers(event: Event) -> Json:
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
