"""The judge's side of candidates' processes: starts them, sends requests within time and memory limits, ends them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from phalanx.errors import Problem, SystemFailure
from phalanx.io.values import printable
from phalanx.units import GIB, format_bytes, format_seconds

MESSAGE_BYTES = 64 * 1024
LOOK_EVERY_S = 0.02  # interval of memory checks while a candidate has not answered
START_LIMIT_S = 120.0  # for importing torch on a busy machine
KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "PYTHONPATH", "HOME", "CC", "TMPDIR")


# Exception in a candidate's process -> kind of the refusal.
REFUSALS = {
    "MemoryError": "memory",
    "OutOfMemoryError": "memory",
    "PermissionError": "forbidden",
    "ModuleNotFoundError": "import",
}


class RefusedError(Exception):
    """Raised when a candidate is refused; `kind` is one word for programs, the message a clause for people."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateLimits:
    """Limits of a candidate's process, from its start to its end."""

    seconds: float = 60.0
    memory_bytes: int = 4 * GIB
    threads: int = 1


class CandidateServer:
    """A process that has imported torch and forks one process per candidate; a context manager.

    One server runs any number of candidates, one after the other.
    """

    def __init__(self) -> None:
        self._gpu_blocks: dict[str, torch.Tensor] = {}
        self._start()

    def _start(self) -> None:
        judge_end, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        variables = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        # -P: Python must not import modules from the working folder.
        command = [sys.executable, "-P", "-m", "phalanx.train.kernels.lab.candidate_process", str(server_end.fileno())]
        package_home = Path(__file__).parents[4]  # src/, or where the package is installed
        path = [str(package_home), *([variables["PYTHONPATH"]] if variables.get("PYTHONPATH") else [])]
        self._process = subprocess.Popen(
            command,
            pass_fds=(server_end.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**variables, "PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1"},
        )
        server_end.close()
        self._link = judge_end
        self._ready = False

    def fork_candidate(self, block_file: int, settings: dict[str, Any], limits: CandidateLimits) -> CandidateProcess:
        """Start a new process for the candidate whose source is in the block."""
        if self._process.poll() is not None:
            self.close()
            self._start()
        if not self._ready:
            self._answer(START_LIMIT_S)
            self._ready = True
        judge_end, candidate_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {
            "do": "fork", "seconds": limits.seconds, "memory": limits.memory_bytes, "threads": limits.threads,
            "cache": "", "compile": False, "cuda": None, "watch": True, **settings,
        }  # fmt: skip
        socket.send_fds(self._link, [json.dumps(request).encode()], [candidate_end.fileno(), block_file])
        candidate_end.close()
        return CandidateProcess(self, self._answer(START_LIMIT_S)["pid"], judge_end, limits)

    def gpu_memory(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Return a block of GPU memory that is reused for all candidates.

        PyTorch never frees memory that another process mapped and did not release, and candidates' processes are
        killed.
        """
        block = self._gpu_blocks.get(str(device))
        if block is None or block.numel() < num_bytes:
            block = self._gpu_blocks[str(device)] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return block

    def end_process(self, pid: int) -> int:
        """Kill a candidate's process if it is still running; return its status as of os.waitpid."""
        self._link.send(json.dumps({"do": "end", "pid": pid}).encode())
        return int(self._answer(START_LIMIT_S)["status"])

    def _answer(self, limit_s: float) -> dict[str, Any]:
        self._link.settimeout(limit_s)
        try:
            raw = self._link.recv(MESSAGE_BYTES)
        except OSError as error:
            raise _server_lost(str(error)) from error
        if not raw:
            raise _server_lost("it ended")
        answer: dict[str, Any] = json.loads(raw)
        return answer

    def close(self) -> None:
        """End the server; its forks end with it."""
        self._link.close()
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> CandidateServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _server_lost(what: str) -> SystemFailure:
    fix = "start it again; a machine without free memory kills processes"
    return SystemFailure(
        Problem(where="phalanx kernels", what=f"the process that runs kernels was lost: {what}", fix=fix)
    )


class CandidateProcess:
    """One candidate's process, and its limits."""

    def __init__(self, server: CandidateServer, pid: int, link: socket.socket, limits: CandidateLimits) -> None:
        self._server, self._pid, self._link, self._limits = server, pid, link, limits
        self._deadline = time.monotonic() + limits.seconds
        self._paused_at = 0.0  # monotonic time of the pause; 0 while it runs
        self._most_bytes = self._used_bytes() + limits.memory_bytes

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the answer; raise RefusedError if the process ends, hangs or exceeds its memory."""
        try:
            self._link.send(json.dumps(request).encode())
        except OSError:
            self._say_end()
        return self.hear()

    def hear(self) -> dict[str, Any]:
        """Wait for the next message and return it; raise RefusedError if it reports a problem or is not an answer."""
        while True:
            self._link.settimeout(LOOK_EVERY_S)
            try:
                raw = self._link.recv(MESSAGE_BYTES)
            except TimeoutError:
                self._check_limits()
                continue
            except OSError:
                raw = b""
            if not raw:
                self._say_end()
            try:
                answer = json.loads(raw)
            except (ValueError, RecursionError):
                answer = None
            if not isinstance(answer, dict):
                raise RefusedError("nonsense", "its process sent something that is no answer")
            if problem := answer.get("problem"):
                kind = REFUSALS.get(str(answer.get("raised")), "result")
                text = printable(problem)
                if "can't allocate memory" in text or "out of memory" in text.lower():
                    kind, text = (
                        "memory",
                        f"took more than {format_bytes(self._limits.memory_bytes)} of memory ({text})",
                    )
                raise RefusedError(kind, text)
            return answer

    def pause(self) -> None:
        """Stop all its threads, so that it cannot watch the preparation of inputs; return when they have stopped."""
        if self._pid == 0:
            return
        # Safe, as the server reaps a process only on request: the number cannot belong to another process yet.
        os.kill(self._pid, signal.SIGSTOP)
        while self._state() not in ("T", "t", "Z", "X", ""):
            self._check_limits()
            time.sleep(0.0002)
        self._paused_at = time.monotonic()

    def resume(self) -> None:
        """Let it continue; the pause, in which inputs were drawn, does not count towards its time limit."""
        if self._paused_at:
            self._deadline += time.monotonic() - self._paused_at
            self._paused_at = 0.0
        if self._pid:
            os.kill(self._pid, signal.SIGCONT)

    def _state(self) -> str:
        try:
            with open(f"/proc/{self._pid}/stat", "rb") as file:
                return file.read().rpartition(b")")[2].split()[0].decode()
        except (OSError, IndexError):
            return ""

    def _check_limits(self) -> None:
        if time.monotonic() > self._deadline:
            raise RefusedError("time", f"was not done after {format_seconds(self._limits.seconds)}")
        if self._used_bytes() > self._most_bytes:
            raise RefusedError("memory", f"took more than {format_bytes(self._limits.memory_bytes)} of memory")

    def _used_bytes(self) -> int:
        try:
            with open(f"/proc/{self._pid}/statm", "rb") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
        except (OSError, ValueError, IndexError):
            return 0

    def _say_end(self) -> None:
        """End the process and raise RefusedError with the reason of its end."""
        status = self.end()
        if os.WIFSIGNALED(status):
            name = signal.Signals(os.WTERMSIG(status)).name
            raise RefusedError("crash", f"its process crashed ({name})")
        raise RefusedError("crash", "its process ended before it answered")

    def end(self) -> int:
        """Kill the process, whatever its state; return its status."""
        if self._pid == 0:
            return 0
        pid, self._pid = self._pid, 0
        self._link.close()
        return self._server.end_process(pid)
