"""A fit's file that was edited: every field that a law is computed with is checked, and named where it is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli.main import main
from phalanx.errors import UserError
from phalanx.scale.fit_result import UsedRates
from phalanx.scale.law_file import read_fit

sys.path.append(str(Path(__file__).parents[1]))
from made_law import made_law, write_law

KAPLAN = {"N_c": 8.8e13, "alpha_N": 0.076, "D_c": 5.4e13, "alpha_D": 0.095}
ISOFLOP = {"G": 0.1, "a": 0.5, "E": 1.7, "K": 400.0, "gamma": 0.15, "curvature": 0.02}


def edited(path: Path, keys: str, value: Any) -> Path:
    """A law's file with one entry changed; `keys` are joined by dots, None removes the entry."""
    used = UsedRates(params=1e8, tokens=2e9, lr=1e-3)
    data = json.loads(write_law(path, made_law(used_rates=used)).read_text())
    *outer, last = keys.split(".")
    place = data
    for key in outer:
        place = place[int(key)] if isinstance(place, list) else place[key]
    if value is None:
        del place[last]
    else:
        place[int(last) if isinstance(place, list) else last] = value
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize("values", [None, KAPLAN, ISOFLOP])
def test_what_a_fit_wrote_is_read(tmp_path: Path, values: dict[str, float] | None) -> None:
    method = "kaplan" if values is KAPLAN else "isoflop" if values is ISOFLOP else "vpnls"
    law = made_law(values, method=method)
    assert read_fit(write_law(tmp_path / "law.json", law)) == law


@pytest.mark.parametrize(
    ("keys", "value", "said"),
    [
        ("method", "foo", 'method: "foo" is not one of vpnls'),
        ("method", "isoflop", "parameters: a law by isoflop has G, a, E, K, gamma, curvature; G, a, K"),
        ("parameters.E", None, "E is not there"),
        ("parameters.alpha.value", 0, "parameters.alpha.value: 0 is not between"),
        ("parameters.alpha.value", 1e300, "parameters.alpha.value: 1e+300 is not between"),
        ("parameters.B.value", -5, "parameters.B.value: -5 is not between 0"),
        ("draws.1.3", -0.3, "draws[1], alpha: -0.3 is not between"),
        ("draws.1", [1.0], "draws[1]: has 1 values, but the law has 5 parameters"),
        ("data.params_counted", "zz", 'data.params_counted: "zz" is not one of total'),
        ("data.flops_range", [0, 0], "data.flops_range: 0 to 0 is no range"),
        ("data.tokens_range", [3, 2], "data.tokens_range: 3 to 2 is no range"),
        ("diagnostics.residual_sd", -1, "diagnostics.residual_sd: -1"),
        ("used_rates.tokens", 0, "used_rates.tokens: 0 is not between"),
        ("used_rates.lr", 0, "used_rates.lr: 0 is not between"),
        ("used_rates.parametrization", 'mup"', "used_rates.parametrization"),
        ("used_rates.parametrization", "mup", "used_rates.base_width: 0 is not between 1"),
    ],
)
def test_an_edited_field_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: str, value: Any, said: str
) -> None:
    path = edited(tmp_path / "law.json", keys, value)
    assert main(["scale", "allocate", str(path), "--budget", "1e20"]) == 2
    assert said in capsys.readouterr().err


def test_nested_text_is_no_law(tmp_path: Path) -> None:
    (tmp_path / "law.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="is not JSON"):
        read_fit(tmp_path / "law.json")
