"""Plans: find the best layout of a job on a cluster, compare plans, and compare predictions with measurements."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.api.jobs import AnyJob, look_at_files, read_job
from phalanx.api.results import INTERRUPTED, Overrides, PublicResult, Tell, teller
from phalanx.errors import mistake
from phalanx.hardware.cluster import LOCAL_SPEC, resolve_cluster
from phalanx.hardware.discover import discover
from phalanx.hardware.kernel_choices import chosen_variants, kernel_cache_folder, read_choices
from phalanx.hardware.types import Cluster
from phalanx.io.codec import json_values
from phalanx.io.path_probes import is_folder
from phalanx.io.visible import one_line
from phalanx.plan.make import make_plan, plan_here
from phalanx.plan.plan import CalibrationNote, Plan
from phalanx.units import plural

if TYPE_CHECKING:
    from phalanx.plan.text import PlanDifference
    from phalanx.validate.calibration_report import CalibrationReport as CalibrationReport
    from phalanx.validate.network_score import NetworkCard
    from phalanx.validate.throughput_score import RowPrediction as RowPrediction
    from phalanx.validate.throughput_score import Scorecard

MOST_COMPARED = 8
PROGRESS_S = 5.0  # seconds between lines of progress


def plan(
    job: AnyJob,
    cluster: str | Path | Cluster | None = None,
    *,
    overrides: Overrides = (),
    calibration: str | Path | CalibrationNote | None = None,
    measure: bool = False,
    allow_unfinishable: bool = False,
    progress: bool | Tell = False,
) -> Plan:
    """Find the best layout of a job on a cluster, with its time, memory, cost and reasons.

    `job` is a path, the result of `load`, or a Job; `cluster` is a spec such as "8xH100:4", a file, or a Cluster, by
    default the job's own. `calibration` is a file that `calibrate` wrote. `measure` times this machine's cores first,
    as `phalanx plan` does for the cluster `local` (about 20 s, once).

    Raises UserError if no layout fits and, unless `allow_unfinishable`, for a run that would never finish.

    >>> import phalanx
    >>> plan = phalanx.plan("examples/llama-3-8b-64xH100.toml", "8xH100:4")
    >>> plan.layout.devices, plan.memory.total_bytes < plan.memory.usable_bytes
    (32, True)
    """
    tell = teller(progress)
    resolved = read_job(job, overrides, where="phalanx.plan")
    note = calibration
    if isinstance(note, str | Path):
        # Imported on demand because it imports scipy.
        from phalanx.plan.calibrate import read_calibration

        note = read_calibration(Path(note))
    findings = look_at_files(resolved, tell)

    def make() -> Plan:
        return make_plan(resolved, cluster, calibration=note, allow_unfinishable=allow_unfinishable)

    target = "" if isinstance(cluster, Cluster) else str(cluster or resolved.job.cluster.target).strip()
    if LOCAL_SPEC.match(target) and (kernels := _kernels_here()):
        tell(f"kernels chosen by earlier runs on this machine: {kernels} (phalanx kernels list)")
    if not measure or not LOCAL_SPEC.match(target):  # only this machine can be measured
        new_plan = make()
    else:
        if cluster is not None and not isinstance(cluster, Cluster):
            # Checked before the machine is measured, which takes 20 s.
            resolve_cluster(cluster)
        new_plan = plan_here(make, target, environ=os.environ, tell=tell)
    if not findings.warnings:
        return new_plan
    return replace(new_plan, warnings=(*new_plan.warnings, *(problem.render() for problem in findings.warnings)))


def _kernels_here() -> str:
    """Return the kernels that the selector has chosen for this machine's GPU; a run measures new shapes."""
    choices = read_choices(kernel_cache_folder(os.environ))
    gpus = discover().gpus if choices else ()  # asking the driver takes time
    chosen = chosen_variants(choices, device=gpus[0].name) if gpus else {}
    return ", ".join(f"{op} {variant}" for op, variant in sorted(chosen.items()))


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class PlanComparison(PublicResult):
    """A comparison of several plans."""

    names: tuple[str, ...]
    plans: tuple[Plan, ...]
    differences: tuple[PlanDifference, ...]

    def __str__(self) -> str:
        from phalanx.plan.text import comparison_text

        return comparison_text(self.differences)

    def __repr__(self) -> str:
        names = one_line(", ".join(self.names))
        return f"<PlanComparison: {names[:100]}{'…' * (len(names) > 100)}>"

    def to_dict(self) -> dict[str, Any]:
        """Return the differences, and every complete plan."""
        return {"differences": json_values(self.differences), "plans": [plan.to_dict() for plan in self.plans]}


def compare_plans(plans: Sequence[Plan], names: Sequence[str] = ()) -> PlanComparison:
    """Compare 2 to 8 plans by layout, time, cost and memory; `names` head the columns.

    >>> import phalanx
    >>> plans = [phalanx.plan("examples/llama-3-8b-64xH100.toml", cluster) for cluster in ("8xH100:4", "8xH100:8")]
    >>> comparison = compare_plans(plans, ["4 hosts", "8 hosts"])
    >>> comparison.names
    ('4 hosts', '8 hosts')
    """
    from phalanx.plan.text import compare_plans

    if not 2 <= len(plans) <= MOST_COMPARED:
        raise mistake("phalanx.compare_plans", f"{plural(len(plans), 'plan')} given", fix=f"give 2 to {MOST_COMPARED}")
    plan_names = tuple(names) or tuple(plan_.job.name for plan_ in plans)
    return PlanComparison(
        names=plan_names, plans=tuple(plans), differences=tuple(compare_plans(plans, list(plan_names)))
    )


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class CalibrationResult(PublicResult):
    """Calibration factors of a system, and how well they fit; `phalanx.plan(job, calibration=...)` takes the file."""

    report: CalibrationReport

    def __str__(self) -> str:
        from phalanx.validate.calibration_report import calibration_text

        return calibration_text(self.report)

    def to_dict(self) -> dict[str, Any]:
        """Return the fit."""
        return dict(json_values(self.report))

    def write(self, path: str | Path) -> None:
        """Write the file that `plan` reads."""
        from phalanx.validate.calibration_report import write_calibration

        write_calibration(Path(path), self.report)


def calibrate(measured: str | Path) -> CalibrationResult:
    """Refit five factors of the cost model from a run folder, or from a table of measured steps.

    >>> calibrate("runs/first-run").write("calibration.json")  # doctest: +SKIP
    >>> phalanx.plan("job.toml", calibration="calibration.json")  # doctest: +SKIP
    """
    from phalanx.validate.calibration_report import calibrate_run, calibrate_table

    source = Path(measured)
    return CalibrationResult(report=calibrate_run(source) if is_folder(source) else calibrate_table(source))


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Backtest(PublicResult):
    """Predictions for a table of published runs, and their errors against the measurements."""

    scorecard: Scorecard
    calibrated_on: int  # rows
    predictions: tuple[RowPrediction, ...]

    def __str__(self) -> str:
        from phalanx.validate.throughput_score import scorecard_text

        return scorecard_text(self.scorecard, calibrated_on=self.calibrated_on)

    def to_dict(self) -> dict[str, Any]:
        """Return the scores, and every prediction."""
        values = {
            "scorecard": self.scorecard,
            "calibrated_on_rows": self.calibrated_on,
            "predictions": self.predictions,
        }
        return dict(json_values(values))

    def write(self, path: str | Path) -> None:
        """Write the predictions as CSV."""
        from phalanx.validate.throughput_score import write_predictions

        write_predictions(Path(path), self.predictions)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class NetworkBacktest(PublicResult):
    """The computed values for a table of network claims, and their errors."""

    card: NetworkCard

    def __str__(self) -> str:
        from phalanx.validate.network_score import network_card_text

        return network_card_text(self.card)

    def to_dict(self) -> dict[str, Any]:
        """Return the scores of every claim."""
        return dict(json_values(self.card))

    @property
    def exit_code(self) -> int:
        """130 if Ctrl-C left rows out."""
        return INTERRUPTED if self.card.interrupted else 0


def backtest(
    table: str | Path,
    *,
    calibration: str | Path | None = None,
    draw: int = 0,
    seed: int = 0,
    simulate: bool = False,
    progress: bool | Tell = False,
) -> Backtest | NetworkBacktest:
    """Predict a table of published measurements, and report the error.

    `table` holds training runs (columns of throughput_public.csv) or network claims (source, quantity, value, unit,
    conditions). For runs, at most five factors per source are first fitted to the rows of `calibration`, or to `draw`
    rows of each source, which are then left out of the score. For claims, `simulate` also runs the simulations beyond
    one minute in total.

    >>> print(backtest("throughput_public.csv", draw=3))  # doctest: +SKIP
    """
    from phalanx.validate.network_claims import is_network_table
    from phalanx.validate.throughput_score import draw_known, predict_table, score_predictions
    from phalanx.validate.throughput_table import read_table

    tell = teller(progress)
    if is_network_table(Path(table)):
        if calibration or draw:
            fix = "leave --predictions, --calibrate and --draw out"
            raise mistake(str(table), "is a table of network claims", fix=fix)
        return _network_backtest(Path(table), simulate=simulate, tell=tell)
    if simulate:
        raise mistake("--simulate", "is for tables of network claims", fix="leave it out")
    if draw < 0 or (draw and calibration):
        raise mistake("--draw", "needs a positive number and excludes --calibrate", fix="use one of the two")
    rows = read_table(Path(table)).rows
    known_rows = read_table(Path(calibration)).rows if calibration else ()
    if draw:
        known_rows, rows = draw_known(rows, per_source=draw, seed=seed)
    predictions = predict_table(rows, known=known_rows)
    return Backtest(
        scorecard=score_predictions(rows, predictions), calibrated_on=len(known_rows), predictions=tuple(predictions)
    )


def _network_backtest(table: Path, *, simulate: bool, tell: Tell) -> NetworkBacktest:
    """Score network claims: only the two ends of a series are fitted, so the options of runs do not apply."""
    from phalanx.validate.network_claims import read_claims
    from phalanx.validate.network_score import plan_simulations as plan_rows
    from phalanx.validate.network_score import score_claims

    rows = read_claims(table)
    simulations = plan_rows(rows, simulate=simulate)
    if simulations.keys:
        cpu = f"about {simulations.cpu_s:.0f} s of CPU; Ctrl-C keeps what is finished"
        tell(f"{plural(len(simulations.keys), 'simulation')}, {cpu}")
    if simulations.left_out:
        tell(f"{simulations.left_out} more would take about {simulations.left_out_cpu_s:,.0f} s: add --simulate")
    printed_s = time.monotonic()

    def progress(done: int, of: int) -> None:
        nonlocal printed_s
        # A minute without output would look like a hang.
        if time.monotonic() - printed_s > PROGRESS_S and done < of:
            printed_s = time.monotonic()
            tell(f"  {done:,} of {of:,} rows")

    return NetworkBacktest(card=score_claims(rows, simulate=simulate, planned=simulations, progress=progress))
