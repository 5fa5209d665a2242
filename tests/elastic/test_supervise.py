"""Real agents, coordinators and processes around ranks that train nothing: one message, and nobody stays behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from phalanx.elastic import local_launch
from phalanx.plan.plan import Plan
from phalanx.record.events import read_events
from phalanx.record.run import Run, create_run
from phalanx.train.prepare import load_job, plan_for_run

HERE = Path(__file__).parent
JOB = HERE.parents[1] / "examples" / "drill.toml"
RANKS = 4
HOST = r"\(host \S+\)"
WITHIN_S = 300.0  # patience, not a limit: a busy machine takes long

MakeRun = Callable[..., Run]
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    def build(recovery: str = "stop", settings: Sequence[str] = (), **fault: object) -> Run:
        wanted = {"recovery": f'"{recovery}"', "dead_after_s": 2, **fault}
        overrides = [*(f"fault.{name}={value}" for name, value in wanted.items()), *settings]
        plan: Plan = plan_for_run(load_job(str(JOB), overrides=overrides, cluster=None, steps=0))
        run = create_run(tmp_path, "fake", job_toml="", job={}, plan_json=plan.to_json())
        run.set_launch(v=1)
        return run

    return build


@pytest.fixture
def run(make_run: MakeRun) -> Run:
    """One that ends with the first failure."""
    return make_run()


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def begin(run: Run, behaviour: str, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(HERE / "fake_cli.py"), behaviour, str(run.path), str(RANKS), *more]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def finish(start: Start) -> Callable[..., tuple[int, str]]:
    def end(run: Run, behaviour: str) -> tuple[int, str]:
        process = start(run, behaviour)
        output, _ = process.communicate(timeout=WITHIN_S)
        assert orphans(run) == []
        return process.returncode, output

    return end


Finish = Callable[[Run, str], tuple[int, str]]


def pids(run: Run) -> list[int]:
    """The process ids that the ranks printed into their logs."""
    texts = [path.read_text() for path in sorted((run.path / "logs").glob("rank-*.log"))]
    return [int(pid) for text in texts for pid in re.findall(r"pid (\d+)\n", text)]


def living(run: Run) -> list[int]:
    return [pid for pid in pids(run) if exists(pid)]


def exists(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return False
    return state not in ("Z", "X")


def orphans(run: Run) -> list[int]:
    """Processes of the run that live: ranks, agents and coordinators have its folder in their command line."""
    found = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in found if str(run.path) in " ".join(command(pid)) and exists(pid)]


def command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def agent_of(process: subprocess.Popen[str]) -> int:
    (found,) = children(process.pid)
    return found


def coordinator_of(agent: int) -> int | None:
    return next((pid for pid in children(agent) if "phalanx.elastic.coordinator" in command(pid)), None)


def wait(condition: Callable[[], object], seconds: float = WITHIN_S) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())


def steps(run: Run, *, epoch: int = 1) -> int:
    """Steps that rank 0 did in an epoch."""
    events = read_events(run.events(0))[0]
    return sum(event["event"] == "step" and event["epoch"] == epoch for event in events)


def supervisor(run: Run, kind: str) -> list[dict[str, object]]:
    return [event for event in read_events(run.supervisor)[0] if event["event"] == kind]


# ---- the first failure ends the run ----------------------------------------------------------------------------------


def test_a_run_that_ends_well(run: Run, finish: Finish) -> None:
    assert finish(run, "finish") == (0, "done 0\n\n")
    assert run.status()["state"] == "done"


def test_a_rank_that_raises_is_the_headline(run: Run, finish: Finish) -> None:
    code, output = finish(run, "raise")
    assert code == 3
    head, *tail = output.splitlines()[1:]
    assert re.fullmatch(rf"step 5: rank 2 of 4 {HOST}: ValueError: boom", head)
    assert tail == [
        "  other ranks: 3 stopped by us",
        f"  last good checkpoint: step 3; resume with: phalanx train --resume {run.path}",
        f"  log: {run.log(2)}",
    ]
    assert "Traceback" in run.log(2).read_text()
    assert run.status()["rank"] == 2


def test_a_users_mistake_keeps_its_words_and_its_exit_code(make_run: MakeRun, finish: Finish) -> None:
    run = make_run("auto")
    code, output = finish(run, "user")
    assert code == 2
    assert output.splitlines()[1:4] == [
        "data/shard-0003: ends early: 10 bytes of 20",
        "  it was cut",
        "  build it again",
    ]
    assert (
        "  said by rank 2, step 5\n  other ranks: 3 stopped by us\n  last good checkpoint: step 3; resume with"
        in output
    )


def test_a_killed_rank_is_explained_with_memory(run: Run, finish: Finish) -> None:
    code, output = finish(run, "sigkill")
    assert code == 3
    assert re.search(rf"step 5: rank 2 of 4 {HOST}: was killed \(SIGKILL\) from outside", output)
    assert re.search(r"it had used 1.00 GB; the plan expected [\d.]+ .B per rank; the host has ", output)
    assert "if memory was short: use a smaller batch.micro" in output


def test_out_of_memory_says_what_to_change(run: Run, finish: Finish) -> None:
    code, output = finish(run, "memory")
    assert code == 3
    assert ": ran out of memory\n" in output
    assert 'use a smaller batch.micro, parallel.recompute = "full"' in output


def test_the_cause_wins_over_a_consequence_that_came_first(run: Run, finish: Finish) -> None:
    code, output = finish(run, "consequence")
    assert code == 3
    assert re.search(rf"rank 2 of 4 {HOST}: KeyError: 'the true cause'", output)
    assert "other ranks: 1 lost their peer, 2 stopped by us" in output


@pytest.mark.parametrize(
    ("behaviour", "place"), [("hang", r"in sleep \(fake_agent.py:\d+\)"), ("sigstop", r"in a stopped process")]
)
def test_a_silent_rank_is_named_and_everything_ends(run: Run, finish: Finish, behaviour: str, place: str) -> None:
    code, output = finish(run, behaviour)
    assert code == 3
    assert re.search(rf"step 5: rank 2 of 4 {HOST}: stopped answering \d+\.\d+ s ago {place}", output)


def test_the_interpreter_lock_hides_no_sign_of_life(make_run: MakeRun, start: Start) -> None:
    """Five runs side by side, each with one rank in native code that keeps the lock: all but two are well.

    fault.dead_after_s = 2; the lock is held for 20 s.
    """
    well = {name: make_run("auto") for name in ("lock-joining", "lock-building", "lock-step")}
    stopped = make_run()
    dead = make_run(settings=["comm.init_timeout_s=1"])
    processes = {name: start(run, name) for name, run in well.items()}
    ends = start(stopped, "lock-and-stop"), start(dead, "lock-for-ever")
    for name, run in well.items():
        assert wait(lambda run=run: steps(run) > 8 or supervisor(run, "incident")), name
        assert supervisor(run, "incident") == [], name
        processes[name].send_signal(signal.SIGINT)
        output, _ = processes[name].communicate(timeout=WITHIN_S)
        assert processes[name].returncode == 130, output
    (said_stopped, _), (said_dead, _) = (process.communicate(timeout=WITHIN_S) for process in ends)
    place = r"rank 2 of 4 \(host \S+\): stopped answering "
    assert re.search(rf"{place}\d\.\d+ s ago in a stopped process \(state T\)", said_stopped)
    (incident,) = supervisor(stopped, "incident")
    assert incident["cause"]["kind"] == "Silence"
    assert re.search(
        rf"{place}\d+\.\d s ago in deadlock \(fake_agent.py:\d+\), in native code that holds the", said_dead
    )
    assert "which may take comm.init_timeout_s + 10 s = 11 s" in said_dead


@pytest.mark.parametrize(
    ("behaviour", "dead_after_s", "bound"),
    [("deaf", 2, "fault.dead_after_s = 2 s"), ("deaf-joining", 60, "2.5 s")],  # one that joins has computed nothing
)
def test_one_fault_is_one_epoch_also_where_nobody_leaves_by_itself(
    make_run: MakeRun, start: Start, behaviour: str, dead_after_s: int, bound: str
) -> None:
    run = make_run("auto", dead_after_s=dead_after_s)
    process = start(run, behaviour)
    assert wait(lambda: steps(run, epoch=2) > 3 or len(supervisor(run, "epoch")) > 2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 130, output
    assert [one["epoch"] for one in supervisor(run, "epoch")] == [1, 2]
    assert [(one["rank"], one["in_a_row"]) for one in supervisor(run, "incident")] == [(2, 1)]
    replaced = supervisor(run, "replacement")
    assert sorted(one["rank"] for one in replaced) == [0, 1, 3]
    assert all(f"did not leave its membership within {bound}" in one["cause"]["message"] for one in replaced)
    assert orphans(run) == []


def test_peers_that_time_out_point_at_the_one_who_is_silent(run: Run, finish: Finish) -> None:
    code, output = finish(run, "timeout")
    assert code == 3
    assert re.search(rf"step 4: rank 2 of 4 {HOST}: stopped answering .* ago in behave \(fake_agent.py:\d+\)", output)
    assert "other ranks: 3 lost their peer" in output


def test_a_rank_that_ignores_sigterm_is_killed_all_the_same(run: Run, finish: Finish) -> None:
    code, output = finish(run, "stubborn")
    assert code == 3
    assert "rank 2 of 4" in output


def test_a_rank_that_hangs_once_per_step_is_no_endless_crawl(make_run: MakeRun, finish: Finish) -> None:
    run = make_run("replace")
    code, output = finish(run, "crawl")
    assert code == 3
    assert re.search(
        r"given up: slot 2 of host host-0 failed \d+ times with Silence; incidents cost \S+ s of the last \S+ s "
        r"\(fault.max_lost = 0.8\); no other slot is free\n",
        output,
    )
    incidents = supervisor(run, "incident")
    assert 3 <= len(incidents) <= 20
    assert {(one["slot"], one["in_a_row"]) for one in incidents} == {(2, 1)}, "each time a new step was done"


# ---- stopping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_and_says_how_to_go_on(run: Run, start: Start, number: signal.Signals) -> None:
    process = start(run, "good")
    assert wait(lambda: steps(run) > 5)
    process.send_signal(number)
    output, _ = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 130
    assert re.fullmatch(
        r"asked 1\nstopped 130\nstopped as asked: saved step \d+; "
        rf"resume with: phalanx train --resume {re.escape(str(run.path))}\n",
        output,
    )
    assert orphans(run) == []


@pytest.mark.parametrize("phase", ["late", "importing"])
def test_ctrl_c_before_any_rank_runs(run: Run, start: Start, phase: str) -> None:
    process = start(run, phase)
    assert wait((run.path / "waits").exists)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=WITHIN_S)
    assert (process.returncode, output) == (130, "asked 1\nstopped 130\nstopped before the first rank was started\n")
    assert orphans(run) == []


def test_ctrl_c_while_the_ranks_form(run: Run, start: Start) -> None:
    process = start(run, "forming")
    assert wait(lambda: len(list(run.path.glob("waits-1-*"))) == RANKS)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 130
    assert "stopped as asked: saved step 1; resume with" in output


def test_ctrl_c_during_recovery(make_run: MakeRun, start: Start) -> None:
    run = make_run("auto")
    process = start(run, "recovering")
    assert wait(lambda: len(list(run.path.glob("waits-2-*"))) == RANKS)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 130
    assert "stopped as asked: saved step 3; resume with" in output
    assert steps(run, epoch=2) == 1, "formed again, to save what memory holds"


def test_ctrl_c_while_there_is_no_coordinator(run: Run, start: Start) -> None:
    process = start(run, "good")
    assert wait(lambda: steps(run) > 5)
    coordinator = coordinator_of(agent_of(process))
    assert coordinator is not None
    os.kill(coordinator, signal.SIGKILL)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 130
    assert re.search(r"stopped as asked: saved step \d+; resume with", output)


def test_a_second_ctrl_c_ends_it_at_once(make_run: MakeRun, start: Start) -> None:
    run = make_run(dead_after_s=60)
    process = start(run, "stubborn")
    assert wait(lambda: steps(run) > 5)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "asked 1\n"
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 130
    assert re.match(r"asked 2\nstopped 130\nkilled at once, as asked; the last checkpoint is step \d+", output)
    assert orphans(run) == []


def test_a_ctrl_c_while_another_is_told_of(make_run: MakeRun, start: Start) -> None:
    """It comes in the middle of a write to stdout, which takes no other write then."""
    run = make_run(dead_after_s=60)
    process = start(run, "stubborn", "1", "interrupted-writes")
    assert wait(lambda: steps(run) > 5)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 130, output
    assert "stopped 130\nkilled at once, as asked; the last checkpoint is step " in output
    assert "asked 1\nasked 2\n" in output
    assert orphans(run) == []


def test_the_stop_file_is_a_kill_switch(run: Run, start: Start) -> None:
    process = start(run, "good")
    assert wait(lambda: steps(run) > 5)
    run.stop_file.touch()
    output, _ = process.communicate(timeout=WITHIN_S)
    assert (process.returncode, output.splitlines()[0]) == (130, "stopped 130")


# ---- parents ---------------------------------------------------------------------------------------------------------


def test_nobody_outlives_a_killed_caller(run: Run, start: Start) -> None:
    process = start(run, "good")
    assert wait(lambda: steps(run) > 5)
    process.kill()
    assert wait(lambda: not orphans(run))


def test_an_agent_that_is_killed_takes_its_ranks_along_and_comes_back(make_run: MakeRun, start: Start) -> None:
    run = make_run("auto")
    process = start(run, "good")
    assert wait(lambda: steps(run) > 5)
    before = living(run)
    os.kill(agent_of(process), signal.SIGKILL)
    assert wait(lambda: not any(exists(pid) for pid in before))
    assert wait(lambda: steps(run, epoch=2) > 2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=WITHIN_S)
    assert (process.returncode, orphans(run)) == (130, []), output


def test_an_agent_that_is_killed_again_and_again_is_the_end(make_run: MakeRun, start: Start) -> None:
    run = make_run("auto")
    process = start(run, "good")
    for epoch in (1, 2, 3, 4):
        assert wait(lambda epoch=epoch: steps(run, epoch=epoch) > 2), supervisor(run, "end")  # type: ignore[misc]
        os.kill(agent_of(process), signal.SIGKILL)
    output, _ = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 3
    assert f"the supervisor of {run.path} was killed by SIGKILL\n" in output
    assert orphans(run) == []


@pytest.mark.parametrize("cause", ["HostLost", "KeyError"])
def test_the_signal_of_an_agent_is_named_where_the_coordinator_wrote_the_reason(run: Run, cause: str) -> None:
    end = f"set_status('failed', exit_code=3, message='step 3: rank 0', cause={cause!r})"
    code = (
        f"import os, sys; from phalanx.record.run import open_run; open_run(sys.argv[1]).{end}; os.kill(os.getpid(), 9)"
    )
    outcome = local_launch.tend_agents(
        run,
        hosts=local_launch.local_hosts(1),
        environ=os.environ,
        tick=lambda: None,
        asked=lambda count: None,
        stop_requests=(),
        agent=("-c", code),
    )
    named = f"\n  the supervisor of {run.path} was killed by SIGKILL" if cause == "HostLost" else ""
    assert (outcome.state, outcome.exit_code, outcome.message) == ("failed", 3, f"step 3: rank 0{named}")


# ---- the coordinator -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_coordinator_that_is_lost_is_replaced_and_nobody_notices(
    make_run: MakeRun, start: Start, number: signal.Signals
) -> None:
    run = make_run("auto")
    process = start(run, "good")
    assert wait(lambda: steps(run) > 5)
    agent = agent_of(process)
    first = coordinator_of(agent)
    assert first is not None
    os.kill(first, number)
    assert wait(lambda: coordinator_of(agent) not in (None, first))
    assert wait(lambda: len(supervisor(run, "host")) == 2)
    before = steps(run)
    assert wait(lambda: steps(run) > before + 3)
    assert [event["epoch"] for event in supervisor(run, "epoch")] == [1]
    victim = int(supervisor(run, "epoch")[0]["members"][1]["pid"])  # type: ignore[index, call-overload]
    os.kill(victim, signal.SIGKILL)
    assert wait(lambda: steps(run, epoch=2) > 2), "it decides like the first"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=WITHIN_S)
    assert (process.returncode, orphans(run)) == (130, [])


def test_a_frozen_host_with_the_coordinator_on_it_does_not_stop_the_others(make_run: MakeRun, start: Start) -> None:
    """Its processes keep whatever they hold: the others go on without it, and it does no harm when it wakes up."""
    run = make_run("auto")
    process = start(run, "good", "2")
    assert wait(lambda: steps(run) > 5)
    agent = next(pid for pid in children(process.pid) if "host-0" in command(pid))
    frozen = [agent, *children(agent)]
    assert coordinator_of(agent) in frozen
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    worlds = lambda: [event["world"] for event in supervisor(run, "epoch")]  # noqa: E731
    assert wait(lambda: worlds() == [RANKS, RANKS // 2]), worlds()
    for pid in frozen:
        with suppress(ProcessLookupError):  # the agent, awake again, may have ended it by now
            os.kill(pid, signal.SIGCONT)
    assert wait(lambda: worlds()[-1] == RANKS), worlds()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=WITHIN_S)
    assert (process.returncode, orphans(run)) == (130, [])


def test_agents_that_did_not_hear_of_the_end_find_it_written_down(run: Run, start: Start) -> None:
    process = start(run, "good")
    assert wait(lambda: steps(run) > 5)
    run.set_status("failed", exit_code=3, message="the last word")
    coordinator = coordinator_of(agent_of(process))
    assert coordinator is not None
    os.kill(coordinator, signal.SIGKILL)
    output, _ = process.communicate(timeout=WITHIN_S)
    assert (process.returncode, output) == (3, "failed 3\nthe last word\n")
    assert orphans(run) == []


# ---- going on --------------------------------------------------------------------------------------------------------


def test_a_hung_rank_is_replaced_and_the_others_keep_their_processes(make_run: MakeRun, start: Start) -> None:
    run = make_run("auto")
    process = start(run, "sigstop")
    assert wait(lambda: steps(run, epoch=2) > 2)
    first, second = ([one["pid"] for one in event["members"]] for event in supervisor(run, "epoch"))  # type: ignore[attr-defined]
    assert [rank for rank in range(RANKS) if first[rank] != second[rank]] == [2]
    assert not exists(first[2])
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=WITHIN_S)
    assert (process.returncode, orphans(run)) == (130, [])


def test_a_crash_loop_comes_to_an_end(make_run: MakeRun, finish: Finish) -> None:
    run = make_run("auto", restarts=2)
    code, output = finish(run, "crash")
    assert code == 3
    assert "ValueError: boom, always" in output
    assert "given up: 3 failures in a row, without a new step between (fault.restarts = 2)" in output
    assert len(supervisor(run, "epoch")) == 3


def test_a_host_of_two_is_lost_and_comes_back(make_run: MakeRun, start: Start) -> None:
    run = make_run("auto", dead_after_s=8)  # a busy machine lets a sound host be silent for two
    process = start(run, "good", "2")
    assert wait(lambda: steps(run) > 5)
    worlds = lambda: [event["world"] for event in supervisor(run, "epoch")]  # noqa: E731
    victim = next(pid for pid in children(process.pid) if "host-1" in command(pid))
    os.kill(victim, signal.SIGKILL)
    assert wait(lambda: len(worlds()) > 1)
    assert wait(lambda: worlds()[-1] == RANKS), worlds()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=WITHIN_S)
    assert (process.returncode, orphans(run)) == (130, [])


def test_a_host_whose_disk_went_bad_is_left_out_after_the_next_failure(make_run: MakeRun, start: Start) -> None:
    """Its agent looks before it says that it is ready, in a process of its own, and asks only for what is new."""
    run = make_run("auto")
    process = start(run, "spoilt", "2")
    assert wait(lambda: len(epochs(run)) > 2, WITHIN_S)
    run.stop_file.touch()
    process.communicate(timeout=WITHIN_S)
    assert orphans(run) == []
    told = {one["event"]: one for one in read_events(run.supervisor)[0]}
    assert (told["quarantine"]["host"], told["quarantine"]["reason"]) == (
        "host-1",
        "host-1: its disk cannot be written",
    )
    assert {member["host"] for member in epochs(run)[-1]["members"]} == {"host-0"}
    looks = (run.path / "looks").read_text().splitlines()
    assert sorted(looks[:2]) == ["host-0 2 2", "host-1 2 2"], "at the start everything is new"
    assert sorted(looks[2:4]) == ["host-0 0 0", "host-1 1 0"], "then the process that replaces the fallen one"


def epochs(run: Run) -> list[dict[str, Any]]:
    return [one for one in read_events(run.supervisor)[0] if one["event"] == "epoch"]
