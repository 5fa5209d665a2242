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
    "semicolons and English numbers": lines("params;tokens;loss", "{n:,};{d:,};{loss:.5f}"),
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


SMALL = [(11_320, 368_256, 4.314), (22_640, 736_512, 4.108), (45_280, 999_424, 3.912)]  # no cell tells on its own


@pytest.mark.parametrize("swapped", [False, True])
def test_losses_decide_what_a_comma_is(tmp_path: Path, *, swapped: bool) -> None:
    text = "params;tokens;final loss\n" + "".join(f"{n:,};{d:,};{loss:.3f}\n" for n, d, loss in SMALL)
    if swapped:
        text = text.translate(str.maketrans(",.", ".,"))
    points = read(tmp_path, text, columns={"loss": "final loss"})
    assert list(zip(points.params, points.tokens, points.loss, strict=True)) == SMALL


def test_a_comma_that_may_be_either_is_refused(tmp_path: Path) -> None:
    text = "params;tokens;loss\n" + "".join(f"{n:,};{d:,};{loss:.0f}\n" for n, d, loss in SMALL)
    with pytest.raises(UserError, match=r'such as "11,320".*\n.*write counts without separators'):
        read(tmp_path, text)
    assert [*read(tmp_path, text.replace(";", "\t")).params] == [n for n, _, _ in SMALL]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("1e258,1e60,3", 'params = "1e258" is not within 1 to 1e\\+18'),
        ("1e8,1e60,3", 'tokens = "1e60" is not within 1 to 1e\\+24'),
        ("1e-291,1e9,3", 'params = "1e-291" is not within 1 to'),
        ("0.07,1.4,3", "--column 'params=THEIRS\\*1e6'"),
        ("1e8,1e9,1e200", 'loss = "1e200" is not within'),
    ],
)
def test_numbers_that_are_no_counts_are_refused(row: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        read(tmp_path, PLAIN + row + "\n")


def test_counts_that_flops_make_are_held_to_the_same(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"csv:2: tokens = flops / \(6·params\) = 1.67e-09 is not within 1 to 1e\+24"):
        read(tmp_path, "params,flops,loss\n1e8,1,3\n2e8,2,2.9\n")
    text = lines("N,tokens,loss", "{n},{d},{loss:.5f}")
    with pytest.raises(UserError, match=r'N\*1e99 = "1.2\d*e\+105" is not within 1 to 1e\+18'):
        read(tmp_path, text, columns={"params": "N*1e99"})


def test_repeated_rows_count_once_whichever_came_first(tmp_path: Path) -> None:
    again = "".join(f"{RUNS[0][0]},{RUNS[0][1]},{loss}\n" for loss in (3.41, 3.3, 3.3))
    points = read(tmp_path, PLAIN + again, repeated=True)
    assert len(points) == len(RUNS) + 2
    assert points.left_out == ("1 duplicate row",)


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
