"""The caller's side: starts the agent of a run, passes on the wish to stop, and knows how it ended. No torch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

from phalanx.record.run import Run

POLL_S = 0.1
INTERRUPTED = 130  # 128 + SIGINT
# -P: a file of the current folder called torch.py is not torch.
AGENT = ("-P", "-m", "phalanx.train.supervise.agent")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a launch ended."""

    state: str  # done, stopped or failed
    exit_code: int
    message: str


def launch(
    run: Run,
    *,
    environ: Mapping[str, str],
    tick: Callable[[], None],
    asked: Callable[[int], None],
    agent: Sequence[str] = AGENT,
) -> Outcome:
    """Start the ranks and stay until they are gone; `tick` is called often, `asked(n)` at the n-th wish to stop."""
    run.stop_file.unlink(missing_ok=True)  # it stopped the run once; it does not stop it again
    with _wishes(asked) as wishes:
        run.set_status("launching")
        process = _start(run, [sys.executable, *agent, str(run.path), str(os.getpid())], environ)
        try:
            passed = 0
            while process.poll() is None:
                for _ in range(len(wishes) - passed):
                    process.terminate()
                    passed += 1
                tick()
                time.sleep(POLL_S)  # a signal does not cut it short: a wish waits this long at most
            tick()
        finally:
            if process.poll() is None:  # we are leaving by an exception: nothing stays behind
                process.kill()
                process.wait()
    return _outcome(run, process.returncode, wishes=len(wishes))


def _start(run: Run, command: list[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """The agent in a session of its own: Ctrl-C in the terminal reaches only us, and we pass it on."""
    with open(run.path / "logs" / "agent.log", "ab") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(environ), start_new_session=True
        )


@contextlib.contextmanager
def _wishes(asked: Callable[[int], None]) -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM are collected: the first asks to stop after the step, the second at once."""
    wishes: list[int] = []

    def wish(number: int, frame: FrameType | None) -> None:
        wishes.append(number)
        asked(len(wishes))

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, wish) for number in numbers}
    try:
        yield wishes
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _outcome(run: Run, code: int, *, wishes: int) -> Outcome:
    status = run.status()
    if status.get("state") in ("done", "stopped", "failed"):
        return Outcome(
            state=str(status["state"]),
            exit_code=int(status.get("exit_code", code)),
            message=str(status.get("message", "")),
        )
    if wishes and code == -signal.SIGTERM:  # the wish came before the agent could listen
        message = "stopped before the first rank was started"
        run.set_status("stopped", exit_code=INTERRUPTED, message=message)
        return Outcome(state="stopped", exit_code=INTERRUPTED, message=message)
    message = _died(run, code)
    run.set_status("failed", exit_code=3, message=message)
    return Outcome(state="failed", exit_code=3, message=message)


def _died(run: Run, code: int) -> str:
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    log = run.path / "logs" / "agent.log"
    lines = [f"the supervisor of {run.path} {how}", "  its ranks were ended with it"]
    try:
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    except OSError:
        last = []
    return "\n".join([*lines, *(f"  its last words: {line[:300]}" for line in last), f"  log: {log}"])
