"""The command with the real trainer: two ranks learn, Ctrl-C saves, a resumed run ends where an unbroken one does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from tiny_dataset import write_dataset

from phalanx.record.archive.history import RunHistory
from phalanx.record.event_schema import event_fields, load_schema
from phalanx.record.events import read_events
from phalanx.record.run import Run, open_run
from phalanx.rules.specification import check
from phalanx.validate.calibration_report import calibrate_run

JOB = """\
name = "real"
[model]
layers = 2
hidden = 32
heads = 4
kv_heads = 2
ffn = 64
vocab = 320
[data]
path = "data"
sequence = 32
tokens = 10240
[batch]
global_tokens = 256
[precision]
compute = "fp32"
[train]
sample_tokens = 8
[comm]
init_timeout_s = 60
[cluster]
spec = "local-cpu:2"
"""
DRILLED = {"CKP002", "CKP003", "CKP006", "FLT002"}  # rules that a run without a failure cannot answer
STEPS = 40  # enough to be interrupted on a fast machine

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real")
    write_dataset(folder)
    (folder / "job.toml").write_text(JOB)
    return folder


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    command = [sys.executable, "-m", "phalanx", "train", *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=600)
    return process.returncode, out, err


def losses(run: Run) -> dict[int, float]:
    """By step; a later start wins."""
    events, _ = read_events(run.events(0))
    return {event["step"]: event["loss"] for event in events if event["event"] == "step"}


def check_record(run: Run) -> None:
    """Every event fits the schema and has no field that is not in it; the history is the events'."""
    validator, known = Draft202012Validator(load_schema()), event_fields()
    for path in (*run.event_files(), run.supervisor):
        for event in read_events(path)[0]:
            validator.validate(event)
            assert set(event) - {"v", "event", "t", "rank"} <= set(known[event["event"]]), event
    history = RunHistory.open(run)
    curve = history.curve("loss")
    assert dict(zip(curve.step, curve.mean, strict=True)) == losses(run)
    assert history.damage() == []


def check_rules(run: Run) -> None:
    """The training specification finds no error in it; what it does not know only a drill or a probe could tell."""
    report = check(str(run.path))
    assert [(one.rule.id, one.outcome.what) for one in report.problems if one.severity == "error"] == []
    assert not [one for one in report.findings if "the rule itself failed" in one.outcome.what]
    assert {rule for rule, verdict in report.verdicts.items() if verdict == "unknown"} <= DRILLED


def only_run(root: Path) -> Run:
    (found,) = root.iterdir()
    return open_run(found)


def wait_for_step(root: Path) -> None:
    until = time.monotonic() + 600
    while time.monotonic() < until:
        if any('"step"' in path.read_text() for path in root.glob("*/events-00000.jsonl")):
            return
        time.sleep(0.01)
    raise AssertionError("no step within two minutes")


def test_interrupted_and_resumed_equals_uninterrupted(folder: Path) -> None:
    code, out, err = finish(start(folder, "job.toml", "--runs", "whole", "--json"))
    assert code == 0, err
    report: dict[str, Any] = json.loads(out)
    assert (report["steps"], report["state"], len(report["ranks"])) == (STEPS, "done", 2)
    assert report["last_loss"] < report["first_loss"]
    assert report["evaluation"]["bigram_bits_per_byte"] > 0
    assert report["samples"]
    fitted = calibrate_run(only_run(folder / "whole").path)
    assert fitted.median_error_after < fitted.median_error_before
    check_record(only_run(folder / "whole"))
    check_rules(only_run(folder / "whole"))

    broken = start(folder, "job.toml", "--runs", "broken")
    wait_for_step(folder / "broken")
    broken.send_signal(signal.SIGINT)
    code, _, err = finish(broken)
    run = only_run(folder / "broken")
    if code == 0:  # the machine was quicker than the signal
        pytest.skip("the run ended before it could be interrupted")
    assert code == 130, err
    (saved,) = run.saved_steps()
    assert f"stopped as asked: saved step {saved}; resume with: phalanx train --resume " in err
    code, _, err = finish(start(folder, "--resume", str(run.path)))
    assert code == 0, err
    assert losses(run) == losses(only_run(folder / "whole")), "bit for bit, on the same layout"
    assert run.saved_steps()[-1] == STEPS
    check_record(run)
    check_rules(run)


def test_a_killed_rank_ends_a_run_that_is_not_to_go_on(folder: Path) -> None:
    process = start(
        folder, "job.toml", "--runs", "killed", "--steps", "2000", "--set", "fault.recovery=stop"
    )  # fmt: skip
    wait_for_step(folder / "killed")
    run = only_run(folder / "killed")
    (epoch,) = (event for event in read_events(run.supervisor)[0] if event["event"] == "epoch")
    members = [int(member["pid"]) for member in epoch["members"]]
    os.kill(members[1], signal.SIGKILL)
    code, out, err = finish(process)
    assert (code, out) == (3, "")
    assert ": rank 1 of 2 (host " in err
    assert "was killed (SIGKILL) from outside" in err
    assert "other ranks: 1 lost their peer" in err or "other ranks: 1 stopped by us" in err
    assert not any(Path(f"/proc/{pid}").exists() for pid in members)
