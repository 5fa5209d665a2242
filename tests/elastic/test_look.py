"""A check that answers, hangs, fails or is killed; nobody waits for it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import pytest

from phalanx.elastic import forked_check as looking
from phalanx.elastic.forked_check import ForkedCheck


def result(check: Callable[[], Sequence[str]]) -> list[str]:
    look = ForkedCheck(check)
    until_s = time.monotonic() + 300.0
    while (found := look.found()) is None:
        assert time.monotonic() < until_s
        time.sleep(0.005)
    return found


def raise_stale() -> list[str]:
    raise OSError(116, "Stale file handle")


def be_killed() -> list[str]:
    os.kill(os.getpid(), signal.SIGKILL)
    return ["never said"]


@pytest.mark.parametrize(
    ("check", "found"),
    [
        (list, []),
        (lambda: ["its disk is full", "x" * 900, *"abcdef"], ["its disk is full", "x" * 500, "a", "b"]),
        (raise_stale, ["cannot be looked at: [Errno 116] Stale file handle"]),
        (be_killed, []),
    ],
)
def test_what_was_found(check: Callable[[], list[str]], found: list[str]) -> None:
    assert result(check) == found


def test_one_that_hangs_is_the_problem_and_costs_no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "PATIENCE_S", 0.2)
    look = ForkedCheck(lambda: time.sleep(1000) or [])
    assert look.found() is None, "asked and answered at once"
    until_s = time.monotonic() + 300.0
    while (found := look.found()) is None and time.monotonic() < until_s:
        time.sleep(0.02)
    assert found == ["its devices, its disk or the run folder did not answer within 0.2 s"]


def test_an_agent_that_was_stopped_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(looking.time, "monotonic", lambda: now_s[0])
    look = ForkedCheck(lambda: signal.pause() or [])
    now_s[0] += 1000.0
    assert look.found() is None
    look.close()


def test_closing_leaves_no_process_and_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    look = ForkedCheck(lambda: signal.pause() or [])
    pid = look._pid
    look.close()
    look.close()
    assert len(os.listdir("/proc/self/fd")) == before
    with suppress(ChildProcessError):  # close() may have reaped it
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
