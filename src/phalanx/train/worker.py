"""One rank of a run: joins the others, builds its part of the job, and trains."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from phalanx.errors import Problem, WorldError, mistake
from phalanx.job.schema import Job
from phalanx.plan.plan import Plan
from phalanx.record.events import EventWriter
from phalanx.record.run import Run, open_run
from phalanx.train.engine import Engine
from phalanx.train.loop import Loop
from phalanx.train.memory import MemoryMeter
from phalanx.train.models.protocol import build_model, differs_from_shape
from phalanx.train.settings import Settings
from phalanx.train.state import restore_newest, take_weights


def run_rank(
    *,
    run: Path,
    rank: int,
    world: int,
    store: Store | None,
    stop: Callable[[], bool],
    heartbeat: Callable[[int], None],
) -> None:
    """Train until the tokens are spent or a stop is asked for; whatever goes wrong is raised."""
    folder = open_run(str(run))
    plan = Plan.from_json(folder.plan_json.read_text(encoding="utf-8"), where=str(folder.plan_json))
    device = _device(plan, world)
    _join(plan, device, rank=rank, world=world, store=store)
    events = EventWriter(folder.events(rank), rank=rank)
    try:
        train(folder, plan, device, events, stop=stop, heartbeat=heartbeat)
    finally:
        events.close()
    dist.destroy_process_group()


def train(
    folder: Run,
    plan: Plan,
    device: torch.device,
    events: EventWriter,
    *,
    stop: Callable[[], bool],
    heartbeat: Callable[[int], None],
) -> None:
    """Build the engine, take up the newest checkpoint if there is one, and run the loop."""
    began_s, memory = time.monotonic(), MemoryMeter(device)
    job = plan.job
    engine = Engine(
        job.model,
        Settings.of(job, plan.layout, on_gpu=device.type == "cuda", allow_code=bool(folder.launch().get("allow_code"))),
        job.optim,
        device=device,
        state_dtype=job.precision.optimizer_state,
    )
    engine.initialise()
    restored = restore_newest(engine, folder.checkpoints)
    if job.train.weights and not restored.step:
        take_weights(engine, Path(job.train.weights))
    loop = Loop(folder, plan, engine, events, memory, stop=stop, heartbeat=heartbeat)
    if restored.data and restored.data != loop.dataset.digest:
        raise mistake(
            ", ".join(job.data.paths),
            "holds other tokens than the run has learnt from so far",
            why="the next batches would not be those that come next",
            fix="put the old dataset back, or start a new run",
        )
    warnings = [*restored.warnings, *_other_size(job, engine.settings)]
    events.write("ready", step=restored.step, seconds=time.monotonic() - began_s, warnings=warnings)
    loop.run(restored.step)


def _other_size(job: Job, settings: Settings) -> list[str]:
    """A warning where a network of the user's own is not of the size that was planned."""
    if not job.model.module:
        return []
    with torch.device("meta"):
        network = build_model(job.model, allow_code=settings.allow_code)
    found = differs_from_shape(network, job.model)
    return [found.render()] if found is not None else []


def _device(plan: Plan, world: int) -> torch.device:
    """The GPU of this rank, or a fair share of the cores."""
    if torch.cuda.is_available() and plan.cluster.accelerator.family != "cpu":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    # One thread where bits must not depend on the number of ranks: kernels split their sums by thread.
    torch.set_num_threads(1 if plan.job.numerics.reproducible else max(1, (os.cpu_count() or 1) // local))
    return torch.device("cpu")


def _join(plan: Plan, device: torch.device, *, rank: int, world: int, store: Store | None) -> None:
    # Gloo beside NCCL: what is kept in host memory is exchanged there too.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    limit_s = plan.job.train.timeout_s
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=limit_s),
            device_id=device if device.type == "cuda" else None,
        )
    except dist.DistError as error:
        if "timeout" not in str(error).lower():
            raise
        raise WorldError(
            Problem(
                where=f"rank {rank}",
                what=f"not all of {world} ranks arrived within {limit_s:g} s",
                why="every rank of the job must be started, with the same MASTER_ADDR and WORLD_SIZE",
                fix="look at the logs of the ranks that are missing, or raise train.timeout_s",
            )
        ) from error
