"""Several ranks of one job, each traced in a process of its own, and which of its ranks there are to tell apart."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection

from phalanx.errors import Problem, SystemFailure, UserError, mistake
from phalanx.job.model import ModelShape
from phalanx.job.schema import Job, Optim
from phalanx.plan.layout import Layout
from phalanx.train.rank_settings import Settings
from phalanx.train.tracing.log import RankTrace
from phalanx.train.verify.ranks import warm_up

STILL_S = 10.0  # after which a person is told that it goes on
PRELOAD = ("phalanx.train.tracing.traced_step",)  # torch is imported once, not by every worker


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedStep:
    """What every rank of a job is told: enough to build its engine."""

    shape: ModelShape
    settings: Settings
    optim: Optim
    state_dtype: str

    @classmethod
    def of(cls, job: Job, layout: Layout, *, on_gpu: bool = False, allow_code: bool = False) -> TracedStep:
        """The step of a planned job; on GPUs it is compiled unless the job says otherwise."""
        settings = Settings.of(job, layout, on_gpu=on_gpu, allow_code=allow_code)
        return cls(shape=job.model, settings=settings, optim=job.optim, state_dtype=job.precision.optimizer_state)


def stage_ranks(layout: Layout) -> list[int]:
    """One rank of every pipeline place, and the far corner of the first: only the pipeline makes ranks differ.

    >>> stage_ranks(Layout(data=2, shard=1, tensor=2, context=1, pipeline=2, virtual_pipeline=1, expert=1, zero=0,
    ...     sequence_parallel=False, micro_batch=1, accumulation=1, recompute="none", precision="bf16",
    ...     schedule="1f1b", offload="none", compression="none"))
    [0, 4, 3]
    """
    inside = layout.data * layout.context * layout.tensor
    first = [place * inside for place in range(layout.pipeline)]
    return [*first, inside - 1] if inside > 1 else first


def check_rank(rank: int, layout: Layout) -> None:
    """Refuse a rank the job does not have."""
    if not 0 <= rank < layout.devices:
        raise mistake(
            "phalanx trace --rank",
            f"{rank} is not a rank of {layout.name}",
            why=f"its ranks are 0 to {layout.devices - 1:,}",
            fix="name one of them, or use --all-stages",
        )


def trace_ranks(
    step: TracedStep,
    ranks: Sequence[int],
    *,
    workers: int = 0,
    done: Callable[[RankTrace], None] = lambda _: None,
    still: Callable[[Sequence[int], float], None] = lambda ranks, seconds: None,
) -> list[RankTrace]:
    """The step of each rank, in the order asked for; one rank alone is traced in this process.

    `still` is told now and then which ranks are being traced, and for how long this has been going on.
    """
    if len(ranks) == 1:
        with _reported_regularly(lambda seconds: still(ranks, seconds)):
            found = [_trace_rank(step, ranks[0])]
        done(found[0])
        return found
    workers = min(workers or os.cpu_count() or 1, len(ranks))
    traces: dict[int, RankTrace] = {}
    began_s = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(_ends_when_terminated())
        waiting, running = deque(ranks), list[_Worker]()
        while waiting or running:
            while waiting and len(running) < workers:
                running.append(stack.enter_context(_Worker(step, waiting.popleft())))
            ready = connection.wait([worker.answers for worker in running], timeout=STILL_S)
            if not ready:
                still([worker.rank for worker in running], time.monotonic() - began_s)
            for worker in [worker for worker in running if worker.answers in ready]:
                running.remove(worker)
                trace = worker.answer()
                traces[trace.rank] = trace
                done(trace)
    return [traces[rank] for rank in ranks]


class _Worker:
    """A process that traces one rank; gone when its context ends, however it ends, and when its parent dies."""

    def __init__(self, step: TracedStep, rank: int) -> None:
        context = warm_up(PRELOAD)
        self.rank = rank
        self.answers, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_serve_parent, args=(theirs, step, rank), daemon=True)
        self._process.start()  # waits until the server has imported torch; Ctrl-C ends that too
        theirs.close()

    def answer(self) -> RankTrace:
        """What it found; raises what it raised."""
        try:
            found = self.answers.recv()
        except EOFError:
            self._process.join(1.0)
            raise SystemFailure(
                Problem(
                    where=f"rank {self.rank}",
                    what=f"the process that traced it ended with code {self._process.exitcode}",
                    why="a rank takes about half a gigabyte: there may not have been enough memory",
                    fix="trace fewer at a time: --workers 1",
                )
            ) from None
        if isinstance(found, RankTrace):
            return found
        raise UserError(found) if isinstance(found, tuple) else RuntimeError(found)

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self.answers.close()


def _serve_parent(pipe: Connection, step: TracedStep, rank: int) -> None:
    """The life of a worker. Ctrl-C reaches the whole terminal: the parent answers it, and ends us."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    found: RankTrace | tuple[Problem, ...] | str
    try:
        found = _trace_rank(step, rank)
    except UserError as error:
        found = error.problems
    except Exception as error:
        found = f"rank {rank}: {type(error).__name__}: {error}"
    with suppress(BrokenPipeError):
        pipe.send(found)


def _end_with_parent() -> None:
    """A parent that was killed can end nobody: its end of a pipe closes, which wakes this thread."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


@contextmanager
def _reported_regularly(tell: Callable[[float], None]) -> Iterator[None]:
    """While this thread works, another one says for how long."""
    began_s, over = time.monotonic(), threading.Event()

    def speak() -> None:
        while not over.wait(STILL_S):
            tell(time.monotonic() - began_s)

    thread = threading.Thread(target=speak, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def _ends_when_terminated() -> Iterator[None]:
    """SIGTERM unwinds the stack like Ctrl-C, so that no worker is left behind; the exit code is 143, as in shells."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _trace_rank(step: TracedStep, rank: int) -> RankTrace:
    from phalanx.train.tracing.traced_step import trace_rank

    return trace_rank(step.shape, step.settings, step.optim, rank=rank, state_dtype=step.state_dtype)
