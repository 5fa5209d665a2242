"""The driver's side of a drill, against processes that only sleep: whom it hits, when, and what it takes back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.record.run import Run
from phalanx.train.drill import driver as module
from phalanx.train.drill import firings
from phalanx.train.drill.driver import DrillStuck, FaultDriver, damage_checkpoint
from phalanx.train.drill.faults import parse_faults

# An "agent" with two "ranks", which it names on its first line.
AGENT = """
import subprocess, sys, time
ranks = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in range(2)]
print(*[rank.pid for rank in ranks], flush=True)
time.sleep(600)
"""


PATIENCE_S = 120.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of drivers and notes; only the test moves it."""
    now_s = [1_000.0]
    for one in (module, firings):
        monkeypatch.setattr(one, "time", SimpleNamespace(time=lambda: now_s[0], monotonic=lambda: now_s[0]))
    return now_s


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(path=tmp_path)
    made.set_launch(v=1, drill=True)
    made.set_status("running")
    return made


@pytest.fixture
def host(run: Run) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """The agent and its ranks; the record names the ranks."""
    agent = subprocess.Popen([sys.executable, "-c", AGENT], stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    ranks = [int(word) for word in agent.stdout.readline().split()]
    members = [{"rank": number, "host": "host-1", "slot": number, "pid": pid} for number, pid in enumerate(ranks)]
    write(run.path / "supervisor.jsonl", event="epoch", epoch=3, members=members)
    yield agent, ranks
    module.signal_processes([agent.pid, *ranks], signal.SIGKILL)
    agent.stdout.close()
    agent.wait()


def write(path: Path, **event: Any) -> None:
    with path.open("a") as file:
        file.write(json.dumps({"t": time.time(), "rank": 0, **event}) + "\n")


def driver(run: Run, *texts: str, **options: Any) -> FaultDriver:
    faults = parse_faults(texts)
    firings.write_schedule(run, faults)
    return FaultDriver(run, faults, hosts=["host-0", "host-1"], **options)


def state(pid: int) -> str:
    """One letter, as ps shows it; X when the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def becomes(pid: int, states: str) -> bool:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until and state(pid) not in states:
        time.sleep(0.01)
    return state(pid) in states


def test_a_lost_host_is_the_agent_and_its_ranks_at_the_step(run: Run, host: Any) -> None:
    agent, ranks = host
    told: list[str] = []
    drill = driver(run, "host:host=1,step=4", tell=told.append)
    drill.tick()
    write(run.events(0), event="step", step=3)
    drill.tick()
    assert agent.poll() is None
    write(run.events(0), event="step", step=4)
    drill.tick()
    assert agent.wait(PATIENCE_S) == -signal.SIGKILL
    assert all(becomes(pid, "XZ") for pid in ranks)
    [note] = firings.read_firings(run)
    assert (note.host, note.epoch, note.step, note.note) == ("host-1", 3, 4, "SIGKILL to 3 processes")
    drill.tick()
    assert told == ["  generation 3, step 4: host:step=4 host-1"]


def test_a_frozen_host_wakes_again(run: Run, host: Any, clock: list[float]) -> None:
    agent, ranks = host
    drill = driver(run, "freeze:host=1,for_s=30")
    write(run.events(0), event="step", step=0)
    drill.tick()
    assert all(becomes(pid, "T") for pid in (agent.pid, *ranks))
    clock[0] += 29
    drill.tick()
    assert all(state(pid) == "T" for pid in (agent.pid, *ranks))
    clock[0] += 2
    drill.tick()
    assert all(becomes(pid, "S") for pid in (agent.pid, *ranks))


def test_what_still_lasts_is_taken_back_at_the_end(run: Run, host: Any) -> None:
    agent, _ = host
    drill = driver(run, "freeze:host=1,for_s=100")
    write(run.events(0), event="step", step=0)
    drill.tick()
    assert becomes(agent.pid, "T")
    drill.close()
    assert becomes(agent.pid, "S")


def test_a_rank_that_stopped_itself_is_woken(run: Run, host: Any, clock: list[float]) -> None:
    _, [rank, _] = host
    drill = driver(run, "hang:rank=0,for_s=20")
    os.kill(rank, signal.SIGSTOP)
    firings.claim_firing(run, parse_faults(["hang:rank=0,for_s=20"])[0], whom=0, rank=0, pid=rank)
    drill.tick()
    assert becomes(rank, "T")
    clock[0] += 25
    drill.tick()
    assert becomes(rank, "S")


def test_a_host_that_is_down_is_hit_when_it_is_back(run: Run) -> None:
    drill = driver(run, "host:host=1")
    write(run.events(0), event="step", step=0)
    drill.tick()
    assert firings.read_firings(run) == []


def test_the_coordinator_of_this_run_and_no_other(run: Run, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)", module.COORDINATOR]
    mine = subprocess.Popen([*command, str(run.path)])
    other = subprocess.Popen([*command, str(tmp_path / "other")])
    try:
        drill = driver(run, "coordinator")
        write(run.events(0), event="step", step=0)
        drill.tick()
        assert mine.wait(PATIENCE_S) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for process in (mine, other):
            process.kill()
            process.wait()


def test_seconds_and_the_clock_of_the_ranks(run: Run, clock: list[float]) -> None:
    drill = driver(run, "port:at_s=0.1")
    drill.tick()
    assert firings.drill_clock(run) is None
    write(run.events(0), event="step", step=0)
    drill.tick()
    assert firings.drill_clock(run) == clock[0]
    assert firings.read_firings(run) == []
    clock[0] += 0.12
    drill.tick()
    assert len(firings.read_firings(run)) == 1
    drill.close()


def test_a_run_is_stopped_after_its_minutes_or_its_steps(run: Run) -> None:
    for options, step in (({"minutes": 1e-9}, 0), ({"until_step": 5}, 4)):
        run.stop_file.unlink(missing_ok=True)
        drill = driver(run, **options)
        drill.tick()
        assert not run.stop_file.exists()
        write(run.events(0), event="step", step=step)
        drill.tick()
        drill.tick()
        assert run.stop_file.exists()


def test_a_run_that_stands_still_is_left(run: Run, clock: list[float]) -> None:
    drill = driver(run, patience_s=0.05)
    write(run.events(0), event="step", step=7)
    drill.tick()
    clock[0] += 0.06
    with pytest.raises(DrillStuck, match=r"no step and no event for 0.05 s, after step 7"):
        drill.tick()


def test_processes_that_outlive_the_end_are_left(run: Run, clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.train.drill.driver.LEAVE_S", 0.05)
    run.set_status("done")
    drill = driver(run)
    drill.tick()
    clock[0] += 0.06
    with pytest.raises(DrillStuck, match=r"its processes are still there 0.05 s after its end"):
        drill.tick()


@pytest.fixture
def saved(run: Run) -> Path:
    for step in (3, 7):
        folder = run.path / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
        for rank in range(2):
            (folder / f"rank-{rank:05d}.safetensors").write_bytes(bytes([rank]) * 100)
    return folder


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("flip", "flipped"),
        ("truncate", "cut from 100 to"),
        ("swap", "swapped with"),
        ("missing", "deleted"),
        ("manifest", "manifest.json: bit"),
    ],
)
def test_damage_hits_one_commit_alone(run: Run, saved: Path, how: str, said: str) -> None:
    def contents(folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    older, before = contents(saved.parent / "step-00000003"), contents(saved)
    assert said in damage_checkpoint(run, int(saved.name[5:]), how=how, seed=4)
    assert contents(saved) != before
    assert contents(saved.parent / "step-00000003") == older


def test_no_commit_no_damage(run: Run) -> None:
    assert damage_checkpoint(run, 7, how="flip", seed=0) == ""
    drill = driver(run, "damage")
    write(run.events(0), event="step", step=0)
    drill.tick()
    assert firings.read_firings(run) == []
