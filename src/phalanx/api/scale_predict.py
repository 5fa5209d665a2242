"""Compare a run's loss with the prediction of a fitted law."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.api.results import PublicResult
from phalanx.api.scale_fit import FittedLaw
from phalanx.api.scale_inputs import require_number
from phalanx.errors import mistake
from phalanx.io.codec import json_values
from phalanx.io.path_probes import is_folder, path_exists
from phalanx.io.tables import text_table
from phalanx.units import format_count

if TYPE_CHECKING:
    from phalanx.job.schema import Optim
    from phalanx.scale.fit_result import ScalingFit
    from phalanx.scale.judge_run import RunForecast

MOST_SHOWN = 12  # evaluations


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ForecastComparison(PublicResult):
    """A run's loss compared with the law's band; the exit code is 1 if it is outside.

    >>> phalanx.scale.predict("law.json", "runs/first-run").forecast.verdict  # doctest: +SKIP
    'inside'
    """

    forecast: RunForecast

    def __str__(self) -> str:
        forecast = self.forecast
        lines = [
            f"{forecast.run}: {forecast.verdict}",
            f"  {forecast.sentence}",
            f"  at its end ({format_count(forecast.params)} parameters, "
            f"{format_count(forecast.planned_tokens)} tokens) the law predicts "
            f"{forecast.final_loss:.4f} (80 %: {forecast.final_low:.4f} to {forecast.final_high:.4f})",
        ]
        rows = [("tokens", "loss", "predicted", "80 % interval", "difference")]
        for evaluation in forecast.evaluations[-MOST_SHOWN:]:
            band = f"{evaluation.low:.4f} to {evaluation.high:.4f}"
            off = f"{100 * (evaluation.ratio - 1):+.2f} %"
            rows.append(
                (format_count(evaluation.tokens), f"{evaluation.loss:.4f}", f"{evaluation.predicted:.4f}", band, off)
            )
        if forecast.evaluations:
            lines += ["", *text_table(rows, right=(0, 1, 2, 3, 4), indent=2)]
        return "\n".join([*lines, *(f"note: {note}" for note in forecast.notes)])

    def to_dict(self) -> dict[str, Any]:
        """Return the forecast."""
        return dict(json_values(self.forecast))

    @property
    def exit_code(self) -> int:
        """1 for a run outside the band."""
        return 0 if self.forecast.verdict == "inside" else 1


def predict(
    fit: str | Path | FittedLaw,
    run: str | Path,
    *,
    allowance: float = 0.08,
    planned_tokens: float | str | None = None,
) -> ForecastComparison:
    """Compare a run's loss with the band of a law, while it trains or afterwards.

    `run` is a run folder, or a CSV table of one run's params, tokens and loss, which ends after `planned_tokens`.
    `allowance` is how far a run may be above the band until its learning rate decays; at its first tokens it may be
    further, since it has had few steps (docs/scaling.md, "Predict").

    >>> print(phalanx.scale.predict("law.json", "runs/first-run"))  # doctest: +SKIP
    """
    from phalanx.scale.law_file import read_fit

    require_number("--allowance", allowance)
    if not 0.0 <= allowance < 1.0:
        raise mistake("--allowance", f"{allowance} is not a share", fix="use 0.08 for 8 %")
    law = fit.fit if isinstance(fit, FittedLaw) else read_fit(Path(fit))
    path = Path(run)
    if is_folder(path):
        if planned_tokens is not None:
            raise mistake("--tokens", "is for a table: a run folder says itself where the run ends", fix="leave it out")
        return _predict_folder(law, path, allowance)
    if not path_exists(path):
        raise mistake(
            str(path), "there is no such run folder or table", fix="name a folder under runs/, or a CSV table"
        )
    return _predict_table(law, path, allowance, planned_tokens)


def _predict_folder(law: ScalingFit, path: Path, allowance: float) -> ForecastComparison:
    """Judge a run by its evaluations; without any, by means of its training losses."""
    from phalanx.scale.judge_run import average_windows, judge_run
    from phalanx.scale.run_points import is_run, read_run_losses

    if not is_run(path):
        fix = "name the folder of one run, such as runs/NAME-DATE; of a sweep they are in its folder runs"
        raise mistake(str(path), "is no run folder", why="it has no plan.json", fix=fix)
    run_losses = read_run_losses(path, counted=law.data.params_counted)
    curve = [(tokens, loss) for tokens, loss in zip(run_losses.tokens, run_losses.losses, strict=True) if tokens > 0]
    notes: tuple[str, ...] = ()
    if not run_losses.evaluated:
        notes = ("no evaluation was recorded: these are means of training losses",)
        curve = average_windows(curve)
    for kind, of_law, of_run in (
        ("tokenizer", law.data.tokenizer, run_losses.tokenizer),
        ("data", law.data.data, run_losses.data),
    ):
        if of_law and of_run and of_law != of_run:
            notes += (f"the law is of other {kind} ({of_law[:40]}, here {of_run[:40]}): losses may not compare",)
    forecast = judge_run(
        law,
        run=run_losses.name,
        finished=run_losses.state == "done",
        params=run_losses.params,
        planned_tokens=run_losses.planned_tokens,
        curve=curve,
        rate_left=[_rate_left(run_losses.optim, tokens, run_losses.planned_tokens) for tokens, _ in curve],
        evaluated=run_losses.evaluated,
        allowance=allowance,
        notes=notes,
    )
    return ForecastComparison(forecast=forecast)


def _rate_left(optim: Optim, tokens: float, planned_tokens: float) -> float:
    """Return the remaining part of a run's learning rate decay, from 1 to 0."""
    from phalanx.train.optim.learning_rate import learning_rate

    if optim.final_lr >= 1.0 or tokens < optim.warmup_tokens:
        return 1.0
    rate = learning_rate(replace(optim, lr=1.0), tokens_seen=round(tokens), total_tokens=round(planned_tokens))
    return (rate - optim.final_lr) / (1.0 - optim.final_lr)


def _predict_table(
    law: ScalingFit, path: Path, allowance: float, planned_tokens: float | str | None
) -> ForecastComparison:
    from phalanx.scale.allocate_budget import positive_amount
    from phalanx.scale.judge_run import judge_run
    from phalanx.scale.points import TableOptions, read_points

    points = read_points(path, TableOptions(repeated=True))
    if len(set(points.params.tolist())) > 1:
        raise mistake(str(path), "holds more than one model size", fix="give the rows of one run")
    order = points.tokens.argsort()
    curve = [(float(points.tokens[row]), float(points.loss[row])) for row in order]
    planned, note = curve[-1][0], "a table does not say when the run ends: it is taken as going on; --tokens says it"
    if planned_tokens is not None:
        planned = positive_amount("--tokens", str(planned_tokens))
        note = "the schedule of the run is not known: its learning rate is taken as being at its peak"
        if planned < curve[-1][0]:
            message = f"{format_count(planned)} are fewer than the {format_count(curve[-1][0])} of the last row"
            raise mistake("--tokens", message, fix="give the tokens that the run is to be trained on in all")
    forecast = judge_run(
        law,
        run=points.run[0] or path.stem,
        finished=False,
        params=float(points.params[0]),
        planned_tokens=planned,
        curve=curve,
        allowance=allowance,
        notes=(note,),
    )
    return ForecastComparison(forecast=forecast)
