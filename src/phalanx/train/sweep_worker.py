"""A worker process of a sweep: reads runs from standard input, trains each, and answers on standard output.

{"run": FOLDER, "save_at": STEP, "trunk": FOLDER, "trunk_step": STEP}      one line each, until the input ends
{"progress": STEP}                                                         while it trains, a few times a second
{"state": "done", "loss": NATS, "step": STEP, "seconds": S, "message": ""}  done, stopped, diverged or failed
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from phalanx.elastic.rank_process import die_with
from phalanx.io.visible import visible

PROGRESS_S = 0.5


class SweepStop:
    """Records SIGINT and SIGTERM; the current run saves a checkpoint before the worker ends."""

    def __init__(self) -> None:
        self.stopping = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.stopping = True


def main(arguments: list[str]) -> int:
    """Train runs until the input ends.

    `arguments` are the caller's process id, and the number of workers that share this machine.
    """
    caller, sharers = int(arguments[0]), int(arguments[1])
    die_with(caller)
    stop_requests = SweepStop()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries goes to stderr: stdout holds answers only
    for line in sys.stdin:
        if stop_requests.stopping:
            break
        _answer(answers, _train(json.loads(line), stop_requests, answers, sharers=sharers))
    return 0


def _answer(answers: TextIO, value: dict[str, Any]) -> None:
    """Write one answer; end the process if the caller is gone."""
    try:
        print(json.dumps(value), file=answers, flush=True)
    except BrokenPipeError:
        os._exit(1)


def _train(task: dict[str, Any], stop_requests: SweepStop, answers: TextIO, *, sharers: int) -> dict[str, Any]:
    """Train one run and return the answer for it."""
    from phalanx.record.run import Run
    from phalanx.train.lone_rank import SweepWatch, start_from_trunk, train_lone_rank

    began_s, last_answer_s = time.monotonic(), 0.0
    run, watch = Run(path=Path(task["run"])), SweepWatch(save_at=int(task["save_at"]))

    def progress(step: int) -> None:
        nonlocal last_answer_s
        if time.monotonic() - last_answer_s > PROGRESS_S:
            last_answer_s = time.monotonic()
            _answer(answers, {"progress": step})

    answer: dict[str, Any] = {"state": "failed", "loss": None, "message": "", "shared_steps": 0}
    try:
        if task["trunk"] and start_from_trunk(run, Run(path=Path(task["trunk"])), int(task["trunk_step"])):
            answer["shared_steps"] = int(task["trunk_step"])
        state = train_lone_rank(
            run, stop=lambda: stop_requests.stopping, progress=progress, callbacks=[watch], sharers=sharers
        )
        answer["state"] = "diverged" if watch.diverged else state
        answer["message"] = watch.diverged
        if state == "done" and not watch.diverged:
            if watch.score is None:
                answer |= {"state": "failed", "message": "nothing is held out to measure the loss on"}
            else:
                answer |= {"loss": watch.score.loss, "bits_per_byte": watch.score.bits_per_byte}
    except Exception as error:  # reported for this run; the sweep continues
        answer["message"] = visible(f"{type(error).__name__}: {error}")[:2000]
    return {**answer, "seconds": time.monotonic() - began_s}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
