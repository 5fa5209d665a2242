"""Checkpoints as a callback: copies in host memory, saves on disk when one is due, and their events."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from phalanx.errors import SystemFailure
from phalanx.record.provenance import redact
from phalanx.record.run import Run
from phalanx.train.callbacks import Callback
from phalanx.train.parallel.tensor_shard import TensorShard
from phalanx.train.state.async_saver import AsyncSaver
from phalanx.train.state.last_save import agree_on, write_last_step
from phalanx.train.state.paths import Location, parse_location
from phalanx.train.state.retention import CheckpointInterval, untrusted_deleted
from phalanx.train.state.save import SavedCheckpoint, save_checkpoint
from phalanx.train.state.training_state import checkpoint_meta, checkpoint_rank_meta, checkpoint_shards
from phalanx.train.step_result import StepRequest

if TYPE_CHECKING:
    from phalanx.train.step_result import StepReport
    from phalanx.train.training_context import TrainingContext

# The last save's attempts are numbered from here; smaller numbers are those of AsyncSaver.
LAST_SAVES = 1_000_000


class Checkpointing(Callback):
    """The callback that saves checkpoints; it is called last, so that it saves the state of all other callbacks."""

    def __init__(self, training: TrainingContext) -> None:
        control, plan = training.control, training.plan
        self._training, self._keeper, self._memory_every = training, control.keeper, plan.reliability.memory_every
        self._leaves_at, self._run_id = control.leaves_at, training.folder.run_id
        # A name of this start of the job, the same on all ranks and different from that of every earlier start.
        number = torch.tensor([time.time_ns() // 1000], device=training.engine.device)
        dist.broadcast(number, src=0)
        self._attempt = f"{int(number.item()):x}"
        self.saver = AsyncSaver(
            training.folder.checkpoints,
            attempt=self._attempt,
            rank=dist.get_rank(),
            world=dist.get_world_size(),
            keep=training.job.checkpoint.keep,
            point=control.hooks.save_point,
            fence=control.fence,
            generation=control.generation,
            copies=control.copies,
            trusted_step=self._trusted_step,
        )
        self._interval = CheckpointInterval.of(
            plan.reliability,
            training.job.checkpoint,
            now_s=time.monotonic() - _since_last_commit(training.folder, control.went_s),
        )
        self._saved_step = self._writing_step = -1
        # True if this rank's replica wrote the last save, not another model replica.
        self._has_written = False
        self._reason = ""  # reason of the save that is being written
        # The newest save that failed, with its step.
        self._failed: tuple[int, SystemFailure] | None = None
        self._copied_step = -1  # newest step of which this rank made a copy in memory
        self.safe_step = -1  # newest step whose copy is safe in memory on every rank
        # Seconds that the last copy in memory delayed training.
        self.copy_s: float | None = None
        self._save_requested = False
        # True until host memory is reserved: touching fresh memory takes longer than copying into it.
        self.needs_memory = False

    def _trusted_step(self) -> int:
        """Return the number of steps done before the present streak of skipped steps.

        The newest checkpoint up to that step is kept.
        """
        return self._training.skipped_steps.trusted_step

    def request_save(self) -> None:
        """Request a checkpoint after the next step; the request of one rank is enough."""
        self._save_requested = True

    # ---- around a step ---------------------------------------------------------------------------------------------

    def is_due(self) -> bool:
        """Return True if this rank requests a save: by `request_save`, or on rank 0 by the clock.

        All ranks learn of the request with the step's numbers.
        """
        is_first = dist.get_rank() == 0 and self._is_lead
        return self._save_requested or (is_first and self._interval.due(time.monotonic()))

    @property
    def _is_lead(self) -> bool:
        """True if this rank's model replica saves; only one replica does."""
        across = self._training.engine.across
        return across is None or across.is_lead

    def is_copy_unsafe(self) -> bool:
        """Return True unless this rank's newest copy in memory has also reached its replica on another host."""
        return self._keeper is None or self._copied_step < 0 or self._keeper.safe_step < self._copied_step

    def on_step_end(self, training: TrainingContext, report: StepReport) -> None:
        """Record the save that ended, copy the state to host memory, and save if some rank requested it."""
        self.tell_saved()
        # Not before the first step: reserving gigabytes takes seconds, for some of which CUDA calls wait.
        if self.needs_memory:
            self._reserve_memory(checkpoint_shards(training.engine))
        self._copy_to_memory(training)
        if report.result.requests[StepRequest.SAVE]:
            self._save_requested = False
            self.save("interval")

    def _reserve_memory(self, shards: Sequence[TensorShard]) -> None:
        """Allocate the host memory that copies and saves of these shards need."""
        self.needs_memory = False
        if self._keeper is not None:
            self._keeper.reserve(shards)
        self.saver.reserve(shards)

    def confirm_copies(self, copied_step: int, requests: tuple[bool, ...]) -> None:
        """Record that the copies of `copied_step` are safe on every rank, unless a rank requested COPY_UNSAFE."""
        if not requests[StepRequest.COPY_UNSAFE]:
            self.safe_step = copied_step

    @property
    def copied_step(self) -> int:
        """Newest step of which this rank has made a copy in memory."""
        return self._copied_step

    def _copy_to_memory(self, training: TrainingContext) -> None:
        """Copy the state to host memory, if this step is due; a lost rank is restored from such copies."""
        step, keeper, every = training.step, self._keeper, self._memory_every
        if keeper is None or not every or (step % every and step not in self._leaves_at):
            return
        skipped, began_s = keeper.skipped, time.perf_counter()
        keeper.put(
            step,
            checkpoint_shards(training.engine),
            self._checkpoint_meta(),
            held=self.safe_step,
            rank_meta=self._rank_meta(),
        )
        self.copy_s = time.perf_counter() - began_s
        if keeper.skipped == skipped:
            self._copied_step = step

    def _checkpoint_meta(self) -> dict[str, Any]:
        """Return a checkpoint's metadata that is the same on every rank."""
        training = self._training
        tokens = training.batch_plan.tokens_before(training.step)
        meta = checkpoint_meta(
            training.engine, step=training.step, tokens=tokens, data=training.batches.digest, run_id=self._run_id
        )
        meta["skipped_in_a_row"] = training.skipped_steps.in_a_row
        position = training.batches.position(training.step)
        return meta if position is None else {**meta, "data_position": position}

    def _rank_meta(self) -> dict[str, Any]:
        """Return a checkpoint's metadata of this rank."""
        states = self._training.callbacks.state_dict()
        return {**checkpoint_rank_meta(self._training.engine), **({"callbacks": states} if states else {})}

    # ---- on disk ---------------------------------------------------------------------------------------------------

    def save(self, reason: str) -> None:
        """Save this step, unless it is saved already.

        `reason` is recorded; only saves with the reason "interval" count when a report computes how often the run
        saves.
        """
        training = self._training
        step, asynchronous = training.step, training.job.checkpoint.asynchronous
        if step == self._saved_step:
            return
        began_s, self._saved_step = time.monotonic(), step
        self._has_written = self._is_lead
        if not self._is_lead:
            self._interval.saved(now_s=began_s, blocked_s=0.0)
            return
        training.pause()
        self.tell_saved()
        meta, rank_meta = self._checkpoint_meta(), self._rank_meta()
        try:
            self.saver.save(step=step, shards=checkpoint_shards(training.engine), meta=meta, rank_meta=rank_meta)
        except SystemFailure as error:  # from the previous save; this one has begun
            self.tell_unsaved(self._writing_step, error)
        self._writing_step, self._reason = step, reason
        if not asynchronous:
            # Training waits until it is written; `tell_saved` records errors.
            self.saver.finish()
        blocked_s = time.monotonic() - began_s
        self._interval.saved(now_s=began_s, blocked_s=blocked_s)
        training.events.write(
            "checkpoint",
            step=step,
            epoch=training.control.generation,
            phase="stage",
            reason=reason,
            blocked_s=blocked_s,
            seconds=None,
            bytes=None,
        )
        training.callbacks.call("on_checkpoint_taken", training, step)
        if not asynchronous:
            self.tell_saved(wait=True)

    def forget_unwritten(self) -> None:
        """Treat the last save as not made, unless this rank's replica wrote it.

        Called when a model replica was lost, perhaps the one that was to write that save.
        """
        if not self._has_written:
            self._saved_step = -1

    def tell_saved(self, *, wait: bool = False) -> None:
        """Record the end of the save in progress, if it has ended: committed or failed. `wait` waits for it."""
        if self._writing_step < 0 or (self.saver.busy and not wait):
            return
        step, self._writing_step = self._writing_step, -1
        try:
            saved = self.saver.wait()
        except SystemFailure as error:
            self.tell_unsaved(step, error)
            return
        if saved is not None:
            self._interval.persisted(saved.seconds)
            self._tell_commit(saved)

    def _tell_commit(self, saved: SavedCheckpoint) -> None:
        """Record a committed checkpoint, and the older ones that were deleted."""
        self._training.events.write(
            "checkpoint",
            step=saved.step,
            epoch=self._training.control.generation,
            phase="commit",
            reason=self._reason,
            path=saved.path.name,
            seconds=saved.seconds,
            bytes=saved.bytes,
            total_bytes=saved.total_bytes,
        )
        if saved.deleted_untrusted:
            text = untrusted_deleted(saved.deleted_untrusted, step=saved.step)
            self._training.events.write("remark", step=saved.step, text=text, is_told=True)
        if saved.deleted_for_room:
            steps = ", ".join(f"{step:,}" for step in saved.deleted_for_room)
            text = f"the disk is nearly full: checkpoints of step {steps} were deleted to make room for the next"
            self._training.events.write("remark", step=saved.step, text=text, is_warning=True)
        self._training.callbacks.call("on_checkpoint_saved", self._training, saved.step)

    def tell_unsaved(self, step: int, error: SystemFailure) -> None:
        """Record a save that failed.

        It is tried again when the next save is due; the checkpoint before it is intact.
        """
        self._saved_step = -1
        # The library of an object store may quote its keys.
        text = redact(str(error), os.environ).splitlines()[0]
        self._training.events.write("checkpoint", step=step, epoch=self._training.control.generation, error=text)
        self._failed = (step, error)

    # ---- leaving ---------------------------------------------------------------------------------------------------

    def save_last(self, reason: str) -> None:
        """Save the state with which the run ends.

        A save that fails is tried again, then written elsewhere; if that fails too, it raises.
        """
        training = self._training
        # Unless the interval's save of this very step has failed.
        if self._failed_at(training.step) is None:
            self.save(reason)
            self.tell_saved(wait=True)
        error = self._failed_at(training.step)
        if not self._is_lead or not agree_on(error is not None, training.engine.device):
            return
        training.control.check()
        training.pause()
        began_s, shards = time.monotonic(), checkpoint_shards(training.engine)
        saved = write_last_step(
            training.step,
            error,
            checkpoints=parse_location(training.folder.checkpoints),
            run_folder=training.folder.path,
            device=training.engine.device,
            write_to=partial(self._write_to, shards),
        )
        self._saved_step, self._has_written, self._reason = training.step, True, reason
        self._tell_commit(replace(saved, seconds=time.monotonic() - began_s))

    def _failed_at(self, step: int) -> SystemFailure | None:
        """Return the error of the save of `step`, or None if it did not fail."""
        return self._failed[1] if self._failed is not None and self._failed[0] == step else None

    def _write_to(
        self, shards: Sequence[TensorShard], place: Location, number: int, timeout_s: float
    ) -> SavedCheckpoint:
        """Write this rank's part of the last step to `place`, while training waits."""
        training = self._training
        return save_checkpoint(
            place,
            step=training.step,
            attempt=f"{self._attempt}.{LAST_SAVES + number}",
            shards=shards,
            meta=self._checkpoint_meta(),
            rank_meta=self._rank_meta(),
            rank=dist.get_rank(),
            world=dist.get_world_size(),
            keep=training.job.checkpoint.keep,
            generation=training.control.generation,
            timeout_s=timeout_s,
            fence=training.control.fence,
            trusted_step=self._trusted_step,
        )

    def leave_membership(self) -> None:
        """Wait until the step is safe in the memory of every rank, before the ranks leave the membership.

        Without a copy in memory of this step it is saved on disk.
        """
        training, keeper, step = self._training, self._keeper, self._training.step
        training.timeouts.lengthen()
        if keeper is None or self._copied_step != step:
            self.save("reform")
            self.tell_saved(wait=True)
        else:
            until_s = time.monotonic() + training.job.fault.dead_after_s
            # Otherwise the next membership would restore an older step.
            while keeper.safe_step < step and time.monotonic() < until_s:
                time.sleep(0.001)
        dist.barrier()


def _since_last_commit(folder: Run, went_s: float | None) -> float:
    """Return the seconds of this launch during which nothing was saved.

    A new membership within the launch does not reset that clock.
    """
    now_s = time.time()
    steps = folder.saved_steps()
    saved_s = folder.saved_at(max(steps)) if steps else 0.0
    return max(0.0, now_s - max(now_s if went_s is None else went_s, saved_s))
