"""Worker processes that train the runs of a sweep in parallel, each worker one run after the other."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from phalanx.errors import Problem, SystemFailure
from phalanx.io.toml import to_toml
from phalanx.job.load import job_to_dict
from phalanx.plan.plan import Plan
from phalanx.record.provenance import job_provenance
from phalanx.record.run import Run, create_run
from phalanx.scale.sweep_store import SweepFolder, SweepOutcome

SAVE_S = 60.0  # seconds that interrupted runs may take to save
# Consecutive deaths of a worker's process, after which the sweep is given up.
MOST_DEATHS = 3
OnRunEnded = Callable[[SweepOutcome, float, int], None]


class SweepPool:
    """A context manager with `workers` processes that import torch once. On exit, unfinished runs save and end."""

    def __init__(self, folder: SweepFolder, *, workers: int, gpus: int) -> None:
        self._folder, self._count, self._gpus = folder, workers, gpus
        self._workers: list[subprocess.Popen[str]] = []
        self._threads: list[threading.Thread] = []
        self._answers: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()

    def __enter__(self) -> SweepPool:
        for number in range(self._count):
            self._workers.append(self._start(number))
            self._listen(number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            with suppress(OSError):
                assert worker.stdin is not None
                worker.stdin.close()
            if kind is not None and worker.poll() is None:
                worker.terminate()  # handled after the step, with a checkpoint
        until_s = time.monotonic() + SAVE_S
        for worker in self._workers:
            with suppress(subprocess.TimeoutExpired):
                worker.wait(max(0.0, until_s - time.monotonic()))
            if worker.poll() is None:
                worker.kill()
                worker.wait()
        for thread in self._threads:
            thread.join()

    def _start(self, number: int) -> subprocess.Popen[str]:
        environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if self._gpus:
            environ["CUDA_VISIBLE_DEVICES"] = str(number % self._gpus)
        else:
            environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        with self._log(number).open("a", encoding="utf-8") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "phalanx.train.sweep_worker", str(os.getpid()), str(os.cpu_count() or 1)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environ,
                text=True,
                # Ctrl-C is handled here: workers are asked to save.
                start_new_session=True,
            )

    def _log(self, number: int) -> Path:
        return self._folder.path / f"worker-{number}.log"

    def _listen(self, number: int) -> None:
        worker = self._workers[number]

        def read() -> None:
            assert worker.stdout is not None
            with worker.stdout:
                for line in worker.stdout:
                    self._answers.put((number, json.loads(line)))
            self._answers.put((number, {"state": "ended"}))

        thread = threading.Thread(target=read, name=f"sweep-worker-{number}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def train(
        self, outcomes: list[SweepOutcome], plans: Sequence[Plan], *, weights: Sequence[float], on_ended: OnRunEnded
    ) -> None:
        """Train all runs that are not final; replace entries of `outcomes` as results arrive, and store them on disk.

        The longest runs come first, so that none is left alone at the end; a run that continues from another's
        checkpoint waits for that one.
        """
        by_name = {outcome.run.name: number for number, outcome in enumerate(outcomes)}
        waiting = sorted((n for n, outcome in enumerate(outcomes) if not outcome.is_final), key=lambda n: -weights[n])
        ended = {number for number, outcome in enumerate(outcomes) if outcome.is_final}
        idle, deaths = list(range(self._count)), [0] * self._count
        busy: dict[int, int] = {}  # run number by worker
        shares: dict[int, float] = {}  # completed share by run number
        done_s = 0.0
        while waiting or busy:
            for number in list(waiting):
                trunk = outcomes[number].run.trunk
                if idle and (not trunk or by_name[trunk] in ended):
                    waiting.remove(number)
                    worker = idle.pop(0)
                    busy[worker] = number
                    outcomes[number] = self._hand_over(worker, outcomes, number, by_name, plans[number])
            worker, answer = self._answers.get()
            number = busy.get(worker, -1)
            if "progress" in answer:
                if number >= 0:
                    shares[number] = answer["progress"] / max(outcomes[number].run.steps, 1)
                continue
            if answer["state"] == "ended":
                deaths[worker] += 1
                self._replace(worker, deaths[worker])
                answer = {"state": "failed", "loss": None, "seconds": 0.0, "message": "its process ended by itself"}
                if number < 0:
                    continue
            else:
                deaths[worker] = 0
            del busy[worker]
            idle.append(worker)
            ended.add(number)
            shares.pop(number, None)
            outcomes[number] = replace(
                outcomes[number],
                state=str(answer["state"]),
                loss=answer["loss"],
                seconds=float(answer["seconds"]),
                message=str(answer["message"]),
                cached=False,
            )
            self._folder.keep(outcomes[number])
            done_s += weights[number]
            going_s = sum(share * weights[run_number] for run_number, share in shares.items())
            on_ended(outcomes[number], done_s + going_s, len(waiting) + len(busy))

    def _replace(self, worker: int, deaths: int) -> None:
        """Start a new process for a worker that was killed, as for lack of memory; only its current run fails."""
        if deaths >= MOST_DEATHS:
            message = f"a process of the sweep ended {deaths} times in a row"
            raise SystemFailure(Problem(where=str(self._log(worker)), what=message, fix="its last lines say why"))
        self._workers[worker].wait()
        self._workers[worker] = self._start(worker)
        self._listen(worker)

    def _hand_over(
        self, worker: int, outcomes: Sequence[SweepOutcome], number: int, by_name: dict[str, int], plan: Plan
    ) -> SweepOutcome:
        """Create the run's folder, unless an earlier call left one, and hand the run to a worker."""
        outcome = outcomes[number]
        if not outcome.folder:
            job = job_to_dict(plan.job)
            run = create_run(
                self._folder.runs, outcome.run.name, job_toml=to_toml(job), job=job, plan_json=plan.to_json()
            )
            run.set_launch(
                v=1,
                world=1,
                layout=plan.layout.name,
                started=round(time.time(), 3),
                earlier=[],
                data_s=0.0,
                allow_code=False,
                provenance=job_provenance(job),
            )
            outcome = replace(outcome, folder=run.name)
        outcome = replace(outcome, state="stopped", cached=False)
        # Stored now, so that the next call finds it if this process is killed.
        self._folder.keep(outcome)
        trunk = outcomes[by_name[outcome.run.trunk]] if outcome.run.trunk else None
        task = {
            "run": str(self._path(outcome)),
            "save_at": outcome.run.decay_step,
            "trunk": str(self._path(trunk)) if trunk is not None and trunk.folder else "",
            "trunk_step": trunk.run.decay_step if trunk is not None else 0,
        }
        process = self._workers[worker]
        assert process.stdin is not None
        # The worker has ended, which its output reader reports.
        with suppress(BrokenPipeError):
            print(json.dumps(task), file=process.stdin, flush=True)
        return outcome

    def _path(self, outcome: SweepOutcome) -> Path:
        return Run(path=(self._folder.runs / outcome.folder).resolve()).path
