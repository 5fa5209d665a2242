"""Real runs on a real Slurm: they train, survive what happens to them, and end with the bits of an undisturbed run."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import psutil
import pytest
from slurm_cluster import SlurmCluster, wait_for
from tiny_dataset import write_dataset
from tiny_job import tiny_job

import phalanx
from phalanx.record.events import read_events
from phalanx.record.run import Run

JOB = tiny_job(
    model={"layers": 2, "kv_heads": 2},
    train={"samples": 0},
    parallel={"shard": 2, "zero": 3, "tensor": 1, "pipeline": 1, "context": 1},
    comm={"init_timeout_s": 240},
    checkpoint={"interval_s": 3600},
    fault={"digest_every": 1, "grace_s": 100},
    cluster={"spec": "local-cpu:2"},
    plugins={"callbacks": ["pace.py:Pace"]},
    launch={"on": "slurm", "interface": "lo", "time_s": 3600, "hosts": 2},
)
# Steps take half a second, so that a fast machine does not finish before something could happen to it, until a file
# called "fast" is there.
PACE = """\
import os, time
from phalanx.train.callbacks import Callback
class Pace(Callback):
    def on_step_begin(self, training):
        if not os.path.exists(os.path.join(os.path.dirname(__file__), "fast")):
            time.sleep(0.5)
"""
STEPS = 60
PATIENCE_S = 900.0

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launch")
    write_dataset(folder, documents=2500)
    (folder / "job.toml").write_text(JOB)
    (folder / "pace.py").write_text(PACE)
    return folder


def launch(folder: Path, **options: Any) -> tuple[str, Run]:
    """Launch the job; its id and its run."""
    wanted = {"steps": STEPS, "runs": folder / "runs", "progress": False, "check": False, "allow_code": True, **options}
    done = phalanx.launch(folder / "job.toml", **wanted)
    return done.ids[0], Run(path=Path(done.requests[0].run))


def steps_done(run: Run) -> int:
    events, _ = read_events(run.events(0)) if run.events(0).exists() else ([], None)
    return max((event["step"] for event in events if event["event"] == "step"), default=0)


def digests(run: Run) -> dict[int, Any]:
    """The digest of the weights by step; a step done again must have the same."""
    events, _ = read_events(run.events(0))
    return {event["step"]: event["digest"] for event in events if event["event"] == "step" and event.get("digest")}


def await_state(job: str, *states: str) -> phalanx.api.launching.QueueTable:
    def has_ended() -> bool:
        [one] = [row for row in phalanx.queue(on="slurm").jobs if row.id == job]
        assert one.state not in ("failed", "cancelled") or one.state in states, phalanx.logs(job, lines=200)
        return one.state in states

    wait_for(has_ended, f"{job} to be {states}", patience_s=PATIENCE_S)
    return phalanx.queue(on="slurm")


@pytest.fixture(scope="module")
def undisturbed(slurm: SlurmCluster, folder: Path) -> Run:
    """Submitted, trained, done; a drained node is left alone, and nodes are ordered by their place in the network."""
    slurm.run("scontrol", "update", "NodeName=n10", "State=DRAIN", "Reason=test")
    (folder / "fast").touch()
    job, run = launch(folder, queue="wide", spares=1)
    await_state(job, "done")
    hosts = run.launch()["hosts"]
    assert len(hosts) == 3
    assert "n10" not in hosts
    assert hosts == sorted(hosts, key=lambda name: int(name[1:]))
    assert steps_done(run) == STEPS - 1  # counted from 0
    assert str(phalanx.why(job)) == f"{job} is done: the training is complete; phalanx report {run.path}"
    assert "phalanx: done" in str(phalanx.logs(job))
    slurm.run("scontrol", "update", "NodeName=n10", "State=RESUME")
    return run


def test_rank_agent_and_node_are_lost_and_replaced_inside_the_allocation(
    slurm: SlurmCluster, folder: Path, undisturbed: Run
) -> None:
    (folder / "fast").unlink()
    job, run = launch(folder, queue="wide", spares=1, again=True)
    wait_for(lambda: steps_done(run) >= 3 and len(_joined(run)) == 3, "three steps and hosts", patience_s=PATIENCE_S)
    script_node = re.findall(r"BatchHost=(\S+)", slurm.run("scontrol", "show", "job", job))[0]
    rank = psutil.Process(_member_beside(script_node, run)["pid"])
    rank.kill()
    seen = steps_done(run)
    wait_for(lambda: steps_done(run) > seen + 3, "steps after a lost rank", patience_s=PATIENCE_S)
    host = _member_beside(script_node, run)["host"]
    psutil.Process(_member_beside(script_node, run)["pid"]).parent().kill()
    # Its ranks are on the spare now; started again, it is the spare of the next.
    wait_for(lambda: _joined(run).count(host) == 2, "the agent to come back", patience_s=PATIENCE_S)
    # The node of rank 0, of the coordinator and of the batch script. Slurm starts no other script (--no-kill).
    slurm.lose_node(script_node)
    (folder / "fast").touch()
    await_state(job, "done")
    slurm.start_node(script_node)
    assert "Restarts=0" in slurm.run("scontrol", "show", "job", job)
    assert f"node {script_node} of the batch script was lost" in str(phalanx.logs(job, lines=1000))
    wait_for(lambda: not slurm.processes(str(run.path)), "its processes to be gone")
    causes = [event["cause"]["kind"] for event in read_events(run.supervisor)[0] if event["event"] == "incident"]
    assert causes == ["Signal", "HostLost", "HostLost"]
    assert digests(run) == digests(undisturbed)


def _joined(run: Run) -> list[str]:
    events = [event for event in read_events(run.supervisor)[0] if event["event"] == "host"]
    return [event["host"] for event in events if event["state"] == "joined"]


def _member_beside(host: str, run: Run) -> dict[str, Any]:
    """A rank of the newest membership that is not on `host`."""
    formed = [event for event in read_events(run.supervisor)[0] if event["event"] == "epoch"][-1]
    return next(one for one in formed["members"] if one["host"] != host)


def test_preempted_and_out_of_time_it_saves_waits_and_goes_on_at_the_same_step(
    slurm: SlurmCluster, folder: Path, undisturbed: Run
) -> None:
    (folder / "fast").unlink()
    job, run = launch(folder, queue="low", again=True)
    wait_for(lambda: steps_done(run) >= 3, "three steps", patience_s=PATIENCE_S)
    other = slurm.run(
        "sbatch", "--parsable", "-p", "high", "-N8", "--exclusive", "-o", "/dev/null", "--wrap", "true"
    ).strip()
    restarts = re.compile(r"Restarts=(\d+)")

    def restarted(times: int) -> bool:
        found = restarts.search(slurm.run("scontrol", "show", "job", job))
        return found is not None and int(found[1]) >= times

    wait_for(lambda: restarted(1), "the requeue", patience_s=PATIENCE_S)
    saved = run.saved_steps()
    assert saved
    assert other
    wait_for(lambda: steps_done(run) > saved[-1] + 1, "it to go on", patience_s=PATIENCE_S)
    elapsed = slurm.run("squeue", "-h", "-j", job, "-o", "%M").strip().split(":")
    slurm.run("scontrol", "update", f"JobId={job}", f"TimeLimit={int(elapsed[-2]) + 2}")
    wait_for(lambda: restarted(2), "the requeue at the time limit", patience_s=PATIENCE_S)
    assert run.saved_steps()[-1] > saved[-1]
    (folder / "fast").touch()
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=120")
    await_state(job, "done")
    assert digests(run) == digests(undisturbed)
    [row] = [one for one in phalanx.queue(on="slurm").jobs if one.id == job]
    assert row.restarts == 2
    assert os.path.getsize(run.path / "launch.sh") > 0
