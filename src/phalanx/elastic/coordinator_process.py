"""The coordinator that an agent has started, as its parent sees it: a process, and where it says that it listens."""

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

GOODBYE_S = 2.0  # for the coordinator to write down how it ended


class CoordinatorProcess:
    """None at first; `start` makes one, and another once that has ended."""

    def __init__(self, run: Run, *, address: str, election: str) -> None:
        self._run, self._address, self._election = run, address, election
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1  # through which it tells where it listens
        self._where: Address | None = None
        self.started_s = -1e9

    @property
    def is_running(self) -> bool:
        """Whether there is one; it ends by itself when another coordinates."""
        return self._process is not None and self._process.poll() is None

    def start(self, watched: Watched) -> None:
        """Start one, which is told what was seen of the holder of the term before."""
        self.started_s = time.monotonic()
        self.close_pipe()
        self._where = None
        self._pipe, theirs = os.pipe()
        os.set_blocking(self._pipe, False)
        command = [sys.executable, "-P", "-m", "phalanx.elastic.coordinator", str(self._run.path), self._address]
        with open(self._run.path / "logs" / "coordinator.log", "ab") as log:
            self._process = subprocess.Popen(
                [*command, str(os.getpid()), str(theirs), self._election, str(watched)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs,),
            )
        os.close(theirs)

    def read_address(self) -> Address | None:
        """Where it listens, once it has told; no other needs to be asked, and no disk."""
        if self._pipe >= 0:
            with contextlib.suppress(BlockingIOError):
                told = os.read(self._pipe, 4096)  # it is written at once
                self.close_pipe()
                if told:
                    host, port = json.loads(told)
                    self._where = str(host), int(port)
        return self._where

    def close_pipe(self) -> None:
        """Also in a forked child, whose copy would keep it open."""
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1

    def kill(self) -> None:
        """It hangs: it would keep its term until its lease is over."""
        if self._process is not None and self.is_running:
            self._process.kill()
            self._process.wait()

    def await_end(self) -> None:
        """It dies with us: let it write down how the run ended."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GOODBYE_S)
