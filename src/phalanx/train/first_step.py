"""Do once, before ranks are forked, what the first step of every process does: for a rank that replaces another.

The others wait for its first step. With tensor parallelism torch decides in Python how each of about 70 operations is
split; compiled, dynamo traces the blocks. Both load and register as they go, and a process that is forked later has
that: on a CPU a quarter to a half of a compiled first step, a tenth or less of one with split tensors. What torch keeps
for a mesh is thrown away again: it would be another rank's.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from phalanx.job.model import ModelShape
from phalanx.job.schema import Job
from phalanx.plan.layout import Layout
from phalanx.train.engine import Engine
from phalanx.train.leave import forget_groups
from phalanx.train.settings import Settings
from phalanx.train.tracing.traced_step import constant_values, fake_world, forget_meshes

SEQUENCE = 12  # tokens, divided by 2 and by 3


def is_worth_loading(job: Job, layout: Layout, *, on_gpu: bool) -> bool:
    """Whether a first step takes long in Python; a network of the user's own is not run where ranks are forked."""
    settings = Settings.of(job, layout, on_gpu=on_gpu)
    return not job.model.module and not settings.loss and (layout.tensor > 1 or settings.compile)


def load_first_step(job: Job, layout: Layout, *, on_gpu: bool) -> None:
    """Run a forward pass of a model of the same kind, very small, on a CPU, in a group that moves nothing.

    Uses no GPU, starts no thread, draws no random number, and leaves no process group behind. No backward: it would
    ask CUDA for its devices, after which no forked process can use them.
    """
    settings = Settings.of(job, layout, on_gpu=on_gpu)
    shape, settings = _small_shape(job.model), _small_settings(settings)
    try:
        with _state_kept(), warnings.catch_warnings(), fake_world(0, settings.layout.devices):
            warnings.simplefilter("ignore")  # no backward comes, and other advice for a training
            engine = Engine(shape, settings, job.optim, device=torch.device("cpu"), read=constant_values)
            tokens_BS = torch.zeros(1, SEQUENCE, dtype=torch.int64)
            with engine._loss_context():
                engine._loss(engine.parts[0].model(tokens_BS), tokens_BS)
            del engine
    finally:
        if settings.compile:
            torch._dynamo.reset()
        forget_meshes()
        forget_groups()
        gc.collect()
        gc.freeze()  # as after the imports: what is left is shared with the ranks


def try_first_step(job: Job, layout: Layout, *, on_gpu: bool) -> list[str]:
    """In a process of its own: the seconds that it took, or why it must not be done where ranks are forked."""
    began_s, threads = time.monotonic(), _num_threads()
    try:
        load_first_step(job, layout, on_gpu=on_gpu)
    except Exception as error:
        return [f"failed: {type(error).__name__}: {error}"]
    if _num_threads() > threads:
        return ["started a thread"]
    if not _is_fork_usable():
        return ["has used CUDA"]
    return [f"{time.monotonic() - began_s:.3f}"]


def _small_shape(shape: ModelShape) -> ModelShape:
    """A dense model with the same switches: what is loaded depends on them, not on sizes."""
    return replace(
        shape,
        layers=1,
        hidden=48,
        heads=12,
        kv_heads=12 if shape.kv_heads == shape.heads else 6,
        head_dim=4,
        ffn=48,
        vocab=48,
        max_positions=SEQUENCE if shape.max_positions else 0,
        experts=0,
        experts_per_token=0,
        balance="none",
        q_lora_rank=0,
        kv_lora_rank=0,
    )


def _small_settings(settings: Settings) -> Settings:
    """A mesh that no rank of the job has, so that nothing found for it is ever taken for theirs."""
    layout = settings.layout
    tensor = 1 if layout.tensor == 1 else 2 if layout.tensor == 3 else 3
    data = 1 if not layout.zero else 2 if layout.shard == 3 else 3
    small = replace(
        layout,
        data=data,
        shard=data,
        tensor=tensor,
        context=1,
        pipeline=1,
        virtual_pipeline=1,
        expert=1,
        micro_batch=1,
        accumulation=1,
        recompute="none",
        offload="none",
        compression="none",
        schedule="1f1b",
    )
    return replace(
        settings,
        layout=small,
        sequence=SEQUENCE,
        compute="bf16" if settings.compute == "fp8" else settings.compute,
        compile_backend="eager",  # traced and not compiled: there is no compile cache of this
        optimizer="",
    )


@contextmanager
def _state_kept() -> Iterator[None]:
    """Random numbers and threads as they were, and no look at a GPU."""
    torch_state, python_state, threads = torch.get_rng_state(), random.getstate(), torch.get_num_threads()
    torch.set_num_threads(1)  # threads of a kernel would not be there in a forked process
    try:
        with _without_gpu_state():
            yield
    finally:
        torch.set_num_threads(threads)
        random.setstate(python_state)
        torch.set_rng_state(torch_state)


@contextmanager
def _without_gpu_state() -> Iterator[None]:
    """dynamo keeps the GPU's random numbers and its current stream while it traces, and starts CUDA to read them."""
    if rules := sys.modules.get("torch._dynamo.trace_rules"):
        rules.get_torch_obj_rule_map()  # finds functions by name, once: not while another stands in for one of them
    read_random, is_available = torch.cuda.get_rng_state, torch.accelerator.is_available
    torch.cuda.get_rng_state = lambda *_: None  # type: ignore[assignment,return-value]
    torch.accelerator.is_available = lambda: False
    try:
        yield
    finally:
        torch.cuda.get_rng_state, torch.accelerator.is_available = read_random, is_available


def _num_threads() -> int:
    """Threads of this process, also those that Python does not know."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()


def _is_fork_usable() -> bool:
    """Whether a process that is forked from this one can use CUDA: asks for the number of devices in one."""
    if not torch.backends.cuda.is_built():
        return True
    child = os.fork()
    if not child:
        code = 1
        try:
            count = torch._C._cuda_getDeviceCount()  # type: ignore[attr-defined]
            code = 0 if count and not torch._C._cuda_isInBadFork() else 1  # type: ignore[attr-defined]
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
