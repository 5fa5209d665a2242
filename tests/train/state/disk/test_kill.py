"""A process that dies while it saves: what is found afterwards is always whole."""

import json
import subprocess
import sys

import pytest
import torch

from phalanx.train.state.reader import newest_checkpoint
from phalanx.train.state.restore import load_shards

POINTS = ("begin", "data", "index", "done", "all", "manifest", "set-aside", "commit", "prune")

# Forks writers that save step after step without end and dies with them at a save point, or kills them after a while;
# one process, since importing torch takes longer than everything else here. Every element of a step's tensor is the
# number of the step, so that a mixture of two would show. Prints a line a writer: the step it
# found, and the last it reported as saved.
DRIVER = """
import json, os, signal, sys, time
from pathlib import Path
import torch
from phalanx.train.state.reader import newest_checkpoint
from phalanx.train.state.save import save_checkpoint
from phalanx.train.parallel.tensor_shard import TensorShard

def write(root, attempt, stop, report, found):
    first = found + 1
    for step in range(first, first + 10_000):
        def point(name):
            if name == stop and step >= first + 2 and again == (stop == "set-aside"):  # there is a commit to set aside
                os.kill(os.getpid(), signal.SIGKILL)
        for again in range(2 if stop == "set-aside" else 1):
            for rank in (1, 0):
                mine = torch.full((20, 50), float(step))
                start = (20 * rank, 0)
                shard = TensorShard(name="w", tensor=mine, shape=(40, 50), start=start,
                                    replicas=1, owner=True, groups={})
                save_checkpoint(root, step=step, attempt=f"{attempt}.{again}", shards=[shard], meta={}, rank=rank,
                                world=2, keep=2, point=point)
        os.write(report, f"{step}\\n".encode())

def live(root, attempt, stop, seconds):
    found = newest_checkpoint(root, verify=True)
    found = found.step if found else 0
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            write(root, attempt, stop, writing, found)
        finally:
            os._exit(1)
    os.close(writing)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    with os.fdopen(reading) as told:
        steps = [int(line) for line in told.read().split()]
    told = max(steps, default=0)
    print(json.dumps({"stop": stop, "signal": os.WTERMSIG(status), "told": told, "found": found}), flush=True)

root, lives = Path(sys.argv[1]), json.loads(sys.argv[2])
for folder, attempt, stop, seconds in lives:
    live(root / folder, attempt, stop, seconds)
"""


def run(root, lives):
    """What each writer reported, after all of them died."""
    command = [sys.executable, "-c", DRIVER, str(root), json.dumps(lives)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def whole_step(kit, root):
    """The step found, after making sure that it is all there and of one step."""
    found = newest_checkpoint(root, verify=True)
    assert found.warnings == ()  # a dead writer leaves drafts, never a damaged commit
    target = kit.shard("w", torch.zeros(40, 50))
    load_shards(found.path, [target])
    assert target.tensor.unique().tolist() == [float(found.step)]
    return found.step


@pytest.fixture(scope="module")
def lives(tmp_path_factory):
    """A folder, and what 14 writers in it reported: one for each save point, and five after each other in `run`."""
    root = tmp_path_factory.mktemp("killed")
    at_points = [(point, "a", point, None) for point in POINTS]
    at_random = [("run", f"life{life}", "never", 0.01 + 0.06 * (life * 3 % 5)) for life in range(5)]  # 10 to 250 ms
    at_random.append(("run", "last", "commit", None))  # on a busy machine none of these may have come to a save
    return root, run(root, at_points + at_random)


@pytest.mark.slow
def test_killed_at_every_save_point(kit, lives):
    """Each writer dies while it saves step 3."""
    root, reports = lives
    for report in reports[: len(POINTS)]:
        assert (report["signal"], report["told"]) == (9, 2)
        # At set-aside step 3 is saved for the second time: the first one still counts.
        committed = report["stop"] in ("set-aside", "commit", "prune")
        assert whole_step(kit, root / report["stop"]) == (3 if committed else 2)


@pytest.mark.slow
def test_killed_at_random_and_started_again(kit, lives):
    root, reports = lives
    told = 0
    for report in reports[len(POINTS) :]:
        assert report["signal"] == 9
        assert report["found"] in (told, told + 1)  # everything reported as saved is there; one more may be
        told = max(report["found"], report["told"])
    assert whole_step(kit, root / "run") in (told, told + 1)
    assert told >= 1  # they did live for a while
