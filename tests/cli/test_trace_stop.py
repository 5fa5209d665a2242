"""Stopping `phalanx trace`: Ctrl-C and SIGTERM end it and every process it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

pytest.importorskip("torch")

COMMAND = (
    *(sys.executable, "-m", "phalanx.cli.main", "trace", "examples/llama-3-8b-64xH100.toml", "--against-plan"),
    *("--set", "parallel.pipeline=4", "--set", "parallel.tensor=2"),
)


def members(session: int) -> list[int]:
    """Living processes of a session, from /proc; what is dead and not yet waited for does not count."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            found.append(int(folder.name))
    return found


def fork_servers(session: int) -> list[int]:
    """Those of its processes that fork others for multiprocessing."""
    found = []
    for pid in members(session):
        with suppress(FileNotFoundError, ProcessLookupError):
            if b"multiprocessing.forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


@contextmanager
def tracing() -> Iterator[subprocess.Popen[str]]:
    """The command in a session of its own, once it has said what it traces; nothing of it is left afterwards."""
    process = subprocess.Popen(
        COMMAND, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    try:
        told = process.stderr.readline()
        while told and "ranks" not in told:
            told = process.stderr.readline()
        yield process
    finally:
        if process.poll() is None or members(process.pid):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks Linux which processes there are")
def test_sigterm_leaves_nothing():
    """It is sent to the command alone."""
    with tracing() as process:
        while process.poll() is None and len(members(process.pid)) < 4:  # also fork server, its tracker, a worker
            time.sleep(0.05)
        process.terminate()
        _, rest = process.communicate(timeout=300)
        assert process.returncode == 128 + signal.SIGTERM, rest
        assert "Traceback" not in rest
        while members(process.pid):
            time.sleep(0.05)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks Linux which processes there are")
def test_ctrl_c_waits_for_no_import():
    """Ctrl-C, which reaches every process of the terminal, ends it while the fork server still imports torch."""
    with tracing() as process:
        while process.poll() is None and not (servers := fork_servers(process.pid)):
            time.sleep(0.05)
        for pid in servers:
            os.kill(pid, signal.SIGSTOP)  # an import that takes for ever
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=300) == 130
        for pid in servers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)  # one that was stopped before it could ask to end with its caller
        assert "Traceback" not in process.communicate(timeout=300)[1]
        while members(process.pid):
            time.sleep(0.05)
