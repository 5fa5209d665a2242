"""A fit as the page that `phalanx scale fit` prints."""

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
    """The whole page."""
    note, notes = fit.data, fit.diagnostics
    lines = [
        f"{fit.formula}   ({fit.method}, {plural(note.rows, 'row')} of {note.source})",
        f"parameters: {COUNTED[note.params_counted]}",
        f"FLOPs: {FLOPS_COUNTED[note.flops_counted]}",
        "",
    ]
    rows = [("", "value", "80 % interval", "profile", "std. error")]
    for name, one in {**fit.parameters, **fit.derived}.items():
        label = "a of N* ∝ C^a" if name == "a" else SYMBOLS.get(name, name)
        error = f"{one.standard_error:.3g}" if one.standard_error is not None else ""
        rows.append(
            (
                label,
                f"{one.value:.4g}",
                _range_text(one.low, one.high),
                _profile_text(one),
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
        kept = ("kept in the fit", "left out of the fit")
        lines += [f"  {one.name}: {one.what}; {kept[one.is_left_out]}" for one in notes.outliers]
        if lines_kept := sorted(one.line for one in notes.outliers if one.line and not one.is_left_out):
            lines.append(f"  to fit without the rows that are kept: --drop {','.join(map(str, lines_kept))}")
    if fit.comparisons:
        lines += ["", "PUBLISHED FITS"]
        lines += [f"  {one.name}: {one.sentence}  [{one.source}]" for one in fit.comparisons]
    lines += [f"left out: {one}" for one in note.left_out]
    lines += [f"warning: {one}" for one in fit.warnings]
    lines.append(f"data sha256 {note.sha256}")
    return "\n".join([*lines, "", *_answer_lines(fit)])


def _answer_lines(fit: ScalingFit) -> list[str]:
    """What the law was fitted for, in two sentences at the end of the page."""
    flops = 10.0 * fit.data.flops_range[1]
    best = optimum_estimates(fit, flops)
    params, tokens = (_with_range(best[key], as_count=True) for key in ("params", "tokens"))
    loss = _with_range(best["loss"], as_count=False)
    lines = [
        f"With ten times the compute of the largest run ({flops:.2g} FLOP): train {params} parameters on {tokens} "
        f"tokens, and expect a loss of {loss}."
    ]
    tested = fit.diagnostics.left_out_budget
    if tested is not None:
        lines.append(
            f"The largest budget here, predicted from the others, was off by {100 * tested.mean_abs_error:.1f} % on "
            f"average, {100 * tested.worst_error:+.1f} % at worst."
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
    """Budgets at the edge of the data, ten and a hundred times it."""
    largest = fit.data.flops_range[1]
    rows: list[tuple[str, ...]] = [("C", "N*", "D*", "D/N", "loss")]
    for factor in (1.0, 10.0, 100.0):
        found = optimum_estimates(fit, factor * largest)
        rows.append(
            (
                f"{factor * largest:.2e}",
                *(_with_range(found[key], as_count=True) for key in ("params", "tokens", "tokens_per_param")),
                _with_range(found["loss"], as_count=False),
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
    for one in fit.curves:
        known = one.params == one.params
        rows.append(
            (
                f"{one.flops:.2e}",
                str(one.rows),
                format_count(one.params) if known else "",
                f"{one.tokens / one.params:.1f}" if known else "",
                f"{one.loss:.3f}" if known else "",
                "" if one.used else f"left out: {one.note}",
            )
        )
    return text_table(rows, right=(0, 1, 2, 3, 4), indent=2)


def _trust_lines(fit: ScalingFit) -> list[str]:
    notes = fit.diagnostics
    lines = [f"  residuals of ln L: standard deviation {100 * notes.residual_sd:.2f} %"]
    if notes.noise:
        known = {"proportional": "proportional to the loss, by likelihood"}
        lines.append(f"  noise: {known.get(notes.noise, 'constant, or too few points to tell')}; intervals weigh both")
    if notes.left_out_budget is not None:
        one = notes.left_out_budget
        baseline = one.baseline_mean_abs_error
        other = f"; a law without E, L = K·N^-p·D^-q: {100 * baseline:.2f} %" if baseline is not None else ""
        lines.append(
            f"  extrapolation to the largest budget, held out ({plural(one.rows, 'row')} from {one.least_flops:.2e} "
            f"FLOP): mean error {100 * one.mean_abs_error:.2f} %, worst {100 * one.worst_error:+.2f} %{other}"
        )
        if one.drift > 0.0:
            lines.append(
                f"  {100 * one.drift:.2f} % of it to one side is more than noise explains: intervals of losses beyond "
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
