"""The launcher with ranks that raise, are killed, hang, or are asked to stop: one message, and nobody stays behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.record.run import Run, create_run

HERE = Path(__file__).parent
HOST = r"\(host \S+\)"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    plan = '{"memory": {"total_bytes": 2.5e9}}'
    return create_run(tmp_path, "fake", job_toml="", job={}, plan_json=plan)


def start(run: Run, behaviour: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(HERE / "fake_cli.py"), behaviour, str(run.path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(run: Run, behaviour: str, *, within_s: float = 40.0) -> tuple[int, str]:
    process = start(run, behaviour)
    output, _ = process.communicate(timeout=within_s)
    assert orphans(run) == []
    return process.returncode, output


def pids(run: Run) -> list[int]:
    """The process ids that the ranks printed into their logs."""
    texts = [path.read_text() for path in sorted((run.path / "logs").glob("rank-*.log"))]
    return [int(found.group(1)) for text in texts if (found := re.search(r"pid (\d+)\n", text))]


def exists(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return False
    return state not in ("Z", "X")


def orphans(run: Run) -> list[int]:
    return [pid for pid in pids(run) if exists(pid)]


def wait(condition: Callable[[], bool], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def test_a_run_that_ends_well(run: Run) -> None:
    assert finish(run, "finish") == (0, "done 0\n\n")
    assert run.status()["state"] == "done"


def test_a_rank_that_raises_is_the_headline(run: Run) -> None:
    code, output = finish(run, "raise")
    assert code == 3
    head, *tail = output.splitlines()[1:]
    assert re.fullmatch(rf"step 5: rank 2 of 4 {HOST}: ValueError: boom", head)
    assert tail == [
        "  other ranks: 3 stopped by us",
        f"  last good checkpoint: step 3; go on with: phalanx train --resume {run.path}",
        f"  log: {run.log(2)}",
    ]
    assert "Traceback" in run.log(2).read_text()
    assert run.status()["rank"] == 2


def test_a_users_mistake_keeps_its_words_and_its_exit_code(run: Run) -> None:
    code, output = finish(run, "user")
    assert code == 2
    assert output.splitlines()[1:4] == [
        "data/shard-0003: ends early: 10 bytes of 20",
        "  it was cut",
        "  build it again",
    ]
    assert "  said by rank 2, step 5\n  other ranks: 3 stopped by us\n  last good checkpoint: step 3; go on" in output


def test_a_killed_rank_is_explained_with_memory(run: Run) -> None:
    code, output = finish(run, "sigkill")
    assert code == 3
    assert re.search(rf"step 5: rank 2 of 4 {HOST}: was killed \(SIGKILL\) from outside", output)
    assert "it had used 1.00 GB; the plan expected 2.50 GB per rank; the host has " in output
    assert "if memory was short: use a smaller batch.micro" in output


def test_out_of_memory_says_what_to_change(run: Run) -> None:
    code, output = finish(run, "memory")
    assert code == 3
    assert ": ran out of memory\n" in output
    assert 'use a smaller batch.micro, parallel.recompute = "full"' in output


def test_the_cause_wins_over_a_consequence_that_came_first(run: Run) -> None:
    code, output = finish(run, "consequence")
    assert code == 3
    assert re.search(rf"rank 2 of 4 {HOST}: KeyError: 'the true cause'", output)
    assert "other ranks: 1 lost their peer, 2 stopped by us" in output


@pytest.mark.parametrize(
    ("behaviour", "place"), [("hang", r"in sleep \(fake_agent.py:\d+\)"), ("sigstop", r"in a stopped process")]
)
def test_a_silent_rank_is_named_and_everything_ends(run: Run, behaviour: str, place: str) -> None:
    code, output = finish(run, behaviour)
    assert code == 3
    assert re.search(rf"step 5: rank 2 of 4 {HOST}: stopped answering \d\.\d+ s ago {place}", output)


def test_peers_that_time_out_point_at_the_one_who_is_silent(run: Run) -> None:
    code, output = finish(run, "timeout")
    assert code == 3
    assert re.search(rf"step 4: rank 2 of 4 {HOST}: stopped answering .* ago in behave \(fake_agent.py:\d+\)", output)
    assert "other ranks: 3 lost their peer" in output


def test_a_rank_that_ignores_sigterm_is_killed_all_the_same(run: Run) -> None:
    code, output = finish(run, "stubborn")
    assert code == 3
    assert "rank 2 of 4" in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_and_says_how_to_go_on(run: Run, number: signal.Signals) -> None:
    process = start(run, "good")
    assert wait(lambda: len(pids(run)) == 4 and run.events(0).exists(), 30)
    time.sleep(0.3)
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert output == (
        f"asked 1\nstopped 130\nstopped as asked: saved step 3; go on with: phalanx train --resume {run.path}\n"
    )
    assert orphans(run) == []


def test_ctrl_c_before_any_rank_runs(run: Run) -> None:
    process = start(run, "good")
    assert wait(lambda: run.status().get("state") == "launching", 30)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (130, "asked 1\nstopped 130\nstopped before the first rank was started\n")
    assert orphans(run) == []


def test_a_second_ctrl_c_ends_it_at_once(run: Run) -> None:
    process = start(run, "deaf")
    assert wait(lambda: len(pids(run)) == 4, 30)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "asked 1\nasked 2\nstopped 130\nkilled at once, as asked; the last checkpoint is step 3\n" in output
    assert orphans(run) == []


def test_the_stop_file_is_a_kill_switch(run: Run) -> None:
    process = start(run, "good")
    assert wait(lambda: len(pids(run)) == 4, 30)
    run.stop_file.touch()
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, output.splitlines()[0]) == (130, "stopped 130")


@pytest.mark.parametrize("victim", ["caller", "agent"])
def test_nobody_outlives_a_killed_parent(run: Run, victim: str) -> None:
    process = start(run, "good")
    assert wait(lambda: len(pids(run)) == 4, 30)
    agent = run.status()["pid"]
    os.kill(process.pid if victim == "caller" else agent, signal.SIGKILL)
    assert wait(lambda: not orphans(run) and not exists(agent), 2.0)
    output, _ = process.communicate(timeout=30)
    if victim == "agent":
        assert process.returncode == 3
        assert f"the supervisor of {run.path} was killed by SIGKILL\n" in output
