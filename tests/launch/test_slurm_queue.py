"""What is refused before anything is submitted, why jobs wait, groups, and cancelling, on a real Slurm."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from slurm_cluster import SlurmCluster, wait_for
from tiny_dataset import write_dataset
from tiny_job import tiny_job

import phalanx
from phalanx.launch.book import LaunchRecord, record_launch
from phalanx.record.run import Run

JOB = tiny_job(
    model={"layers": 2},
    data={"tokens": 2560},
    cluster={"spec": "local-cpu:1"},
    launch={"on": "slurm", "interface": "lo"},
)

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_dataset(tmp_path, documents=200)
    (tmp_path / "job.toml").write_text(JOB)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data-home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


def launch(folder: Path, *options: str, **more: Any) -> phalanx.api.launching.LaunchResult:
    """Launch the job with options of sbatch, which launch.toml names."""
    (folder / "config" / "phalanx").mkdir(parents=True, exist_ok=True)
    (folder / "config" / "phalanx" / "launch.toml").write_text(f"options = {list(options)}\n" if options else "")
    wanted = {"runs": folder / "runs", "progress": False, "check": False, "again": True, **more}
    return phalanx.launch(folder / "job.toml", **wanted)


def refused(folder: Path, **options: Any) -> str:
    """The message, and nothing is half-submitted."""
    with pytest.raises(phalanx.UserError) as caught:
        launch(folder, **options)
    assert not list((folder / "runs").glob("*"))
    return str(caught.value)


def test_bad_requests_are_refused_with_the_cure_and_leave_nothing_behind(slurm: SlurmCluster, folder: Path) -> None:
    before = slurm.run("squeue", "-h")
    assert refused(folder, queue="wid") == (
        "--queue wid: this cluster has no such partition\n"
        "  did you mean wide? the partitions are far, high, low, pair, shut, wide"
    )
    assert refused(folder, queue="pair", spares=2) == (
        "partition pair: tiny asks for 3 nodes (2 of them spare), but a job gets at most 2\n"
        "  use fewer --hosts or --spares, or another --queue"
    )
    for place in ("--runs", "data.path"):
        assert re.search(rf"{place} /\S+: is local to each node: elsewhere would", refused(folder, queue="far"))
    assert "is not a Python interpreter on this machine" in refused(folder, overrides=["launch.python=/nowhere/python"])
    assert "launch.options: --nodes is set by Phalanx" in refused(folder, overrides=['launch.options=["--nodes=9"]'])
    gpus = refused(folder, queue="wide", cluster="8xH100:1")
    assert gpus.startswith("partition wide: its nodes have 0 GPUs each, but the plan needs 8")
    image = refused(folder, queue="wide", overrides=["launch.image=registry.example#phalanx:1"])
    assert image.startswith("launch.image registry.example#phalanx:1: srun of this cluster has no option")
    assert slurm.run("squeue", "-h") == before


def test_why_names_the_reason_of_waiting_and_the_cure(slurm: SlurmCluster, folder: Path) -> None:
    busy = slurm.run(
        "sbatch", "--parsable", "-p", "pair", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 600"
    )
    busy = busy.strip()
    wait_for(lambda: "RUNNING" in slurm.run("squeue", "-h", "-j", busy, "-o", "%T"), "the busy job")
    expected = {
        "it is next in the queue, waiting for nodes": launch(folder, queue="pair").ids[0],
        "jobs with higher priority are waiting for the same nodes": launch(folder, "--nice=1000", queue="pair").ids[0],
        "partition shut is down": launch(folder, queue="shut").ids[0],
        "it is held by its owner": launch(folder, "--hold", queue="wide").ids[0],
        "it was just requeued": launch(folder, "--begin=now+3600", queue="wide").ids[0],
        "it waits for another job to end": launch(folder, f"--dependency=afterany:{busy}", queue="wide").ids[0],
    }
    try:
        for reason, job in expected.items():
            wait_for(lambda reason=reason, job=job: reason in str(phalanx.why(job)), reason, patience_s=120)
            said = phalanx.why(job).explanation
            assert (said.state, bool(said.cure)) == ("waiting", True)
        # The same job is not launched twice by mistake.
        with pytest.raises(phalanx.UserError, match=r"job tiny is already waiting, as \d+"):
            launch(folder, queue="wide", again=False)
        held = expected["it is held by its owner"]
        with pytest.raises(phalanx.UserError, match="is already waiting"):
            phalanx.requeue(expected["partition shut is down"])
        assert str(phalanx.cancel(held)).startswith(f"{held}: cancelled")
        with pytest.raises(phalanx.UserError, match="has already ended"):
            phalanx.cancel(held)
        assert phalanx.why(held).explanation.state == "cancelled"
    finally:
        slurm.run("scancel", busy, *expected.values())


def test_cancelling_leaves_no_process(slurm: SlurmCluster, folder: Path) -> None:
    (folder / "job.toml").write_text(JOB.replace("2560", "256000000"))
    done = launch(folder, queue="wide", runs=folder / "runs dir")
    [job], run = done.ids, done.requests[0].run

    def is_agent(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended after it was listed
            return "phalanx.train.agent" in " ".join(process.cmdline())
        return False

    wait_for(lambda: any(is_agent(one) for one in slurm.processes(run)), "an agent", patience_s=600)
    phalanx.cancel(job)
    wait_for(lambda: not slurm.processes(run), "the processes to be gone", patience_s=120)
    [row] = [one for one in phalanx.queue(on="slurm").jobs if one.id == job]
    assert row.state == "cancelled"


# In place of a Python that trains: 40 trainings take minutes, and test_slurm_runs.py has real ones. Number 7 fails.
STAND_IN = """\
#!/bin/bash
case "$4" in
describe) echo "x $SLURMD_NODENAME 127.0.0.1" ;;
serve) echo '{"state": "done"}' >"${@: -1}/status.json" ;;
conclude) case "$5" in *tiny-7-*) echo '{}' >"$5/status.json"; echo "phalanx: failed: no luck" >&2; exit 3 ;; esac ;;
esac
"""


def test_a_group_of_forty_is_one_array_with_one_table_and_a_folder_each(slurm: SlurmCluster, folder: Path) -> None:
    (folder / "stand-in").write_text(STAND_IN)
    (folder / "stand-in").chmod(0o755)
    jobs = [folder / f"job-{number}.toml" for number in range(40)]
    for number, path in enumerate(jobs):
        path.write_text(JOB.replace('"tiny"', f'"tiny-{number}"'))
    done = phalanx.launch(
        jobs,
        group="sweep-40",
        queue="low",
        overrides=[f"launch.python={folder / 'stand-in'}"],
        runs=folder / "runs dir",
        progress=False,
        check=False,
        wait=True,
    )
    array = done.ids[0].partition("_")[0]
    assert done.ids == tuple(f"{array}_{number}" for number in range(40))  # one submission
    table = phalanx.queue(group="sweep-40")
    assert [(one.id, one.name, one.group) for one in table.jobs] == [
        (f"{array}_{number}", f"tiny-{number}", "sweep-40") for number in range(40)
    ]
    assert [one.name for one in table.jobs if one.state != "done"] == ["tiny-7"]
    assert (done.exit_code, str(table).splitlines()[-1]) == (3, "39 done, 1 failed")
    assert phalanx.why(f"{array}_7").explanation.reason == "no luck"
    for number, request in enumerate(done.requests):
        assert [path.name for path in (Path(request.run) / "logs").glob("*.log")] == [f"slurm-{array}_{number}.log"]


def test_without_slurm_the_verbs_say_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    command = [sys.executable, "-m", "phalanx", "launch", str(folder / "job.toml"), "--no-check", "--queue", "wide"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--on slurm: Slurm's command scontrol is not on this machine" in done.stderr
    assert not (folder / "runs").exists()
    with pytest.raises(phalanx.UserError, match="Slurm's command squeue is not on this machine"):
        phalanx.queue(on="slurm")
    with pytest.raises(phalanx.UserError, match="Slurm's command sinfo is not on this machine") as caught:
        phalanx.cluster_health(on="slurm")
    assert "--on local" not in str(caught.value)  # which has no nodes to look after
    # Launched elsewhere, with this folder in sight: what the run says is worth more than that Slurm is not here.
    run = Run(path=folder / "there")
    run.path.mkdir()
    (run.path / "plan.json").write_text("{}")
    run.set_status("failed", message="rank 3 ran out of memory")
    record_launch(LaunchRecord(id="12", system="slurm", name="tiny", run=str(run.path)), os.environ)
    said = str(phalanx.why("12"))
    assert said.startswith("12 is failed: its run folder says failed: rank 3 ran out of memory (Slurm's commands are")
    assert f"phalanx watch {run.path} follows it from here" in said
    with pytest.raises(phalanx.UserError, match="Slurm's command squeue is not on this machine"):
        phalanx.cancel("12")
    shutil.rmtree(run.path)
    with pytest.raises(phalanx.UserError, match="its run folder cannot be read from here either"):
        phalanx.why("12")
    for verb in ("why", "cancel", "requeue", "logs"):
        with pytest.raises(phalanx.UserError, match="no launched job has the id '4711'"):
            getattr(phalanx, verb)("4711")
    # A script can be written anywhere, for a cluster that this machine is no part of.
    dry = phalanx.launch(folder / "job.toml", dry_run=True, check=False, queue="wide", progress=False)
    assert "#SBATCH --partition=wide" in str(dry)
