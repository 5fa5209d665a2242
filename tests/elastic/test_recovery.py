"""Real runs that lose ranks, hosts and coordinators: they go on, with the same numbers, and lose no step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_dataset import write_dataset

from phalanx.record.account.incidents import read_incidents
from phalanx.record.events import read_events
from phalanx.record.run import Run, open_run

JOB = Path(__file__).parents[2] / "examples" / "drill.toml"
STEPS, RANKS = 26, 4
SAME_LR = 16  # steps before the learning rate depends on how many there are in all
FOREVER = "100000"
Event = dict[str, Any]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The job of the drills on a small text."""
    folder = tmp_path_factory.mktemp("recovery")
    write_dataset(folder, documents=2500)
    text = JOB.read_text(encoding="utf-8")
    corpus = next(line for line in text.splitlines() if line.startswith("corpus ="))
    # One layer and one micro-batch: half the time of a step, and the same things to lose.
    smaller = {corpus: 'path = "data"', "layers = 2": "layers = 1", "micro = 2": "micro = 4"}
    for old, new in smaller.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "job.toml").write_text(text)
    return folder


class Trial:
    """A run in a process of its own."""

    def __init__(self, folder: Path, runs: str, *arguments: str, resume: Path | None = None) -> None:
        environ = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
        words = ["job.toml", "--runs", runs, *arguments] if resume is None else ["--resume", str(resume)]
        self.root = folder / runs
        self.error = open(folder / f"{runs}.err", "a+", encoding="utf-8")  # noqa: SIM115 (closed in `close`)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "phalanx", "train", *words],
            cwd=folder,
            env=environ,
            stdout=subprocess.DEVNULL,
            stderr=self.error,
        )

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.error.close()

    @property
    def run(self) -> Run:
        (found,) = self.root.iterdir()
        return open_run(found)

    def said(self) -> str:
        return Path(self.error.name).read_text(encoding="utf-8")

    def supervisor(self, kind: str) -> list[Event]:
        return [event for event in read_events(self.run.supervisor)[0] if event["event"] == kind]

    def steps(self, rank: int = 0) -> list[Event]:
        return [event for event in read_events(self.run.events(rank))[0] if event["event"] == "step"]

    def reach(self, step: int, *, epoch: int = 1) -> None:
        """Wait for a step of an epoch, or of a later one."""
        self.wait(lambda: any(one["step"] >= step and one["epoch"] >= epoch for one in self.steps()))

    def wait(self, condition: Callable[[], object], within_s: float = 120.0) -> None:
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            if self.root.exists() and list(self.root.glob("*/supervisor.jsonl")) and condition():
                return
            assert self.process.poll() is None, self.said()
            time.sleep(0.02)
        raise AssertionError(f"not within {within_s:g} s:\n{self.said()}")

    def finish(self) -> int:
        return self.process.wait(240)

    def members(self) -> list[int]:
        """Processes of the present formation."""
        return [int(member["pid"]) for member in self.supervisor("epoch")[-1]["members"]]

    def kill(self, *ranks: int, number: int = signal.SIGKILL) -> None:
        pids = self.members()
        for rank in ranks:
            os.kill(pids[rank], number)

    def agent(self, host: str) -> int:
        return next(pid for pid in children(self.process.pid) if host in command(pid))

    @property
    def worlds(self) -> list[int]:
        return [event["world"] for event in self.supervisor("epoch")]

    def digests(self) -> list[str]:
        """Of every rank's parameters after the last step."""
        return [self.steps(rank)[-1]["digest"] for rank in range(RANKS)]

    def losses(self) -> dict[int, float]:
        """By step; what was done again counts."""
        return {one["step"]: one["loss"] for one in self.steps()}

    def lost_no_held_step(self) -> None:
        """No restore went behind what a step event said to be safe in memory."""
        for restore in self.supervisor("restore")[1:]:
            before = [
                one["held"] for one in self.steps() if one["epoch"] < restore["epoch"] and one["held"] is not None
            ]
            assert restore["source"] == "memory"
            assert restore["step"] >= max(before, default=0)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")


Begin = Callable[..., Trial]


@pytest.fixture(scope="module")
def whole(folder: Path) -> Trial:
    """The run to which nothing happens."""
    trial = Trial(folder, "whole", "--steps", str(STEPS))
    code = trial.finish()
    trial.close()
    assert code == 0, trial.said()
    return trial


@pytest.fixture
def begin(folder: Path, request: pytest.FixtureRequest) -> Iterator[Begin]:
    trials: list[Trial] = []

    def start(*arguments: str, resume: Path | None = None) -> Trial:
        trials.append(Trial(folder, request.node.name.replace("[", "-").rstrip("]"), *arguments, resume=resume))
        return trials[-1]

    yield start
    for trial in trials:
        trial.close()


def test_a_stopped_rank_killed_ranks_and_a_killed_coordinator_cost_no_step(begin: Begin, whole: Trial) -> None:
    """One run that suffers them one after the other ends with the bits of the run to which nothing happens."""
    trial = begin("--steps", str(STEPS), "--set", "fault.dead_after_s=4")
    trial.reach(4)
    victim = trial.members()[1]
    os.kill(victim, signal.SIGSTOP)
    trial.reach(6, epoch=2)
    trial.kill(2)
    trial.reach(9, epoch=3)
    trial.kill(1, 3)
    trial.reach(12, epoch=4)
    generation = len(trial.worlds)
    coordinator = next(pid for pid in children(trial.agent("host-0")) if "phalanx.elastic.coordinator" in command(pid))
    os.kill(coordinator, signal.SIGKILL)
    assert trial.finish() == 0, trial.said()
    assert trial.digests() == whole.digests(), "bit for bit"
    assert trial.losses() == whole.losses()
    assert trial.worlds == [RANKS] * generation, "without a coordinator ranks train on"
    trial.lost_no_held_step()
    check_stopped(trial, victim)
    killed = [one for one in trial.supervisor("incident") if one["cause"]["signal"] == signal.SIGKILL]
    assert killed[0]["rank"] == 2
    told = [
        *killed[1:],
        *trial.supervisor("replacement"),
    ]  # one that fails while the others leave is replaced with them
    failed = {rank for one in told for rank in (one["rank"], *one.get("others", ()))}
    assert failed >= {1, 3}, "as one incident, or as two when the first was noticed before the second was killed"


def check_stopped(trial: Trial, victim: int) -> None:
    """The first incident: rank 1 was stopped, and is named by its cause and by the flight recorders of the others."""
    incident, *_ = trial.supervisor("incident")
    assert (incident["rank"], incident["cause"]["kind"]) == (1, "Silence")
    assert "in a stopped process (state T)" in incident["cause"]["message"]
    evidence, *_ = trial.supervisor("evidence")
    # A rank gives its flight recorder half a second, which a busy machine may not grant.
    if len(list(trial.run.path.glob("flight/epoch-1-rank-*.json"))) == RANKS - 1:
        assert evidence["culprits"] == [1]
        assert "rank 1 left no record of entering it" in evidence["finding"]
        assert read_incidents(trial.run)[0].finding == evidence["finding"]
    assert not Path(f"/proc/{victim}").exists()


def test_survivors_keep_their_processes_and_say_what_they_waited_for(begin: Begin, whole: Trial) -> None:
    trial = begin("--steps", FOREVER, "--set", "fault.recovery=shrink")
    trial.reach(4)
    before = trial.members()
    trial.kill(1)
    trial.reach(SAME_LR, epoch=2)
    assert trial.worlds == [4, 3]
    assert trial.members() == [before[0], before[2], before[3]]
    trial.lost_no_held_step()
    ours, theirs = trial.losses(), whole.losses()
    assert all(abs(ours[step] - theirs[step]) < 1e-4 for step in range(SAME_LR)), "the same batches, summed otherwise"
    trial.wait(lambda: trial.supervisor("evidence"))
    assert set(trial.supervisor("evidence")[0]["last_collectives"]) <= {"0", "2", "3"}
    trial.process.send_signal(signal.SIGINT)
    assert trial.finish() == 130


def test_a_lost_host_is_restored_from_the_copies_on_the_other_and_comes_back(begin: Begin, whole: Trial) -> None:
    """The agent of host-0 has the coordinator as its child: another is started by the other host."""
    trial = begin("--steps", FOREVER, "--hosts", "2")
    trial.reach(4)
    os.kill(trial.agent("host-0"), signal.SIGKILL)
    trial.wait(lambda: trial.worlds[-1] == 2)
    trial.wait(lambda: trial.worlds[-1] == RANKS)
    epoch = len(trial.worlds)
    trial.reach(SAME_LR, epoch=epoch)
    trial.lost_no_held_step()
    ours, theirs = trial.losses(), whole.losses()
    assert all(abs(ours[step] - theirs[step]) < 1e-4 for step in range(SAME_LR))
    trial.process.send_signal(signal.SIGINT)
    assert trial.finish() == 130, trial.said()


def test_a_host_that_was_stopped_wakes_up_and_cannot_hurt(begin: Begin, whole: Trial) -> None:
    trial = begin("--steps", FOREVER, "--hosts", "2", "--set", "fault.dead_after_s=2")
    trial.reach(4)
    agent = trial.agent("host-1")
    stopped = [agent, *children(agent)]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    trial.wait(lambda: trial.worlds == [4, 2])
    trial.reach(8, epoch=2)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    trial.wait(lambda: trial.worlds[-1] == RANKS)
    trial.reach(SAME_LR, epoch=len(trial.worlds))
    trial.lost_no_held_step()
    ours, theirs = trial.losses(), whole.losses()
    assert all(abs(ours[step] - theirs[step]) < 1e-4 for step in range(SAME_LR))
    assert not any("may not commit" in log.read_text() for log in trial.run.path.glob("logs/rank-*.log"))
    trial.process.send_signal(signal.SIGINT)
    assert trial.finish() == 130, trial.said()


def test_data_that_went_away_is_a_users_error_also_in_recovery(begin: Begin, folder: Path) -> None:
    trial = begin("--steps", FOREVER)
    trial.reach(2)
    (folder / "data").rename(folder / "elsewhere")
    try:
        trial.kill(0)
        assert trial.finish() == 2
    finally:
        (folder / "elsewhere").rename(folder / "data")
    assert f"{folder / 'data'}" in trial.said()
    assert len(trial.worlds) == 2, "not tried again"


def test_stopped_during_recovery_and_resumed_it_ends_where_an_undisturbed_run_does(begin: Begin, whole: Trial) -> None:
    trial = begin("--steps", str(STEPS))
    trial.reach(4)
    trial.kill(3)
    trial.process.send_signal(signal.SIGTERM)
    code = trial.finish()
    assert code == 130, trial.said()
    assert "stopped as asked: saved step " in trial.said()
    saved = max(trial.run.saved_steps())
    assert 4 < saved < STEPS
    resumed = begin(resume=trial.run.path)
    assert resumed.finish() == 0, resumed.said()
    assert trial.digests() == whole.digests()
    epochs = [event["epoch"] for event in trial.supervisor("epoch")]
    assert epochs == sorted(set(epochs)), "numbers only grow, over all launches"
