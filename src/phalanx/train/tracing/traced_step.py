"""Dry trace of a rank: its real training step on one CPU, with a fake process group and fake tensors.

To make the engine traceable, shapes between stages are known in advance, the one read of a step returns constants,
and experts take tokens in turn. A short first step is not recorded: FSDP2 and the optimizer create their buffers in
it.
"""

from __future__ import annotations

import gc
import resource
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from phalanx.errors import UserError, mistake
from phalanx.job.model import ModelShape
from phalanx.job.schema import Optim
from phalanx.train.engine import Engine
from phalanx.train.parallel.expert import balance_routing
from phalanx.train.parallel.pipeline import assume_static
from phalanx.train.rank_settings import Settings
from phalanx.train.tracing.gpu_kernels import fused_loss, fused_norms, fused_products
from phalanx.train.tracing.log import RankTrace
from phalanx.train.tracing.recorder import Recorder
from phalanx.train.tracing.shortcuts import Shortcuts, run_plainly
from phalanx.train.tracing.traced_ranks import TracedStep
from phalanx.train.verify.ranks import run_ranks


def trace_rank(
    shape: ModelShape, settings: Settings, optim: Optim, *, rank: int, state_dtype: str = "fp32"
) -> RankTrace:
    """Record one step of `rank` without its peers, its data or its memory."""
    began_s = time.perf_counter()
    forget_meshes()
    with (
        warnings.catch_warnings(),
        _fake_world(rank, settings.layout.devices),
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
    ):
        # Spares the garbage collector from walking torch's million objects
        gc.freeze()
        # torch's warnings about the program, which a training run shows instead
        warnings.simplefilter("ignore")
        fused = fused_products() if settings.compile else nullcontext()
        try:
            with fused:
                trace = record_step(
                    shape,
                    traceable_settings(settings),
                    optim,
                    state_dtype=state_dtype,
                    fakes=mode,
                    compiled=settings.compile,
                )
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            if not shape.module:
                raise
            raise _reads_values(shape, error) from None
        finally:
            gc.unfreeze()
    rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return replace(trace, seconds=time.perf_counter() - began_s, rss_bytes=rss_bytes)


def _reads_values(shape: ModelShape, error: Exception) -> UserError:
    """Return the error for an untraceable network of the user's, at its last line in the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    own_frames = [frame for frame in frames if frame.filename == shape.module.rpartition(":")[0]]
    location = f"{own_frames[-1].filename}:{own_frames[-1].lineno}" if own_frames else "model.module"
    return mistake(
        location,
        f"{shape.module} reads the value of a tensor in forward",
        why="a traced step has shapes and no values; nn.BatchNorm with momentum=None reads its count, for one",
        fix="train a few steps and look at the record, or trace a network that does not",
    )


def traceable_settings(settings: Settings) -> Settings:
    """Replace settings that have no CPU kernels or hide operators: compiled blocks run eagerly, fp8 as bf16.

    `trace_rank` compensates for it in memory: see `gpu_kernels.py`.
    """
    compute = "bf16" if settings.compute == "fp8" else settings.compute
    return replace(settings, compile=False, compute=compute)


def record_step(
    shape: ModelShape,
    settings: Settings,
    optim: Optim,
    *,
    state_dtype: str,
    fakes: FakeTensorMode | None,
    compiled: bool = False,
) -> RankTrace:
    """Build this rank's engine, warm it up, and record one step of it. The process group must exist.

    A dry step can represent a `compiled` one: it runs eagerly, and saves what the compiled one would.
    """
    layout, dry = settings.layout, fakes is not None
    read = constant_values if dry else torch.Tensor.tolist
    run = run_plainly if fakes is None else Shortcuts(fakes).run
    with fused_norms(), Recorder(run) as recorder:
        engine = Engine(shape, settings, optim, device=torch.device("cpu"), state_dtype=state_dtype, read=read)
        for stage in engine.parts:
            balance_routing(stage.model)
        if compiled:
            engine.micro_batches.loss = fused_loss
        recorder.attach(engine)
        if dry:
            # Micro-batches of the warm-up step: two, so that one of them is not the last; 1F1B needs one per stage.
            least = layout.pipeline if layout.virtual_pipeline == 1 else 2
            _run_steps(engine, min(layout.accumulation, max(least, 2)), dry=True)
            engine.micro_batches.clear_schedules()  # and their receive buffers
        else:
            engine.initialise()
            _run_steps(engine, layout.accumulation, dry=False)
        recorder.begin()
        _run_steps(engine, layout.accumulation, dry=dry)
        return recorder.finish()


def _run_steps(engine: Engine, micro_batches: int, *, dry: bool) -> None:
    layout = engine.settings.layout
    if dry and layout.pipeline > 1:
        assume_static(engine.micro_batches.schedule(micro_batches)[0])
    tokens_BS = torch.zeros(micro_batches * layout.micro_batch, engine.settings.sequence, dtype=torch.int64)
    engine.step(tokens_BS, tokens_BS, lr=1e-4)


def constant_values(numbers: torch.Tensor) -> list[float]:
    """Return constants for the values that ranks would sum: a finite norm, a loss, some tokens, and no stop request."""
    return [1.0, 1.0, 1.0] + [0.0] * (numbers.numel() - 3)


def forget_meshes() -> None:
    """Clear DTensor's caches, which refer to the groups of meshes that an earlier trace has destroyed."""
    from torch.distributed.tensor import _redistribute, debug

    for module, name in ((debug, "_clear_sharding_prop_cache"), (_redistribute, "clear_redistribute_planner_cache")):
        # torch 2.11 lacks the second
        getattr(module, name, lambda: None)()


@contextmanager
def _fake_world(rank: int, world: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def record_ranks(step: TracedStep, *, limit_s: float | None = None) -> list[RankTrace]:
    """Record the step on real ranks of this machine over gloo, as a reference for a dry trace.

    Experts take tokens in turn, as in a dry trace.
    """
    return run_ranks(_record_rank, step.settings.layout.devices, step, limit_s=limit_s)


def _record_rank(_: int, step: TracedStep) -> RankTrace:
    return record_step(
        step.shape, traceable_settings(step.settings), step.optim, state_dtype=step.state_dtype, fakes=None
    )
