import json
import os
import subprocess
import sys

import pytest

from phalanx.cli.main import main
from phalanx.plan.plan import Plan

JOB = """\
name = "small"
[model]
preset = "gpt2"
[data]
sequence = 1024
tokens = "2B"
[batch]
global_sequences = 64
[cluster]
spec = "8xH100:1"
"""


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return str(path)


def test_page_on_stdout(job, capsys):
    assert main(["plan", job]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("small: gpt2, 124M parameters, on 8xH100-80GB-SXM:1 (8 devices)\n")
    assert "COST AND ENERGY" in out
    assert err == ""


def test_json_is_the_whole_plan(job, capsys):
    assert main(["plan", job, "--json"]) == 0
    plan = Plan.from_json(capsys.readouterr().out)
    assert plan.layout.devices == 8
    assert plan.alternatives


def test_cluster_and_set_override_the_job(job, capsys):
    assert main(["plan", job, "--cluster", "8xA100:2", "--set", "parallel.tensor=2", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["cluster"]["name"] == "8xA100-80GB-SXM:2"
    assert plan["layout"]["tensor"] == 2


def test_out_writes_the_plan_whole(job, tmp_path, capsys):
    target = tmp_path / "plan.json"
    assert main(["plan", job, "--out", str(target)]) == 0
    assert Plan.from_json(target.read_text()).job.name == "small"
    assert f"wrote {target}" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.toml", "plan.json"]


def test_a_failed_plan_leaves_an_old_file_alone(job, tmp_path, capsys):
    target = tmp_path / "plan.json"
    target.write_text("old")
    assert main(["plan", job, "--cluster", "8xH100:0", "--out", str(target)]) == 2
    assert target.read_text() == "old"
    assert "has 0 domains" in capsys.readouterr().err


def test_unwritable_out_is_the_worlds_fault(job, tmp_path, capsys):
    assert main(["plan", job, "--out", str(tmp_path / "no" / "plan.json")]) == 3
    out, err = capsys.readouterr()
    assert "cannot be written: No such file or directory" in err
    assert "Traceback" not in err
    assert out == ""


def test_compare(job, tmp_path, capsys):
    other = tmp_path / "other.toml"
    other.write_text(JOB.replace("8xH100:1", "8xA100:1"))
    assert main(["plan", "--compare", job, str(other)]) == 0
    out = capsys.readouterr().out
    assert "cluster" in out
    assert "8xA100-80GB-SXM:1" in out
    assert main(["plan", job, "--compare", str(other), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["plans"]) == 2
    rows = {one["name"]: one["shown"] for one in data["differences"]}
    assert rows["file"] == [job, str(other)]
    assert rows["layout"] == [Plan.from_dict(one).layout.short for one in data["plans"]]
    assert all(" to " in shown for shown in rows["step, 80%"])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "phalanx plan: no job file is named"),
        (["JOB", "--top", "-1"], "--top -1 is below 0"),
        (["--compare", "JOB"], "phalanx plan --compare: 1 job file named"),
        (["JOB", "--set", "parallel.tensor=5"], "parallel.tensor = 5 does not divide the model's 12 attention heads"),
        (["JOB", "--set", "batch.global_sequences=7"], None),
        (["JOB", "--cluster", "1xT4:1", "--set", "model.hidden=12288", "--set", "model.layers=96"], "does not fit"),
        (["JOB", "--cluster", "8xH900:2"], "unknown accelerator 'H900'"),
        (["JOB", "--set", "cost.region=nowhere"], 'cost.region = "nowhere" is not in the grid table'),
    ],
)
def test_mistakes_exit_2_with_a_cure(job, capsys, arguments, told):
    code = main(["plan", *(job if one == "JOB" else one for one in arguments)])
    out, err = capsys.readouterr()
    if told is None:
        assert code == 0
        return
    assert (code, out) == (2, "")
    assert told in err
    assert "Traceback" not in err


def test_calibration_is_applied_and_recorded(job, tmp_path, capsys):
    file = tmp_path / "mine.json"
    scalars = {"compute": 2.0, "memory": 1.0, "host": 1.0, "inner_traffic": 1.0, "outer_traffic": 1.0}
    file.write_text(json.dumps({"version": 1, "scalars": scalars}))
    assert main(["plan", job, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert main(["plan", job, "--json", "--calibration", str(file)]) == 0
    fitted = json.loads(capsys.readouterr().out)
    assert plain["calibration"] is None
    assert fitted["calibration"] == {"file": str(file), "scalars": scalars}
    assert fitted["prediction"]["step_s"] > plain["prediction"]["step_s"]
    file.write_text("{}")
    assert main(["plan", job, "--calibration", str(file)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "is no calibration file" in err


def test_a_reader_that_stops_early_gets_no_traceback(job):
    command = [sys.executable, "-m", "phalanx.cli.main", "plan", job, "--json"]
    reading, writing = os.pipe()
    process = subprocess.Popen(command, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert os.read(reading, 1) == b"{"
    os.close(reading)  # the plan is longer than a pipe holds: the next write fails
    _, err = process.communicate(timeout=300)
    assert err == b""
    assert process.returncode in (0, 141)


@pytest.mark.parametrize("name", [".", "job.toml/plan.json"])
def test_an_impossible_out_leaves_nothing_behind(job, tmp_path, capsys, name):
    assert main(["plan", job, "--out", str(tmp_path / name)]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert "cannot be written: " in err
    assert [path.name for path in tmp_path.iterdir()] == ["job.toml"]


def test_out_writes_into_a_pipe_and_never_replaces_it(job, tmp_path, capsys):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen([sys.executable, "-c", f"print(len(open({str(pipe)!r}).read()))"], stdout=subprocess.PIPE)
    assert main(["plan", job, "--out", str(pipe)]) == 0
    assert int(reader.communicate(timeout=300)[0]) > 1000
    assert pipe.is_fifo()
