"""Several ranks of one job, each traced in a process of its own, and which of its ranks there are to tell apart."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

from phalanx.errors import mistake
from phalanx.job.model import ModelShape
from phalanx.job.schema import Job, Optim
from phalanx.plan.layout import Layout
from phalanx.train.settings import Settings
from phalanx.train.tracing.log import RankTrace


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What every rank of a job is told: enough to build its engine."""

    shape: ModelShape
    settings: Settings
    optim: Optim
    state_dtype: str

    @classmethod
    def of(cls, job: Job, layout: Layout, *, allow_code: bool = False) -> Step:
        """The step of a planned job."""
        settings = Settings.of(job, layout, on_gpu=False, allow_code=allow_code)
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
    step: Step, ranks: Sequence[int], *, workers: int = 0, done: Callable[[RankTrace], None] = lambda _: None
) -> list[RankTrace]:
    """The step of each rank, in the order asked for; one rank alone is traced in this process."""
    if len(ranks) == 1:
        found = [_trace(step, ranks[0])]
        done(found[0])
        return found
    workers = workers or min(len(ranks), os.cpu_count() or 1)
    traces: dict[int, RankTrace] = {}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["phalanx.train.tracing.dry"])  # torch is imported once, not by every worker
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        waiting = [pool.submit(_trace, step, rank) for rank in ranks]
        for future in as_completed(waiting):
            trace = future.result()
            traces[trace.rank] = trace
            done(trace)
    return [traces[rank] for rank in ranks]


def _trace(step: Step, rank: int) -> RankTrace:
    from phalanx.train.tracing.dry import trace_rank

    return trace_rank(step.shape, step.settings, step.optim, rank=rank, state_dtype=step.state_dtype)
