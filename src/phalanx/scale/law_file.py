"""Read a fit from its file and check every number that the law uses, as users may have edited it.

Laws take logarithms and powers of these values. Invalid values could end in a division by zero or, such as a negative
B, in a page of meaningless numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from phalanx.errors import Problem, UserError, mistake
from phalanx.io.codec import from_json_values
from phalanx.io.files import read_text
from phalanx.scale.fit_result import FORMAT, DataNote, ScalingFit, UsedRates
from phalanx.scale.laws import FORMULAS
from phalanx.scale.points import COUNTED

LARGEST_FIT_BYTES = 64 * 2**20
FIX = "phalanx scale fit TABLE.csv --out FIT writes one"

# Bounds of each number: fits stay well inside, and powers of values inside do not overflow.
_LOSS, _FACTOR, _SCALE, _EXPONENT = (0.0, 1e6), (0.0, 1e200), (1e-200, 1e200), (1e-6, 1e4)
_SURFACE = {"E": _LOSS, "A": _FACTOR, "B": _FACTOR, "alpha": _EXPONENT, "beta": _EXPONENT}
_ISOFLOP = {
    "G": (0.0, 1e300),
    "a": (-100.0, 100.0),
    "E": _LOSS,
    "K": (-1e200, 1e200),  # a draw of few curves may rise with compute
    "gamma": (1e-6, 100.0),
    "curvature": (-1e6, 1e6),
}
_KAPLAN = {"N_c": _SCALE, "alpha_N": _EXPONENT, "D_c": _SCALE, "alpha_D": _EXPONENT}
PARAMETRIZATIONS = ("", "mup", "completep")


def read_fit(path: Path) -> ScalingFit:
    """Read the file that `phalanx scale fit --out` wrote; raises UserError naming each wrong field."""
    text = read_text(path, noun="fit", most_bytes=LARGEST_FIT_BYTES)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise mistake(str(path), f"is not JSON: {error}", fix=FIX) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT or "parameters" not in data:
        raise mistake(str(path), "is not a fit of this version", fix=FIX)
    fit = from_json_values(ScalingFit, data, str(path), noun="fit", fix=FIX)
    if problems := [Problem(where=f"{path}: {field}", what=reason, fix=FIX) for field, reason in _wrong_fields(fit)]:
        raise UserError(problems)
    return fit


def _wrong_fields(fit: ScalingFit) -> Iterator[tuple[str, str]]:
    """Yield fields with values that no fit has, and the problem of each."""
    if fit.method not in FORMULAS:
        yield "method", f'"{fit.method[:40]}" is not one of {", ".join(FORMULAS)}'
        return
    bounds = {"isoflop": _ISOFLOP, "kaplan": _KAPLAN}.get(fit.method, _SURFACE)
    if missing := [name for name in bounds if name not in fit.parameters]:
        yield "parameters", f"a law by {fit.method} has {', '.join(bounds)}; {', '.join(missing)} is not there"
        return
    for name, (least, most) in bounds.items():
        yield from _outside(f"parameters.{name}.value", fit.parameters[name].value, least, most)
    yield from _wrong_draws(fit, bounds)
    yield from _wrong_data(fit.data)
    yield from _outside("diagnostics.residual_sd", fit.diagnostics.residual_sd, 0.0, 100.0)
    if (held_out := fit.diagnostics.left_out_budget) is not None:
        yield from _outside("diagnostics.left_out_budget.drift", held_out.drift, 0.0, 100.0)
        yield from _outside("diagnostics.left_out_budget.decades", held_out.decades, 0.0, 100.0)
    if fit.used_rates is not None:
        yield from _wrong_rates(fit.used_rates)


def _outside(field: str, value: float, least: float, most: float) -> Iterator[tuple[str, str]]:
    # This form also reports NaN.
    if not least <= value <= most:
        yield field, f"{value:g} is not between {least:g} and {most:g}"


def _wrong_draws(fit: ScalingFit, bounds: dict[str, tuple[float, float]]) -> Iterator[tuple[str, str]]:
    """Yield the first draw that is wrong: a file with one of them has hundreds."""
    names = tuple(fit.parameters)
    for number, row in enumerate(fit.draws):
        if len(row) != len(names):
            yield f"draws[{number}]", f"has {len(row)} values, but the law has {len(names)} parameters"
            return
        for name, value in zip(names, row, strict=True):
            least, most = bounds.get(name, (-math.inf, math.inf))
            if problems := list(_outside(f"draws[{number}], {name}", value, least, most)):
                yield from problems
                return


def _wrong_data(data: DataNote) -> Iterator[tuple[str, str]]:
    if data.params_counted not in COUNTED:
        yield "data.params_counted", f'"{data.params_counted[:40]}" is not one of {", ".join(COUNTED)}'
    for name in ("params_range", "tokens_range", "flops_range"):
        low, high = getattr(data, name)
        if not 0.0 < low <= high < math.inf:
            yield f"data.{name}", f"{low:g} to {high:g} is no range of positive numbers"


def _wrong_rates(used: UsedRates) -> Iterator[tuple[str, str]]:
    for name in ("params", "tokens", "lr"):
        yield from _outside(f"used_rates.{name}", getattr(used, name), 1e-30, 1e30)
    yield from _outside("used_rates.batch_tokens", used.batch_tokens, 0.0, 1e18)
    if used.parametrization not in PARAMETRIZATIONS:
        yield "used_rates.parametrization", f'"{used.parametrization[:40]}" is neither "mup" nor "completep"'
    elif used.parametrization:
        shape: Sequence[str] = ("base_width", "base_depth", "base_head_dim")
        for name in shape:
            yield from _outside(f"used_rates.{name}", getattr(used, name), 1, 10**7)
