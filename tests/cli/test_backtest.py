"""`phalanx backtest`: exit codes, what goes where, and nothing half-written."""

import csv
import json
from pathlib import Path

import pytest

from phalanx.cli.main import main

FIXTURE = str(Path(__file__).parents[1] / "data" / "published_runs.csv")
HEADER = "id,source,model_name,layers,hidden,seq,gpu,gpus,global_batch,tp,dp,step_s"
LINES = (
    "one,s,llama-3-8b,32,4096,4096,H100-80GB-SXM,64,256,1,64,3.0",
    "two,s,llama-3-8b,32,4096,4096,H900,64,256,1,64,3.0",
    "three,s,llama-3-8b,32,4096,4096,H100-80GB-SXM,64,256,8,8,",
)


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([HEADER, *LINES]) + "\n")
    return path


def test_page_on_stdout(table, capsys):
    assert main(["backtest", str(table)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("2 of 3 rows priced\n  1 not: unknown accelerator 'H900'\n")
    assert err == ""


def test_predictions_file(table, tmp_path, capsys):
    target = tmp_path / "out.csv"
    assert main(["backtest", str(table), "--predictions", str(target)]) == 0
    assert f"wrote 3 rows to {target}" in capsys.readouterr().err
    lines = target.read_text().splitlines()
    assert lines[0] == "id,step_s,step_s_lo,step_s_hi,mem_gb,fits"
    rows = list(csv.DictReader(lines))
    assert [row["id"] for row in rows] == ["one", "two", "three"]
    assert set(rows[1].values()) == {"two", ""}
    assert float(rows[0]["step_s_lo"]) < float(rows[0]["step_s"]) < float(rows[0]["step_s_hi"])
    assert {rows[0]["fits"], rows[2]["fits"]} <= {"true", "false"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.csv", "runs.csv"]


def test_hiding_the_measurements_changes_no_byte(table, tmp_path, capsys):
    blind = tmp_path / "blind.csv"
    blind.write_text(table.read_text().replace(",3.0\n", ",\n"))
    for source, target in ((table, "a.csv"), (blind, "b.csv")):
        assert main(["backtest", str(source), "--predictions", str(tmp_path / target)]) == 0
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()
    assert "no row of this table has a measured step_s that counts" in capsys.readouterr().out


def test_json(table, capsys):
    assert main(["backtest", str(table), "--json"]) == 0
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert err == ""
    assert data["scorecard"]["rows"] == 3
    assert data["scorecard"]["unpriced"] == {"unknown accelerator 'H900'": 1}
    assert data["scorecard"]["sources"][0]["rows"] == 1
    assert [one["id"] for one in data["predictions"]] == ["one", "two", "three"]
    assert data["predictions"][1]["step_s"] is None
    assert data["calibrated_on_rows"] == 0


def test_the_published_fixture(capsys):
    assert main(["backtest", FIXTURE, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scorecard"]["mean_median"] < 0.12


def test_calibrate_from_a_second_table(table, tmp_path, capsys):
    known = tmp_path / "known.csv"
    known.write_text(
        f"{HEADER}\n" + "".join(f"k{at},{LINES[0].split(',', 1)[1].replace('3.0', '1.2')}\n" for at in range(3))
    )
    steps = []
    for options in ([], ["--calibrate", str(known)]):
        assert main(["backtest", str(table), "--json", *options]) == 0
        data = json.loads(capsys.readouterr().out)
        steps.append(data["predictions"][0]["step_s"])
    assert data["calibrated_on_rows"] == 3
    assert abs(steps[1] / 1.2 - 1) < abs(steps[0] / 1.2 - 1)


def test_draw_is_seeded(capsys):
    pages = []
    for seed in ("1", "1", "2"):
        assert main(["backtest", FIXTURE, "--draw", "3", "--seed", seed]) == 0
        pages.append(capsys.readouterr().out)
    assert pages[0] == pages[1] != pages[2]
    assert "each source calibrated on its measured rows" in pages[0]


def test_drawing_every_row_leaves_an_empty_table(table, capsys):
    table.write_text(f"{HEADER}\n{LINES[0]}\n")
    assert main(["backtest", str(table), "--draw", "5"]) == 0
    assert capsys.readouterr().out.startswith("0 of 0 rows priced")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "there is no such CSV file"),
        (b"", "is not a table of training runs"),
        (b"\x89PNG\x00\x00", "holds a NUL byte"),
        (
            b"id,layer,hidden,seq,gpu,gpus,global_batch\na,1,1,1,H100,1,1\n",
            'has no column "layers"\n  rename the column "layer"',
        ),
        (f"{HEADER}\n{LINES[0]}\n{LINES[0]}\n".encode(), 'repeats the id "one" of line 2'),
        (f"{HEADER}\n".encode(), "has a header but no rows"),
    ],
    ids=["missing", "empty", "binary", "columns", "ids", "no rows"],
)
@pytest.mark.parametrize("place", ["table", "calibrate"])
def test_an_unreadable_table_exits_2_and_writes_nothing(table, tmp_path, capsys, content, told, place):
    bad, target = tmp_path / "bad.csv", tmp_path / "out.csv"
    if content is not None:
        bad.write_bytes(content)
    names = [str(bad)] if place == "table" else [str(table), "--calibrate", str(bad)]
    assert main(["backtest", *names, "--predictions", str(target)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err
    assert "Traceback" not in err
    assert not target.exists()


def test_an_old_predictions_file_survives_a_bad_table(tmp_path, capsys):
    target = tmp_path / "out.csv"
    target.write_text("old")
    assert main(["backtest", str(tmp_path / "no.csv"), "--predictions", str(target)]) == 2
    assert target.read_text() == "old"
    assert capsys.readouterr().out == ""


def test_an_unwritable_target_is_the_worlds_fault(table, tmp_path, capsys):
    assert main(["backtest", str(table), "--predictions", str(tmp_path / "no" / "out.csv")]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert "cannot be written: No such file or directory" in err


@pytest.mark.parametrize("options", [["--draw", "-1"], ["--draw", "3", "--calibrate", "TABLE"]])
def test_options_that_make_no_sense(table, capsys, options):
    options = [str(table) if one == "TABLE" else one for one in options]
    assert main(["backtest", str(table), *options]) == 2
    assert "--draw: needs a positive number and excludes --calibrate" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [[], ["--nonsense", "x"], ["a.csv", "--draw", "many"], ["a.csv", "b.csv"]],
    ids=lambda value: " ".join(value),
)
def test_a_wrong_call_exits_2(capsys, arguments):
    assert main(["backtest", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err
    assert "Traceback" not in err


def test_all_rows_unpriceable_is_still_an_answer(table, capsys):
    table.write_text(f"{HEADER}\n{LINES[1]}\n")
    assert main(["backtest", str(table)]) == 0
    assert capsys.readouterr().out.startswith("0 of 1 rows priced\n  1 not: unknown accelerator 'H900'\n")


@pytest.mark.parametrize("cells", [{"heads": "0.2"}, {"nodes_gpu": "-8"}], ids=str)
def test_one_garbage_cell_does_not_cost_the_other_rows(tmp_path, capsys, cells):
    [(name, value)] = cells.items()
    path = tmp_path / "runs.csv"
    path.write_text(f"{HEADER},{name}\n{LINES[0].replace('llama-3-8b', 'x')},{value}\n{LINES[2]},\n")
    assert main(["backtest", str(path)]) == 0
    assert capsys.readouterr().out.startswith("1 of 2 rows priced")
