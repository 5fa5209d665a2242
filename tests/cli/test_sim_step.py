"""`phalanx sim JOB --fabric F`."""

import json

import pytest

from phalanx.cli.main import main
from phalanx.sim.step import breaks
from phalanx.sim.step import step_report as report

JOB = """\
name = "small"
[model]
preset = "gpt2"
[data]
sequence = 1024
tokens = "2B"
[batch]
global_sequences = 64
[parallel]
pipeline = 2
tensor = 1
context = 1
zero = 1
[cluster]
spec = "8xH100:4"
"""


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return str(path)


def test_page_trace_and_break(job, tmp_path, capsys):
    trace = tmp_path / "step.json"
    options = ["--fabric", "clos2:32x400G/4p/8", "--break", "nic", "--trace", str(trace)]
    assert main(["sim", job, *options]) == 0
    out, err = capsys.readouterr()
    for title in ("WHERE THE TIME GOES", "WHY IT DIFFERS FROM THE PLAN", "WHEN A NIC PORT BREAKS"):
        assert f"\n{title}" in out
    assert f"wrote {trace}: " in err
    assert json.loads(trace.read_text())["otherData"]["job"] == "small"


def test_json_is_one_document_without_spans(job, capsys):
    assert main(["sim", job, "--fabric", "clos2:32x400G/4p/8", "--break", "t1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step_s"] == pytest.approx(sum(line["exposed_s"] for line in found["lines"]))
    assert [one["recovery"] for one in found["aftermath"]] == ["conventional", "edge"]
    assert found["break"] == "t1"
    assert "timeline" not in found
    assert [sum(parts.values()) for parts in found["stages_s"]] == pytest.approx([found["step_s"]] * 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--fabric", "clos2:16x400G/1p/64"], "it has 16 NICs, and the plan has 32 devices"),
        (["--fabric", "ring"], 'fabric: "ring" is not a fabric'),
        (["--break", "link"], "the fabric non-blocking has T0 switches alone"),
        (["--break", "grey"], "the fabric non-blocking has T0 switches alone"),
        (["--days", "9", "--trace", "x.json"], "phalanx sim: --trace belongs to one step, --days to months"),
        (["--days", "9", "--routing", "ecmp"], "  use --edge-recovery for spraying with recovery at the edge"),
        (["--compare"], "phalanx sim: --compare belongs to months, not to one step\n  add --days 90"),
        (["--outage", "5"], "phalanx sim: --outage without --break: nothing fails"),
        (["--break", "nic", "--outage", "0"], "phalanx sim: --outage 0 is out of range\n  use seconds above 0"),
    ],
)
def test_mistakes(job, options, message, capsys):
    assert main(["sim", job, *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


def test_a_missing_part_is_told_before_anything_is_simulated(job, capsys, monkeypatch):
    monkeypatch.setattr(report, "_simulated_step", None)
    assert main(["sim", job, "--break", "t1"]) == 2
    assert "the fabric non-blocking has T0 switches alone" in capsys.readouterr().err


def test_ctrl_c_during_a_break_leaves_the_step(job, capsys, monkeypatch):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(breaks, "failure_aftermath", stopped)
    assert main(["sim", job, "--fabric", "clos2:32x400G/4p/8", "--break", "t1"]) == 130
    out, err = capsys.readouterr()
    assert "WHERE THE TIME GOES" in out
    assert "WHEN" not in out
    assert err.endswith("stopped by Ctrl-C: the step is finished, and shown; what a failure does to it is not\n")


def test_a_fabric_that_carries_nothing_is_said(job, capsys):
    alone = ["--cluster", "8xH100", "--set", "parallel.pipeline=1"]
    assert main(["sim", job, *alone, "--fabric", "clos2:32x400G/4p/8"]) == 0
    assert "unused: all traffic of this step stays inside a fast domain" in capsys.readouterr().out
