"""A run folder that Phalanx 0.6.0 wrote is reported, checked, shown and resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from dashboard import dashboard

from phalanx.cli.main import main
from phalanx.record.events import read_events

FIXTURE = Path(__file__).parents[1] / "data" / "run-0.6"
Output = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy in which the dataset has its path of today."""
    shutil.copytree(FIXTURE, tmp_path / "runs")
    run = tmp_path / "runs" / "small"
    for name in ("plan.json", "job.json", "job.toml"):
        text = (run / name).read_text(encoding="utf-8")
        (run / name).write_text(text.replace("DATASET", str(tmp_path / "runs" / "words")), encoding="utf-8")
    (run / "errors").mkdir(exist_ok=True)
    return run


def test_report(folder: Path, capsys: Output) -> None:
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.md").read_text(encoding="utf-8")
    assert "**stopped**, 62 of 100 steps, 15.9k tokens in 56.3 s." in page
    assert "small-llama (28.2k parameters) on local:2, 2 ranks" in page
    assert "damaged" not in page.lower()


def test_check(folder: Path, capsys: Output) -> None:
    assert main(["check", str(folder), "--format", "json"]) in (0, 1)
    report = json.loads(capsys.readouterr().out)
    verdicts = {one["rule"]: one["verdict"] for one in report["findings"]}
    assert verdicts["TEL006"] == "pass"  # its ledger closes
    assert verdicts["EFF002"] != "unknown"  # MFU is known: the plan and the steps are read


def test_dashboard(folder: Path) -> None:
    with dashboard(folder.parent) as page:
        (row,) = page.json("/api/runs")["runs"]
        assert (row["name"], row["state"], row["step"], row["world"], row["damage"]) == ("small", "stopped", 62, 2, 0)
        loss = page.json("/api/runs/small/curves?names=loss")["curves"]["loss"]
        assert loss["mean"][0] == pytest.approx(5.6804, abs=1e-3)
        assert page.json("/api/runs/small/ledger")["closes"] is True
        assert page.complaints == []


def test_resume(folder: Path) -> None:
    """From 0.6's checkpoint to the end, where 0.6 itself came to the same loss."""
    assert main(["train", "--resume", str(folder), "--no-check"]) == 0
    events, _ = read_events(folder / "events-00000.jsonl")
    steps = [one for one in events if one["event"] == "step"]
    assert [one["step"] for one in steps] == list(range(100))
    assert steps[-1]["loss"] == pytest.approx(1.8132346, abs=1e-4)
