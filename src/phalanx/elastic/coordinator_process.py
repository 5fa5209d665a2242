"""The coordinator process that an agent has started: its start, its address, and its end."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time

from phalanx.elastic.channel import Address
from phalanx.elastic.file_election import Watched
from phalanx.record.run import Run

GOODBYE_S = 2.0  # for the coordinator to write how the run ended


class CoordinatorProcess:
    """At most one coordinator process; `start` starts one, and another once that has ended."""

    def __init__(self, run: Run, *, address: str, election: str) -> None:
        self._run, self._address, self._election = run, address, election
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1  # on which it writes the address where it listens
        self._where: Address | None = None
        self.started_s = -1e9

    @property
    def is_running(self) -> bool:
        """True while the process runs; it exits by itself when another process coordinates."""
        return self._process is not None and self._process.poll() is None

    def start(self, watched: Watched) -> None:
        """Start a coordinator; `watched` is what this agent saw of the holder of the term before."""
        self.started_s = time.monotonic()
        self.close_pipe()
        self._where = None
        self._pipe, child_end = os.pipe()
        os.set_blocking(self._pipe, False)
        command = [sys.executable, "-P", "-m", "phalanx.elastic.coordinator", str(self._run.path), self._address]
        with open(self._run.path / "logs" / "coordinator.log", "ab") as log:
            self._process = subprocess.Popen(
                [*command, str(os.getpid()), str(child_end), self._election, str(watched)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(child_end,),
            )
        os.close(child_end)

    def read_address(self) -> Address | None:
        """Return the address where the coordinator listens, once it has written it into the pipe; no disk is read."""
        if self._pipe >= 0:
            with contextlib.suppress(BlockingIOError):
                # The address is written in one piece.
                text = os.read(self._pipe, 4096)
                self.close_pipe()
                if text:
                    host, port = json.loads(text)
                    self._where = str(host), int(port)
        return self._where

    def close_pipe(self) -> None:
        """Close the pipe; also called in a forked child, whose copy would keep it open."""
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1

    def kill(self) -> None:
        """Kill a coordinator that hangs: it would keep its term until its lease is over."""
        if self._process is not None and self.is_running:
            self._process.kill()
            self._process.wait()

    def await_end(self) -> None:
        """Wait until the coordinator has written how the run ended; it would be killed with this process."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GOODBYE_S)
