"""One rank among those another launcher started: what it refuses, and how ranks learn of the run folder."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.elastic.launchers import RankPlace
from phalanx.errors import PhalanxError, SystemFailure, UserError
from phalanx.record.run import Run, create_run
from phalanx.train import joined, worker
from phalanx.train.joined import _agree, _meet, check_world, join


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def place(rank: int, world: int, port: int) -> RankPlace:
    return RankPlace(launcher="srun", rank=rank, world=world, address="127.0.0.1", port=port)


def run_of(folder: Path) -> Run:
    return create_run(folder, "x", job_toml="", job={}, plan_json="{}")


def never() -> Any:
    raise AssertionError("not to be called")


def watch(plan: Any, run: Run) -> Callable[[], None]:
    return lambda: None


def test_rank_0_names_the_run_to_the_others(tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[int, Path] = {}
    both = threading.Barrier(2)  # rank 0 holds the store: it must outlive the others' question

    def run_rank(*, run: Path, rank: int, world: int, heartbeat: Callable[[int], None], **_: Any) -> None:
        seen[rank] = run
        heartbeat(1)
        both.wait(30)

    monkeypatch.setattr(worker, "run_rank", run_rank)
    other = threading.Thread(target=lambda: join(place(1, 2, port), never, watch), daemon=True)
    other.start()
    done = join(place(0, 2, port), lambda: (SimpleNamespace(), run_of(tmp_path)), watch)  # type: ignore[arg-type]
    other.join(30)
    assert done is not None
    assert seen[1] == done[1].path.resolve()
    assert done[1].status()["state"] == "done"


def test_a_failure_of_rank_0_reaches_the_others(tmp_path: Path, port: int) -> None:
    told: list[str] = []
    both = threading.Barrier(2)

    def other() -> None:
        with pytest.raises(SystemFailure) as caught:
            join(place(1, 2, port), never, watch)
        told.append(str(caught.value))
        both.wait(30)

    thread = threading.Thread(target=other, daemon=True)
    thread.start()

    def prepare() -> Any:
        raise ValueError("no plan")

    with pytest.raises(ValueError) as caught:
        join(place(0, 2, port), prepare, watch)
    both.wait(30)  # `caught` keeps the store of rank 0 alive until here
    thread.join(30)
    assert str(caught.value) == "no plan"
    assert told == ["rank 1: rank 0 could not prepare the run\n  see its message"]


def test_what_a_rank_raises_is_left_in_the_run(tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path)

    def run_rank(*, heartbeat: Callable[[int], None], **_: Any) -> None:
        heartbeat(7)
        raise RuntimeError("boom")

    monkeypatch.setattr(worker, "run_rank", run_rank)
    with pytest.raises(RuntimeError):
        join(place(0, 1, port), lambda: (SimpleNamespace(), run), watch)  # type: ignore[arg-type]
    assert '"step": 7' in run.error(0).read_text()
    assert "RuntimeError: boom" in run.log(0).read_text()
    assert (run.status()["state"], run.status()["message"]) == ("failed", "rank 0: boom")


def test_a_signal_or_the_stop_file_asks_the_loop_to_stop(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path)
    seen: list[bool] = []

    def by_signal(*, stop: Callable[[], bool], **_: Any) -> None:
        seen.append(stop())
        signal.raise_signal(signal.SIGTERM)
        seen.append(stop())

    monkeypatch.setattr(worker, "run_rank", by_signal)
    join(place(0, 1, port), lambda: (SimpleNamespace(), run), watch)  # type: ignore[arg-type]
    assert (seen, run.status()["state"]) == ([False, True], "stopped")

    def by_file(*, stop: Callable[[], bool], **_: Any) -> None:
        run.stop_file.touch()
        seen.append(stop())

    monkeypatch.setattr(worker, "run_rank", by_file)
    join(place(0, 1, port), lambda: (SimpleNamespace(), run), watch)  # type: ignore[arg-type]
    assert seen == [False, True, True]
    monkeypatch.setattr(worker, "run_rank", lambda *, stop, **_: seen.append(stop()))
    join(place(0, 1, port), lambda: (SimpleNamespace(), run), watch)  # type: ignore[arg-type]
    assert seen == [False, True, True, False], "it stops one run, not the next"


def test_a_port_in_use_is_one_clear_message(port: int) -> None:
    with socket.socket(socket.AF_INET6) as holder:
        holder.bind(("::", port))
        holder.listen()
        with pytest.raises(SystemFailure) as caught:
            join(place(0, 1, port), never, watch)
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
            _agree(store, at, [call])
            told[name] = ""
        except UserError as error:
            told[name] = str(error)

    store = _meet(place(0, 4, port), {})
    first = threading.Thread(target=answer, args=("rank 0", place(0, 4, port), "a job", store), daemon=True)
    first.start()
    calls = {"same": (1, 4, "a job"), "twice": (1, 4, "a job"), "number": (2, 2, "a job"), "job": (3, 4, "another")}
    for name, (rank, world, call) in calls.items():
        answer(name, place(rank, world, port), call, _meet(place(rank, world, port), {}))
    first.join(30)
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
        join(place(0, 3, port), never, watch)
    assert str(caught.value).startswith("rank 0: 2 of 3 ranks did not come within 0.5 s: 1, 2\n")


def test_a_restart_of_torchrun_does_not_read_what_the_ranks_before_wrote(port: int) -> None:
    first = _meet(place(0, 1, port), {"TORCHELASTIC_RESTART_COUNT": "0"})
    first.set("run", "old")
    again = _meet(place(0, 1, port), {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert not again.check(["run"])


def test_the_store_of_one_machine_is_reached_from_it_alone(port: int) -> None:
    store = _meet(place(0, 1, port), {})
    with socket.socket() as other:
        other.bind(("127.0.0.2", port))  # free: nothing listens on every address
    assert store is not None


def test_a_first_node_that_cannot_be_looked_up_is_said_at_once(port: int) -> None:
    nowhere = replace(place(1, 2, port), address="no-such-host.invalid", derived=True)
    with pytest.raises(SystemFailure) as caught:
        join(nowhere, never, watch)
    assert str(caught.value).startswith("rank 1: the first node of srun, no-such-host.invalid, is no host that can be")
    assert "export MASTER_ADDR with an address of that node" in str(caught.value)


def test_the_number_of_ranks_must_be_the_plans() -> None:
    plan = SimpleNamespace(layout=SimpleNamespace(devices=4), cluster=SimpleNamespace(name="local:4"))
    check_world(plan, place(0, 4, 1))  # type: ignore[arg-type]
    with pytest.raises(PhalanxError) as caught:
        check_world(plan, place(0, 2, 1))  # type: ignore[arg-type]
    assert str(caught.value) == (
        "local:4: the plan needs 4 ranks, and srun started 2\n"
        "  every process it starts is one rank of one run\n"
        "  start 4 (srun --ntasks=4, mpirun -n 4), or name the cluster you have with --cluster. Runs of their own are "
        "started one by one; in a Slurm job: srun --ntasks=1 --exact phalanx train …"
    )


def test_signals_are_as_they_were() -> None:
    """The tests above ran `join` in this process; its handlers must not outlive it."""
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
