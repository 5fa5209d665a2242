"""The list of runs: a row each, cheap enough for hundreds of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from phalanx.io.values import at, integer, number, text
from phalanx.record.account.memberships import measured_mfu
from phalanx.record.run import Run, last_written
from phalanx.web.answer import Json, Parts
from phalanx.web.memo import NotYetError
from phalanx.web.shelf import Shelf, mark
from phalanx.web.story import story
from phalanx.web.views import launch_of, progress, state_of

# Seconds a list may take to work out what it does not know yet; the rest is null until the next time.
PATIENCE_S = 2.0
WHAT = ("model", "job", "cluster", "layout", "world", "started")
WHERE = ("step", "steps", "loss", "tokens_per_s", "mfu", "incidents", "damage")
EMPTY = dict.fromkeys((*WHAT, *WHERE, "effective", "usd"))


def runs(shelf: Shelf) -> Json:
    """Every run under the root. `settled` is false while some numbers are still being worked out."""
    until_s = time.monotonic() + PATIENCE_S
    found = shelf.runs()
    # Where all of them stand before what any of them cost: that takes longer, and is less waited for.
    passes = [[_soon(run, partial(work, shelf), until_s) for run in found] for work in (_now, _spent)]
    rows = [_row(run, now, spent) for run, now, spent in zip(found, *passes, strict=True)]
    return {"root": shelf.title, "runs": rows, "settled": None not in (*passes[0], *passes[1])}


def _row(run: Run, now: Json | None, spent: Json | None) -> Json:
    state, live = state_of(run)
    fresh = {"name": run.name, "state": state, "live": live, "updated": last_written(run) or None}
    return fresh | EMPTY | (now or {}) | (spent or {})


def _soon(run: Run, work: Callable[[Run, float], Json], until_s: float) -> Json | None:
    """What `work` finds, or None when that takes too long."""
    try:
        return work(run, max(0.0, until_s - time.monotonic()))
    except NotYetError:
        return None
    except Exception:  # one run that cannot be read, or that goes away meanwhile, must not hide the others
        return {"damage": 1}


def _now(shelf: Shelf, run: Run, wait_s: float) -> Json:
    over = not state_of(run)[1]
    found: Json = shelf.memo.get(("row", run.name), mark(run), lambda: _stand(shelf, run), wait_s=wait_s, now=over)
    return found


def _spent(shelf: Shelf, run: Run, wait_s: float) -> Json:
    """Dollars, the share of the time that was of use, and of a run that is over its mean rates."""
    told = story(shelf, run, wait_s=wait_s).summary
    means = {"tokens_per_s": told.tokens_per_s.measured, "mfu": told.mfu.measured}
    spent = {"effective": told.effective_time.measured, "usd": told.cost.usd if told.cost else None}
    return spent if state_of(run)[1] else spent | means


def _stand(shelf: Shelf, run: Run) -> Json:
    """What the run is, and where it stands."""
    parts, going = Parts(), state_of(run)[1]
    plan, launch = parts.read("plan.json", run.plan, {}), launch_of(run)
    with shelf.history(run.name) as history:
        now = parts.read("steps", lambda: progress(run, plan, history), {})
        supervisor = parts.read("supervisor.jsonl", history.supervisor, [])
        parts.read("events", history.look, None)
        parts.note(parts.read("events", history.damage, ()))
    return {
        "model": text(at(plan, "job", "model"), "name"),
        "job": text(at(plan, "job"), "name"),
        "cluster": text(at(plan, "cluster"), "name"),
        "layout": text(launch, "layout"),
        "world": run.world(),
        "started": min((*run.launches(), *filter(None, [number(launch, "started")])), default=None),
        "step": now.get("step"),
        "steps": now.get("steps") or integer(at(plan, "duration"), "steps"),
        "loss": now.get("loss"),
        # As it goes now; once it is over, `_spent` tells what it came to.
        "tokens_per_s": now.get("tokens_per_s") if going else None,
        "mfu": measured_mfu(plan, now.get("tokens_per_s") or None) if going else None,
        "incidents": sum(one.get("event") == "incident" for one in supervisor),
        "damage": len(parts.damage),
    }
