"""Tracing of several ranks of one job, each in its own process, and the choice of ranks that differ."""

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

STILL_S = 10.0  # seconds after which progress is reported
# torch is imported once, not by every worker
PRELOAD = ("phalanx.train.tracing.traced_step",)


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedStep:
    """Description of a job's step for the traced ranks: enough to build their engines."""

    shape: ModelShape
    settings: Settings
    optim: Optim
    state_dtype: str

    @classmethod
    def of(cls, job: Job, layout: Layout, *, on_gpu: bool = False, allow_code: bool = False) -> TracedStep:
        """Build the description for a planned job; on GPUs the step is compiled unless the job disables it."""
        settings = Settings.of(job, layout, on_gpu=on_gpu, allow_code=allow_code)
        return cls(shape=job.model, settings=settings, optim=job.optim, state_dtype=job.precision.optimizer_state)


def stage_ranks(layout: Layout) -> list[int]:
    """Return one rank of every pipeline stage, and the last rank of the first: only the pipeline makes ranks differ.

    >>> stage_ranks(Layout(data=2, shard=1, tensor=2, context=1, pipeline=2, virtual_pipeline=1, expert=1, zero=0,
    ...     sequence_parallel=False, micro_batch=1, accumulation=1, recompute="none", precision="bf16",
    ...     schedule="1f1b", offload="none", compression="none"))
    [0, 4, 3]
    """
    ranks_per_stage = layout.data * layout.context * layout.tensor
    first = [place * ranks_per_stage for place in range(layout.pipeline)]
    return [*first, ranks_per_stage - 1] if ranks_per_stage > 1 else first


def check_rank(rank: int, layout: Layout) -> None:
    """Raise UserError for a rank that the job does not have."""
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
    """Trace the step on each rank, and return the traces in the order of `ranks`.

    Args:
        step: The job's step.
        ranks: Ranks to trace; a single one is traced in this process.
        workers: Processes at once; default is the number of cores.
        done: Called with each finished trace.
        still: Called regularly with the ranks in work and the seconds since the start.
    """
    if len(ranks) == 1:
        with _reported_regularly(lambda seconds: still(ranks, seconds)):
            single_trace = [_trace_rank(step, ranks[0])]
        done(single_trace[0])
        return single_trace
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
    """A process that traces one rank; it is killed when its context exits, and ends when its parent dies."""

    def __init__(self, step: TracedStep, rank: int) -> None:
        context = warm_up(PRELOAD)
        self.rank = rank
        self.answers, child_end = context.Pipe(duplex=False)
        self._process = context.Process(target=_serve_parent, args=(child_end, step, rank), daemon=True)
        # Waits until the fork server has imported torch; Ctrl-C interrupts that too
        self._process.start()
        child_end.close()

    def answer(self) -> RankTrace:
        """Return the trace, or raise the worker's error."""
        try:
            reply = self.answers.recv()
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
        if isinstance(reply, RankTrace):
            return reply
        raise UserError(reply) if isinstance(reply, tuple) else RuntimeError(reply)

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self.answers.close()


def _serve_parent(pipe: Connection, step: TracedStep, rank: int) -> None:
    """Run a worker, and send its trace or error to the parent.

    It ignores Ctrl-C, which reaches all processes of the terminal: the parent handles it and ends its workers.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    reply: RankTrace | tuple[Problem, ...] | str
    try:
        reply = _trace_rank(step, rank)
    except UserError as error:
        reply = error.problems
    except Exception as error:
        reply = f"rank {rank}: {type(error).__name__}: {error}"
    with suppress(BrokenPipeError):
        pipe.send(reply)


def _end_with_parent() -> None:
    """End this process when its parent dies: the closing pipe wakes the thread."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


@contextmanager
def _reported_regularly(tell: Callable[[float], None]) -> Iterator[None]:
    """Call the given function regularly from another thread with the seconds that the block has run."""
    began_s, is_over = time.monotonic(), threading.Event()

    def report_regularly() -> None:
        while not is_over.wait(STILL_S):
            tell(time.monotonic() - began_s)

    thread = threading.Thread(target=report_regularly, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@contextmanager
def _ends_when_terminated() -> Iterator[None]:
    """Turn SIGTERM into SystemExit(143), so that the stack unwinds as for Ctrl-C and no worker is left."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    previous_handler = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def _trace_rank(step: TracedStep, rank: int) -> RankTrace:
    from phalanx.train.tracing.traced_step import trace_rank

    return trace_rank(step.shape, step.settings, step.optim, rank=rank, state_dtype=step.state_dtype)
