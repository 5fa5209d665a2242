"""All data of a run that a report shows, read once."""

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
# Per curve: more than a plot 640 pixels wide can show.
POINTS = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedCheckpoint:
    """The size and times of one checkpoint."""

    step: int
    t: float
    blocked_s: float | None
    seconds: float | None
    size_bytes: float | None
    error: str
    # True if the size is of all ranks; in runs before 0.7 it is rank 0's part.
    is_whole: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """The data of a report."""

    summary: Summary
    curves: dict[str, Curve]
    evaluations: tuple[tuple[int, float], ...]  # step, loss
    saved: tuple[ReportedCheckpoint, ...]
    marks: tuple[PlotMark, ...]  # on the axis of steps
    effective: Effective
    scores: StragglerScores
    memory_limit_bytes: float | None
    reasons: tuple[str, ...]  # warnings of the plan


def read_run_report(run: Run, *, points: int = POINTS) -> RunReport:
    """Read the report's data from a run folder, in whatever state the run is."""
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
    """Set the state to "interrupted" if the run's status is running but no process holds its lock."""
    if summary.state not in ("running", "launching") or run.is_held:
        return summary
    return replace(
        summary,
        state="interrupted",
        message="its processes ended without an error message; phalanx train --resume continues the run",
    )


def _plan_warnings(run: Run) -> tuple[str, ...]:
    try:
        warnings = run.plan().get("warnings")
    except PhalanxError:
        return ()
    return (
        tuple(printable(warning) for warning in warnings if isinstance(warning, str))[:20]
        if isinstance(warnings, list)
        else ()
    )


def _evaluation_points(history: RunHistory) -> tuple[tuple[int, float], ...]:
    points = []
    for event in history.events("evaluate"):
        step, loss = integer(event, "step"), number(event, "loss")
        if step is not None and loss is not None:
            points.append((step, loss))
    return tuple(points)


def saved_checkpoints(history: RunHistory) -> tuple[ReportedCheckpoint, ...]:
    """Return the checkpoints of a run; taking one and committing it are two events of one step."""
    checkpoints: dict[int, ReportedCheckpoint] = {}
    for event in history.events("checkpoint"):
        step = integer(event, "step")
        if step is None:
            continue
        before = checkpoints.get(step)
        checkpoints[step] = ReportedCheckpoint(
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
    return tuple(checkpoints.values())


def _newer_value(value: float | None, before: float | None) -> float | None:
    return before if value is None else value


def timeline_marks(history: RunHistory) -> tuple[PlotMark, ...]:
    """Return marks for incidents and checkpoints, by step."""
    marks = []
    for event in history.supervisor():
        if event["event"] == "incident":
            step = integer(event, "step") or 0
            marks.append(PlotMark(x=step, kind="incident", text=f"step {step:,}: {incident_text(event)}"))
    for checkpoint in saved_checkpoints(history):
        outcome = f"NOT saved: {checkpoint.error}" if checkpoint.error else _duration_text(checkpoint)
        marks.append(
            PlotMark(x=checkpoint.step, kind="checkpoint", text=f"checkpoint of step {checkpoint.step:,}{outcome}")
        )
    return tuple(marks)


def _duration_text(one: ReportedCheckpoint) -> str:
    parts = [format_bytes(one.size_bytes)] if one.size_bytes else []
    parts += [f"training waited {format_seconds(one.blocked_s)}"] if one.blocked_s is not None else []
    return f": {', '.join(parts)}" if parts else ""
