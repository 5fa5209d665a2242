"""This machine as a launch system: a job in the background is listed, cancelled, requeued, and goes on where it was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from slurm_cluster import wait_for
from tiny_dataset import write_dataset
from tiny_job import ENDLESS, tiny_job

import phalanx
from phalanx.record.events import read_events
from phalanx.record.run import Run

JOB = tiny_job(model={"layers": 2}, data=ENDLESS, cluster={"spec": "local-cpu:1"})

pytestmark = pytest.mark.slow


def test_launch_cancel_requeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_dataset(tmp_path, documents=2500)
    (tmp_path / "job.toml").write_text(JOB)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data-home"))
    monkeypatch.chdir(tmp_path)
    options = {"progress": False, "check": False}
    with pytest.raises(phalanx.UserError, match="tiny: asks for 9,001 ranks, spares included"):
        phalanx.launch("job.toml", spares=9000, **options)
    with pytest.raises(
        phalanx.UserError, match="--flavour job: is a way to launch on Kubernetes, and this goes to local"
    ):
        phalanx.launch("job.toml", flavour="job", **options)
    assert not (tmp_path / "runs").exists()
    done = phalanx.launch("job.toml", **options)
    [job], run = done.ids, Run(path=Path(done.requests[0].run))
    try:
        wait_for(
            lambda: run.events(0).exists() and b'"event":"step"' in run.events(0).read_bytes(), "a step", patience_s=600
        )
        table = phalanx.queue()
        assert [(one.id, one.state) for one in table.jobs] == [(job, "running")]
        assert table.steps[job] > 0  # before the first checkpoint
        with pytest.raises(phalanx.UserError, match="--group sweep: no launched job is in this group"):
            phalanx.queue(group="sweep")
        assert str(phalanx.why(job)) == f"{job} is running: on this machine; phalanx watch {run.path}"
        with pytest.raises(phalanx.UserError, match=f"job tiny is already running, as {job}"):
            phalanx.launch("job.toml", **options)
    finally:
        phalanx.cancel(job)
    assert phalanx.why(str(run.path)).explanation.state == "cancelled"
    saved = run.saved_steps()[-1]
    # Through the command, from another process: the book leads to the run.
    again = subprocess.run(
        [sys.executable, "-m", "phalanx", "requeue", job, "--json"], capture_output=True, text=True, check=True
    )
    assert json.loads(again.stdout)["id"] == job
    try:
        wait_for(lambda: _restored(run) == [0, saved], "it to go on at the step it had saved", patience_s=600)
    finally:
        phalanx.cancel(job)
    assert phalanx.logs(job, rank=0).files
    assert phalanx.queue().jobs[0].restarts == 1


def _restored(run: Run) -> list[int]:
    return [event["step"] for event in read_events(run.supervisor)[0] if event["event"] == "restore"]
