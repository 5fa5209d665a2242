"""Processes that raise, die or hang end the task with the first cause, and none is left behind."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from phalanx.elastic.rank_process import FAILED
from phalanx.errors import SystemFailure, UserError
from phalanx.hardware import machine_load
from phalanx.train.verify import ranks
from phalanx.train.verify.ranks import run_ranks

sys.path.insert(0, str(Path(__file__).parent))  # a task is named by its module, which the new process must find too
tasks = importlib.import_module("rank_tasks")


def children() -> int:
    """Ranks that are alive: grandchildren, below the server that forks them."""
    return sum(len(child.children()) for child in psutil.Process().children())


def test_every_rank_answers_in_order():
    found = run_ranks(divmod, 3, 2)
    assert found == [(0, 0), (0, 1), (1, 0)]


def test_ranks_are_in_a_group_of_their_own():
    assert run_ranks(tasks.add, 4) == [6, 6, 6, 6]
    assert not dist.is_initialized()


def test_the_first_cause_is_the_headline():
    with pytest.raises(SystemFailure) as caught:
        run_ranks(tasks.fail, 3, "raise", debug=False)
    assert str(caught.value).startswith("rank 1 of 3: ZeroDivisionError: division by zero\n")
    assert "PHALANX_DEBUG=1" in str(caught.value)
    assert children() == 0


def test_a_wrong_job_stays_the_users_error():
    with pytest.raises(UserError) as caught:
        run_ranks(tasks.fail, 2, "mistake")
    assert str(caught.value) == "parallel.tensor: too many\n  use fewer"


def test_a_killed_rank_is_named_not_its_neighbours():
    with pytest.raises(SystemFailure) as caught:
        run_ranks(tasks.fail, 3, "kill", debug=False)
    assert str(caught.value).startswith("rank 1 of 3: its process was killed by signal 9\n")
    assert children() == 0


def test_a_hang_is_bounded():
    with pytest.raises(SystemFailure) as caught:
        run_ranks(tasks.fail, 2, "hang", limit_s=1.5)
    assert str(caught.value).startswith("rank 1 of 2: no answer within 1.5 s\n") or "rank 0" in str(caught.value)
    assert children() == 0


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_busy_machine_has_longer(monkeypatch: pytest.MonkeyPatch, is_busy: bool) -> None:
    monkeypatch.setattr(ranks, "LIMIT_S", 1e-3)
    monkeypatch.setattr(machine_load, "busy_processes", lambda cores: 1e6 if is_busy else 0.0)
    if is_busy:
        assert run_ranks(tasks.add, 2) == [1, 1]
    else:
        with pytest.raises(SystemFailure, match=r"no answer within 0\.001 s"):
            run_ranks(tasks.add, 2)


def test_threads_of_the_caller_do_not_matter():
    torch.ones(100, 100) @ torch.ones(100, 100)
    assert run_ranks(tasks.add, 2) == [1, 1]


def test_a_rank_whose_server_is_gone_does_not_begin():
    """Between its fork and its first line the server may have ended: its parent is then a process that lives on."""
    text = (
        "import os, sys\n"
        "from multiprocessing import Pipe\n"
        "from phalanx.train.verify import ranks, server\n"
        "server.SERVER_PID = int(sys.argv[1])\n"
        "ranks._rank_answer = lambda order: None\n"
        "order = ranks.RankTask(task=divmod, arguments=(), store='', rank=0, world=1, place=ranks.CORES, limit_s=1.0,"
        " debug=True)\n"
        "ranks._serve_rank(Pipe()[1], order)\n"
    )
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    codes = [subprocess.run([sys.executable, "-c", text, str(pid)]).returncode for pid in (gone.pid, os.getpid())]
    assert codes == [FAILED, 0]
