"""The text of a fit, as `phalanx scale fit` prints it."""

from __future__ import annotations

from phalanx.io.tables import text_table
from phalanx.scale.fit_points import optimum_estimates
from phalanx.scale.fit_result import FitEstimate, ScalingFit
from phalanx.scale.points import COUNTED, FLOPS_COUNTED
from phalanx.units import format_count, plural

SYMBOLS = {
    "alpha": "α",
    "beta": "β",
    "gamma": "γ",
    "alpha_N": "αN",
    "alpha_D": "αD",
    "N_c": "Nc",
    "D_c": "Dc",
    "R_D": "R_D*",
    "R_N": "R_N*",
}


def fit_text(fit: ScalingFit) -> str:
    """Format the whole page."""
    note, notes = fit.data, fit.diagnostics
    lines = [
        f"{fit.formula}   ({fit.method}, {plural(note.rows, 'row')} of {note.source})",
        f"parameters: {COUNTED[note.params_counted]}",
        f"FLOPs: {FLOPS_COUNTED[note.flops_counted]}",
        "",
    ]
    rows = [("", "value", "80 % interval", "profile", "std. error")]
    for name, estimate in {**fit.parameters, **fit.derived}.items():
        label = "a of N* ∝ C^a" if name == "a" else SYMBOLS.get(name, name)
        error = f"{estimate.standard_error:.3g}" if estimate.standard_error is not None else ""
        rows.append(
            (
                label,
                f"{estimate.value:.4g}",
                _range_text(estimate.low, estimate.high),
                _profile_text(estimate),
                error,
            )
        )
    lines += text_table(rows, right=(1, 2, 3, 4))
    lines += ["", "COMPUTE-OPTIMAL MODELS", *_optimum_lines(fit)]
    if fit.curves:
        lines += ["", "ISOFLOP CURVES", *_curve_lines(fit)]
    lines += ["", "DIAGNOSTICS", *_trust_lines(fit)]
    if notes.outliers:
        lines += ["", "OUTLIERS"]
        outcomes = ("kept in the fit", "left out of the fit")
        lines += [f"  {outlier.name}: {outlier.what}; {outcomes[outlier.is_left_out]}" for outlier in notes.outliers]
        if lines_kept := sorted(outlier.line for outlier in notes.outliers if outlier.line and not outlier.is_left_out):
            lines.append(f"  to fit without the rows that are kept: --drop {','.join(map(str, lines_kept))}")
    if fit.comparisons:
        lines += ["", "PUBLISHED FITS"]
        lines += [
            f"  {comparison.name}: {comparison.sentence}  [{comparison.source}]" for comparison in fit.comparisons
        ]
    lines += [f"left out: {excluded}" for excluded in note.left_out]
    lines += [f"warning: {warning}" for warning in fit.warnings]
    lines.append(f"data sha256 {note.sha256}")
    return "\n".join([*lines, "", *_answer_lines(fit)])


def _answer_lines(fit: ScalingFit) -> list[str]:
    """Return the closing sentences of the page: the best model at ten times the compute, and the held-out error."""
    flops = 10.0 * fit.data.flops_range[1]
    best = optimum_estimates(fit, flops)
    params, tokens = (_with_range(best[key], as_count=True) for key in ("params", "tokens"))
    loss = _with_range(best["loss"], as_count=False)
    lines = [
        f"With ten times the compute of the largest run ({flops:.2g} FLOP): train {params} parameters on {tokens} "
        f"tokens, and expect a loss of {loss}."
    ]
    held_out = fit.diagnostics.left_out_budget
    if held_out is not None:
        lines.append(
            f"The largest budget here, predicted from the others, was off by {100 * held_out.mean_abs_error:.1f} % on "
            f"average, {100 * held_out.worst_error:+.1f} % at worst."
        )
    return lines


def _range_text(low: float | None, high: float | None) -> str:
    return f"{low:.4g} to {high:.4g}" if low is not None and high is not None else ""


def _profile_text(one: FitEstimate) -> str:
    if one.profile_low is None:
        return ""
    if one.profile_high is None:
        return f"{one.profile_low:.4g} or more" if one.profile_low else "open"
    return _range_text(one.profile_low, one.profile_high)


def _optimum_lines(fit: ScalingFit) -> list[str]:
    """Format the optima at the largest budget of the data, and at ten and a hundred times that."""
    largest = fit.data.flops_range[1]
    rows: list[tuple[str, ...]] = [("C", "N*", "D*", "D/N", "loss")]
    for factor in (1.0, 10.0, 100.0):
        estimates = optimum_estimates(fit, factor * largest)
        rows.append(
            (
                f"{factor * largest:.2e}",
                *(_with_range(estimates[key], as_count=True) for key in ("params", "tokens", "tokens_per_param")),
                _with_range(estimates["loss"], as_count=False),
            )
        )
    return text_table(rows, right=(0, 1, 2, 3, 4), indent=2)


def _with_range(one: FitEstimate, *, as_count: bool) -> str:
    show = format_count if as_count else "{:.3f}".format
    if one.low is None or one.high is None:
        return show(one.value)
    return f"{show(one.value)} ({show(one.low)} to {show(one.high)})"


def _curve_lines(fit: ScalingFit) -> list[str]:
    rows = [("C", "rows", "N*", "D/N", "loss", "")]
    for curve in fit.curves:
        has_optimum = curve.params == curve.params
        rows.append(
            (
                f"{curve.flops:.2e}",
                str(curve.rows),
                format_count(curve.params) if has_optimum else "",
                f"{curve.tokens / curve.params:.1f}" if has_optimum else "",
                f"{curve.loss:.3f}" if has_optimum else "",
                "" if curve.used else f"left out: {curve.note}",
            )
        )
    return text_table(rows, right=(0, 1, 2, 3, 4), indent=2)


def _trust_lines(fit: ScalingFit) -> list[str]:
    """Format the diagnostics: residuals, noise, held-out error, agreement of starts, condition number."""
    notes = fit.diagnostics
    lines = [f"  residuals of ln L: standard deviation {100 * notes.residual_sd:.2f} %"]
    if notes.noise:
        noise_texts = {"proportional": "proportional to the loss, by likelihood"}
        lines.append(
            f"  noise: {noise_texts.get(notes.noise, 'constant, or too few points to tell')}; intervals weigh both"
        )
    if notes.left_out_budget is not None:
        test = notes.left_out_budget
        baseline = test.baseline_mean_abs_error
        plain = f"; a law without E, L = K·N^-p·D^-q: {100 * baseline:.2f} %" if baseline is not None else ""
        lines.append(
            f"  extrapolation to the largest budget, held out ({plural(test.rows, 'row')} from {test.least_flops:.2e} "
            f"FLOP): mean error {100 * test.mean_abs_error:.2f} %, worst {100 * test.worst_error:+.2f} %{plain}"
        )
        if test.drift > 0.0:
            lines.append(
                f"  {100 * test.drift:.2f} % of it to one side is more than noise explains: intervals of losses beyond "
                "the data are widened by as much"
            )
    else:
        lines.append("  extrapolation to the largest budget: not tested, too few rows would remain")
    if notes.starts_agreeing is not None:
        reached = round(notes.starts_agreeing * notes.starts)
        share = f"{reached} of {notes.starts} random starts ({notes.starts_agreeing:.0%})"
        lines.append(f"  {share} reach the exponents of the least objective within 1 %")
    if notes.condition_number is not None:
        raw = notes.raw_condition_number
        more = (
            f"; {raw:.1e} when all five parameters are fitted at once"
            if raw is not None and raw != notes.condition_number
            else ""
        )
        lines.append(f"  condition number {notes.condition_number:.2g}{more}")
    return lines
