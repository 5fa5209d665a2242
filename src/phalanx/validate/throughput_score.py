"""Predictions of published rows held against what was measured: errors, memory, out-of-memory calls, regret."""

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

LEAST_ROWS = 5  # sources with fewer rows do not count in the mean
LEAST_CELL = 6  # runs that finished, for a (model, GPUs) cell of a sweep to count in the regret
IDLE_SOURCES = ("hf-ultrascale", "vtrain-single")  # sweeps whose runs below this MFU count for ranking only
IDLE_MFU = 5.0
# A single run scatters around its calibrated prediction by about half the 80 % width it has uncalibrated (z = 1.28,
# less what calibration removes).
SCATTER_SHARE = 0.6


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPrediction:
    """What is written per row; `reason` says why a row has none."""

    id: str
    step_s: float | None = None
    step_s_lo: float | None = None
    step_s_hi: float | None = None
    mem_gb: float | None = None
    fits: bool | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceScore:
    """Step-time error of one source."""

    source: str
    rows: int
    median: float
    p90: float
    bias: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Regret:
    """One (model, GPUs) cell of a sweep: the row the planner picks, the fastest row, and the time lost."""

    source: str
    model: str
    gpus: str
    pick: str
    best: str
    regret: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Scorecard:
    """Everything `phalanx backtest` prints; None where the table has no such measurements."""

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
    """Predict every row; with `known` rows, each source is first calibrated on its own measured rows there."""
    found = predict_rows(rows)
    low, high = step_interval(found.cases, found.times, found.frameworks)
    seconds = found.times.step_s
    if known:
        seconds, low, high = _calibrated_rows(rows, found, known, low, high)
    predictions = [RowPrediction(id=row["id"], reason=reason) for row, reason in zip(rows, found.reason, strict=True)]
    for at, index in enumerate(found.priced):
        predictions[index] = RowPrediction(
            id=rows[index]["id"],
            step_s=float(seconds[at]),
            step_s_lo=float(low[at]),
            step_s_hi=float(high[at]),
            # What the first rank's log will show: an allocator cannot reserve more than there is.
            mem_gb=float(min(found.memory.first_stage[at], found.memory.usable[at])) / 1e9,
            fits=bool(found.memory.fits[at]),
        )
    return predictions


def fit_sources(known: tuple[PublishedRun, ...]) -> dict[str, Calibration]:
    """Scalars per source from the measured rows given."""
    found = predict_rows(known)
    low, high = step_interval(found.cases, found.times, found.frameworks)
    scatter = SCATTER_SHARE * np.log(high / low) / 2.0
    measured = np.array([number(known[index], "step_s") or np.nan for index in found.priced])
    source = np.array([known[index].get("source", "") for index in found.priced])
    fitted = {}
    for name in sorted(set(source)):
        part = source == name
        fitted[str(name)] = fit_calibration(take_rows(found.times, part), measured[part], scatter[part])
    return fitted


def _calibrated_rows(
    rows: tuple[PublishedRun, ...], found: RowPredictions, known: tuple[PublishedRun, ...], low: Floats, high: Floats
) -> tuple[Floats, Floats, Floats]:
    seconds, low, high = found.times.step_s.copy(), low.copy(), high.copy()
    source = np.array([rows[index].get("source", "") for index in found.priced])
    for name, fitted in fit_sources(known).items():
        part = source == name
        if part.any():
            seconds[part] = apply_calibration(take_rows(found.times, part), fitted).step_s
            shift = seconds[part] / found.times.step_s[part]
            # Calibration moves the middle; single runs scatter around it as much as before.
            low[part], high[part] = low[part] * shift, high[part] * shift
    return seconds, low, high


def take_rows(times: StepTimes, part: NDArray[np.bool_]) -> StepTimes:
    """The same table restricted to some rows."""
    return times.take(part)


def quantile(values: Sequence[float], share: float) -> float:
    """The nearest-rank quantile the published score uses."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def score_predictions(rows: Sequence[PublishedRun], predictions: Sequence[RowPrediction]) -> Scorecard:
    """The scorecard of a table whose measurements are present (or partly so)."""
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
    large = [one for one in sources if one.rows >= LEAST_ROWS]
    precision, recall = _oom_scores(rows, predictions)
    regrets = _cell_regrets(rows, predictions)
    lost = [one.regret for one in regrets]
    reasons: dict[str, int] = defaultdict(int)
    for guess in predictions:
        if guess.reason:
            reasons[guess.reason] += 1
    return Scorecard(
        rows=len(rows),
        priced=sum(1 for guess in predictions if guess.step_s),
        unpriced=dict(reasons),
        sources=sources,
        mean_median=_mean_or_none([one.median for one in large]),
        mean_p90=_mean_or_none([one.p90 for one in large]),
        memory_rows=len(memory),
        memory_median=float(np.median(memory)) if memory else None,
        memory_p90=quantile(memory, 0.9) if memory else None,
        oom_precision=precision,
        oom_recall=recall,
        coverage=_mean_or_none([float(one) for one in inside]),
        regret_cells=len(regrets),
        regret_median=float(np.median(lost)) if lost else None,
        regret_p90=quantile(lost, 0.9) if lost else None,
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
    sizes = [abs(one) for one in errors]
    middle = float(np.median(sizes))
    return SourceScore(
        source=name, rows=len(errors), median=middle, p90=quantile(sizes, 0.9), bias=float(np.median(errors))
    )


def _has_failed(row: PublishedRun) -> bool:
    return row.get("status", "ok") not in ("ok", "")


def _sweep_sources(rows: Sequence[PublishedRun]) -> set[str]:
    """Sources that report failures beside successes: only there does a missing run mean anything."""
    failed = {row.get("source", "") for row in rows if _has_failed(row)}
    counts: dict[str, int] = defaultdict(int)
    for row in rows:
        counts[row.get("source", "")] += _has_failed(row)
    return {name for name in failed if counts[name] >= 20}


def _oom_scores(
    rows: Sequence[PublishedRun], predictions: Sequence[RowPrediction]
) -> tuple[float | None, float | None]:
    """Precision and recall of "does not fit" over the sweeps."""
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
    measured: float | None  # seconds per token; None where the run failed


def _run_cells(
    rows: Sequence[PublishedRun], predictions: Sequence[RowPrediction]
) -> dict[tuple[str, str, str], list[_KnownRun]]:
    """The runs of every (source, model, GPUs) cell of a sweep."""
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
    """Per cell: how much slower the predicted best really ran than the real best; 100 % where it failed."""
    found = []
    for (source, model, gpus), cell in _run_cells(rows, predictions).items():
        finished = [run for run in cell if run.measured]
        if len(finished) < LEAST_CELL:
            continue
        pick = min([run for run in cell if run.fits] or cell, key=lambda run: run.predicted)
        best = min(finished, key=lambda run: run.measured or 0.0)
        lost = 1.0 if pick.measured is None else pick.measured / (best.measured or 1.0) - 1.0
        found.append(Regret(source=source, model=model, gpus=gpus, pick=pick.id, best=best.id, regret=lost))
    return found


def draw_known(
    rows: Sequence[PublishedRun], *, per_source: int, seed: int
) -> tuple[tuple[PublishedRun, ...], tuple[PublishedRun, ...]]:
    """A seeded split: `per_source` measured rows of every source to calibrate on, and all the others."""
    chooser = random.Random(seed)
    by_source: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        if _is_comparable(row) and not _is_idle(row) and number(row, "step_s"):
            by_source[row.get("source", "")].append(index)
    taken: set[int] = set()
    for name in sorted(by_source):
        taken |= set(chooser.sample(by_source[name], min(per_source, len(by_source[name]))))
    known = tuple(row for index, row in enumerate(rows) if index in taken)
    return known, tuple(row for index, row in enumerate(rows) if index not in taken)


# The scorecard of `phalanx validate` as text, and its predictions as a file.


HEADER = ("id", "step_s", "step_s_lo", "step_s_hi", "mem_gb", "fits")
MOST_REASONS = 8


def write_predictions(path: Path, predictions: Sequence[RowPrediction]) -> None:
    """One line per row, also for rows without a prediction; the file appears whole or not at all."""
    scorecard_text = io.StringIO()
    writer = csv.writer(scorecard_text, lineterminator="\n")
    writer.writerow(HEADER)
    for one in predictions:
        numbers = [
            ("" if value is None else f"{value:.6g}")
            for value in (one.step_s, one.step_s_lo, one.step_s_hi, one.mem_gb)
        ]
        writer.writerow([one.id, *numbers, "" if one.fits is None else str(one.fits).lower()])
    write_text(path, scorecard_text.getvalue())


def scorecard_text(card: Scorecard, *, calibrated_on: int = 0) -> str:
    """What a person reads: coverage of the table first, then errors, worst last."""
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
    for one in card.sources:
        few = "" if one.rows >= LEAST_ROWS else "(too few for the mean)"
        rows.append((one.source, f"{one.rows:,}", f"{one.median:.1%}", f"{one.p90:.1%}", f"{one.bias:+.1%}", few))
    if card.mean_median is not None and card.mean_p90 is not None:
        counted = sum(one.rows >= LEAST_ROWS for one in card.sources)
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
