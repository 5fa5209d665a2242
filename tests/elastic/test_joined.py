"""One rank among those another launcher started: what it refuses, how ranks learn of the run, and that it recovers."""

from __future__ import annotations

import json
import os
import platform
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistNetworkError

from phalanx.elastic.launchers import RankPlace
from phalanx.elastic.local_launch import HostSpec, LauncherTask, LaunchOutcome, prepare_launch, tend_agents
from phalanx.errors import PhalanxError, SystemFailure, UserError
from phalanx.plan.plan import Plan
from phalanx.record.events import read_events
from phalanx.record.run import Run, create_run
from phalanx.train import joined
from phalanx.train.joined import _agree_on_call, _meeting_store, _run_of_first, check_world, run_joined_rank
from phalanx.train.prepare import load_job, plan_for_run

HERE = Path(__file__).parent
JOB = HERE.parents[1] / "examples" / "drill.toml"
RANKS, WITHIN_S = 4, 300.0
Watch = Callable[[Plan, Run], Callable[[], None]]


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_for_run(load_job(str(JOB), overrides=["fault.dead_after_s=2"], cluster=None, steps=0))


def place(rank: int, world: int, port: int) -> RankPlace:
    return RankPlace(launcher="srun", rank=rank, world=world, address="127.0.0.1", port=port)


def never() -> Any:
    raise AssertionError("not to be called")


def watch(plan: Any, run: Run) -> Callable[[], None]:
    return lambda: None


def stop_after_recovery(plan: Plan, run: Run) -> Callable[[], None]:
    """Rank 0 makes the stop file once the second membership trains."""

    def tick() -> None:
        if sum(one["event"] == "restore" for one in read_events(run.supervisor)[0]) == 2:
            run.stop_file.touch()

    return tick


def join_all(
    plan: Plan, run: Run, port: int, behaviour: str, watch: Watch = watch
) -> list[tuple[LaunchOutcome, tuple[Plan, Run] | None]]:
    """Every rank of the plan as a task, each in a thread, with agents that train nothing."""
    agent = (str(HERE / "fake_agent.py"), behaviour)
    with ThreadPoolExecutor(RANKS) as pool:
        prepare: Callable[[], tuple[Plan, Run]] = lambda: (plan, run)  # noqa: E731
        tasks = [
            pool.submit(run_joined_rank, replace(place(rank, RANKS, port), one_host=True), prepare, watch, agent=agent)
            for rank in range(RANKS)
        ]
        return [task.result(WITHIN_S) for task in tasks]


def run_of(folder: Path, plan: Plan) -> Run:
    run = create_run(folder, "x", job_toml="", job={}, plan_json=plan.to_json())
    run.set_launch(v=1)
    return run


def test_ranks_of_a_launcher_have_agents_and_survive_a_lost_rank(tmp_path: Path, plan: Plan, port: int) -> None:
    """One way to run a rank: coordinator, membership, incident and replacement are those of `phalanx train`."""
    run = run_of(tmp_path, plan)
    run.stop_file.touch()  # it stopped the run before this one; it does not stop this one
    ended = join_all(plan, run, port, "recovered", watch=stop_after_recovery)
    assert [outcome.state for outcome, _ in ended] == ["stopped"] * RANKS, ended[0][0].message
    assert [made is not None for _, made in ended] == [True, False, False, False]
    assert run.status()["state"] == "stopped"
    node = platform.node()
    assert run.launch()["hosts"] == [f"{node}:{rank}" for rank in range(RANKS)]
    assert (run.launch()["launcher"], set(run.launch()["machines"].values())) == ("srun", {node})
    events = read_events(run.supervisor)[0]
    assert [one["epoch"] for one in events if one["event"] == "epoch"] == [1, 2]
    (incident,) = (one for one in events if one["event"] == "incident")
    assert (incident["rank"], incident["host"]) == (2, f"{node}:2")


def test_a_task_knows_its_place_on_its_machine(tmp_path: Path, plan: Plan, port: int) -> None:
    """The agent of a task has one slot, slot 0; GPU and threads follow from the launcher's local rank."""
    seen: dict[str, list[str]] = {}
    spec = HostSpec(name="n:5", slots=1, task=LauncherTask(local_rank=5, local_world=8))
    run = run_of(tmp_path, plan)
    prepare_launch(run, [spec], machines={"n:5": "n"})
    script = tmp_path / "agent.py"
    script.write_text("import sys, pathlib\npathlib.Path(sys.argv[1], 'words').write_text('\\n'.join(sys.argv[1:]))\n")
    tend_agents(
        run, hosts=[spec], environ={}, tick=lambda: None, asked=lambda n: None, stop_requests=[], agent=(str(script),)
    )
    seen["words"] = (run.path / "words").read_text().splitlines()
    assert seen["words"][1:3] == ["n:5", "1"]
    assert json.loads(seen["words"][5]) == {"local_rank": 5, "local_world": 8, "shares_gpu": False}


def test_a_failure_of_rank_0_reaches_the_others(port: int) -> None:
    told: list[str] = []
    both = threading.Barrier(2)

    def other() -> None:
        with pytest.raises(SystemFailure) as caught:
            run_joined_rank(place(1, 2, port), never, watch)
        told.append(str(caught.value))
        both.wait(300)

    thread = threading.Thread(target=other, daemon=True)
    thread.start()

    def prepare() -> Any:
        raise ValueError("no plan")

    with pytest.raises(ValueError) as caught:
        run_joined_rank(place(0, 2, port), prepare, watch)
    both.wait(300)  # `caught` keeps the store of rank 0 alive until here
    thread.join(300)
    assert str(caught.value) == "no plan"
    assert told == ["rank 1: rank 0 could not prepare the run\n  see its message"]


def test_a_failed_run_fails_every_task(tmp_path: Path, port: int) -> None:
    plan = plan_for_run(load_job(str(JOB), overrides=["fault.recovery='stop'"], cluster=None, steps=0))
    run = run_of(tmp_path, plan)
    ended = join_all(plan, run, port, "raise")
    assert {(outcome.state, outcome.exit_code) for outcome, _ in ended} == {("failed", 3)}
    assert "rank 2 of 4" in ended[0][0].message


def test_what_goes_wrong_before_the_agents_start_is_left_in_the_run(
    tmp_path: Path, plan: Plan, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path, plan)

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("boom")

    monkeypatch.setattr(joined, "tend_agents", refuse)
    with pytest.raises(RuntimeError):
        run_joined_rank(place(0, 1, port), lambda: (plan, run), watch)
    assert "RuntimeError: boom" in run.log(0).read_text()
    assert (run.status()["state"], run.status()["message"]) == ("failed", "rank 0: boom")


def test_a_port_in_use_is_one_clear_message(port: int) -> None:
    with socket.socket(socket.AF_INET6) as holder:
        holder.bind(("::", port))
        holder.listen()
        with pytest.raises(SystemFailure) as caught:
            run_joined_rank(place(0, 1, port), never, watch)
    assert str(caught.value) == (
        f"rank 0: port {port} of 127.0.0.1 is in use\n"
        "  rank 0 listens there for the others\n"
        "  set MASTER_PORT to a free port on every rank, or end the job that holds it"
    )


def test_a_rank_is_there_once_and_all_belong_together(port: int) -> None:
    """Rank 0 of 4 hears every answer, and makes nothing when one of them is a refusal."""
    told: dict[str, str] = {}

    def answer(name: str, at: RankPlace, call: str, store: Any) -> None:
        try:
            _agree_on_call(store, at, [call])
            told[name] = ""
        except UserError as error:
            told[name] = str(error)

    store = _meeting_store(place(0, 4, port), {})
    first = threading.Thread(target=answer, args=("rank 0", place(0, 4, port), "a job", store), daemon=True)
    first.start()
    calls = {"same": (1, 4, "a job"), "twice": (1, 4, "a job"), "number": (2, 2, "a job"), "job": (3, 4, "another")}
    for name, (rank, world, call) in calls.items():
        answer(name, place(rank, world, port), call, _meeting_store(place(rank, world, port), {}))
    first.join(300)
    heads = {name: text.partition("\n")[0] for name, text in told.items()}
    assert heads == {
        "same": "",
        "twice": "rank 1: another process has the same rank",
        "number": "rank 2: was told of 2 ranks, and rank 0 of 4",
        "job": "rank 3: was started with another job or other settings than rank 0",
        "rank 0": "rank 0: nothing was started, because not all ranks belong together",
    }
    assert "  rank 2: was told of 2 ranks, and rank 0 of 4\n" in told["rank 0"]


def test_ranks_that_do_not_come_are_named(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined, "MEETING_S", 0.5)
    with pytest.raises(SystemFailure) as caught:
        run_joined_rank(place(0, 3, port), never, watch)
    assert str(caught.value).startswith("rank 0: 2 of 3 ranks did not come within 0.5 s: 1, 2\n")


def test_a_restart_of_torchrun_does_not_read_what_the_ranks_before_wrote(port: int) -> None:
    first = _meeting_store(place(0, 1, port), {"TORCHELASTIC_RESTART_COUNT": "0"})
    first.set("run", "old")
    again = _meeting_store(
        place(0, 1, port), {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    )
    assert not again.check(["run"])


def test_the_store_of_one_machine_is_reached_from_it_alone(port: int) -> None:
    store = _meeting_store(place(0, 1, port), {})
    with socket.socket() as other:
        other.bind(("127.0.0.2", port))  # free: nothing listens on every address
    assert store is not None


def test_a_first_node_that_cannot_be_looked_up_is_said_at_once(port: int) -> None:
    nowhere = replace(place(1, 2, port), address="no-such-host.invalid", derived=True)
    with pytest.raises(SystemFailure) as caught:
        run_joined_rank(nowhere, never, watch)
    assert str(caught.value).startswith("rank 1: the first node of srun, no-such-host.invalid, is no host that can be")
    assert "export MASTER_ADDR with an address of that node" in str(caught.value)


def test_a_launcher_that_binds_ranks_to_cores_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    cluster = SimpleNamespace(name="local", accelerator=SimpleNamespace(family="cpu"))
    plan = SimpleNamespace(layout=SimpleNamespace(devices=1), cluster=cluster)
    with pytest.raises(PhalanxError) as caught:
        check_world(plan, place(0, 2, 1))  # type: ignore[arg-type]
    assert str(caught.value) == (
        "local: the plan needs 1 rank, and srun started 2\n"
        "  srun bound this process to 1 of 2 cores, and the plan counts those\n"
        "  leave the cores to all ranks: mpirun --bind-to none, srun --cpu-bind=none"
    )


def test_a_rank_whose_store_is_gone_says_that_rank_0_failed() -> None:
    class GoneStore:
        def get(self, name: str) -> bytes:
            raise DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed.")

    with pytest.raises(PhalanxError) as caught:
        _run_of_first(GoneStore(), 1)  # type: ignore[arg-type]
    assert str(caught.value) == "rank 1: rank 0 could not prepare the run\n  see its message"


def test_the_number_of_ranks_must_be_the_plans() -> None:
    accelerator = SimpleNamespace(family="cpu")
    plan = SimpleNamespace(
        layout=SimpleNamespace(devices=4), cluster=SimpleNamespace(name="local:4", accelerator=accelerator)
    )
    check_world(plan, place(0, 4, 1))  # type: ignore[arg-type]
    with pytest.raises(PhalanxError) as caught:
        check_world(plan, place(0, 2, 1))  # type: ignore[arg-type]
    assert str(caught.value) == (
        "local:4: the plan needs 4 ranks, and srun started 2\n"
        "  every process it starts is one rank of one run\n"
        "  start 4 (srun --ntasks=4, mpirun -n 4), or name the cluster you have with --cluster. Runs of their own are "
        "started one by one; in a Slurm job: srun --ntasks=1 --exact phalanx train …"
    )
