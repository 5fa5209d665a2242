"""The plan of a run: what was chosen, what was not, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.io.values import at, number, printable, text
from phalanx.plan.layout import Layout
from phalanx.units import format_seconds
from phalanx.web.answer import Json, Parts
from phalanx.web.shelf import Shelf
from phalanx.web.views import launch_of

# Parts of plan.json as they are. Not the job: it holds paths of the machine that trains.
PASSED = ("layout", "prediction", "memory", "mapping", "rank_order", "duration", "reliability", "bill", "search")
LISTED = ("alternatives", "pareto", "warnings")
MOST_REMARKS = 200


def plan(shelf: Shelf, name: str) -> Json:
    """Layout, prediction, memory and the alternatives."""
    parts, run = Parts(), shelf.run(name)
    found = parts.read("plan.json", run.plan, {})
    lists = {key: found.get(key) if isinstance(found.get(key), list) else [] for key in LISTED}
    return {
        "layout_name": text(launch_of(run), "layout") or short(found.get("layout")),
        "model": text(at(found, "job", "model"), "name"),
        "cluster": {key: at(found, "cluster").get(key) for key in ("name", "source", "domains", "domain_devices")},
        **{key: found.get(key) for key in PASSED},
        "pareto": [_named(one) for one in lists["pareto"]],
        "alternatives": [_named(one) for one in lists["alternatives"]],
        "reasons": [*_searched(at(found, "search")), *(one for one in lists["warnings"] if isinstance(one, str))],
        "damage": parts.damage,
    }


def _searched(search: Mapping[str, Any]) -> list[str]:
    legal, fitting, seconds = (number(search, key) for key in ("legal", "fitting", "seconds"))
    if not legal or fitting is None:
        return []
    spent = f", searched in {format_seconds(seconds)}" if seconds else ""
    return [f"the best of {legal:,.0f} legal layouts, of which {fitting:,.0f} fit into memory{spent}"]


def _named(one: Any) -> Any:
    return {**one, "name": short(one.get("layout"))} if isinstance(one, dict) else one


def short(layout: Any) -> str:
    """A layout in a few letters; empty when it is none."""
    try:
        return Layout(**layout).short
    except Exception:  # a plan of another version, or a damaged one
        return ""


def remarks(shelf: Shelf, name: str, parts: Parts) -> list[Json]:
    """The warnings of a run's plan, and the places that were shut out while it went on."""
    run = shelf.run(name)
    warnings = parts.read("plan.json", run.plan, {}).get("warnings")
    with shelf.history(name) as history:
        shut_out = [
            one for one in parts.read("supervisor.jsonl", history.supervisor, []) if one["event"] == "quarantine"
        ]
    found = [_remark("plan", one) for one in (warnings if isinstance(warnings, list) else ()) if isinstance(one, str)]
    found += [_remark("run", f"{text(one, 'host')}: {one.get('reason')}") for one in shut_out]
    return found[:MOST_REMARKS]


def _remark(source: str, rendered: str) -> Json:
    """A problem as it was written: what is wrong in its first line, then why and what to do."""
    what, *hints = [printable(line) for line in rendered.splitlines() if line.strip()] or [""]
    return {"source": source, "level": "warning", "what": what, "hints": [hint.strip() for hint in hints]}
