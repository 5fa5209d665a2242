"""One rank among those another launcher started: what it refuses, and how ranks learn of the run folder."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.errors import PhalanxError, UserError, WorldError
from phalanx.record.run import Run, create_run
from phalanx.train import worker
from phalanx.train.supervise.joined import check_world, join


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def environ(rank: int, world: int, port: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


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
    other = threading.Thread(target=lambda: join(environ(1, 2, port), never, watch), daemon=True)
    other.start()
    done = join(environ(0, 2, port), lambda: (SimpleNamespace(), run_of(tmp_path)), watch)  # type: ignore[arg-type]
    other.join(30)
    assert done is not None
    assert seen[1] == done[1].path.resolve()
    assert done[1].status()["state"] == "done"


def test_a_failure_of_rank_0_reaches_the_others(tmp_path: Path, port: int) -> None:
    told: list[str] = []
    both = threading.Barrier(2)

    def other() -> None:
        with pytest.raises(WorldError) as caught:
            join(environ(1, 2, port), never, watch)
        told.append(str(caught.value))
        both.wait(30)

    thread = threading.Thread(target=other, daemon=True)
    thread.start()

    def prepare() -> Any:
        raise ValueError("no plan")

    with pytest.raises(ValueError) as caught:
        join(environ(0, 2, port), prepare, watch)
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
        join(environ(0, 1, port), lambda: (SimpleNamespace(), run), watch)  # type: ignore[arg-type]
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
    join(environ(0, 1, port), lambda: (SimpleNamespace(), run), watch)  # type: ignore[arg-type]
    assert (seen, run.status()["state"]) == ([False, True], "stopped")

    def by_file(*, stop: Callable[[], bool], **_: Any) -> None:
        run.stop_file.touch()
        seen.append(stop())

    monkeypatch.setattr(worker, "run_rank", by_file)
    join(environ(0, 1, port), lambda: (SimpleNamespace(), run), watch)  # type: ignore[arg-type]
    assert seen == [False, True, True]
    monkeypatch.setattr(worker, "run_rank", lambda *, stop, **_: seen.append(stop()))
    join(environ(0, 1, port), lambda: (SimpleNamespace(), run), watch)  # type: ignore[arg-type]
    assert seen == [False, True, True, False], "it stops one run, not the next"


def test_a_port_in_use_is_one_clear_message(port: int) -> None:
    with socket.socket(socket.AF_INET6) as holder:
        holder.bind(("::", port))
        holder.listen()
        with pytest.raises(WorldError) as caught:
            join(environ(0, 1, port), never, watch)
    assert str(caught.value) == (
        f"rank 0: port {port} of 127.0.0.1 is in use\n"
        "  rank 0 listens there for the others\n"
        "  set MASTER_PORT to a free port on every rank, or end the job that holds it"
    )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"RANK": "x"}, "RANK: 'x' is not a whole number"),
        ({"RANK": "4"}, "RANK: 4 is not below WORLD_SIZE = 2"),
        ({"MASTER_PORT": "-1"}, "MASTER_PORT: '-1' is not a whole number"),
    ],
)
def test_a_broken_environment(change: dict[str, str], told: str) -> None:
    with pytest.raises(UserError) as caught:
        join({**environ(0, 2, 29500), **change}, never, watch)
    assert str(caught.value).startswith(told)


def test_the_number_of_ranks_must_be_the_plans() -> None:
    plan = SimpleNamespace(layout=SimpleNamespace(devices=4), cluster=SimpleNamespace(name="local:4"))
    check_world(plan, {"WORLD_SIZE": "4"})  # type: ignore[arg-type]
    with pytest.raises(PhalanxError) as caught:
        check_world(plan, {"WORLD_SIZE": "2"})  # type: ignore[arg-type]
    assert str(caught.value).startswith("local:4: the plan needs 4 ranks, and 2 were started\n")


def test_signals_are_as_they_were() -> None:
    """The tests above ran `join` in this process; its handlers must not outlive it."""
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
