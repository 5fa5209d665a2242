"""The supervisor of one host: forks the ranks, watches them, stops them together, tells what happened."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from types import FrameType

from phalanx.record.events import read_events
from phalanx.record.run import Run
from phalanx.train.supervise import failure as failing
from phalanx.train.supervise.board import Board
from phalanx.train.supervise.failure import Failure
from phalanx.train.supervise.process import Work, fork_rank
from phalanx.train.supervise.stacks import Whereabouts, find_silent

POLL_S = 0.05
GATHER_S = 0.5  # after the cause of a failure is known, time for its consequences to arrive and be counted
CAUSE_S = 2.0  # while only consequences are known, time for the cause to show
GRACE_S = 5.0  # between SIGTERM and SIGKILL
STOPPED, FAILED = 130, 3


@dataclass(slots=True)
class _Ranks:
    """The processes: those alive, and how the others ended."""

    alive: dict[int, int]  # rank -> process id
    failures: dict[int, Failure] = field(default_factory=dict)


@dataclass(slots=True)
class Wishes:
    """Signals from outside: the first asks the ranks to stop after their step, the second ends them at once."""

    count: int = 0

    @classmethod
    def listen(cls) -> Wishes:
        """Count SIGTERM and SIGINT from now on."""
        wishes = cls()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, wishes._note)
        return wishes

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


def supervise(work: Work, *, run: Run, world: int, timeout_s: float, wishes: Wishes, grace_s: float = GRACE_S) -> int:
    """Run `work` on `world` ranks to its end; the exit code: 0, 130 after a stop, 2 or 3 after a failure.

    `timeout_s` is the longest silence of a rank. The message about a failure is left in status.json.
    """
    failing.clear(run)
    if wishes.count:
        run.set_status("stopped", exit_code=STOPPED, message="stopped before the first rank was started")
        return STOPPED
    board = Board(world)
    kills_before = failing.oom_kills()
    started = time.time()
    run.set_status("running", pid=os.getpid(), world=world, started=round(started, 3))
    ranks = _Ranks(alive={rank: fork_rank(work, run=run, rank=rank, world=world, board=board) for rank in range(world)})
    try:
        _watch(ranks, run=run, board=board, wishes=wishes, timeout_s=timeout_s)
    finally:
        _end(ranks, grace_s if wishes.count < 2 else 0.0)
    if wishes.count >= 2:
        return _killed(run)
    if ranks.failures:
        out_of_memory = failing.oom_kills() > kills_before
        return _failed(run, ranks, world, out_of_memory=out_of_memory)
    return _finished(run, stopping=board.stopping, since_s=started)


def _watch(ranks: _Ranks, *, run: Run, board: Board, wishes: Wishes, timeout_s: float) -> None:
    """Returns when all ranks ended, one of them failed or fell silent, or someone insisted on the end."""
    while ranks.alive and wishes.count < 2:
        if wishes.count or run.stop_file.exists():
            board.ask_to_stop()
        _reap(ranks, run, board)
        if ranks.failures:
            _gather(ranks, run, board)
            return
        if _silence_s(ranks, board) > timeout_s:
            found = find_silent(run, ranks.alive, board)
            if _silence_s(ranks, board) > timeout_s:  # nobody woke up while all were asked
                _blame(ranks, board, found)
                return
        time.sleep(POLL_S)


def _reap(ranks: _Ranks, run: Run, board: Board) -> None:
    for rank, pid in list(ranks.alive.items()):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            del ranks.alive[rank]
            found = _failure(run, rank, os.waitstatus_to_exitcode(status), board.last(rank).step)
            if found is not None:
                ranks.failures[rank] = found


def _failure(run: Run, rank: int, code: int, step: int) -> Failure | None:
    if code == 0:
        return None
    if code < 0:
        return failing.by_signal(rank, step, -code)
    return failing.read_error(run, rank) or failing.unexplained(rank, step, code)


def _gather(ranks: _Ranks, run: Run, board: Board) -> None:
    """Let the other failures arrive; where all are consequences, the cause may be a rank that is alive and silent."""
    began_s = time.monotonic()

    def only_consequences() -> bool:
        return all(one.is_consequence for one in ranks.failures.values())

    while ranks.alive and time.monotonic() - began_s < (CAUSE_S if only_consequences() else GATHER_S):
        _reap(ranks, run, board)
        time.sleep(POLL_S)
    if ranks.alive and only_consequences():
        found = find_silent(run, ranks.alive, board)
        if not found.waits:
            _blame(ranks, board, found)


def _silence_s(ranks: _Ranks, board: Board) -> float:
    """The longest silence of a rank."""
    now = time.monotonic()
    return max((now - board.last(rank).at_s for rank in ranks.alive), default=0.0)


def _blame(ranks: _Ranks, board: Board, found: Whereabouts) -> None:
    beat = board.last(found.rank)
    silent_s = time.monotonic() - beat.at_s
    ranks.failures[found.rank] = failing.silence(found.rank, beat.step, silent_s=silent_s, where=found.place)


def _end(ranks: _Ranks, grace_s: float) -> None:
    """No rank survives this."""
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 60.0)):
        for pid in ranks.alive.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        until = time.monotonic() + wait_s
        while ranks.alive and time.monotonic() < until:
            for rank, pid in list(ranks.alive.items()):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    del ranks.alive[rank]
            time.sleep(POLL_S / 5)


def _killed(run: Run) -> int:
    saved = failing.last_checkpoint(run)
    kept = f"the last checkpoint is step {saved:,}" if saved is not None else "no checkpoint was written"
    run.set_status("stopped", exit_code=STOPPED, message=f"killed at once, as asked; {kept}", step=saved)
    return STOPPED


def _failed(run: Run, ranks: _Ranks, world: int, *, out_of_memory: bool) -> int:
    cause = failing.first(list(ranks.failures.values()))
    others = [one for one in ranks.failures.values() if one is not cause]
    message = failing.tell(run, cause, others=others, world=world, out_of_memory=out_of_memory)
    code = cause.exit_code if cause.is_user else FAILED
    run.set_status("failed", exit_code=code, message=message, rank=cause.rank, step=cause.step)
    return code


def _finished(run: Run, *, stopping: bool, since_s: float) -> int:
    """All ranks returned: the run is done, unless the loop says that it stopped early."""
    events = [event for event in read_events(run.events(0))[0] if float(event.get("t") or 0.0) >= since_s]
    early = stopping and any(event["event"] == "stop" for event in events)
    saved = failing.last_checkpoint(run)
    if not early:
        run.set_status("done", exit_code=0, message="", step=saved)
        return 0
    kept = f"saved step {saved:,}" if saved is not None else "nothing was saved"
    message = f"stopped as asked: {kept}; go on with: phalanx train --resume {run.path}"
    run.set_status("stopped", exit_code=STOPPED, message=message, step=saved)
    return STOPPED
