"""What several answers share: the plan's numbers, where ranks stand, how a run goes."""

from __future__ import annotations

from phalanx.io.values import at, integer, number, seconds, text
from phalanx.record.archive.history import Curve, RunHistory
from phalanx.record.run import Run, is_run_over
from phalanx.web.answer import Json

GOING = ("created", "launching", "running")
RECENT = 20  # steps behind the rate and the time that is left


def plan_of(run: Run) -> Json:
    """plan.json; empty when it is missing or damaged."""
    try:
        return run.plan()
    except Exception:  # whoever needs to say so reads it with Parts
        return {}


def launch_of(run: Run) -> Json:
    """launch.json; empty when it is missing or damaged."""
    try:
        return run.launch()
    except Exception:
        return {}


def state_of(run: Run) -> tuple[str, bool]:
    """What the run says of itself, and whether it really goes on."""
    state = text(run.status(), "state") or "unknown"
    return state, state in GOING and not is_run_over(run)


def total_steps(plan: Json, history: RunHistory) -> int:
    """Steps the run is to take; 0 when not known."""
    start = history.latest("run_start") or {}
    return integer(start, "steps") or integer(at(plan, "duration"), "steps") or 0


def progress(run: Run, plan: Json, history: RunHistory) -> Json:
    """Where a run stands after its newest step."""
    state, live = state_of(run)
    last, steps = history.last_step, total_steps(plan, history)
    recent = [] if last is None else list(history.steps(history.witness, max(0, last - RECENT + 1), last))
    timed = [(number(one, "tokens") or 0.0, spent) for one in recent if (spent := seconds(one, "duration_s"))]
    spent = sum(took for _, took in timed)
    done = 0 if last is None else last + 1
    return {
        "step": done,
        "steps": steps,
        "loss": number(recent[-1], "loss") if recent else None,
        "tokens_per_s": sum(tokens for tokens, _ in timed) / spent if spent else None,
        "left_s": max(0, steps - done) * spent / len(timed) if timed and steps and live else None,
        "t": number(recent[-1], "t") if recent else None,
        "state": state,
        "live": live,
    }


def curve_json(curve: Curve) -> Json:
    """A curve as the page draws it."""
    names = ("unit", "step", "t", "low", "high", "mean")
    return {name: getattr(curve, name) for name in names}


def tokens_per_step(plan: Json) -> float | None:
    """Of the whole global batch, as planned."""
    return number(at(plan, "job", "batch"), "global_tokens")
