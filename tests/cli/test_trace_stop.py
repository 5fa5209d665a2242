"""Stopping `phalanx trace`: Ctrl-C and SIGTERM end it and every process it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
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


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks Linux which processes there are")
@pytest.mark.parametrize(
    ("sent", "whole_terminal", "living", "code"),
    [
        (signal.SIGINT, True, 2, 130),  # while the fork server still imports torch
        (signal.SIGTERM, False, 4, 128 + signal.SIGTERM),  # itself, the fork server and its tracker, a worker
    ],
)
def test_nothing_is_left(sent, whole_terminal, living, code):
    """Ctrl-C reaches every process of the terminal, SIGTERM only the one it is sent to."""
    process = subprocess.Popen(
        COMMAND, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    try:
        told = process.stderr.readline()
        while told and "ranks" not in told:
            told = process.stderr.readline()
        while process.poll() is None and len(members(process.pid)) < living:
            time.sleep(0.05)
        os.killpg(process.pid, sent) if whole_terminal else process.send_signal(sent)
        _, rest = process.communicate(timeout=300)
        assert process.returncode == code, rest
        assert "Traceback" not in rest
        for pid in members(process.pid):  # the fork server ends when it sees that its parent is gone
            while os.path.exists(f"/proc/{pid}") and pid in members(process.pid):
                time.sleep(0.05)
    finally:
        if process.poll() is None or members(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
