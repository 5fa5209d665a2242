"""`fault.on_loss = "leave-out"` with the real trainer: a host lost, a rank stopped, Ctrl-C, and resumed as "rebuild".

Every loss of it is held against one process that learns the same tokens without those of replicas that were left out.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.record.events import read_events
from phalanx.train.data.build_dataset import Recipe, TextOrigin, build_dataset
from phalanx.train.data.documents import Reading
from phalanx.train.data.progress import BuildProgress

REPLAY = Path(__file__).parents[2] / "benchmarks" / "replica_loss.py"
JOB = """\
name = "replicas"
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
tokens = 100_000_000
[batch]
global_sequences = 6
micro = 1
[precision]
compute = "fp32"
[parallel]
tensor = 1
context = 1
pipeline = 1
shard = 1
zero = 0
[train]
samples = 0
[comm]
init_timeout_s = 60
[fault]
on_loss = "leave-out"
recovery = "auto"
dead_after_s = 2
[cluster]
spec = "local-cpu:3"
"""
# Every process of the run loads it first (callbacks are refused with "leave-out"). Ranks that compute as fast as they
# can while another host starts keep its processors from it, and make hundreds of steps that are all learnt again.
CALM = """\
import time

from phalanx.record.events import EventWriter

write = EventWriter.write


def calm(self, event, **fields):
    write(self, event, **fields)
    if event == "step":
        time.sleep(0.1)


EventWriter.write = calm
"""
PATIENCE_S = 900.0
pytestmark = pytest.mark.slow
Event = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("\n\n".join(f"{n} and {n * 7} are not {n * 3} but {n % 11}" for n in range(900)))
    origin = TextOrigin(path=tmp_path / "text.txt")
    recipe = Recipe(origins=(origin,), vocab=300, heldout=0.1, reading=Reading(split_on="blank"))
    build_dataset(recipe, tmp_path / "data", lambda size: BuildProgress(sys.stderr, size))
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "calm").mkdir()
    (tmp_path / "calm" / "sitecustomize.py").write_text(CALM)
    return tmp_path


def start(folder: Path, *arguments: str, verb: str = "train") -> subprocess.Popen[str]:
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    environ["PYTHONPATH"] = os.pathsep.join([str(folder / "calm"), environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    command = [sys.executable, "-m", "phalanx", verb, *arguments]
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


class Watcher:
    """Waits for what a run writes down."""

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.run = self.wait(lambda: next(folder.glob("runs/*/supervisor.jsonl"), None)).parent

    def wait(self, condition: Callable[[], Any]) -> Any:
        until_s = time.monotonic() + PATIENCE_S
        while not (found := condition()):
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < until_s, [one for one in self.told() if one["event"] != "members"][-8:]
            time.sleep(0.3)  # each look reads the whole record
        return found

    def told(self) -> list[Event]:
        path = self.run / "supervisor.jsonl"
        return read_events(path)[0] if path.exists() else []

    def members(self) -> dict[int, Event]:
        """By rank, the newest."""
        return {one["rank"]: one for event in self.told() for one in event.get("members") or ()}

    def step(self, rank: int = 0) -> int:
        path = self.run / f"events-{rank:05d}.jsonl"
        events = read_events(path)[0] if path.exists() else []
        return max((one["step"] for one in events if one["event"] == "step"), default=-1)

    def wait_for_step(self, more: int = 4) -> None:
        wanted = self.step() + more
        self.wait(lambda: self.step() >= wanted)

    def replicas(self) -> list[tuple[int, str]]:
        return [(one["replica"], one["state"]) for one in self.told() if one["event"] == "replica"]


def agent_of(pid: int) -> int:
    """The parent of a rank."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_host_lost_rank_stopped_interrupted_and_resumed(folder: Path) -> None:
    started = [start(folder, "job.toml", "--hosts", "3")]
    try:
        process = started[0]
        watcher = Watcher(folder, process)
        watcher.wait_for_step()
        started.append(start(folder, str(watcher.run), "--host", "spare", "--slots", "1", verb="agent"))
        watcher.wait(lambda: any(one["event"] == "host" and one["host"] == "spare" for one in watcher.told()))

        os.kill(agent_of(watcher.members()[1]["pid"]), signal.SIGKILL)  # and with it its rank
        watcher.wait(lambda: watcher.replicas() == [(1, "left out"), (1, "rejoined")])
        watcher.wait_for_step()
        assert watcher.members()[1]["host"] == "spare"

        os.kill(watcher.members()[2]["pid"], signal.SIGSTOP)
        watcher.wait(lambda: watcher.replicas()[2:] == [(2, "left out"), (2, "rejoined")])
        watcher.wait_for_step()
        assert [one["epoch"] for one in watcher.told() if one["event"] == "epoch"] == [1], "nothing else was rebuilt"

        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130, err
    finally:
        for one in started:
            one.terminate()  # agents end with whom they belong to
            one.communicate(timeout=PATIENCE_S)
    done = watcher.step()
    resumed = start(
        folder, "--resume", str(watcher.run), "--set", "fault.on_loss=rebuild", "--steps", str(done + 9)
    )  # fmt: skip
    _, err = resumed.communicate(timeout=PATIENCE_S)
    assert resumed.returncode == 0, err
    assert watcher.step() == done + 8

    told = subprocess.run(
        [sys.executable, str(REPLAY), "--replay", str(watcher.run)], check=True, capture_output=True, timeout=PATIENCE_S
    )
    losses = json.loads(told.stdout)
    assert list(losses["recorded"]) == [str(step) for step in range(done + 9)]
    for step, loss in losses["recorded"].items():
        # float32, and sums in another order; with the left-out tokens it would be about 1e-2.
        assert losses["replayed"][step] == pytest.approx(loss, abs=1e-3), step
