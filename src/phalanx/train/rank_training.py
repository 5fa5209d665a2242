"""One rank's training in one membership: builds the engine, restores the run's state, and runs the training loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from phalanx.elastic.heartbeat_board import Phase
from phalanx.errors import Problem, UserError, mistake
from phalanx.job.dataset import MANIFEST
from phalanx.job.schema import Job
from phalanx.plan.plan import Plan
from phalanx.record.events import EventWriter
from phalanx.record.run import Run
from phalanx.train.callbacks import Callback
from phalanx.train.engine import Engine
from phalanx.train.guard.spikes import SpikeDetector
from phalanx.train.kernels.engine_kernels import kernel_lines
from phalanx.train.listeners import listening_sockets, refuse_strangers
from phalanx.train.loop import run_training
from phalanx.train.memory_use import MemoryMeter
from phalanx.train.models.own_model import build_outline, differs_from_shape
from phalanx.train.plugins import load_plugins, refuse_plugins
from phalanx.train.rank_control import RankControl
from phalanx.train.rank_settings import Settings
from phalanx.train.state.paths import commit_step
from phalanx.train.state.rank_state import seed_random_state
from phalanx.train.state.reader import list_commits
from phalanx.train.state.replica_reader import ReplicaSource
from phalanx.train.state.retention import delete_commits_after, remove_drafts, untrusted_deleted
from phalanx.train.state.training_state import (
    RestoredRun,
    load_hf_weights,
    restore_from_replicas,
    restore_newest_checkpoint,
)
from phalanx.train.telemetry.communicators import tell_communicators
from phalanx.train.training_context import TrainingContext


def train_rank(
    folder: Run,
    plan: Plan,
    device: torch.device,
    events: EventWriter,
    control: RankControl,
    *,
    copies: ReplicaSource | None = None,
    at_most: int | None = None,
    store: Store | None = None,
    joined_s: float = 0.0,
    notes: Sequence[str] = (),
    allow_code: bool = False,
    built: Callable[[], None] | None = None,
    enter_round: Callable[[int], None] = lambda number: None,
    report_restored: Callable[..., None] = lambda **fields: None,
    callbacks: Sequence[Callback] = (),
) -> tuple[str, int]:
    """Build the engine, restore the run's state and run the training loop.

    Returns how the loop ended ("done", "stopped" or "reform") and the number of steps done.

    Args:
        copies: copies of the state in host memory; without them, the newest checkpoint is restored.
        at_most: restore a checkpoint of at most so many steps, and delete newer ones.
        store, joined_s: the store in which the ranks met, and the seconds it took to make the group of all ranks.
        notes: what NCCL cannot use on this host; recorded with the communicators.
        allow_code: consent to run code that the job names, from the user who started the agent; the run folder cannot
            give it.
        built: called by a model replica that joins late once it is built; it then takes the state of the others.
        enter_round: called before replicas are connected: sockets made from then on are cut when a replica is lost.
        report_restored: called on rank 0 with the step and the source that training continues from.
        callbacks: called after those of the job.
    """
    across = control.rounds.across if control.rounds is not None else None
    began_s, memory = time.monotonic(), MemoryMeter(device)
    job = plan.job
    plugins = load_plugins(job, allow_code=allow_code)
    plugins = replace(plugins, callbacks=(*plugins.callbacks, *callbacks))
    # Sockets that plug-ins have opened: they stay open to other processes.
    listening = listening_sockets()
    refuse_plugins(job.plugins, plan.layout, loss_parallel=job.parallel.loss_parallel)
    engine = Engine(
        job.model,
        Settings.of(job, plan.layout, on_gpu=device.type == "cuda", allow_code=allow_code),
        job.optim,
        device=device,
        state_dtype=job.precision.optimizer_state,
        across=across,
    )
    if control.peers is not None:
        control.peers.attach(engine, steps=plan.duration.steps)
    if device.type == "cpu":
        refuse_strangers(listening)
    engine.spikes = SpikeDetector(job.train.spike_factor)
    tell_communicators(
        events,
        store,
        engine.meshes.group_times,
        joined_s=joined_s,
        generation=control.generation,
        device=device,
        notes=notes,
    )
    control.hooks.restoring(control.generation, across.rank if across is not None else dist.get_rank())
    if dist.get_rank() == 0 and (across is None or across.replica == 0) and built is None:
        # Half-written checkpoints of dead processes.
        remove_drafts(folder.checkpoints)
    if built is not None:
        engine.initialise_unsaved()
        restored, source = RestoredRun(), "replica"
    else:
        restored, source = _restore_state(engine, folder, copies, at_most)
        # After restoring, which has verified the older state that the run continues from.
        if at_most is not None and dist.get_rank() == 0 and (across is None or across.replica == 0):
            deleted = delete_commits_after(folder.checkpoints, at_most)
            if deleted:
                text = untrusted_deleted(deleted, step=restored.step)
                events.write("remark", step=restored.step, text=text, is_told=True)
        if job.train.weights and not restored.step:
            load_hf_weights(engine, Path(job.train.weights))
    training = TrainingContext(folder, plan, engine, events, memory, control, plugins)
    try:
        if control.rounds is not None:
            restored = _meet_replicas(control, engine, restored, built, enter_round)
            # The copies of the earlier process are in the memory of the other replicas too.
            if built is not None:
                training.checkpoints.safe_step = restored.step
        if restored.data and restored.data != training.batches.digest:
            raise _data_changed(job, before=restored.data, now=training.batches.digest)
        training.restore_extras(engine.restored_extras)
        if control.peers is not None:
            restored = replace(restored, step=control.peers.enter(training, restored.step))
        warnings = [*restored.warnings, *_size_warning(job, engine.settings)]
        events.write(
            "ready",
            step=restored.step,
            epoch=control.generation,
            source=source,
            seconds=time.monotonic() - began_s,
            warnings=warnings,
        )
        if dist.get_rank() == 0 and (lines := kernel_lines(engine)):
            events.write("remark", step=restored.step, text="; ".join(lines), is_told=True)
        if dist.get_rank() == 0 and built is None:
            report_restored(step=restored.step, source=source)
        training.checkpoints.needs_memory = control.keeper is not None and source != "memory"
        control.progress(restored.step, Phase.BUILDING)  # the first step may compile
        return run_training(training, restored.step), training.step
    finally:
        training.close()
        if control.peers is not None:
            control.peers.close()


def _meet_replicas(
    control: RankControl,
    engine: Engine,
    restored: RestoredRun,
    built: Callable[[], None] | None,
    enter_round: Callable[[int], None],
) -> RestoredRun:
    """Connect to the other model replicas for the first time.

    A replica that has done fewer steps than another takes over its state.
    """
    assert control.rounds is not None
    if built is not None:
        built()
    else:
        enter_round(0)
    step = control.rounds.regroup(engine, restored.step)
    control.check()
    return restored if step == restored.step else replace(restored, step=step, data="")


def _restore_state(
    engine: Engine, folder: Run, copies: ReplicaSource | None, at_most: int | None
) -> tuple[RestoredRun, str]:
    """Restore the state from host memory, else from disk, else initialise it; return it with its source.

    A damaged copy in memory is a warning, and the next source is tried.
    """
    warnings: tuple[str, ...] = ()
    engine.initialise_unsaved()
    if copies is not None:
        restored = restore_from_replicas(engine, copies)
        if not restored.warnings:
            return restored, "memory"
        warnings = restored.warnings
    restored = restore_newest_checkpoint(engine, folder.checkpoints, at_most=at_most, run_id=folder.run_id)
    if at_most is None and dist.get_rank() == 0:
        warnings = (*warnings, *_lost_checkpoint_warning(folder, restored.step))
    if not restored.step:
        engine.initialise()
        seed_random_state(engine.settings.seed, rank=dist.get_rank(), world=dist.get_world_size())
    return replace(restored, warnings=(*warnings, *restored.warnings)), "disk" if restored.step else "start"


def _lost_checkpoint_warning(folder: Run, restored_step: int) -> list[str]:
    """Return a warning if a newer step than the restored one was saved and its checkpoint is no longer there."""
    newest = folder.committed_step()
    if newest is None or newest <= restored_step:
        return []
    if newest in {commit_step(place.name) for place in list_commits(folder.checkpoints)}:
        return []  # damaged: restoring has warned of it
    what = f"the checkpoint of step {newest:,} was saved, and is gone"
    why = f"training goes on from step {restored_step:,}" if restored_step else "training starts again from step 0"
    return [Problem(where=str(folder.checkpoints), what=what, why=why).render()]


def _data_changed(job: Job, *, before: str, now: str) -> UserError:
    """Return the error for a dataset that differs from the one the checkpoint was trained on.

    It names the folder whose digest differs, where digests can be compared folder by folder.
    """
    paths, old, new = job.data.paths, before.split("+"), now.split("+")
    if job.plugins.data or not len(paths) == len(old) == len(new):
        where, digests = job.plugins.data or ", ".join(paths), ""
    else:
        place = next(index for index, pair in enumerate(zip(old, new, strict=True)) if len(set(pair)) > 1)
        where = str(Path(paths[place]) / MANIFEST)
        digests = f": its digest is {new[place][:12]}…, and the checkpoint was trained on {old[place][:12]}…"
    return mistake(
        where,
        f"holds other tokens than the run has learnt from so far{digests}",
        why="the next batches would not be those that come next",
        fix="put the old dataset back (phalanx data show prints its digest), or start a new run",
    )


def _size_warning(job: Job, settings: Settings) -> list[str]:
    """Return a warning if the user's own network has another size than the plan assumed."""
    if not job.model.module:
        return []
    network = build_outline(job.model, allow_code=settings.allow_code)
    problem = differs_from_shape(network, job.model)
    return [problem.render()] if problem is not None else []
