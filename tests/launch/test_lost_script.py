"""A job whose batch script was lost with its node: who does what is left, with commands that only answer as Slurm's."""

from __future__ import annotations

from pathlib import Path

import pytest
from slurm_cluster import wait_for

from phalanx.launch.lost_script import LEFT, ScriptSuccessor
from phalanx.record.run import Run

COMMANDS = {
    "squeue": 'cat "$FOLDER/view"',
    "scontrol": 'case "$2" in hostnames) echo "${3//,/ }" ;; config) echo "SlurmdTimeout = 0 sec" ;; '
    '*) echo "scontrol $*" >>"$FOLDER/asked" ;; esac',
    "scancel": 'echo "scancel $*" >>"$FOLDER/asked"',
}
HOSTS = ["n1", "n2", "n3", "n4", "n5"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    for name, body in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    run = Run(path=tmp_path)
    (tmp_path / "logs").mkdir()
    run.set_launch(launched=17.5)
    return run


def successor(run: Run, own: str, code: int = 75) -> ScriptSuccessor:
    environ = {"PATH": f"{run.path}:/usr/bin:/bin", "FOLDER": str(run.path), "SLURM_JOB_ID": "7"}
    said = (code, "interrupted" if code == 75 else "done")
    return ScriptSuccessor(run, HOSTS, environ, own=own, script_node="n1", save_s=60, conclude=lambda: said)


def asked(run: Run) -> str:
    file = run.path / "asked"
    text = file.read_text() if file.exists() else ""
    file.unlink(missing_ok=True)
    return text


def test_the_first_node_that_is_left_ends_the_job_or_puts_it_back_into_the_queue(run: Run) -> None:
    (run.path / "view").write_text("RUNNING|n3,n4,n5|30:00\n")  # n1 had the script, n2 was lost, too
    for own in ("n2", "n4", "n5"):
        successor(run, own).end()
        assert asked(run) == "", own
    successor(run, "n3").end()
    assert asked(run) == "scontrol requeue 7\n"
    successor(run, "n3", code=0).end()
    assert asked(run) == "scancel 7\n"
    log = (run.path / "logs" / "slurm-7.log").read_text()
    assert log.endswith("node n1 of the batch script was lost; n3 did the rest\nphalanx: done\n")
    (run.path / "view").write_text("COMPLETING|n3,n4,n5|30:00\n")  # somebody cancelled it
    successor(run, "n3").end()
    assert asked(run) == ""


def test_a_script_that_lives_is_left_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.launch.lost_script.MARGIN_S", 0.0)
    monkeypatch.setattr("phalanx.launch.lost_script.ASK_S", 0.2)
    (run.path / "view").write_text("RUNNING|n1,n2,n3,n4,n5|30:00\n")
    successor(run, "n1").end()  # its agent leaves: the script goes on
    assert (run.path / "logs" / LEFT).read_text() == "17.5"
    successor(run, "n2").end()
    # That file is of an earlier launch: Slurm decides, and here it still counts the node as the job's when time is up.
    run.set_launch(launched=18.5)
    successor(run, "n2").end()
    assert asked(run) == ""


def test_before_the_time_limit_the_run_is_asked_to_save(run: Run) -> None:
    (run.path / "view").write_text("RUNNING|n2,n3,n4,n5|0:59\n")
    one = successor(run, "n2")
    one.begin()
    wait_for(run.stop_file.exists, "the stop file")
    assert run.stop_file.read_text() == "requeue\n"
    (run.path / "view").write_text("COMPLETING|n2,n3,n4,n5|0:59\n")
    one.end()
