"""A rank as a process: forked, tied to the life of its supervisor, printing into its own log."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Protocol

from phalanx.errors import PhalanxError
from phalanx.record.run import Run
from phalanx.train.supervise.board import Board
from phalanx.train.supervise.failure import write_error

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
STACK_SIGNAL = signal.SIGUSR2  # asks a rank to write down where it is
FAILED = 3


class Work(Protocol):
    """What a rank does: returns when the run is over or was asked to stop, raises when it failed."""

    def __call__(self, *, rank: int, stop: Callable[[], bool], heartbeat: Callable[[int], None]) -> None: ...


def die_with(parent: int) -> None:
    """Be killed by the kernel when process `parent` ends, however it ends; nothing outlives its supervisor."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel was told
        os._exit(FAILED)


def fork_rank(work: Work, *, run: Run, rank: int, world: int, board: Board) -> int:
    """Start one rank; returns its process id. The caller has imported what the ranks share, and runs no threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    code = FAILED
    try:
        _become_rank(run, rank, world, parent)
        code = _run(work, run, rank, board)
    finally:
        os._exit(code)  # the supervisor's own clean-up is not the rank's business


def _become_rank(run: Run, rank: int, world: int, parent: int) -> None:
    os.setpgid(0, 0)
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches ranks as a wish to stop, through the board
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _redirect(run.log(rank))
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, file=open(run.stack(rank), "w"), all_threads=True)  # noqa: SIM115 (kept open)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    gc.enable()


def _redirect(log: os.PathLike[str]) -> None:
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.stderr.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _run(work: Work, run: Run, rank: int, board: Board) -> int:
    try:
        work(rank=rank, stop=lambda: board.stopping, heartbeat=lambda step: board.beat(rank, step))
    except BaseException as error:
        write_error(run, rank, error, step=board.last(rank).step)
        traceback.print_exc()
        return error.exit_code if isinstance(error, PhalanxError) else FAILED
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0
