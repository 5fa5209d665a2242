"""Tables as people keep them: the same runs in other forms give the same points."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from phalanx.errors import UserError
from phalanx.scale.fit_points import fit_law
from phalanx.scale.points import ScalingPoints, TableOptions, read_points
from phalanx.scale.surface import Surface

LAW = Surface(E=1.7, A=400.0, B=1500.0, alpha=0.34, beta=0.3)
RUNS = [(n, n * ratio, LAW.loss(n, n * ratio)) for n in (1_250_000, 12_500_000, 125_000_000) for ratio in (10, 40, 160)]


def lines(header: str, line: str) -> str:
    """A table with a line per run."""
    return "\n".join([header, *(line.format(n=n, d=d, m=n / 1e6, loss=loss) for n, d, loss in RUNS)]) + "\n"


PLAIN = lines("params,tokens,loss", "{n},{d},{loss:.5f}")
FORMS = {
    "blank lines, a comment and empty cells": "\n# my sweep\n\n" + PLAIN + ",,\n",
    "tabs": PLAIN.replace(",", "\t"),
    "semicolons and decimal commas": lines("params;tokens;loss", "{n};{d};{loss:.5f}").replace(".", ","),
    "semicolons, decimal commas, thousands points": lines("params;tokens;loss", "{n:,};{d:,};{loss:.5f}")
    .replace(".", "!")
    .replace(",", ".")
    .replace("!", ","),
    "semicolons and decimal points": PLAIN.replace(",", ";"),
    "thousands separators": lines("params,tokens,loss", '"{n:,}","{d:,}",{loss:.5f}'),
    "tabs and thousands separators": lines("params\ttokens\tloss", "{n:,}\t{d:,}\t{loss:.5f}"),
    "suffixes": lines("params,tokens,loss", "{m}M,{d},{loss:.5f}"),
    "other names": lines("Model Size,Training-Tokens,Val Loss", "{n},{d},{loss:.5f}"),
    "json lines": "\n".join(json.dumps({"params": n, "tokens": d, "loss": round(loss, 5)}) for n, d, loss in RUNS),
    "json array": json.dumps([{"params": n, "tokens": d, "loss": round(loss, 5), "seed": None} for n, d, loss in RUNS]),
    "byte order mark and CRLF": "\ufeff" + PLAIN.replace("\n", "\r\n"),
}


def read(folder: Path, text: str, **options: object) -> ScalingPoints:
    """The points of a table."""
    path = folder / "table.csv"
    path.write_bytes(text.encode())
    return read_points(path, TableOptions(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize("form", FORMS)
def test_the_same_runs_in_another_form(form: str, tmp_path: Path) -> None:
    points = read(tmp_path, FORMS[form])
    assert [*points.params] == [n for n, _, _ in RUNS]
    assert [*points.tokens] == [d for _, d, _ in RUNS]
    assert [*points.loss] == [round(loss, 5) for _, _, loss in RUNS]


@pytest.mark.parametrize("missing", ["params", "tokens"])
def test_one_of_size_and_tokens_follows_from_flops(missing: str, tmp_path: Path) -> None:
    rows = [{"params": n, "tokens": d, "flops": 6.0 * n * d, "loss": loss} for n, d, loss in RUNS]
    points = read(tmp_path, "\n".join(json.dumps({k: v for k, v in row.items() if k != missing}) for row in rows))
    np.testing.assert_allclose(points.params, [n for n, _, _ in RUNS])
    np.testing.assert_allclose(points.tokens, [d for _, d, _ in RUNS])


def test_a_column_in_millions_is_read_as_counts(tmp_path: Path) -> None:
    text = lines("N (M),tokens,loss", "{m},{d},{loss:.5f}")
    points = read(tmp_path, text, columns={"params": "N (M)*1e6"})
    np.testing.assert_allclose(points.params, [n for n, _, _ in RUNS])
    with pytest.raises(UserError, match='has no column "N \\(M\\)\\*million"'):
        read(tmp_path, text, columns={"params": "N (M)*million"})


def test_units_that_are_no_counts_are_warned_of(tmp_path: Path) -> None:
    text = lines("params,tokens,loss", "{m},{d},{loss:.5f}")
    warnings = " ".join(fit_law(read(tmp_path, text), draws=0).warnings)
    assert "params lie between 1.25 and 125: are these millions or billions?" in warnings
    assert "tokens lie" not in warnings


def test_a_loss_is_never_read_with_thousands_separators(tmp_path: Path) -> None:
    """3,141 may be 3.141 written with a comma."""
    with pytest.raises(UserError, match='loss = "3,141" is not a positive number'):
        read(tmp_path, PLAIN + '1000000,5000000,"3,141"\n')


@pytest.mark.parametrize("method", ["vpnls", "huber3"])
def test_a_row_of_little_weight_hardly_moves_the_law(method: str, tmp_path: Path) -> None:
    """One run is 5 % off: the more it counts, the further it pulls; with weight 0 it is not there."""

    def exponent(weight: float) -> float:
        rows = [f"{n},{d},{loss:.6f},1" for n, d, loss in RUNS]
        rows[-1] = f"{RUNS[-1][0]},{RUNS[-1][1]},{1.05 * RUNS[-1][2]:.6f},{weight}"
        points = read(tmp_path, "params,tokens,loss,weight\n" + "\n".join(rows))
        return fit_law(points, method=method, draws=0, leave_out=False, with_starts=False).derived["a"].value

    off = [abs(exponent(weight) - LAW.exponent) for weight in (0.0, 1e-5, 1.0, 100.0)]
    assert off[0] < 1e-4
    assert off[1] < 0.3 * off[2]
    assert off[2] < off[3]
