"""Compare predictions of published rows with measurements: errors, memory, out-of-memory calls, regret."""

from __future__ import annotations

import csv
import io
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.io.files import write_text
from phalanx.io.tables import text_table
from phalanx.plan.calibrate import Calibration, apply_calibration, fit_calibration
from phalanx.plan.cases import Floats
from phalanx.plan.prediction import step_interval
from phalanx.plan.step import StepTimes
from phalanx.units import plural
from phalanx.validate.throughput_rows import RowPredictions, predict_rows
from phalanx.validate.throughput_table import PublishedRun, number

# Sources with fewer rows do not count in the mean.
LEAST_ROWS = 5
# Finished runs that a (model, GPUs) cell of a sweep needs to count in the regret.
LEAST_CELL = 6
# Sweeps whose runs below IDLE_MFU count only for ranking.
IDLE_SOURCES = ("hf-ultrascale", "vtrain-single")
IDLE_MFU = 5.0
# A single run scatters around its calibrated prediction by about half of the uncalibrated 80 % width (z = 1.28, less
# what calibration removes).
SCATTER_SHARE = 0.6


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPrediction:
    """The prediction of a row as written to a file; `reason` is set if there is none."""

    id: str
    step_s: float | None = None
    step_s_lo: float | None = None
    step_s_hi: float | None = None
    mem_gb: float | None = None
    fits: bool | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceScore:
    """The step-time errors of one source."""

    source: str
    rows: int
    median: float
    p90: float
    bias: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Regret:
    """One (model, GPUs) cell of a sweep: the row the planner picks, the fastest row, and the relative time lost."""

    source: str
    model: str
    gpus: str
    pick: str
    best: str
    regret: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Scorecard:
    """The results that `phalanx backtest` prints; None where the table has no such measurements."""

    rows: int
    priced: int
    unpriced: dict[str, int]
    sources: list[SourceScore] = field(default_factory=list)
    mean_median: float | None = None
    mean_p90: float | None = None
    memory_rows: int = 0
    memory_median: float | None = None
    memory_p90: float | None = None
    oom_precision: float | None = None
    oom_recall: float | None = None
    coverage: float | None = None
    regret_cells: int = 0
    regret_median: float | None = None
    regret_p90: float | None = None
    regrets: list[Regret] = field(default_factory=list)


def predict_table(rows: tuple[PublishedRun, ...], *, known: tuple[PublishedRun, ...] = ()) -> list[RowPrediction]:
    """Predict every row; with `known` rows, each source is first calibrated on its measured rows there."""
    priced_rows = predict_rows(rows)
    low, high = step_interval(priced_rows.cases, priced_rows.times, priced_rows.frameworks)
    seconds = priced_rows.times.step_s
    if known:
        seconds, low, high = _calibrated_rows(rows, priced_rows, known, low, high)
    predictions = [
        RowPrediction(id=row["id"], reason=reason) for row, reason in zip(rows, priced_rows.reason, strict=True)
    ]
    for at, index in enumerate(priced_rows.priced):
        predictions[index] = RowPrediction(
            id=rows[index]["id"],
            step_s=float(seconds[at]),
            step_s_lo=float(low[at]),
            step_s_hi=float(high[at]),
            # The value in the first rank's log: an allocator cannot reserve more than the device has.
            mem_gb=float(min(priced_rows.memory.first_stage[at], priced_rows.memory.usable[at])) / 1e9,
            fits=bool(priced_rows.memory.fits[at]),
        )
    return predictions


def fit_sources(known: tuple[PublishedRun, ...]) -> dict[str, Calibration]:
    """Fit calibration factors per source to its measured rows."""
    predictions = predict_rows(known)
    low, high = step_interval(predictions.cases, predictions.times, predictions.frameworks)
    scatter = SCATTER_SHARE * np.log(high / low) / 2.0
    measured_s = np.array([number(known[index], "step_s") or np.nan for index in predictions.priced])
    source = np.array([known[index].get("source", "") for index in predictions.priced])
    fitted = {}
    for name in sorted(set(source)):
        of_source = source == name
        fitted[str(name)] = fit_calibration(
            take_rows(predictions.times, of_source), measured_s[of_source], scatter[of_source]
        )
    return fitted


def _calibrated_rows(
    rows: tuple[PublishedRun, ...], found: RowPredictions, known: tuple[PublishedRun, ...], low: Floats, high: Floats
) -> tuple[Floats, Floats, Floats]:
    seconds, low, high = found.times.step_s.copy(), low.copy(), high.copy()
    source = np.array([rows[index].get("source", "") for index in found.priced])
    for name, fitted in fit_sources(known).items():
        of_source = source == name
        if of_source.any():
            seconds[of_source] = apply_calibration(take_rows(found.times, of_source), fitted).step_s
            shift = seconds[of_source] / found.times.step_s[of_source]
            # Calibration moves the middle; single runs scatter around it as before.
            low[of_source], high[of_source] = low[of_source] * shift, high[of_source] * shift
    return seconds, low, high


def take_rows(times: StepTimes, part: NDArray[np.bool_]) -> StepTimes:
    """Return the step times of the selected rows."""
    return times.take(part)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank quantile, as in the published score."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def score_predictions(rows: Sequence[PublishedRun], predictions: Sequence[RowPrediction]) -> Scorecard:
    """Compute the scorecard of a table with some measurements."""
    by_source: dict[str, list[float]] = defaultdict(list)
    memory: list[float] = []
    inside: list[bool] = []
    for row, guess in zip(rows, predictions, strict=True):
        seconds = number(row, "step_s")
        if not _is_comparable(row) or not seconds or not guess.step_s:
            continue
        if not _is_idle(row):
            by_source[row.get("source", "") or "unnamed"].append(guess.step_s / seconds - 1.0)
        inside.append((guess.step_s_lo or 0.0) <= seconds <= (guess.step_s_hi or 0.0))
        measured_gb = number(row, "measured_mem_gb")
        if measured_gb and guess.mem_gb:
            memory.append(abs(guess.mem_gb / measured_gb - 1.0))
    sources = [_source_score(name, errors) for name, errors in sorted(by_source.items())]
    large = [source for source in sources if source.rows >= LEAST_ROWS]
    precision, recall = _oom_scores(rows, predictions)
    regrets = _cell_regrets(rows, predictions)
    lost_shares = [regret.regret for regret in regrets]
    reasons: dict[str, int] = defaultdict(int)
    for guess in predictions:
        if guess.reason:
            reasons[guess.reason] += 1
    return Scorecard(
        rows=len(rows),
        priced=sum(1 for guess in predictions if guess.step_s),
        unpriced=dict(reasons),
        sources=sources,
        mean_median=_mean_or_none([source.median for source in large]),
        mean_p90=_mean_or_none([source.p90 for source in large]),
        memory_rows=len(memory),
        memory_median=float(np.median(memory)) if memory else None,
        memory_p90=quantile(memory, 0.9) if memory else None,
        oom_precision=precision,
        oom_recall=recall,
        coverage=_mean_or_none([float(is_inside) for is_inside in inside]),
        regret_cells=len(regrets),
        regret_median=float(np.median(lost_shares)) if lost_shares else None,
        regret_p90=quantile(lost_shares, 0.9) if lost_shares else None,
        regrets=regrets,
    )


def _mean_or_none(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _is_comparable(row: PublishedRun) -> bool:
    ran = row.get("status", "ok") in ("ok", "")
    return ran and row.get("tier", "A") in ("A", "B", "") and row.get("task", "") in ("", "pretrain")


def _is_idle(row: PublishedRun) -> bool:
    mfu = number(row, "measured_mfu_pct")
    return row.get("source") in IDLE_SOURCES and mfu is not None and mfu < IDLE_MFU


def _source_score(name: str, errors: Sequence[float]) -> SourceScore:
    sizes = [abs(error) for error in errors]
    middle = float(np.median(sizes))
    return SourceScore(
        source=name, rows=len(errors), median=middle, p90=quantile(sizes, 0.9), bias=float(np.median(errors))
    )


def _has_failed(row: PublishedRun) -> bool:
    return row.get("status", "ok") not in ("ok", "")


def _sweep_sources(rows: Sequence[PublishedRun]) -> set[str]:
    """Return the sources of sweeps that report failures as well: only there a missing run means a failure."""
    failed = {row.get("source", "") for row in rows if _has_failed(row)}
    counts: dict[str, int] = defaultdict(int)
    for row in rows:
        counts[row.get("source", "")] += _has_failed(row)
    return {name for name in failed if counts[name] >= 20}


def _oom_scores(
    rows: Sequence[PublishedRun], predictions: Sequence[RowPrediction]
) -> tuple[float | None, float | None]:
    """Return precision and recall of "does not fit" over the sweeps."""
    sweeps = _sweep_sources(rows)
    hit = false = missed = 0
    for row, guess in zip(rows, predictions, strict=True):
        if row.get("source", "") not in sweeps or guess.fits is None:
            continue
        failed = _has_failed(row)
        hit += failed and not guess.fits
        false += not failed and not guess.fits
        missed += failed and bool(guess.fits)
    precision = hit / (hit + false) if hit + false else None
    return precision, hit / (hit + missed) if hit + missed else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _KnownRun:
    id: str
    predicted: float  # seconds per token
    fits: bool
    measured: float | None  # seconds per token; None if the run failed


def _run_cells(
    rows: Sequence[PublishedRun], predictions: Sequence[RowPrediction]
) -> dict[tuple[str, str, str], list[_KnownRun]]:
    """Return the runs of every (source, model, GPUs) cell of a sweep."""
    sweeps = _sweep_sources(rows)
    cells: dict[tuple[str, str, str], list[_KnownRun]] = defaultdict(list)
    for row, guess in zip(rows, predictions, strict=True):
        batch, seq, seconds = number(row, "global_batch"), number(row, "seq"), number(row, "step_s")
        if row.get("source", "") not in sweeps or not guess.step_s or not batch or not seq:
            continue
        measured = None if _has_failed(row) or not seconds else seconds / (batch * seq)
        key = (row.get("source", ""), row.get("model_name", ""), row.get("gpus", ""))
        run = _KnownRun(id=guess.id, predicted=guess.step_s / (batch * seq), fits=bool(guess.fits), measured=measured)
        cells[key].append(run)
    return cells


def _cell_regrets(rows: Sequence[PublishedRun], predictions: Sequence[RowPrediction]) -> list[Regret]:
    """Return per cell how much slower the predicted best ran than the real best; 100 % if it failed."""
    regrets = []
    for (source, model, gpus), cell in _run_cells(rows, predictions).items():
        finished = [run for run in cell if run.measured]
        if len(finished) < LEAST_CELL:
            continue
        pick = min([run for run in cell if run.fits] or cell, key=lambda run: run.predicted)
        best = min(finished, key=lambda run: run.measured or 0.0)
        regret = 1.0 if pick.measured is None else pick.measured / (best.measured or 1.0) - 1.0
        regrets.append(Regret(source=source, model=model, gpus=gpus, pick=pick.id, best=best.id, regret=regret))
    return regrets


def draw_known(
    rows: Sequence[PublishedRun], *, per_source: int, seed: int
) -> tuple[tuple[PublishedRun, ...], tuple[PublishedRun, ...]]:
    """Split the rows with a seed: `per_source` measured rows of every source for calibration, and all other rows."""
    chooser = random.Random(seed)
    by_source: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        if _is_comparable(row) and not _is_idle(row) and number(row, "step_s"):
            by_source[row.get("source", "")].append(index)
    drawn: set[int] = set()
    for name in sorted(by_source):
        drawn |= set(chooser.sample(by_source[name], min(per_source, len(by_source[name]))))
    known_rows = tuple(row for index, row in enumerate(rows) if index in drawn)
    return known_rows, tuple(row for index, row in enumerate(rows) if index not in drawn)


# ---- the scorecard of `phalanx backtest` as text, and its predictions as a file --------------------------------------


HEADER = ("id", "step_s", "step_s_lo", "step_s_hi", "mem_gb", "fits")
MOST_REASONS = 8


def write_predictions(path: Path, predictions: Sequence[RowPrediction]) -> None:
    """Write one line per row, also for rows without a prediction; the file is written atomically."""
    scorecard_text = io.StringIO()
    writer = csv.writer(scorecard_text, lineterminator="\n")
    writer.writerow(HEADER)
    for prediction in predictions:
        numbers = [
            ("" if value is None else f"{value:.6g}")
            for value in (prediction.step_s, prediction.step_s_lo, prediction.step_s_hi, prediction.mem_gb)
        ]
        writer.writerow([prediction.id, *numbers, "" if prediction.fits is None else str(prediction.fits).lower()])
    write_text(path, scorecard_text.getvalue())


def scorecard_text(card: Scorecard, *, calibrated_on: int = 0) -> str:
    """Format the scorecard: coverage of the table first, then errors by source, then the other results."""
    lines = [
        f"{card.priced:,} of {card.rows:,} rows priced"
        + (f", each source calibrated on its measured rows ({calibrated_on:,} in all)" if calibrated_on else "")
    ]
    for reason, count in sorted(card.unpriced.items(), key=lambda item: -item[1])[:MOST_REASONS]:
        lines.append(f"  {count:,} not: {reason}")
    if len(card.unpriced) > MOST_REASONS:
        lines.append(f"  and {len(card.unpriced) - MOST_REASONS} other reasons; --json names all")
    lines += _error_lines(card) if card.sources else ["", "no row of this table has a measured step_s that counts"]
    lines += _rest_lines(card)
    return "\n".join(lines)


def _error_lines(card: Scorecard) -> list[str]:
    rows = [("source", "rows", "median", "p90", "bias", "")]
    for source in card.sources:
        few = "" if source.rows >= LEAST_ROWS else "(too few for the mean)"
        rows.append(
            (source.source, f"{source.rows:,}", f"{source.median:.1%}", f"{source.p90:.1%}", f"{source.bias:+.1%}", few)
        )
    if card.mean_median is not None and card.mean_p90 is not None:
        counted = sum(source.rows >= LEAST_ROWS for source in card.sources)
        rows.append((f"mean over {counted} sources", "", f"{card.mean_median:.1%}", f"{card.mean_p90:.1%}", "", ""))
    return ["", "step time, |predicted/measured - 1|", *text_table(rows, right=(1, 2, 3, 4))]


def _rest_lines(card: Scorecard) -> list[str]:
    lines = [""]
    if card.coverage is not None:
        lines.append(f"80 % interval holds      {card.coverage:6.1%} of measured steps")
    if card.memory_median is not None and card.memory_p90 is not None:
        lines.append(
            f"memory of rank 0         {card.memory_median:6.1%} median, {card.memory_p90:.1%} p90 error "
            f"({plural(card.memory_rows, 'row')})"
        )
    if card.oom_precision is not None and card.oom_recall is not None:
        lines.append(f"does not fit             {card.oom_precision:.3f} precision, {card.oom_recall:.3f} recall")
    if card.regret_median is not None and card.regret_p90 is not None:
        lines.append(
            f"regret of the pick       {card.regret_median:6.1%} median, {card.regret_p90:.1%} p90 "
            f"over {card.regret_cells} (model, GPUs) cells"
        )
    return lines if len(lines) > 1 else []
