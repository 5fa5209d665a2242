"""`phalanx calibrate`: from measured steps to a plan that rests on them."""

import json

import pytest

from phalanx.cli.main import main
from phalanx.plan.calibrate import GROUPS

JOB = """\
name = "small"
[model]
preset = "gpt2"
[data]
sequence = 1024
tokens = "2B"
[batch]
global_sequences = 64
micro = 8  # a calibrated plan with more freedom may be of another layout
[parallel]
recompute = "none"
[cluster]
spec = "8xH100:1"
"""
HEADER = "id,source,model_name,layers,hidden,seq,gpu,gpus,global_batch,tp,dp,step_s"
LINES = (
    "one,mine,llama-3-8b,32,4096,4096,H100-80GB-SXM,64,256,1,64,6.0",
    "two,mine,llama-3-8b,32,4096,4096,H100-80GB-SXM,64,256,2,32,6.5",
    "three,mine,llama-3-8b,32,4096,4096,H100-80GB-SXM,64,256,4,16,8.0",
)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.csv").write_text("\n".join([HEADER, *LINES]) + "\n")
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path


def plan_of(capsys, *options):
    assert main(["plan", "job.toml", "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def run_folder(here, capsys, seconds):
    """What a run of the planned job leaves, every step of which took `seconds`."""
    folder = here / "run"
    folder.mkdir()
    assert main(["plan", "job.toml", "--out", "run/plan.json"]) == 0
    capsys.readouterr()
    line = json.dumps({"event": "step", "step": 1, "duration_s": seconds})
    log = "\n".join(['{"event": "start"}', *[line] * 20, "garbage", line[:20]])
    (folder / "events-0.jsonl").write_text(log)
    return folder


def test_a_table(here, capsys):
    assert main(["calibrate", "mine.csv"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("3 measurements from mine.csv\n\nfactor         value  applies to\ncompute ")
    assert err == "wrote calibration.json; use it with: phalanx plan JOB --calibration calibration.json\n"
    assert set(json.loads((here / "calibration.json").read_text())["scalars"]) == set(GROUPS)
    assert sorted(path.name for path in here.iterdir()) == ["calibration.json", "job.toml", "mine.csv"]


def test_json_is_what_the_file_holds(here, capsys):
    assert main(["calibrate", "mine.csv", "--json", "--out", "c.json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data == json.loads((here / "c.json").read_text())
    assert (data["version"], data["source"], data["measurements"]) == (1, "mine.csv", 3)
    assert data["median_error_after"] < data["median_error_before"]


@pytest.mark.parametrize("factor", [0.85, 1.4])
def test_from_a_run_to_a_plan_that_rests_on_it(here, capsys, factor):
    plain = plan_of(capsys)["prediction"]["step_s"]
    folder = run_folder(here, capsys, factor * plain)
    assert main(["calibrate", str(folder), "--out", "c.json"]) == 0
    assert capsys.readouterr().out.startswith(f"1 measurement from {folder}\n")
    plan = plan_of(capsys, "--calibration", "c.json")
    again = plan["prediction"]["step_s"]
    assert abs(again / (factor * plain) - 1) < 0.7 * abs(1 / factor - 1), "one measurement pulls the plan towards it"
    assert plan["calibration"]["scalars"] == json.loads((here / "c.json").read_text())["scalars"]


def test_a_calibrated_plan_can_itself_be_run_and_measured(here, capsys):
    """The plan of a run may carry a calibration; the new scalars are against the plain cost model all the same."""
    plain = plan_of(capsys)["prediction"]["step_s"]
    folder = run_folder(here, capsys, 1.4 * plain)
    assert main(["calibrate", str(folder), "--out", "first.json"]) == 0
    assert main(["plan", "job.toml", "--calibration", "first.json", "--out", "run/plan.json"]) == 0
    assert main(["calibrate", str(folder), "--out", "second.json"]) == 0
    first, second = (json.loads((here / name).read_text())["scalars"] for name in ("first.json", "second.json"))
    assert second == pytest.approx(first, rel=0.05)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (f"{HEADER}\n{LINES[0].removesuffix('6.0')}\n", "mine.csv: has no measured step_s\n  fill in step_s"),
        (f"{HEADER}\n{LINES[0].replace('H100-80GB-SXM', 'H900')}\n", "mine.csv: has no row that can be priced"),
        ("", "mine.csv: is not a table of training runs"),
    ],
)
def test_a_table_without_use_exits_2_and_writes_nothing(here, capsys, content, told):
    (here / "mine.csv").write_text(content)
    assert main(["calibrate", "mine.csv"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(told)
    assert not (here / "calibration.json").exists()


def test_a_folder_that_is_no_run(here, capsys):
    (here / "run").mkdir()
    assert main(["calibrate", "run"]) == 2
    assert capsys.readouterr().err == ("run: has no plan.json\n  name a run folder, or a CSV table of measured steps\n")


def test_a_run_that_has_hardly_begun(here, capsys):
    folder = run_folder(here, capsys, 1.0)
    (folder / "events-0.jsonl").write_text('{"event": "step", "duration_s": 1.0}\n')
    assert main(["calibrate", "run"]) == 2
    assert "run: has 1 measured step, and calibration needs 3 after warm-up" in capsys.readouterr().err


def test_a_missing_table(capsys):
    assert main(["calibrate", "mien.csv"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("mien.csv: ")
    assert "Traceback" not in err


@pytest.mark.parametrize("target", ["no/c.json", "."])
def test_an_unwritable_out_is_the_worlds_fault(here, capsys, target):
    assert main(["calibrate", "mine.csv", "--out", target]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert "cannot be written: " in err
    assert sorted(path.name for path in here.iterdir()) == ["job.toml", "mine.csv"]


@pytest.mark.parametrize("arguments", [[], ["a.csv", "b.csv"], ["a.csv", "--jsn"]], ids=" ".join)
def test_a_wrong_call_exits_2(capsys, arguments):
    assert main(["calibrate", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("phalanx calibrate: ")
