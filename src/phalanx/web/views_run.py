"""One run: its summary, its curves, the marks on their time axis, and several runs beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

from phalanx.io.values import at, integer, number, printable, text
from phalanx.record.account.incidents import incident_text
from phalanx.record.account.summary import Summary, summarize_briefly
from phalanx.record.archive.history import Curve, RunHistory
from phalanx.record.archive.series import unit_of
from phalanx.record.events import Event
from phalanx.record.run import Run, read_json
from phalanx.units import format_bytes, format_seconds, plural
from phalanx.web.answer import Json, Parts
from phalanx.web.shelf import Shelf
from phalanx.web.story import soon
from phalanx.web.views import curve_json, launch_of, plan_of, progress, tokens_per_step

MOST_MARKS = 2000  # of a kind; the newest
PATIENCE_S = 1.0  # for the story of a run; without it, what is quickly known
MOST_RANKS = 256  # rows of the summary's table


def run(shelf: Shelf, name: str) -> Json:
    """Everything about a run that is one number or one line. `settled` is false while some are still worked out."""
    parts, found = Parts(), shelf.run(name)
    plan = parts.read("plan.json", found.plan, {})
    launch = parts.read("launch.json", found.launch, {})
    parts.read("status.json", partial(read_json, found.path / "status.json"))
    told = parts.read("summary", partial(soon, shelf, found, wait_s=PATIENCE_S))
    with shelf.history(name) as history:
        now = parts.read("steps", lambda: progress(found, plan, history), {})
        names = parts.read("series", lambda: [{"name": one, "unit": unit_of(one)} for one in history.names()], [])
        summary = told.summary if told else parts.read("summary", lambda: summarize_briefly(found, history))
        parts.note(parts.read("events", history.damage, ()))
        ranks = len(history.ranks)
    if told is not None and not now.get("live"):
        _count_torn(parts, told.summary)
    return {
        "name": name,
        "summary": replace(summary, run=name, ranks=summary.ranks[:MOST_RANKS]) if summary else None,
        "progress": now,
        "names": names,
        "ranks": ranks,
        "tokens_per_step": tokens_per_step(plan),
        "damage": parts.damage,
        "launched": number(launch, "started"),
        "live": bool(now.get("live")),
        "settled": told is not None or any(one["where"] == "summary" for one in parts.damage),
    }


def _count_torn(parts: Parts, summary: Summary) -> None:
    """A torn last line is damage only once nobody can complete it: the walk counts it, a history waits for its end."""
    count = summary.ledger.unreadable_lines if summary.ledger else 0
    if count and not any("line" in one["what"] for one in parts.damage):
        parts.add("events", "lines that are no events", count)


def curves(
    shelf: Shelf, name: str, *, names: Sequence[str], rank: int, first: int | None, last: int | None, points: int
) -> Json:
    """Some series of one rank; `missing` are those this run does not have."""
    parts = Parts()
    with shelf.history(name) as history:
        known = set(parts.read("series", history.names, ()))
        found = {
            one: parts.read(one, partial(_curve, history, one, rank=rank, first=first, last=last, points=points))
            for one in names
            if one in known
        }
        span = {"first_step": history.first_step, "last_step": history.last_step}
    drawn = {one: curve for one, curve in found.items() if curve is not None}
    missing = [one for one in names if one not in drawn]
    tokens = tokens_per_step(plan_of(shelf.run(name)))
    return {"curves": drawn, "missing": missing, "tokens_per_step": tokens, **span, "damage": parts.damage}


def _curve(history: RunHistory, name: str, *, rank: int, first: int | None, last: int | None, points: int) -> Json:
    return curve_json(history.curve(name, rank=rank, first=first, last=last, points=points))


def marks(shelf: Shelf, name: str) -> Json:
    """What happened between steps, with its place on the axes."""
    parts, found = Parts(), shelf.run(name)
    with shelf.history(name) as history:
        count = parts.read("marks", lambda: mark_count(history), 0)
        saved = parts.read("checkpoints", lambda: _checkpoints(history.events("checkpoint")), [])
        seen = parts.read("evaluations", lambda: [_evaluation(one) for one in history.events("evaluate")], [])
        supervisor = parts.read("supervisor.jsonl", history.supervisor, [])
        launches = parts.read("starts", lambda: history.events("run_start"), [])
        parts.note(parts.read("events", history.damage, ()))
    formed = [one for one in supervisor if one["event"] == "epoch"] or launches
    restored = {integer(one, "epoch"): integer(one, "step") for one in supervisor if one["event"] == "restore"}
    fallen = [one for one in supervisor if one["event"] == "incident"]
    rest = {
        "incidents": parts.read("incidents", lambda: _incidents(shelf, found, fallen), []) if fallen else [],
        "checkpoints": saved[-MOST_MARKS:],
        "evaluations": seen[-MOST_MARKS:],
        "epochs": parts.read("epochs", lambda: [_epoch(one, restored) for one in formed], [])[-MOST_MARKS:],
    }
    return {"count": count, **rest, "damage": parts.damage}


def mark_count(history: RunHistory) -> int:
    """Changes whenever `marks` does, without reading every event."""
    # A checkpoint counts once when it is taken, and once more when it is safe.
    rare = sum(len(history.steps_with(kind)) for kind in ("evaluate", "run_start", "checkpoint", "checkpoint"))
    newest = history.latest("checkpoint") or {}
    underway = bool(newest) and number(newest, "seconds") is None and not newest.get("error")
    return rare - underway + sum(one.get("event") in ("incident", "epoch") for one in history.supervisor())


def _incidents(shelf: Shelf, found: Run, fallen: Sequence[Event]) -> list[Json]:
    told = soon(shelf, found, wait_s=PATIENCE_S)
    after = {(one.t, one.rank): one for one in told.summary.incidents} if told else {}
    marked = []
    for event in fallen[-MOST_MARKS:]:
        one = after.get((number(event, "t") or 0.0, integer(event, "rank") or 0))
        what = {"rank": integer(event, "rank"), "host": text(event, "host")}
        came = {key: getattr(one, key, None) for key in ("world", "source", "restored_step", "recovery_s")}
        came["lost_steps"] = max(0, one.step - one.restored_step) if one and one.restored_step is not None else None
        marked.append({**_place(event), "text": printable(incident_text(event)), **what, **came})
    return marked


def _checkpoints(events: Sequence[Event]) -> list[Json]:
    """One mark per checkpoint: when it was safe, or taken where that is all that is known."""
    by_step: dict[int, Json] = {}
    for event in events:
        step = integer(event, "step")
        if step is not None:
            before = by_step.get(step, {"blocked_s": None})
            blocked_s = number(event, "blocked_s")
            by_step[step] = _checkpoint(event) | {"blocked_s": before["blocked_s"] if blocked_s is None else blocked_s}
    return list(by_step.values())


def _checkpoint(event: Event) -> Json:
    seconds, size = number(event, "seconds"), number(event, "bytes")
    error = text(event, "error")
    cost = [format_bytes(size)] if size else []
    cost += [format_seconds(seconds)] if seconds else []
    what = f"checkpoint NOT saved: {error}" if error else "checkpoint saved" if cost else "checkpoint taken"
    told = what + (f" ({', '.join(cost)})" if cost and not error else "")
    return {**_place(event), "text": told, "seconds": seconds, "bytes": size, "error": error or None}


def _evaluation(event: Event) -> Json:
    loss, bits = number(event, "loss"), number(event, "bits_per_byte")
    told = [f"loss {loss:.4f}"] if loss is not None else []
    told += [f"{bits:.3f} bits per byte"] if bits is not None else []
    return {**_place(event), "text": f"held-out {', '.join(told)}".strip(), "loss": loss, "bits_per_byte": bits}


def _epoch(event: Event, restored: Mapping[int | None, int | None]) -> Json:
    epoch, world, reason = integer(event, "epoch"), integer(event, "world"), text(event, "reason")
    told = f"epoch {epoch}: " if epoch is not None else ""
    told += plural(world, "rank") if world is not None else "ranks form"
    told += f" ({reason})" if reason else ""
    step = restored.get(epoch, integer(event, "step"))
    return {**_place(event), "step": step, "text": told, "epoch": epoch, "world": world, "layout": event.get("layout")}


def _place(event: Event) -> Json:
    return {"t": number(event, "t"), "step": integer(event, "step")}


def compare(shelf: Shelf, names: Sequence[str], *, name: str, points: int) -> Json:
    """One series of several runs, with the tokens each had seen."""
    parts = Parts()
    found = [parts.read(one, partial(_compared, shelf, one, name=name, points=points)) for one in names]
    runs = {one["run"]: one for one in found if one is not None}
    return {"name": name, "unit": unit_of(name), "runs": runs, "damage": parts.damage}


def _compared(shelf: Shelf, run_name: str, *, name: str, points: int) -> Json:
    run = shelf.run(run_name)
    with shelf.history(run_name) as history:
        missing = name not in history.names()
        drawn = None if missing else history.curve(name, points=points)
        tokens = history.curve("tokens", points=points) if drawn and "tokens" in history.names() else None
    started = number(launch_of(run), "started")
    model = text(at(plan_of(run), "job", "model"), "name")
    known = {"run": run_name, "model": model, "started": started, "missing": missing}
    return known if drawn is None else {**known, **curve_json(drawn), "tokens": _seen(tokens, drawn)}


def _seen(tokens: Curve | None, drawn: Curve) -> list[float | None]:
    """Tokens up to the end of each bucket: mean per step times the steps in it."""
    if tokens is None or tokens.step != drawn.step:
        return [None] * len(drawn.step)
    width = max((after - before for before, after in zip(tokens.step, tokens.step[1:], strict=False)), default=1)
    steps = [after - before for before, after in zip(tokens.step, tokens.step[1:], strict=False)] + [width]
    return list(accumulate((mean or 0.0) * count for mean, count in zip(tokens.mean, steps, strict=True)))
