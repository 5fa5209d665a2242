"""`phalanx scale` as a person calls it: fit, allocate, predict, and what is refused."""

from __future__ import annotations

import json
import re
import struct
import tomllib
import zlib
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli.main import main

TABLE = Path(__file__).parents[1] / "data" / "scaling" / "chinchilla_points_epoch.csv"
GRID = [(n, d) for n in (1e7, 3e7, 1e8, 3e8) for d in (1e9, 3e9, 1e10)]


def rows_of(points: list[tuple[float, float]], columns: str = "params,tokens,loss") -> str:
    lines = [f"{n},{d},{1.7 + 400 * n**-0.34 + 410 * d**-0.28}" for n, d in points]
    return "\n".join([columns, *lines]) + "\n"


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fit") / "fit.json"
    call = ["scale", "fit", str(TABLE), "--drop-highest", "5", "--params-counted", "total", "--draws", "60"]
    assert main([*call, "--out", str(out), "--plots", str(out.parent / "plots")]) == 0
    return out


def test_fit_writes_json_and_pictures(fitted: Path) -> None:
    found = json.loads(fitted.read_text())
    assert (found["method"], found["data"]["rows"], len(found["draws"])) == ("vpnls", 240, 60)
    assert len(found["data"]["sha256"]) == 64
    assert found["diagnostics"]["left_out_budget"]["mean_abs_error"] < 0.02
    assert found["diagnostics"]["starts_agreeing"] > 0.9
    for name in ("isoflop", "residuals", "frontier"):
        assert (fitted.parent / "plots" / f"{name}.svg").read_text().startswith("<svg xmlns=")
        assert png_size((fitted.parent / "plots" / f"{name}.png").read_bytes()) == (1280, 488)


def png_size(data: bytes) -> tuple[int, int]:
    """Width and height, from the header; the pixels must decode."""
    assert data.startswith(b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR")
    pixels, at = b"", 8
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        if kind == b"IDAT":
            pixels += data[at + 8 : at + 8 + length]
        at += length + 12
    width, height = struct.unpack(">II", data[16:24])
    assert len(set(zlib.decompress(pixels))) > 50  # lines, dots and letters, not one colour
    return width, height


def test_all_pictures_in_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    table = tmp_path / "t.csv"
    table.write_text(rows_of(GRID))
    call = ["scale", "fit", str(table), "--draws", "0", "--plots"]
    assert main([*call, str(tmp_path / "law.png")]) == 0
    assert png_size((tmp_path / "law.png").read_bytes())[0] == 1280
    assert main([*call, str(tmp_path / "law.gif")]) == 2
    assert ".gif is no format of these pictures\n  name a folder, or a .svg or .png file\n" in capsys.readouterr().err
    assert main([*call, str(tmp_path / "law.svg")]) == 0
    assert (tmp_path / "law.svg").read_text().count("<svg ") == 3  # the frame and two plots: no IsoFLOP curves here
    assert f"wrote {tmp_path / 'law.svg'}" in capsys.readouterr().err
    monkeypatch.setattr("phalanx.io.png_plot.has_pillow", lambda: False)
    assert main([*call, str(tmp_path / "other.png")]) == 2
    assert "pip install 'phalanx[png]'" in capsys.readouterr().err
    assert main([*call, str(tmp_path / "folder")]) == 0
    assert "no PNG: pip install 'phalanx[png]'" in capsys.readouterr().err


def test_allocate_plans_and_writes_a_job(fitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.toml"
    call = ["scale", "allocate", str(fitted), "--budget", "1e22", "--cluster", "8xH100:16", "--out", str(job), "--json"]
    assert main(call) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"]["params"]["low"] < found["best"]["params"]["value"] < found["best"]["params"]["high"]
    assert abs(found["shape_params"] / found["best"]["params"]["value"] - 1) < 0.06
    assert [one["factor"] for one in found["off"]] == [0.5, 2.0]
    assert all(one["loss"] > found["best"]["loss"]["value"] and one["wasted_compute"] > 0.03 for one in found["off"])
    assert found["plan"]["bill"]["device_hours"] > 1000
    text = tomllib.loads(job.read_text())
    assert text["model"]["hidden"] == found["shape"]["hidden"]
    assert main(["plan", str(job)]) == 0


def test_rates_come_from_step_law_only_where_it_was_fitted(
    fitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Extended to 60k parameters it asked for a learning rate of 0.17."""

    def allocated(fit: Path, budget: str, *more: str) -> dict[str, Any]:
        job = tmp_path / "rates.toml"
        capsys.readouterr()
        assert main(["scale", "allocate", str(fit), "--budget", budget, "--json", "--out", str(job), *more]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        written = tomllib.loads(job.read_text())
        assert written["optim"]["lr"] == pytest.approx(found["lr"], rel=0.01)
        assert written["batch"]["global_tokens"] == found["batch_tokens"]
        return {**found, "job": written}

    inside = allocated(fitted, "6e19")
    assert inside["rates_from"] == "step law"
    assert inside["lr"] == inside["step_law_lr"]
    assert not any("Step Law" in one for one in inside["notes"])
    large = allocated(fitted, "6e23")  # 70B parameters: Chinchilla was trained with 1e-4 and batches of 3M
    assert large["rates_from"] == "step law, bounded"
    assert 5e-5 < large["lr"] < large["step_law_lr"] < 2e-4
    assert 2e6 < large["batch_tokens"] < 8e6

    table, law = tmp_path / "small.csv", tmp_path / "small.json"
    points = [(n, d) for n in (1e4, 2e4, 4e4, 8e4) for d in (2e5, 6e5, 2e6)]
    rows = rows_of(points).splitlines()
    table.write_text("\n".join(rows) + "\n")
    assert main(["scale", "fit", str(table), "--draws", "0", "--out", str(law)]) == 0
    tiny = ("--vocab", "64", "--sequence", "16")
    bare = allocated(law, "1e12", *tiny)
    assert bare["rates_from"] == "step law, bounded"
    assert bare["lr"] < 4e-3 < 0.02 < bare["step_law_lr"]
    assert bare["tokens"] / bare["batch_tokens"] > 280  # 400 steps, and a power of two
    assert sum("is cut to" in one for one in bare["notes"]) == 1
    assert main(["check", str(tmp_path / "rates.toml"), "--select", "OPT001"]) == 0

    used = "lr,batch_tokens,parametrization"
    lines = [f"{row},0.01,128,completep:64:3:8" for row in rows[1:]]
    table.write_text("\n".join([f"{rows[0]},{used}", *lines]) + "\n")
    assert main(["scale", "fit", str(table), "--draws", "0", "--out", str(law)]) == 0
    carried = allocated(law, "1e12", *tiny)
    assert carried["rates_from"] == "runs"
    assert carried["lr"] == pytest.approx(0.01 * (carried["tokens"] / 2e6) ** 0.307)
    assert carried["job"]["scale"] == {
        "parametrization": "completep",
        "base_width": 64,
        "base_depth": 3,
        "base_head_dim": 8,
    }
    table.write_text("\n".join([f"{rows[0]},{used}", *(one.replace("completep:64:3:8", "") for one in lines)]) + "\n")
    assert main(["scale", "fit", str(table), "--draws", "0", "--out", str(law)]) == 0
    standard = allocated(law, "1e12", *tiny)
    assert 0.0025 <= standard["lr"] < carried["lr"]
    assert "scale" not in standard["job"]


def test_allocate_for_serving_takes_a_smaller_model(fitted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "allocate", str(fitted), "--budget", "1e22", "--inference-tokens", "1T", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["serving"]["params"] < 0.9 * found["best"]["params"]["value"]
    assert 0.0 < found["serving"]["saved"] < 1.0
    assert abs(found["predicted_loss"] / found["best"]["loss"]["value"] - 1) < 0.005


def test_far_extrapolation_needs_a_flag(fitted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "allocate", str(fitted), "--budget", "1e26"]) == 2
    said = capsys.readouterr().err
    assert "decades beyond the largest run" in said
    assert "-4.3 %" in said
    assert main(["scale", "allocate", str(fitted), "--budget", "1e26", "--extrapolate"]) == 0


def test_predict_warns_above_the_band(fitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run.csv"
    run.write_text("params,tokens,loss\n1e9,1e10,2.66\n1e9,2e10,2.56\n")
    assert main(["scale", "predict", str(fitted), "--run", str(run)]) == 0
    run.write_text("params,tokens,loss\n1e9,1e10,2.66\n1e9,2e10,2.95\n")
    assert main(["scale", "predict", str(fitted), "--run", str(run)]) == 1
    assert "look for the cause now" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (rows_of(GRID[:2]), "has 2 rows; vpnls needs at least 6"),
        (rows_of([(1e8, d) for d in (1e9, 2e9, 3e9, 4e9, 5e9, 6e9)]), "has 1 model size"),
        (rows_of(GRID).replace("loss\n", "loss\n1e9,1e10,nan\n"), 'loss = "nan" is not a positive number'),
        (rows_of(GRID) + "1e7,1e9,3.5\n", "repeats line 2"),
        (rows_of([*GRID, GRID[0]]), "equal rows then count once"),
        ("params,tokens,loss\n" + "".join(f"{n},{d},{n * d / 1e19 + 2}\n" for n, d in GRID), "rise with compute"),
        ("params,tokens,loss\n" + "".join(f"{n},{d},2.5\n" for n, d in GRID), "losses do not fall with compute"),
        (rows_of(GRID) + "1e9,,2.2\n", "tokens is empty"),
        (rows_of(GRID) + "1e9,1e10,2,2\n", "has 4 values, but the header names 3 columns"),
        ("\n", "is empty"),
        (rows_of(GRID, "params,tokens,los"), 'has no column "loss"'),
        (rows_of(GRID, "N (M),tokens,loss"), 'has no column "params" and no "flops"'),
        (rows_of(GRID, "params,loss,loss"), 'has two columns called "loss"'),
        (rows_of(GRID, "params,tokens,loss,weight").replace("\n1", ",-1\n1", 2), 'weight = "-1" is not a number of at'),
        ('{"params": 1e8, "tokens": 1e9, "loss": 3}\n{"params": \n', ":2: is not a table of JSON objects"),
        ("[1, 2]", ":1: is no JSON object"),
        ("[]", "is a JSON array without objects"),
        (
            "params,tokens,loss,data\n" + "".join(f"{n},{d},3,{k % 2}\n" for k, (n, d) in enumerate(GRID)),
            "mixes 2 values",
        ),
    ],
)
def test_bad_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str) -> None:
    table = tmp_path / "t.csv"
    table.write_text(text)
    assert main(["scale", "fit", str(table)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--seed", "-1"], "--seed: -1 is negative"),
        (["--draws", "2"], "--draws: 2 is neither 0 nor in 20 to 20,000"),
        (["--plots", "x.jpg"], ".jpg is no format of these pictures"),
    ],
)
def test_bad_options_are_refused_before_the_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    table, out = tmp_path / "t.csv", tmp_path / "law.json"
    table.write_text(rows_of(GRID))
    assert main(["scale", "fit", str(table), *options, "--out", str(out)]) == 2
    assert said in capsys.readouterr().err
    assert not out.exists()


def test_flops_in_another_unit_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "t.csv"
    rows = rows_of(GRID).splitlines()[1:]
    lines = [f"{row},{6e-15 * n * d}" for row, (n, d) in zip(rows, GRID, strict=True)]
    table.write_text("\n".join(["params,tokens,loss,flops", *lines]) + "\n")
    assert main(["scale", "fit", str(table), "--draws", "0"]) == 0
    said = capsys.readouterr().out
    assert "the column flops is 1e-15 times 6·N·D" in said
    assert "With ten times the compute of the largest run" in said  # the page ends with the answer
    assert "predicted from the others, was off by 0.0 % on average" in said.splitlines()[-1]
    assert main(["scale", "fit", str(table), "--drop-highest", "-3"]) == 2


def test_rows_in_any_order_are_one_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for name, points in (("a", GRID), ("b", GRID[::-1]), ("c", [*GRID, GRID[0]])):
        table = tmp_path / f"{name}.csv"
        table.write_text(rows_of(points))
        assert main(["scale", "fit", str(table), "--draws", "0", "--json", "--repeated"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["data"]["sha256"] == found[1]["data"]["sha256"] == found[2]["data"]["sha256"]
    assert found[2]["data"]["left_out"] == ["1 duplicate row"]


def test_a_fit_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fit.json"
    path.write_text('{"format": 1, "parameters": 3}')
    assert main(["scale", "allocate", str(path), "--budget", "1e20"]) == 2
    assert main(["scale", "fit", str(tmp_path)]) == 2
    assert "holds no runs" in capsys.readouterr().err


def test_rows_that_are_off_are_named_by_line_and_can_be_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, lines = tmp_path / "t.csv", rows_of(GRID).splitlines()
    for number, line in enumerate(lines[1:], 2):  # a little noise, by which deviations are counted
        n, d, loss = line.split(",")
        factor = 1.3 if number in (4, 9) else 1 + 0.001 * (-1) ** number
        lines[number - 1] = f"{n},{d},{float(loss) * factor}"
    table.write_text("\n".join(lines) + "\n")
    call = ["scale", "fit", str(table), "--draws", "0", "--method", "huber3"]
    assert main(call) == 0
    page = " ".join(capsys.readouterr().out.split())
    for number in (4, 9):
        loss = float(lines[number - 1].split(",")[2])
        assert f"{table}:{number}: N" in page
        expected = re.search(rf"loss {loss:.4g}, the law expects ([0-9.]+) ", page)
        assert expected is not None
        assert float(expected[1]) == pytest.approx(loss / 1.3, rel=0.01)
    assert "standard deviations off" in page
    assert "to fit without the rows that are kept: --drop 4,9" in page
    assert main([*call, "--drop", "4,9"]) == 0
    page = capsys.readouterr().out
    assert "left out: 2 rows on the lines of --drop, as asked" in page
    assert f"{table}:4:" not in page
    for drop, message in (("1", "has no row on line 1"), ("x", '"x" is not a line number')):
        assert main([*call, "--drop", drop]) == 2
        assert message in capsys.readouterr().err
