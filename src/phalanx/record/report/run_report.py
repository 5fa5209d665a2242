"""Everything a report shows of a run, read once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx.errors import PhalanxError
from phalanx.io.svg import PlotMark
from phalanx.io.values import integer, number, printable
from phalanx.record.account.incidents import incident_text
from phalanx.record.account.ledger import walk_ledger
from phalanx.record.account.stragglers import StragglerScores, straggler_scores
from phalanx.record.account.summary import Summary, summarize_run
from phalanx.record.account.time_accounts import Effective, from_trail
from phalanx.record.archive.history import Curve, RunHistory
from phalanx.record.run import Run
from phalanx.units import format_bytes, format_seconds

CURVES = (
    "loss", "tokens_per_s", "mfu", "grad_norm", "noise_scale", "memory_bytes", "memory_used_bytes", "lr", "utilization",
    "power_w", "duration_s", "data_s", "wait_s", "compute_s",
)  # fmt: skip
POINTS = 400  # per curve: more than a plot of 640 pixels can tell apart


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedCheckpoint:
    """One checkpoint."""

    step: int
    t: float
    blocked_s: float | None
    seconds: float | None
    size_bytes: float | None
    error: str
    is_whole: bool = False  # whether the size is of all ranks; of runs before 0.7 it is rank 0's part


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """A run as a report tells it."""

    summary: Summary
    curves: dict[str, Curve]
    evaluations: tuple[tuple[int, float], ...]  # step, loss
    saved: tuple[ReportedCheckpoint, ...]
    marks: tuple[PlotMark, ...]  # on the axis of steps
    effective: Effective
    scores: StragglerScores
    memory_limit_bytes: float | None
    reasons: tuple[str, ...]  # of the plan: what it warned of


def read_run_report(run: Run, *, points: int = POINTS) -> RunReport:
    """Read a run folder, in whatever state it is."""
    history = RunHistory.open(run)
    walked = walk_ledger(run, history)
    names = set(history.names())
    return RunReport(
        summary=with_lost_processes(run, summarize_run(run, history, walked)),
        curves={name: history.curve(name, points=points) for name in CURVES if name in names},
        evaluations=_evaluation_points(history),
        saved=saved_checkpoints(history),
        marks=timeline_marks(history),
        effective=from_trail(walked.trail, points),
        scores=straggler_scores(history),
        memory_limit_bytes=number(history.latest("monitor") or {}, "memory_limit_bytes"),
        reasons=_plan_warnings(run),
    )


def with_lost_processes(run: Run, summary: Summary) -> Summary:
    """A run that says it goes on while nobody holds it has lost its processes."""
    if summary.state not in ("running", "launching") or run.is_held:
        return summary
    return replace(
        summary,
        state="interrupted",
        message="its processes ended without an error message; phalanx train --resume continues the run",
    )


def _plan_warnings(run: Run) -> tuple[str, ...]:
    try:
        given = run.plan().get("warnings")
    except PhalanxError:
        return ()
    return tuple(printable(one) for one in given if isinstance(one, str))[:20] if isinstance(given, list) else ()


def _evaluation_points(history: RunHistory) -> tuple[tuple[int, float], ...]:
    found = []
    for event in history.events("evaluate"):
        step, loss = integer(event, "step"), number(event, "loss")
        if step is not None and loss is not None:
            found.append((step, loss))
    return tuple(found)


def saved_checkpoints(history: RunHistory) -> tuple[ReportedCheckpoint, ...]:
    """The checkpoints of a run; taking one and committing it are two events of one step."""
    found: dict[int, ReportedCheckpoint] = {}
    for event in history.events("checkpoint"):
        step = integer(event, "step")
        if step is None:
            continue
        before = found.get(step)
        found[step] = ReportedCheckpoint(
            step=step,
            t=number(event, "t") or 0.0,
            blocked_s=_newer_value(number(event, "blocked_s"), before.blocked_s if before else None),
            seconds=_newer_value(number(event, "seconds"), before.seconds if before else None),
            size_bytes=_newer_value(
                number(event, "total_bytes") or number(event, "bytes"), before.size_bytes if before else None
            ),
            is_whole=number(event, "total_bytes") is not None or (before is not None and before.is_whole),
            error=printable(event["error"]) if event.get("error") else "",
        )
    return tuple(found.values())


def _newer_value(value: float | None, before: float | None) -> float | None:
    return before if value is None else value


def timeline_marks(history: RunHistory) -> tuple[PlotMark, ...]:
    """Incidents and checkpoints, by step."""
    found = []
    for event in history.supervisor():
        if event["event"] == "incident":
            step = integer(event, "step") or 0
            found.append(PlotMark(x=step, kind="incident", text=f"step {step:,}: {incident_text(event)}"))
    for one in saved_checkpoints(history):
        what = f"NOT saved: {one.error}" if one.error else _duration_text(one)
        found.append(PlotMark(x=one.step, kind="checkpoint", text=f"checkpoint of step {one.step:,}{what}"))
    return tuple(found)


def _duration_text(one: ReportedCheckpoint) -> str:
    parts = [format_bytes(one.size_bytes)] if one.size_bytes else []
    parts += [f"training waited {format_seconds(one.blocked_s)}"] if one.blocked_s is not None else []
    return f": {', '.join(parts)}" if parts else ""
