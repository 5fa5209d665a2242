"""The training loop: a page. Data in, a step, the record of it, and now and then a look up."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from phalanx.elastic.heartbeat_board import Phase
from phalanx.errors import SystemFailure
from phalanx.plan.auto_settings import digest_every
from phalanx.plan.plan import Plan
from phalanx.plan.shrink_layout import BatchDeal
from phalanx.record.events import EventWriter
from phalanx.record.provenance import redact
from phalanx.record.run import Run
from phalanx.train.collective_timeouts import CollectiveTimeouts
from phalanx.train.data.batches import Batches, BatchPlan
from phalanx.train.data.dataset import TokenDataset
from phalanx.train.engine import Engine, StepRequest, StepResult
from phalanx.train.evaluate import HeldoutScorer, sample_texts
from phalanx.train.guard.compiled import (
    Comparison,
    code_key,
    compare_compiled,
    compiled_refusal,
    event_fields,
    is_comparison_due,
)
from phalanx.train.guard.divergence import ReplicaGuard, digest_pieces
from phalanx.train.guard.verdict import Divergence, settle_divergence
from phalanx.train.memory import MemoryMeter
from phalanx.train.optim.schedule import learning_rate
from phalanx.train.parallel.expert import imbalance
from phalanx.train.rank_control import RankControl, UntrustedState
from phalanx.train.state.async_saver import AsyncSaver
from phalanx.train.state.retention import CheckpointInterval
from phalanx.train.state.training_state import checkpoint_meta, checkpoint_rank_meta, checkpoint_shards
from phalanx.train.telemetry.clock import compiled_s
from phalanx.train.telemetry.timeline import Sample, TimelineSampler
from phalanx.units import plural

# What is said of a buffer of the user's own network.
FIRST_RANK = "is changed by forward: data ranks change it each in its own way, and the first one's value counts"
UNSAVED = (
    "is changed by forward and registered with persistent=False: no checkpoint holds it, so after a restart it begins "
    "as it was built"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """A step that was taken, and where its time went."""

    result: StepResult
    lr: float
    duration_s: float  # from its begin to the end of the update, less what it was held up to be looked into
    data_s: float  # of it waiting for the batch
    before_s: float  # of it until the engine began
    own_s: float  # of it this rank's own doing: computing, and what surrounds it
    compile_s: float | None  # compiling, in the middle of it; None when nothing was
    samples: Sequence[Sample]  # one when the step was looked into


class TrainingLoop:
    """Everything a run needs between its first and its last step."""

    def __init__(
        self,
        folder: Run,
        plan: Plan,
        engine: Engine,
        events: EventWriter,
        memory: MemoryMeter,
        orders: RankControl,
    ) -> None:
        self.folder, self.plan, self.job, self.engine, self.events = folder, plan, plan.job, engine, events
        self.orders, self.hooks = orders, orders.hooks
        self.dataset = TokenDataset.open([folder.path / path for path in self.job.data.paths], "train")
        self.batch_plan = BatchPlan.of(self.job.batch, sequence=self.job.data.sequence, tokens=plan.duration.tokens)
        dealing = BatchDeal.of(engine.settings.layout, reproducible=engine.settings.reproducible)
        self.batches = Batches(
            self.dataset,
            self.dataset.sampler(self.job.data.sequence, self.job.data.seed),
            self.batch_plan,
            sequence=self.job.data.sequence,
            data_rank=engine.meshes.index("data"),
            data_ranks=dealing.data_ranks,
            micro=dealing.micro,
            rounds=dealing.rounds,
            powers=dealing.powers,
        )
        self.heldout = HeldoutScorer(self.dataset.folders, engine, sequences=self.job.train.evaluate_sequences)
        self.saver = AsyncSaver(
            folder.checkpoints,
            attempt=_attempt(engine.device),
            rank=dist.get_rank(),
            world=dist.get_world_size(),
            keep=self.job.checkpoint.keep,
            point=self.hooks.save_point,
            fence=orders.fence,
            epoch=orders.epoch,
            copies=orders.copies,
        )
        self.memory, self.patience = memory, CollectiveTimeouts.of(plan)
        self._saved_step = self._taken_step = -1
        self._taken_for = ""  # why the save that is being written was made
        self.interval = CheckpointInterval.of(
            plan.reliability, self.job.checkpoint, now_s=time.monotonic() - _since_last_commit(folder, orders.went_s)
        )
        self._skipped, self._is_last = 0, False
        self._warned: set[tuple[str, str]] = set()
        self._put = self._held = -1  # steps of which a copy was made in memory, and is safe there on every rank
        wall_s = plan.duration.wall_s
        every = digest_every(self.job.fault, plan.reliability, plan.prediction, wall_s=wall_s)
        self.guard = ReplicaGuard(engine.state, every=every)
        self._sound = 0  # newest step whose state nothing speaks against
        self._guard_s = 0.0
        self.timeline = TimelineSampler(
            engine.meshes,
            engine.device,
            every=self.job.telemetry.timeline_every,
            compiled=engine.settings.compile,
            tell=lambda text: events.write("remark", step=self.step, text=text),
        )
        self._hold_s: float | None = None  # that the copy after the last step held the training up
        self._telemetry_s = 0.0  # the timeline's `spent_s` at the last step, less what writing that one took
        engine.touch_gradients = self._before_update
        self.step = 0  # steps that are done

    def run(self, first: int) -> str:
        """Take every step from `first` on; "done", or "stopped" or "reform" when all ranks were asked to leave."""
        total = self.batch_plan.steps
        self.events.write("run_start", step=first, steps=total, world=dist.get_world_size(), epoch=self.orders.epoch)
        step, leaving = first, ""
        self._sound = first
        self.patience.begin()
        if step < total:
            self._compare_compiled(step)
        if self.engine.listener is not None:
            self.engine.listener.norms.next = first
        while step < total and not leaving:
            self.step = step
            taken = self._step(step)
            result = taken.result
            step += 1
            self.patience.stepped(taken.duration_s)
            if self.hooks.records_samples:
                self.hooks.updated(step - 1, self.engine.pieces, self.engine.optimizer.state())
            self._compare(step)
            self._record(step - 1, taken)
            self._warn_once(self.engine.first_rank_buffers, FIRST_RANK)
            self._hold(step)
            self._count_skipped(result, step)
            self._tell_saved()
            if self._is_due(step):
                self._evaluate(step)
            if result.wishes[StepRequest.SAVE]:
                self._save(step, "interval")
            leaving = self._leaving(step, result)
            self.orders.progress(step, Phase.TRAINING)
        self.step = step
        if leaving == "reform" and step < total:
            self._await_copies(step)
            return leaving
        self._finish(step, stopped=leaving == "stopped" and step < total)
        return "stopped" if leaving and step < total else "done"

    def _compare_compiled(self, step: int) -> None:
        """Hold compiled code against eager code before anything is learnt from it; raises on every rank alike."""
        orders = self.orders
        if not (self.job.train.compile_check and is_comparison_due(self.engine, orders.compared)):
            return
        began_s, compiled = time.perf_counter(), compiled_s()
        tokens, targets = (torch.from_numpy(rows) for rows in self.batches.get(step))
        with self.memory.left_out():
            found = compare_compiled(self.engine, tokens, targets)
        took_s = time.perf_counter() - began_s
        told = event_fields(found)
        self.events.write(
            "compile_check", step=step, epoch=orders.epoch, seconds=took_s, compile_s=compiled_s() - compiled, **told
        )
        if isinstance(found, Comparison) and not found.passes:
            raise compiled_refusal(found, compute=self.engine.settings.compute, where="train.compile")
        orders.compared.add(code_key(self.engine))
        orders.progress(step, Phase.BUILDING)

    def _leaving(self, step: int, result: StepResult) -> str:
        if result.wishes[StepRequest.STOP]:
            return "stopped"
        return "reform" if result.wishes[StepRequest.REFORM] or step in self.orders.leaves_at else ""

    def close(self) -> None:
        """Give up what runs beside the steps; the formation is over."""
        self.saver.abandon()
        self.batches.close()

    def _before_update(self, grads: Sequence[torch.Tensor]) -> None:
        """As late as can be before the weights are used up: whether they are still what the last update left."""
        self.hooks.gradients(self.step, grads)
        found = self.guard.before(self.step)
        if found is not None:
            raise self._diverged(found)

    def _compare(self, step: int) -> None:
        """Compare copies of the state before anything keeps it; raises Astray on every rank alike."""
        began_s = time.perf_counter()
        found = self.guard.check(step)
        self._guard_s = time.perf_counter() - began_s
        if found is not None:
            raise self._diverged(found)
        case = self.orders.case
        if case is not None and step == case.step and case.boxes in self.guard.last:
            wrong = settle_divergence(case.digests, self.guard.last[case.boxes])
            if wrong is not None:
                what = f"rank {wrong} was wrong at step {step:,}: done again, the others' values came out"
                raise UntrustedState("settled", step=step, sound=step, what=what, suspects=(wrong,))
        if self.guard.is_due(step):
            self._sound = step

    def _diverged(self, found: Divergence) -> UntrustedState:
        text = found.problem().render().splitlines()[0]
        certain = found.suspects if found.certain else ()
        return UntrustedState(
            "diverged", step=found.step, sound=self._sound, what=text, suspects=certain, evidence=found.to_json()
        )

    def _hold(self, step: int) -> None:
        """Copy the state to host memory: what a lost rank is restored from."""
        every = self.plan.reliability.memory_every
        if self.orders.keeper is None or not every or (step % every and step not in self.orders.leaves_at):
            return
        skipped = self.orders.keeper.skipped
        began_s = time.perf_counter()
        self.orders.keeper.put(
            step,
            checkpoint_shards(self.engine),
            self._meta(step),
            held=self._held,
            rank_meta=checkpoint_rank_meta(self.engine),
        )
        self._hold_s = time.perf_counter() - began_s
        if self.orders.keeper.skipped == skipped:
            self._put = step

    def _await_copies(self, step: int) -> None:
        """Leave a formation only with the step safe in memory everywhere; where it is not kept there, on the disk."""
        keeper = self.orders.keeper
        self.patience.rest()
        if keeper is None or self._put != step:
            self._save(step, "reform")
            self._tell_saved(wait=True)
        else:
            until_s = time.monotonic() + self.job.fault.dead_after_s
            while keeper.safe_step < step and time.monotonic() < until_s:  # else whoever forms next takes an older one
                time.sleep(0.001)
        dist.barrier()

    def _rest(self, step: int) -> None:
        """No step for a while: the supervisor and the other ranks are to wait longer."""
        self.orders.progress(step, Phase.RESTING)
        self.patience.rest()

    def _wishes(self) -> tuple[bool, ...]:
        keeper = self.orders.keeper
        unheld = keeper is None or self._put < 0 or keeper.safe_step < self._put
        return self.orders.stop(), self._wants_save(), self.orders.reform(), unheld

    def _step(self, step: int) -> StepReport:
        began_s, compiled = time.perf_counter(), compiled_s()
        self.hooks.step_begins(step)  # within the step: what a drill slows down is slow
        asked_s = time.perf_counter()
        tokens, targets = (torch.from_numpy(rows) for rows in self.batches.get(step))
        data_s = time.perf_counter() - asked_s
        seen, total = self.batch_plan.tokens_before(step + 1), self.plan.duration.tokens
        lr = learning_rate(self.job.optim, tokens_seen=seen, total_tokens=total)
        before = self._put
        ready_s = time.perf_counter()
        with self.timeline.step(step) as samples:
            entered_s = time.perf_counter()
            result = self.engine.step(tokens, targets, lr=lr, wishes=self._wishes)
            ended_s = time.perf_counter()
        self.orders.check()
        opening_s = self.timeline.opening_s  # telemetry's own: no part of the step
        if not result.wishes[StepRequest.UNHELD]:
            self._held = before
        return StepReport(
            result=result,
            lr=lr,
            duration_s=ended_s - began_s - opening_s,
            data_s=data_s,
            before_s=entered_s - began_s - opening_s,
            own_s=result.compute_s + ready_s - began_s - data_s,
            compile_s=compiled_s() - compiled or None,
            samples=samples,
        )

    def _record(self, step: int, taken: StepReport) -> None:
        result, noise = taken.result, taken.result.noise
        inside = self.timeline.inside(taken.samples, result.phases, data_s=taken.data_s, before_s=taken.before_s)
        proof, guard_s = self._proof(step)
        self.orders.check()
        began_s = time.perf_counter()
        self.events.write(
            "step",
            step=step,
            epoch=self.orders.epoch,
            loss=result.loss,
            tokens=result.tokens,
            duration_s=taken.duration_s,
            grad_norm=result.grad_norm,
            lr=taken.lr,
            tokens_per_s=result.tokens / taken.duration_s,
            memory_bytes=self.memory.peak_bytes(),
            compute_s=taken.own_s,
            wait_s=result.wait_s,
            data_s=taken.data_s,
            compile_s=taken.compile_s,
            noise_scale=result.noise_samples,
            noise_trace=noise.trace if noise is not None else None,
            grad_squared=noise.squared if noise is not None else None,
            skipped=result.skipped,
            bytes_sent=result.bytes_sent,
            collective_s=inside.collective_s,
            collective_bytes=inside.collective_bytes,
            expert_imbalance=self._expert_imbalance(),
            held=self._held if self._held >= 0 else None,
            hold_s=self._hold_s,
            guard_s=guard_s,
            telemetry_s=self.timeline.spent_s - self._telemetry_s,
            **proof,
        )
        if inside.timeline is not None:
            fields = {"seconds": taken.duration_s, **inside.timeline}
            self.events.write("timeline", step=step, epoch=self.orders.epoch, **fields)
        self._telemetry_s = self.timeline.spent_s - (time.perf_counter() - began_s)
        self._hold_s = None
        if self.hooks.records_samples:  # a kill must not take the proof along
            self.events.flush()

    def _proof(self, step: int) -> tuple[dict[str, object], float | None]:
        """What an exact proof needs (digests where they are made, in drills the samples), and what it all took."""
        proof: dict[str, object] = {}
        began_s, is_comparison_due = time.perf_counter(), self.guard.is_due(step + 1)
        if is_comparison_due:
            proof["digest"] = digest_pieces(self.engine.weights())
        if self.hooks.records_samples:
            proof["samples"] = self.batches.indices(step).tolist()
        return proof, self._guard_s + time.perf_counter() - began_s if is_comparison_due else None

    def _expert_imbalance(self) -> float | None:
        """Tokens of the busiest expert over the mean, in the worst layer of this stage; None without experts."""
        loads = self.engine.expert_loads
        if loads is None:
            return None
        return max(imbalance(load_E, self.engine.dims.expert).expert for load_E in loads)

    def _count_skipped(self, result: StepResult, step: int) -> None:
        self._skipped = self._skipped + 1 if result.skipped else 0
        if self._skipped >= self.job.train.skipped_steps:
            raise UntrustedState(
                "not-finite",
                step=step,
                sound=step - self._skipped,
                what=f"the gradient was not finite, or far too large, in {plural(self._skipped, 'step')} in a row",
            )

    def _is_due(self, step: int) -> bool:
        every = self.job.train.evaluate_every
        return bool(every) and step % every == 0 and step < self.batch_plan.steps

    def _evaluate(self, step: int) -> None:
        self._rest(step)
        score = self.heldout.score()
        self.orders.check()
        if score is not None:
            self.events.write(
                "evaluate",
                step=step,
                loss=score.loss,
                bits_per_byte=score.bits_per_byte,
                tokens=score.tokens,
                seconds=score.seconds,
            )

    def _wants_save(self) -> bool:
        """Rank 0's clock decides, every rank hears of it with the step's numbers."""
        return dist.get_rank() == 0 and self.interval.due(time.monotonic())

    def _save(self, step: int, reason: str) -> None:
        """Save a step. `reason` says who wanted it: only saves of the "interval" tell how often a run saves."""
        if step == self._saved_step:
            return
        began_s, self._saved_step = time.monotonic(), step
        self._rest(step)
        self._tell_saved()
        meta, rank_meta = self._meta(step), checkpoint_rank_meta(self.engine)
        self._warn_once(self.engine.changed_unsaved(), UNSAVED)
        try:
            self.saver.save(step=step, pieces=checkpoint_shards(self.engine), meta=meta, rank_meta=rank_meta)
        except SystemFailure as error:  # of the save before; this one has begun
            self._tell_unsaved(self._taken_step, error)
        self._taken_step, self._taken_for = step, reason
        if not self.job.checkpoint.asynchronous:
            self.saver.finish()  # training stands still until it is written: what went wrong `_tell_saved` tells
        blocked_s = time.monotonic() - began_s
        self.interval.saved(now_s=began_s, blocked_s=blocked_s)
        self.events.write(
            "checkpoint",
            step=step,
            epoch=self.orders.epoch,
            phase="stage",
            reason=reason,
            blocked_s=blocked_s,
            seconds=None,
            bytes=None,
        )
        if not self.job.checkpoint.asynchronous:
            self._tell_saved(wait=True)

    def _warn_once(self, names: Iterable[str], what: str) -> None:
        """Tell of each buffer of the user's own network once."""
        for name in sorted({(name, what) for name in names} - self._warned):
            self._warned.add(name)
            self.events.write("remark", step=self.step, text=f"the buffer {name[0]} {what}", is_warning=True)

    def _meta(self, step: int) -> dict[str, Any]:
        tokens = self.batch_plan.tokens_before(step)
        return checkpoint_meta(self.engine, step=step, tokens=tokens, data=self.dataset.digest)

    def _tell_saved(self, *, wait: bool = False) -> None:
        """Record a checkpoint once it is on the disk, or that it will never be."""
        if self._taken_step < 0 or (self.saver.busy and not wait):
            return
        taken, self._taken_step = self._taken_step, -1
        try:
            saved = self.saver.wait()
        except SystemFailure as error:
            self._tell_unsaved(taken, error)
            return
        if saved is not None:
            self.interval.persisted(saved.seconds)
            self.events.write(
                "checkpoint",
                step=saved.step,
                epoch=self.orders.epoch,
                phase="commit",
                reason=self._taken_for,
                path=saved.path.name,
                seconds=saved.seconds,
                bytes=saved.bytes,
            )

    def _tell_unsaved(self, step: int, error: SystemFailure) -> None:
        """A save that failed is told, and tried again when the next is due; the one before it is intact."""
        self._saved_step = -1
        text = redact(str(error), os.environ).splitlines()[0]  # a store's library may quote its keys
        self.events.write("checkpoint", step=step, epoch=self.orders.epoch, error=text)
        if self._is_last:  # nothing would be left of what came since
            raise error

    def _finish(self, step: int, *, stopped: bool) -> None:
        self.batches.close()
        if not stopped:
            self._evaluate(step)
        self._rest(step)
        self._is_last = True
        self._save(step, "stop" if stopped else "end")
        self._tell_saved(wait=True)
        self._rest(step)
        dist.barrier()
        self.orders.check()
        if stopped:
            self.events.write("stop", step=step, reason="asked to stop")
        elif dist.get_rank() == 0 and self.job.train.samples:
            for text in sample_texts(self.folder.checkpoints, self.job, self.dataset):
                self.events.write("sample", step=step, text=text)
        self.events.write("run_end", step=step, state="stopped" if stopped else "done")


def _since_last_commit(folder: Run, went_s: float | None) -> float:
    """Seconds that nothing was saved in this launch: a new formation does not set the clock back."""
    now_s = time.time()
    steps = folder.saved_steps()
    saved_s = folder.saved_at(max(steps)) if steps else 0.0
    return max(0.0, now_s - max(now_s if went_s is None else went_s, saved_s))


def _attempt(device: torch.device) -> str:
    """A name for this start of the job that all ranks share and no earlier start had."""
    number = torch.tensor([time.time_ns() // 1000], device=device)
    dist.broadcast(number, src=0)
    return f"{int(number.item()):x}"
