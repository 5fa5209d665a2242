"""The scorecard of `phalanx backtest` as text, and its predictions as a file."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from phalanx.io.files import write_text
from phalanx.units import plural
from phalanx.validate.throughput_score import LEAST_ROWS, Prediction, Scorecard

HEADER = ("id", "step_s", "step_s_lo", "step_s_hi", "mem_gb", "fits")
MOST_REASONS = 8


def write_predictions(path: Path, predictions: Sequence[Prediction]) -> None:
    """One line per row, also for rows without a prediction; the file appears whole or not at all."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEADER)
    for one in predictions:
        numbers = [_number(value) for value in (one.step_s, one.step_s_lo, one.step_s_hi, one.mem_gb)]
        writer.writerow([one.id, *numbers, "" if one.fits is None else str(one.fits).lower()])
    write_text(path, text.getvalue())


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def scorecard_text(card: Scorecard, *, calibrated_on: int = 0) -> str:
    """What a person reads: coverage of the table first, then errors, worst last."""
    lines = [f"{card.priced:,} of {card.rows:,} rows priced" + _calibration(calibrated_on)]
    for reason, count in sorted(card.unpriced.items(), key=lambda item: -item[1])[:MOST_REASONS]:
        lines.append(f"  {count:,} not: {reason}")
    if len(card.unpriced) > MOST_REASONS:
        lines.append(f"  and {len(card.unpriced) - MOST_REASONS} other reasons; --json names all")
    lines += _errors(card) if card.sources else ["", "no row of this table has a measured step_s that counts"]
    lines += _rest(card)
    return "\n".join(lines)


def _calibration(rows: int) -> str:
    return f", each source calibrated on its measured rows ({rows:,} in all)" if rows else ""


def _errors(card: Scorecard) -> list[str]:
    width = max(len(one.source) for one in card.sources)
    lines = [
        "",
        f"{'step time, |predicted/measured - 1|':<{width}}",
        f"{'source':<{width}}   rows  median    p90    bias",
    ]
    for one in card.sources:
        few = "" if one.rows >= LEAST_ROWS else "   (too few for the mean)"
        lines.append(f"{one.source:<{width}}  {one.rows:5,}  {one.median:6.1%} {one.p90:6.1%} {one.bias:+7.1%}{few}")
    if card.mean_median is not None and card.mean_p90 is not None:
        counted = sum(one.rows >= LEAST_ROWS for one in card.sources)
        lines.append(f"{f'mean over {counted} sources':<{width}}         {card.mean_median:6.1%} {card.mean_p90:6.1%}")
    return lines


def _rest(card: Scorecard) -> list[str]:
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
