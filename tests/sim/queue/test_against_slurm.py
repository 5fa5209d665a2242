"""The same jobs in a real Slurm and in the simulation: after every event the same jobs run.

Jobs wait for a file, so that the test ends them; nothing depends on how fast this machine is. Limits are many minutes
apart, the test takes a few. Slurm promises particular nodes, the simulation a number of them: the jobs are chosen so
that this makes no difference (docs/queue-simulation.md).
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster, missing_slurm, wait_for

from phalanx.sim.queue.queue_job import QueueJob
from phalanx.sim.queue.queue_policy import QueuePolicy
from phalanx.sim.queue.simulate_queue import simulate_jobs

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing_slurm()), reason=missing_slurm() or "there is one")]
NODES = 6  # of the partition "wide"
APART_S = 10.0  # between events, in the simulation

# (job, nodes, limit in minutes) is submitted, a lone name ends.
SCRIPT: list[tuple[str, int, int] | str] = [
    ("a", 4, 30),
    ("b", 5, 20),  # waits for a
    ("c", 2, 60),  # fits now, but would delay b
    ("e", 6, 10),
    ("f", 1, 25),  # ends before b is to start
    "f",
    ("g", 1, 200),  # does not delay b, but e: EASY starts it, conservative backfill does not
    "a",
    "b",
    "c",
]
LAST = {"easy": ["g", "e"], "conservative": ["e", "g"]}


def simulated(policy: str) -> list[set[str]]:
    """Which jobs run after each event. A job's time is known when it is ended, so it is simulated event by event."""
    running: list[set[str]] = []
    jobs: dict[str, QueueJob] = {}
    starts: dict[str, float] = {}
    for number, event in enumerate([*SCRIPT, *LAST[policy]]):
        now = number * APART_S
        if isinstance(event, str):
            job = jobs[event]
            jobs[event] = QueueJob(
                name=event, submit_s=job.submit_s, nodes=job.nodes, duration_s=now - starts[event], limit_s=job.limit_s
            )
        else:
            name, nodes, minutes = event
            jobs[name] = QueueJob(
                name=name, submit_s=now, nodes=nodes, duration_s=minutes * 60.0, limit_s=minutes * 60.0
            )
        found = simulate_jobs(list(jobs.values()), nodes=NODES, policy=QueuePolicy(backfill=policy))  # type: ignore[arg-type]
        starts = {one.job.name: one.first_start_s for one in found.states}
        running.append({one.job.name for one in found.states if one.first_start_s <= now < one.end_s})
    return running


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    base = Path(tempfile.mkdtemp(prefix="phalanx-slurm-", dir="/tmp"))  # short: a socket's path has 107 characters
    cluster = SlurmCluster(base)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(base, ignore_errors=True)


def passes(slurm: SlurmCluster) -> int:
    found = re.findall(r"Total cycles: (\d+)", slurm.run("sdiag"))
    return int(found[-1]) if found else 0  # the first is the main scheduler's, the second that of backfill


@pytest.mark.parametrize("policy", ["conservative", "easy"])
def test_the_same_jobs_run_after_every_event(slurm: SlurmCluster, tmp_path: Path, policy: str) -> None:
    conf = slurm.base / "slurm.conf"
    if policy == "easy":  # a promise for one job per partition is EASY
        conf.write_text(conf.read_text().replace("bf_interval=1,", "bf_interval=1,bf_job_part_count_reserve=1,"))
        slurm.run("scontrol", "reconfigure")
    ids: dict[str, str] = {}

    def running() -> set[str]:
        lines = slurm.run("squeue", "-h", "-p", "wide", "-t", "R", "-o", "%j").split()
        return set(lines)

    for event, wanted in zip([*SCRIPT, *LAST[policy]], simulated(policy), strict=True):
        if isinstance(event, str):
            (tmp_path / event).touch()
        else:
            name, nodes, minutes = event
            wait = f"until [ -e {tmp_path}/{name} ]; do sleep 0.1; done"
            options = ["-p", "wide", "-N", str(nodes), "-t", str(minutes), "-J", name, "-o", "/dev/null", "--exclusive"]
            ids[name] = slurm.run("sbatch", "--parsable", *options, "--wrap", wait).strip()
            assert ids[name].isdigit()
        wait_for(lambda now=wanted: running() == now, f"{policy}, after {event}: {sorted(wanted)}")  # type: ignore[misc]
        # And nobody else: two more passes over the queue, each asked for by a change of a job.
        before = passes(slurm)
        for number in range(2):
            seen = passes(slurm)
            slurm.run(
                "scontrol", "update", f"JobId={ids['e']}" if "e" in ids else f"JobId={ids['a']}", f"Comment={number}"
            )
            if len(ids) > len(wanted):
                wait_for(lambda count=seen: passes(slurm) > count or not waiting(slurm), "a pass of backfill")  # type: ignore[misc]
        assert running() == wanted, f"{policy}, after {event}: {passes(slurm) - before} passes"


def waiting(slurm: SlurmCluster) -> bool:
    return bool(slurm.run("squeue", "-h", "-p", "wide", "-t", "PD", "-o", "%j").split())
