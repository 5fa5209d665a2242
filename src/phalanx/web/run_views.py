"""The views of runs: the list of runs, one run with curves and marks, comparisons, ledger and cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import accumulate
from typing import Any

from phalanx.io.values import at, integer, number, printable, seconds, text
from phalanx.record.account.cost import Amount
from phalanx.record.account.incidents import incident_text
from phalanx.record.account.memberships import measured_mfu
from phalanx.record.account.summary import summarize_briefly
from phalanx.record.account.time_accounts import ACCOUNT_LABELS
from phalanx.record.archive.history import Curve, RunHistory
from phalanx.record.archive.series import unit_of
from phalanx.record.events import Event
from phalanx.record.report.live import checkpoint_cost
from phalanx.record.run import Run
from phalanx.record.run_files import read_json
from phalanx.record.run_lock import last_written
from phalanx.units import plural
from phalanx.web.answer import AnswerParts, Json
from phalanx.web.run_store import NotYetError, RunAccount, RunStore, account_soon, run_account, run_stamp, state_of

RECENT = 20  # steps behind the rate and the remaining time


def plan_of(run: Run) -> Json:
    """Return plan.json; empty if it is missing or damaged."""
    try:
        return run.plan()
    except Exception:
        # Views that must report the error read the plan with AnswerParts.
        return {}


def launch_of(run: Run) -> Json:
    """Return launch.json; empty if it is missing or damaged."""
    try:
        return run.launch()
    except Exception:
        return {}


def total_steps(plan: Json, history: RunHistory) -> int:
    """Return the number of steps that the run is to take; 0 if unknown."""
    start = history.latest("run_start") or {}
    return integer(start, "steps") or integer(at(plan, "duration"), "steps") or 0


def run_progress(run: Run, plan: Json, history: RunHistory) -> Json:
    """Return the state of a run after its newest step."""
    state, live = state_of(run)
    last, steps = history.last_step, total_steps(plan, history)
    recent = [] if last is None else list(history.steps(history.witness, max(0, last - RECENT + 1), last))
    timed = [(number(event, "tokens") or 0.0, spent_s) for event in recent if (spent_s := seconds(event, "duration_s"))]
    spent_s = sum(took for _, took in timed)
    done = 0 if last is None else last + 1
    return {
        "step": done,
        "steps": steps,
        "loss": number(recent[-1], "loss") if recent else None,
        "tokens_per_s": sum(tokens for tokens, _ in timed) / spent_s if spent_s else None,
        "left_s": max(0, steps - done) * spent_s / len(timed) if timed and steps and live else None,
        "t": number(recent[-1], "t") if recent else None,
        "state": state,
        "live": live,
    }


def curve_json(curve: Curve) -> Json:
    """Return a curve in the form that the page draws."""
    names = ("unit", "step", "t", "low", "high", "mean")
    return {name: getattr(curve, name) for name in names}


def has_peers(plan: Json) -> bool:
    """Return True if the run's job trains with peers; a job without [sync] has no such table."""
    return text(at(plan, "job", "sync"), "mode") not in ("", "every-step", None)


def tokens_per_step(plan: Json) -> float | None:
    """Return the planned tokens of the global batch."""
    return number(at(plan, "job", "batch"), "global_tokens")


# ---- the list of runs: one row each, cheap enough for hundreds of runs -----------------------------------------------


# Seconds that a list may compute what is not cached yet; the rest is null until the next request.
LIST_PATIENCE_S = 2.0
WHAT = ("model", "job", "cluster", "layout", "world", "started")
WHERE = ("step", "steps", "loss", "tokens_per_s", "mfu", "incidents", "damage")
EMPTY = dict.fromkeys((*WHAT, *WHERE, "effective", "usd"))


def runs_view(store: RunStore) -> Json:
    """Return every run under the root. `settled` is false while some numbers are still being computed."""
    until_s = time.monotonic() + LIST_PATIENCE_S
    runs = store.runs()
    # The state of all runs before the cost of any: the cost takes longer, and is less urgent.
    passes = [[_within_time(run, partial(work, store), until_s) for run in runs] for work in (_run_now, _run_spent)]
    rows = [_run_row(run, now, spent) for run, now, spent in zip(runs, *passes, strict=True)]
    return {"root": store.title, "runs": rows, "settled": None not in (*passes[0], *passes[1])}


def _run_row(run: Run, now: Json | None, spent: Json | None) -> Json:
    state, live = state_of(run)
    fresh = {"name": run.name, "state": state, "live": live, "updated": last_written(run) or None}
    return fresh | EMPTY | (now or {}) | (spent or {})


def _within_time(run: Run, work: Callable[[Run, float], Json], until_s: float) -> Json | None:
    """Return the result of `work`, or None if it takes too long."""
    try:
        return work(run, max(0.0, until_s - time.monotonic()))
    except NotYetError:
        return None
    except Exception:
        # One run that is unreadable or deleted meanwhile must not hide the others.
        return {"damage": 1}


def _run_now(store: RunStore, run: Run, wait_s: float) -> Json:
    over = not state_of(run)[1]
    row: Json = store.memo.get(
        ("row", run.name), run_stamp(run), lambda: _run_standing(store, run), wait_s=wait_s, now=over
    )
    return row


def _run_spent(store: RunStore, run: Run, wait_s: float) -> Json:
    """Return US dollars, the effective share of the time, and the mean rates of a run that is over."""
    summary = run_account(store, run, wait_s=wait_s).summary
    means = {"tokens_per_s": summary.tokens_per_s.measured, "mfu": summary.mfu.measured}
    spent = {"effective": summary.effective_time.measured, "usd": summary.cost.usd if summary.cost else None}
    return spent if state_of(run)[1] else spent | means


def _run_standing(store: RunStore, run: Run) -> Json:
    """Return the description and the present state of a run."""
    parts, going = AnswerParts(), state_of(run)[1]
    plan, launch = parts.read("plan.json", run.plan, {}), launch_of(run)
    with store.history(run.name) as history:
        now = parts.read("steps", lambda: run_progress(run, plan, history), {})
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
        # The present rate; once the run is over, `_run_spent` returns the mean.
        "tokens_per_s": now.get("tokens_per_s") if going else None,
        "mfu": measured_mfu(plan, now.get("tokens_per_s") or None) if going else None,
        "incidents": sum(event.get("event") == "incident" for event in supervisor),
        "damage": len(parts.damage),
    }


# ---- one run: summary, curves, marks on their time axis; comparison of several ---------------------------------------


MOST_MARKS = 2000  # of each kind; the newest
# For the account of a run; without it, only values that are quick to compute.
PATIENCE_S = 1.0
MOST_RANKS = 256  # rows of the summary's table


def run_view(store: RunStore, name: str) -> Json:
    """Return the summary of a run: all single numbers and texts. `settled` is false while some are being computed."""
    parts, run = AnswerParts(), store.run(name)
    plan = parts.read("plan.json", run.plan, {})
    launch = parts.read("launch.json", run.launch, {})
    parts.read("status.json", partial(read_json, run.path / "status.json"))
    account = parts.read("summary", partial(account_soon, store, run, wait_s=PATIENCE_S))
    with store.history(name) as history:
        now = parts.read("steps", lambda: run_progress(run, plan, history), {})
        names = parts.read(
            "series", lambda: [{"name": series, "unit": unit_of(series)} for series in history.names()], []
        )
        summary = account.summary if account else parts.read("summary", lambda: summarize_briefly(run, history))
        parts.note(parts.read("events", history.damage, ()))
        ranks = len(history.ranks)
    if account is not None and not now.get("live"):
        # A torn last line is damage only if no process can complete it: the ledger's walk counts it, the history
        # waits.
        count = account.summary.ledger.unreadable_lines if account.summary.ledger else 0
        if count and not any("line" in problem["what"] for problem in parts.damage):
            parts.add("events", "lines that are no events", count)
    return {
        "name": name,
        "summary": replace(summary, run=name, ranks=summary.ranks[:MOST_RANKS]) if summary else None,
        "progress": now,
        "names": names,
        "ranks": ranks,
        "tokens_per_step": tokens_per_step(plan),
        "has_peers": has_peers(plan),
        "damage": parts.damage,
        "launched": number(launch, "started"),
        "live": bool(now.get("live")),
        "settled": account is not None or any(problem["where"] == "summary" for problem in parts.damage),
    }


def curves_view(
    store: RunStore, name: str, *, names: Sequence[str], rank: int, first: int | None, last: int | None, points: int
) -> Json:
    """Return some series of one rank; `missing` are those that the run does not have."""
    parts = AnswerParts()
    with store.history(name) as history:
        series_names = set(parts.read("series", history.names, ()))
        curves = {
            series: parts.read(
                series, partial(_curve_view, history, series, rank=rank, first=first, last=last, points=points)
            )
            for series in names
            if series in series_names
        }
        span = {"first_step": history.first_step, "last_step": history.last_step}
    known_curves = {series: curve for series, curve in curves.items() if curve is not None}
    missing = [series for series in names if series not in known_curves]
    tokens = tokens_per_step(plan_of(store.run(name)))
    return {"curves": known_curves, "missing": missing, "tokens_per_step": tokens, **span, "damage": parts.damage}


def _curve_view(history: RunHistory, name: str, *, rank: int, first: int | None, last: int | None, points: int) -> Json:
    return curve_json(history.curve(name, rank=rank, first=first, last=last, points=points))


def marks_view(store: RunStore, name: str) -> Json:
    """Return the events between steps, with their positions on the axes."""
    parts, run = AnswerParts(), store.run(name)
    with store.history(name) as history:
        count = parts.read("marks", lambda: mark_count(history), 0)
        saved = parts.read("checkpoints", lambda: _checkpoint_marks(history.events("checkpoint")), [])
        evaluations = parts.read(
            "evaluations", lambda: [_evaluation_mark(event) for event in history.events("evaluate")], []
        )
        supervisor = parts.read("supervisor.jsonl", history.supervisor, [])
        launches = parts.read("starts", lambda: history.events("run_start"), [])
        parts.note(parts.read("events", history.damage, ()))
    memberships = [event for event in supervisor if event["event"] == "epoch"] or launches
    restored = {integer(event, "epoch"): integer(event, "step") for event in supervisor if event["event"] == "restore"}
    incidents = [event for event in supervisor if event["event"] == "incident"]
    marks = {
        "incidents": parts.read("incidents", lambda: _incident_marks(store, run, incidents), []) if incidents else [],
        "checkpoints": saved[-MOST_MARKS:],
        "evaluations": evaluations[-MOST_MARKS:],
        "epochs": parts.read("epochs", lambda: [_generation_mark(event, restored) for event in memberships], [])[
            -MOST_MARKS:
        ],
    }
    return {"count": count, **marks, "damage": parts.damage}


def mark_count(history: RunHistory) -> int:
    """Return a number that changes whenever `marks_view` does, without reading every event."""
    # A checkpoint counts once when it is taken, and once more when it is safely stored.
    rare = sum(len(history.steps_with(kind)) for kind in ("evaluate", "run_start", "checkpoint", "checkpoint"))
    newest = history.latest("checkpoint") or {}
    underway = bool(newest) and number(newest, "seconds") is None and not newest.get("error")
    return rare - underway + sum(event.get("event") in ("incident", "epoch") for event in history.supervisor())


def _incident_marks(store: RunStore, found: Run, fallen: Sequence[Event]) -> list[Json]:
    account = account_soon(store, found, wait_s=PATIENCE_S)
    after = {(incident.t, incident.rank): incident for incident in account.summary.incidents} if account else {}
    marked = []
    for event in fallen[-MOST_MARKS:]:
        incident = after.get((number(event, "t") or 0.0, integer(event, "rank") or 0))
        place = {"rank": integer(event, "rank"), "host": text(event, "host")}
        recovery = {key: getattr(incident, key, None) for key in ("world", "source", "restored_step", "recovery_s")}
        recovery["lost_steps"] = (
            max(0, incident.step - incident.restored_step) if incident and incident.restored_step is not None else None
        )
        marked.append({**_event_place(event), "text": printable(incident_text(event)), **place, **recovery})
    return marked


def _checkpoint_marks(events: Sequence[Event]) -> list[Json]:
    """Return one mark per checkpoint: when it was safe, or when it was taken if no more is known."""
    by_step: dict[int, Json] = {}
    for event in events:
        step = integer(event, "step")
        if step is not None:
            before = by_step.get(step, {"blocked_s": None})
            blocked_s = number(event, "blocked_s")
            by_step[step] = _checkpoint_mark(event) | {
                "blocked_s": before["blocked_s"] if blocked_s is None else blocked_s
            }
    return list(by_step.values())


def _checkpoint_mark(event: Event) -> Json:
    seconds, size = number(event, "seconds"), number(event, "bytes")
    error, cost = text(event, "error"), checkpoint_cost(event)
    outcome = f"checkpoint NOT saved: {error}" if error else "checkpoint saved" if cost else "checkpoint taken"
    words = outcome + (f" ({cost})" if cost and not error else "")
    return {**_event_place(event), "text": words, "seconds": seconds, "bytes": size, "error": error or None}


def _evaluation_mark(event: Event) -> Json:
    loss, bits = number(event, "loss"), number(event, "bits_per_byte")
    words = [f"loss {loss:.4f}"] if loss is not None else []
    words += [f"{bits:.3f} bits per byte"] if bits is not None else []
    return {**_event_place(event), "text": f"held-out {', '.join(words)}".strip(), "loss": loss, "bits_per_byte": bits}


def _generation_mark(event: Event, restored: Mapping[int | None, int | None]) -> Json:
    generation, world, reason = integer(event, "epoch"), integer(event, "world"), text(event, "reason")
    words = f"generation {generation}: " if generation is not None else ""
    words += plural(world, "rank") if world is not None else "ranks join"
    words += f" ({reason})" if reason else ""
    step = restored.get(generation, integer(event, "step"))
    return {
        **_event_place(event),
        "step": step,
        "text": words,
        "epoch": generation,
        "world": world,
        "layout": event.get("layout"),
    }


def _event_place(event: Event) -> Json:
    return {"t": number(event, "t"), "step": integer(event, "step")}


def compare_view(store: RunStore, names: Sequence[str], *, name: str, points: int) -> Json:
    """Return one series of several runs, with the tokens that each had processed."""
    parts = AnswerParts()
    compared = [
        parts.read(run_name, partial(_compared_run, store, run_name, name=name, points=points)) for run_name in names
    ]
    runs = {row["run"]: row for row in compared if row is not None}
    return {"name": name, "unit": unit_of(name), "runs": runs, "damage": parts.damage}


def _compared_run(store: RunStore, run_name: str, *, name: str, points: int) -> Json:
    run = store.run(run_name)
    with store.history(run_name) as history:
        missing = name not in history.names()
        curve = None if missing else history.curve(name, points=points)
        tokens = history.curve("tokens", points=points) if curve and "tokens" in history.names() else None
    started = number(launch_of(run), "started")
    model = text(at(plan_of(run), "job", "model"), "name")
    run_facts = {"run": run_name, "model": model, "started": started, "missing": missing}
    return run_facts if curve is None else {**run_facts, **curve_json(curve), "tokens": _tokens_seen(tokens, curve)}


def _tokens_seen(tokens: Curve | None, drawn: Curve) -> list[float | None]:
    """Return the tokens up to the end of each bucket: the mean per step times the number of its steps."""
    if tokens is None or tokens.step != drawn.step:
        return [None] * len(drawn.step)
    width = max((after - before for before, after in zip(tokens.step, tokens.step[1:], strict=False)), default=1)
    steps = [after - before for before, after in zip(tokens.step, tokens.step[1:], strict=False)] + [width]
    return list(accumulate((mean or 0.0) * count for mean, count in zip(tokens.mean, steps, strict=True)))


# ---- time and cost ---------------------------------------------------------------------------------------------------


NO_CURVE: Mapping[str, Any] = {"t": (), "cumulative": (), "last_hour": (), "window_s": None}
NO_LEDGER: Mapping[str, Any] = {"wall_s": None, "accounts": {}, "closes": None, "gap": "", "overlap_s": None}
NO_BILL: Mapping[str, Any] = {"so_far": Amount(), "projected": Amount(), "predicted": Amount(), "sources": {}}


# A walk over 100,000 steps takes about 4 s of one core; for a longer run the page asks again.
LEDGER_PATIENCE_S = 15.0


def ledger_view(store: RunStore, name: str) -> Json:
    """Return every second of the run by account, with labels, and the effective training time over the run."""
    parts, run = AnswerParts(), store.run(name)
    account = parts.read("ledger", lambda: account_soon(store, run, wait_s=LEDGER_PATIENCE_S))
    ledger = account.summary.ledger.to_json() if account and account.summary.ledger else dict(NO_LEDGER)
    share = ledger.pop("effective", None)
    curve = {key: getattr(account.effective, key) for key in NO_CURVE} if account else NO_CURVE
    answer = {**ledger, "labels": ACCOUNT_LABELS, "effective_share": share, "effective": curve}
    return {**answer, **_settled_state(parts, account)}


def cost_view(store: RunStore, name: str) -> Json:
    """Return US dollars, energy and carbon, so far and projected, with the source of each number."""
    parts, run = AnswerParts(), store.run(name)
    account = parts.read("cost", lambda: account_soon(store, run, wait_s=LEDGER_PATIENCE_S))
    bill = account.summary.cost if account else None
    amounts = {field.name: getattr(bill, field.name) for field in fields(bill)} if bill else {}
    return {**NO_BILL, **amounts, **_settled_state(parts, account)}


def _settled_state(parts: AnswerParts, account: RunAccount | None) -> Json:
    return {"settled": account is not None or bool(parts.damage), "damage": parts.damage}
