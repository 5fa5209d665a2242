"""Hold a run against a fitted law."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.api.results import PublicResult
from phalanx.api.scale_fit import FittedLaw
from phalanx.errors import mistake
from phalanx.io.codec import json_values
from phalanx.io.tables import text_table
from phalanx.units import format_count

if TYPE_CHECKING:
    from phalanx.scale.judge_run import RunForecast

MOST_SHOWN = 12  # evaluations


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ForecastComparison(PublicResult):
    """A run's loss beside the law's band; the exit code is 1 when it is outside.

    >>> phalanx.scale.predict("law.json", "runs/first-run").forecast.verdict  # doctest: +SKIP
    'inside'
    """

    forecast: RunForecast

    def __str__(self) -> str:
        found = self.forecast
        lines = [
            f"{found.run}: {found.verdict}",
            f"  {found.sentence}",
            f"  at its end ({format_count(found.params)} parameters, {format_count(found.planned_tokens)} tokens) the "
            f"law predicts {found.final_loss:.4f} (80 %: {found.final_low:.4f} to {found.final_high:.4f})",
        ]
        rows = [("tokens", "loss", "predicted", "80 % interval", "difference")]
        for one in found.evaluations[-MOST_SHOWN:]:
            band = f"{one.low:.4f} to {one.high:.4f}"
            off = f"{100 * (one.ratio - 1):+.2f} %"
            rows.append((format_count(one.tokens), f"{one.loss:.4f}", f"{one.predicted:.4f}", band, off))
        if found.evaluations:
            lines += ["", *text_table(rows, right=(0, 1, 2, 3, 4), indent=2)]
        return "\n".join([*lines, *(f"note: {one}" for one in found.notes)])

    def to_dict(self) -> dict[str, Any]:
        """The forecast."""
        return dict(json_values(self.forecast))

    @property
    def exit_code(self) -> int:
        """1 for a run outside the band."""
        return 0 if self.forecast.verdict == "inside" else 1


def predict(fit: str | Path | FittedLaw, run: str | Path, *, allowance: float = 0.05) -> ForecastComparison:
    """Hold a run's loss against the band of a law, while it trains or after.

    `run` is a run folder, or a CSV table of one run's params, tokens and loss. `allowance` is how far a run that still
    goes on may be above the band, since its learning rate has not decayed yet.

    >>> print(phalanx.scale.predict("law.json", "runs/first-run"))  # doctest: +SKIP
    """
    from phalanx.scale.allocate_budget import read_fit
    from phalanx.scale.judge_run import judge_run
    from phalanx.scale.points import TableOptions, read_points
    from phalanx.scale.run_points import read_run_losses

    if not 0.0 <= allowance < 1.0:
        raise mistake("--allowance", f"{allowance} is not a share", fix="use 0.05 for 5 %")
    law = fit.fit if isinstance(fit, FittedLaw) else read_fit(Path(fit))
    path = Path(run)
    if path.is_dir():
        found = read_run_losses(path, counted=law.data.params_counted)
        notes: tuple[str, ...] = () if found.evaluated else ("no evaluation was recorded: these are training losses",)
        for what, theirs, ours in (
            ("tokenizer", law.data.tokenizer, found.tokenizer),
            ("data", law.data.data, found.data),
        ):
            if theirs and ours and theirs != ours:
                notes += (f"the law is of other {what} ({theirs[:40]}, here {ours[:40]}): losses may not compare",)
        curve = [(tokens, loss) for tokens, loss in zip(found.tokens, found.losses, strict=True) if tokens > 0]
        forecast = judge_run(
            law,
            run=found.name,
            finished=found.state == "done",
            params=found.params,
            planned_tokens=found.planned_tokens,
            curve=curve,
            allowance=allowance,
            notes=notes,
        )
        return ForecastComparison(forecast=forecast)
    points = read_points(path, TableOptions(repeated=True))
    if len(set(points.params.tolist())) > 1:
        raise mistake(str(path), "holds more than one model size", fix="give the rows of one run")
    order = points.tokens.argsort()
    curve = [(float(points.tokens[one]), float(points.loss[one])) for one in order]
    forecast = judge_run(
        law,
        run=points.run[0] or path.stem,
        finished=False,
        params=float(points.params[0]),
        planned_tokens=curve[-1][0],
        curve=curve,
        allowance=allowance,
        notes=("a table does not say when the run ends: it is taken as going on",),
    )
    return ForecastComparison(forecast=forecast)
