"""How far predictions are from published measurements, for either kind of table: what `phalanx validate` calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import mistake
from phalanx.validate.network_claims import is_network_table, read_claims
from phalanx.validate.network_score import (
    NetworkCard,
    SimulationPlan,
    network_card_text,
    plan_simulations,
    score_claims,
)
from phalanx.validate.throughput_score import (
    Prediction,
    Scorecard,
    draw_known,
    predict_table,
    score_predictions,
    scorecard_text,
)
from phalanx.validate.throughput_table import read_table


@dataclass(frozen=True, kw_only=True, slots=True)
class ThroughputBacktest:
    """Predictions of published training runs, and how far they are from what was measured."""

    scorecard: Scorecard
    predictions: tuple[Prediction, ...]
    calibrated_on_rows: int

    def __str__(self) -> str:
        """The page that `phalanx validate` prints."""
        return scorecard_text(self.scorecard, calibrated_on=self.calibrated_on_rows)

    def __repr__(self) -> str:
        """One line."""
        return f"<ThroughputBacktest of {len(self.predictions):,} runs>"


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkBacktest:
    """Every claim of a table of network claims, and what became of it."""

    card: NetworkCard

    def __str__(self) -> str:
        """The page that `phalanx validate` prints."""
        return network_card_text(self.card)

    def __repr__(self) -> str:
        """One line."""
        total = self.card.total
        return f"<NetworkBacktest of {total.rows:,} claims: {total.within:,} of {total.reproduced:,} within tolerance>"


def backtest(
    table: str | Path,
    *,
    calibrate: str | Path | None = None,
    draw: int = 0,
    seed: int = 0,
    simulate: bool = False,
    planned: Callable[[SimulationPlan], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ThroughputBacktest | NetworkBacktest:
    """Predict every row of a table of training runs, or try every row of a table of network claims.

    Of runs: `calibrate` names a table of known runs, `draw` takes so many rows of each source for that. Of claims:
    `simulate` also runs what takes more than a minute of CPU; `planned` is told what will be simulated, `progress` how
    many rows are done.
    """
    path = Path(table)
    if is_network_table(path):
        if calibrate or draw:
            raise mistake(str(path), "is a table of network claims", fix="leave calibrate and draw out")
        claims = read_claims(path)
        chosen = plan_simulations(claims, simulate=simulate)
        if planned is not None:
            planned(chosen)
        return NetworkBacktest(card=score_claims(claims, simulate=simulate, planned=chosen, progress=progress))
    if simulate:
        raise mistake("simulate", "is for tables of network claims", fix="leave it out")
    if draw < 0 or (draw and calibrate):
        raise mistake("draw", "needs a positive number and excludes calibrate", fix="use one of the two")
    rows = read_table(path).rows
    known = read_table(Path(calibrate)).rows if calibrate else ()
    if draw:
        known, rows = draw_known(rows, per_source=draw, seed=seed)
    predictions = predict_table(rows, known=known)
    return ThroughputBacktest(
        scorecard=score_predictions(rows, predictions), predictions=tuple(predictions), calibrated_on_rows=len(known)
    )
