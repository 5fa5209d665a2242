"""Calibration of the cost model from measured steps, in a table or a run folder; and the calibration file."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phalanx.errors import mistake
from phalanx.io.codec import json_text
from phalanx.io.files import read_text, write_text
from phalanx.io.path_probes import is_file
from phalanx.io.tables import text_table
from phalanx.io.values import seconds
from phalanx.plan import request
from phalanx.plan.calibrate import GROUPS, Calibration, apply_calibration, fit_calibration
from phalanx.plan.cases import Floats
from phalanx.plan.plan import Plan
from phalanx.plan.prediction import step_interval
from phalanx.plan.score import price_layouts
from phalanx.plan.step import StepTimes
from phalanx.record.account.memberships import layout_spans, raw_lines
from phalanx.record.archive.history import RunHistory
from phalanx.record.events import parse_event
from phalanx.record.run import Run
from phalanx.units import plural
from phalanx.validate.throughput_rows import predict_rows
from phalanx.validate.throughput_table import number, read_table

VERSION = 1
# Steps of one system and one program scatter less around their calibrated prediction than the rows of a published
# table, which mix machines and versions (throughput_score.SCATTER_SHARE).
OWN_SCATTER_SHARE = 0.3
LEAST_STEPS = 3  # minimum steps of a run after warm-up
# First share of a run's steps, left out because of compilation, caches and allocator.
WARM_UP_SHARE = 0.2
LARGEST_EVENTS_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationReport:
    """The result of a calibration: source, number of measurements, factors, and median errors before and after."""

    version: int
    source: str
    measurements: int
    skipped: int  # measured rows that could not be predicted
    scalars: Calibration
    median_error_before: float
    median_error_after: float


def calibrate_table(path: Path) -> CalibrationReport:
    """Fit calibration factors to a table with measured steps of one system."""
    rows = tuple(row for row in read_table(path).rows if (number(row, "step_s") or 0.0) > 0)
    if not rows:
        fix = "fill in step_s (seconds per optimizer step) for three to five runs"
        raise mistake(str(path), "has no measured step_s", fix=fix)
    predictions = predict_rows(rows)
    if not predictions.priced.size:
        raise mistake(
            str(path), f"has no row that can be priced: {predictions.reason[0]}", fix="see docs/validation.md"
        )
    measured_s = np.array([number(rows[index], "step_s") or np.nan for index in predictions.priced])
    low, high = step_interval(predictions.cases, predictions.times, predictions.frameworks)
    skipped = len(rows) - predictions.priced.size
    return _fit_report(
        str(path), predictions.times, measured_s, OWN_SCATTER_SHARE * np.log(high / low) / 2.0, skipped=skipped
    )


def calibrate_run(folder: Path) -> CalibrationReport:
    """Fit calibration factors to a run folder: `plan.json` and the step durations in its `events*.jsonl`."""
    plan_file = folder / "plan.json"
    if not is_file(plan_file):
        raise mistake(str(folder), "has no plan.json", fix="name a run folder, or a CSV table of measured steps")
    plan = Plan.from_json(read_text(plan_file, noun="plan"), where=str(plan_file))
    durations = _newest_layout(folder) or list(_step_durations(folder))
    settled_s = durations[int(len(durations) * WARM_UP_SHARE) :]
    if len(settled_s) < LEAST_STEPS:
        raise mistake(
            str(folder),
            f"has {plural(len(durations), 'measured step')}, and calibration needs {LEAST_STEPS} after warm-up",
            fix='let it run longer; steps are lines {"event": "step", "duration_s": 1.25} of events*.jsonl',
        )
    question, _ = request.request_from_job(plan.job, plan.cluster)
    _, times, _ = price_layouts(question, [plan.layout])
    return _fit_report(str(folder), times, np.array([statistics.median(settled_s)]), np.array([0.0]))


def _newest_layout(folder: Path) -> list[float]:
    """Return the durations of the steps in the plan's layout; empty for a run that had only one layout.

    Raises UserError if the plan's layout did no step: the newest layout was not planned, as after a lost rank.
    """
    run = Run(path=folder)
    history = RunHistory.open(run)
    spans = layout_spans(run, history)
    if len(spans) < 2:
        return []
    newest = run.plan()
    planned_spans = [span for span in spans if span.plan == newest]
    if not planned_spans:
        raise mistake(
            str(folder),
            f"has no step in the layout of its plan.json; its newest steps are of {spans[-1].name}",
            why="a calibration holds measured steps against the prediction for the same layout",
            fix="name a run that trained as planned",
        )
    span = planned_spans[-1]
    durations = (seconds(event, "duration_s") for event in history.steps(history.witness, span.first, span.last))
    return [duration_s for duration_s in durations if duration_s]


def _step_durations(folder: Path) -> Iterator[float]:
    """Yield step durations in the order of the first rank's events; invalid lines are skipped."""
    for path in [path for path in sorted(folder.glob("events*.jsonl")) if is_file(path)][:1]:
        if path.stat().st_size > LARGEST_EVENTS_BYTES:
            raise mistake(str(path), f"is larger than {LARGEST_EVENTS_BYTES:,} bytes", fix="name a shorter run")
        for line in raw_lines(path):
            event = parse_event(line)
            if event and event["event"] == "step" and (took_s := seconds(event, "duration_s", most=1e7)):
                yield took_s


def _fit_report(
    source: str, times: StepTimes, measured: Floats, scatter: Floats, *, skipped: int = 0
) -> CalibrationReport:
    fitted = fit_calibration(times, measured, scatter)
    before = np.abs(times.step_s / measured - 1.0)
    after = np.abs(apply_calibration(times, fitted).step_s / measured - 1.0)
    return CalibrationReport(
        version=VERSION,
        source=source,
        measurements=int(measured.size),
        skipped=skipped,
        scalars=fitted,
        median_error_before=float(np.median(before)),
        median_error_after=float(np.median(after)),
    )


def write_calibration(path: Path, report: CalibrationReport) -> None:
    """Write the calibration file atomically."""
    write_text(path, json_text(report, indent=1) + "\n")


MEANING = {
    "compute": "matrix products and attention",
    "memory": "memory-bound kernels and the optimizer",
    "host": "launches, data, logging",
    "inner_traffic": "tensor, context, expert and pipeline traffic",
    "outer_traffic": "gradients and sharded parameters",
}


def calibration_text(report: CalibrationReport) -> str:
    """Format a calibration report for a terminal."""
    rows = [(name, f"{getattr(report.scalars, name):.3f}", MEANING[name]) for name in GROUPS]
    lines = [
        f"{plural(report.measurements, 'measurement')} from {report.source}",
        "",
        *text_table([("factor", "value", "applies to"), *rows], right=(1,)),
    ]
    lines += ["", f"median error {report.median_error_before:.1%} before, {report.median_error_after:.1%} after"]
    if report.skipped:
        lines.append(f"{plural(report.skipped, 'measured row')} left out, not predictable; phalanx backtest says why")
    if report.median_error_after > report.median_error_before:
        lines.append(
            "warning: these measurements disagree with each other more than with the prediction; do not use it"
        )
    if report.measurements < 3:
        lines.append("fewer than 3 measurements: the factors are uncertain; measure three to five runs")
    return "\n".join(lines)
