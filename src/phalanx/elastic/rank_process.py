"""A rank as a process: forked, tied to the life of its agent, printing into its own log."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import io
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.elastic.failure import write_error
from phalanx.elastic.heartbeat_board import HeartbeatBoard
from phalanx.elastic.rank_link import RankLink
from phalanx.errors import PhalanxError
from phalanx.record.provenance import redact
from phalanx.record.run import Run

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Asks a rank to write its stack.
STACK_SIGNAL = signal.SIGUSR2
# Set in the environment of agents that a launch system started: its SIGTERM may come to every process of a host at
# once, and be passed on once more. That is one request to save and end, which ranks and coordinator leave to their
# agent.
SYSTEM_STOPS = "PHALANX_SYSTEM_STOPS"
FAILED = 3
# Characters that wait for the end of their line.
MOST_LINE = 2**16


# The work of a rank; returns when the run is over, raises when it failed.
Work = Callable[[RankLink], None]


def die_with(parent: int) -> None:
    """Let the kernel kill this process when process `parent` ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent ended before prctl was called.
    if os.getppid() != parent:
        os._exit(FAILED)


def ignore_system_stop() -> None:
    """Ignore SIGTERM in ranks and coordinators that a launch system may stop: their agent acts on it."""
    if os.environ.get(SYSTEM_STOPS):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def fork_rank(
    work: Work, *, run: Run, slot: int, board: HeartbeatBoard, forget: Callable[[], None]
) -> tuple[int, socket.socket]:
    """Fork the process of a slot; returns its process id, and the agent's end of the connection to it.

    The caller has imported what the ranks share, and runs no threads. `forget` closes, in the child, what belongs to
    the caller alone.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    agent_end, rank_end = socket.socketpair()
    board.reset(slot)
    child = os.fork()
    if child:
        rank_end.close()
        return child, agent_end
    code = FAILED
    try:
        agent_end.close()
        forget()
        _become_rank(parent)
        code = _run(work, run, RankLink(rank_end, board, slot))
    finally:
        # The agent's clean-up must not run in the rank.
        os._exit(code)


def _become_rank(parent: int) -> None:
    os.setpgid(0, 0)
    die_with(parent)
    # Ctrl-C reaches ranks as a request to stop, through the board.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ignore_system_stop()
    faulthandler.enable()
    gc.enable()


def take_rank(run: Run, rank: int, *, world: int, slot: int, local_world: int, host_log: Path | None = None) -> None:
    """Make this process `rank`: set its log, its stacks, and the variables that torch reads.

    In a `host_log`, which it shares with the other ranks of its host, every line begins with the rank; output of
    libraries appears unchanged. Its stacks then go to memory, where its agent reads them: a file for each of 131,072
    ranks is too many, and a stack is written in pieces, which would mix in a file for all.
    """
    _redirect(host_log or run.rank_log(rank))
    if host_log is not None:
        sys.stdout, sys.stderr = RankLines(1, rank), RankLines(2, rank)
    in_memory = host_log is not None and sys.platform == "linux"
    stack = os.memfd_create(_memory_name(rank), os.MFD_CLOEXEC) if in_memory else run.rank_stack(rank)
    faulthandler.register(STACK_SIGNAL, file=open(stack, "w"), all_threads=True)  # noqa: SIM115 (kept open)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(slot), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(local_world))
    run.error(rank).unlink(missing_ok=True)


class RankLines(io.TextIOBase):
    """A text stream to a log that several ranks append to: one write per line, which begins with the rank."""

    def __init__(self, file: int, rank: int) -> None:
        self._file, self._before = file, f"[rank {rank}] "
        self._lock, self._partial = threading.RLock(), ""

    def write(self, text: str, /) -> int:
        """Write the lines that are complete; the rest waits."""
        with self._lock:
            *lines, self._partial = (self._partial + text).split("\n")
            if len(self._partial) > MOST_LINE:
                lines, self._partial = [*lines, self._partial], ""
            for line in lines:
                # A full disk does not end a rank.
                with contextlib.suppress(OSError):
                    os.write(self._file, f"{self._before}{line}\n".encode(errors="replace"))
        return len(text)

    def flush(self) -> None:
        """Do nothing: an incomplete line waits until it is complete, or until the rank ends."""

    def finish(self) -> None:
        """Write the last, incomplete line."""
        if self._partial:
            self.write("\n")

    def fileno(self) -> int:
        """Return the descriptor of the log."""
        return self._file

    def writable(self) -> bool:
        """Return True."""
        return True


def _redirect(log: os.PathLike[str]) -> None:
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    os.close(nothing)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.stderr.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _run(work: Work, run: Run, link: RankLink) -> int:
    try:
        work(link)
    except BaseException as error:
        write_error(run, int(os.environ.get("RANK", link.slot)), error, step=link.step)
        print(redact(traceback.format_exc(), os.environ), file=sys.stderr, end="")
        return error.exit_code if isinstance(error, PhalanxError) else FAILED
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            if isinstance(stream, RankLines):
                stream.finish()
    return 0


# Locating ranks that do not answer: each writes its Python stack on request, and one of them is not waiting.


# A rank that runs writes its stack within milliseconds; the machine may be busy.
ANSWER_S = 0.5
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')
_WAITS = ("distributed_c10d.py", "_functional_collectives", "distributed/pipelining", "fsdp/_fully_shard")


@dataclass(frozen=True, kw_only=True, slots=True)
class Whereabouts:
    """A rank's place in the code."""

    place: str
    # True when it waits for other ranks, so that it is hardly the one to blame.
    waits: bool


def find_ranks(run: Run, alive: Mapping[int, int], *, host: str) -> dict[int, Whereabouts]:
    """Ask living ranks (rank -> process) of a host for their stacks; takes half a second.

    Stacks that ranks keep in memory are appended to the host's own file.
    """
    files = {rank: _stack_file(run, rank, pid) for rank, pid in alive.items()}
    sizes = {rank: _size(path) for rank, path in files.items()}
    for pid in alive.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACK_SIGNAL)
    time.sleep(ANSWER_S)
    places, memory_stacks = {}, ""
    for rank, pid in alive.items():
        stack = _tail(files[rank], sizes[rank])
        is_waiting = any(word in stack for word in _WAITS)
        places[rank] = Whereabouts(place=_place(stack, pid), waits=is_waiting)
        if stack and files[rank] != run.rank_stack(rank):
            memory_stacks += f"rank {rank}, process {pid}, at {time.time():.0f}:\n{stack}\n"
    if memory_stacks:
        with contextlib.suppress(OSError), open(run.host_stack(host), "a", encoding="utf-8") as file:
            file.write(memory_stacks)
    return places


def read_stack(run: Run, rank: int, pid: int) -> str:
    """Return the stacks that a living rank has written so far; "" where it was not asked."""
    return _tail(_stack_file(run, rank, pid), 0)


def _memory_name(rank: int) -> str:
    return f"phalanx-stack-{rank}"


def _stack_file(run: Run, rank: int, pid: int) -> Path:
    """Return the file in which a living rank writes its stacks."""
    files = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(files):
            # The descriptor was closed meanwhile.
            with contextlib.suppress(OSError):
                # The link's target ends in "(deleted)".
                if os.readlink(f"{files}/{name}").startswith(f"/memfd:{_memory_name(rank)} "):
                    return Path(files, name)
    return run.rank_stack(rank)


def _place(stack: str, pid: int) -> str:
    if not stack:
        return "a stopped process (state T)" if state_of(pid) == "T" else "a process that cannot answer"
    main = stack.split("Current thread", 1)[-1] if "Current thread" in stack else stack
    frame = _FRAME.search(main)
    return f"{frame.group(3)} ({Path(frame.group(1)).name}:{frame.group(2)})" if frame else ""


def state_of(pid: int) -> str:
    """Return the letter of a process's state, as in /proc; "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(") ")[2][:1]
    except OSError:
        return ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _tail(path: Path, start: int) -> str:
    try:
        return path.read_bytes()[start:].decode("utf-8", errors="replace")
    except OSError:
        return ""
