"""The training loop: a batch, a step, and the callbacks that look at it. Everything else a run does is a callback."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from phalanx.elastic.heartbeat_board import Phase
from phalanx.plan.plan import Plan
from phalanx.record.events import EventWriter
from phalanx.record.run import Run
from phalanx.train.callbacks import CallbackList
from phalanx.train.checkpointing import Checkpointing
from phalanx.train.collective_timeouts import CollectiveTimeouts
from phalanx.train.data.batches import Batches, BatchPlan
from phalanx.train.data.sources import OwnBatches, open_batches
from phalanx.train.drill_hooks import DrillFaults
from phalanx.train.engine import Engine
from phalanx.train.evaluate import Evaluator, TextSamples
from phalanx.train.guard.safeguards import CompiledCodeCheck, ReplicaComparison, SkippedSteps, StalledTraining
from phalanx.train.memory import MemoryMeter
from phalanx.train.optim.learning_rate import learning_rate
from phalanx.train.parallel.across_replicas import ReplicaLost
from phalanx.train.plugins import LoadedPlugins
from phalanx.train.rank_control import RankControl
from phalanx.train.slow_links.peer_batches import PeerBatches
from phalanx.train.slow_links.peer_exchange import BehindGroup, LeavingGroup
from phalanx.train.step_result import MemoryChanged, StepRequest, StepResult
from phalanx.train.telemetry.clock import compiled_s
from phalanx.train.telemetry.step_events import StepTelemetry
from phalanx.train.telemetry.timeline import Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """A step that was taken, and where its time went."""

    step: int  # its number, from 0
    result: StepResult
    lr: float
    duration_s: float  # from its begin to the end of the update, less what it was held up to be looked into
    data_s: float  # of it waiting for the batch
    before_s: float  # of it until the engine began
    own_s: float  # of it this rank's own time: computing, and what surrounds it, with a core or without
    cpu_s: float | None  # processor time of this rank's thread; None where a device computes
    compile_s: float | None  # compiling, in the middle of it; None when nothing was
    samples: Sequence[Sample]  # one when the step was looked into


class TrainingLoop:
    """Everything a run needs between its first and its last step; what callbacks get as `training`."""

    def __init__(
        self,
        folder: Run,
        plan: Plan,
        engine: Engine,
        events: EventWriter,
        memory: MemoryMeter,
        control: RankControl,
        plugins: LoadedPlugins | None = None,
    ) -> None:
        self.folder, self.plan, self.job, self.engine, self.events = folder, plan, plan.job, engine, events
        self.control, self.memory = control, memory
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        if engine.across is not None:  # each replica is a torch world of its own
            self.rank, self.world_size = engine.across.rank, engine.across.replicas.layout.devices
        self.step = 0  # steps that are done, and so the number of the step that is being taken
        self.lr = 0.0  # of that step
        plugins = plugins or LoadedPlugins()
        self.batch_plan = BatchPlan.of(self.job.batch, sequence=self.job.data.sequence, tokens=plan.duration.tokens)
        self.batches: Batches | OwnBatches | PeerBatches
        if control.peers is not None:
            self.batches, self.dataset = control.peers.open_batches(folder.path, self.job, self.batch_plan, engine)
        else:
            self.batches, self.dataset = open_batches(folder.path, self.job, self.batch_plan, engine, plugins.data)
        self.timeouts = CollectiveTimeouts.of(plan)
        # Callbacks of the user's own may change weights after an update: not between every two, as far as we know.
        self.comparison = ReplicaComparison(self, each_step=not plugins.callbacks and control.peers is None)
        self.telemetry = StepTelemetry(self)
        self.evaluation = Evaluator(self, metrics=plugins.metrics)
        self.checkpoints = Checkpointing(self)
        self.callbacks = CallbackList(
            [
                self.timeouts,
                CompiledCodeCheck(),
                *([DrillFaults(control.hooks)] if control.hooks.records_samples else []),  # those below find its damage
                self.comparison,  # before anything is written down
                self.telemetry,
                StalledTraining(),
                SkippedSteps(self.job.train.skipped_steps),
                *plugins.callbacks,
                *([control.peers] if control.peers is not None else []),  # what is scored and saved is what peers share
                self.evaluation,
                self.checkpoints,  # last: it saves what all others have become
                TextSamples(),
            ],
            own=plugins.callbacks,
            rank=self.rank,
        )
        if self.callbacks.wants("on_gradients_ready"):
            engine.on_gradients_ready = lambda grads: self.callbacks.call("on_gradients_ready", self, grads)
        if self.callbacks.wants("on_before_update"):
            engine.on_before_update = lambda grads: self.callbacks.call("on_before_update", self, grads)
        if self.callbacks.wants("on_after_update"):
            engine.on_after_update = lambda: self.callbacks.call("on_after_update", self)
        if control.rounds is not None:
            engine.wants_round = control.rounds.is_due
        self._stop_requested = False
        self._warned: set[tuple[str, str]] = set()

    def restore_extras(self, extras: Mapping[str, Any]) -> None:
        """Take up what a checkpoint holds beside the engine's state: states of callbacks, the position in the data."""
        self.callbacks.load_state_dict(extras.get("callbacks") or {})
        self.batches.restore_position(extras.get("data_position"))

    def run(self, first: int) -> str:
        """Take every step from `first` on; "done", or "stopped" or "reform" when all ranks were asked to leave."""
        try:
            return self._run_steps(first)
        except BaseException as error:
            for text in self.callbacks.call_after_failure(self, error):
                self.events.write("remark", step=self.step, text=text, is_warning=True)
            raise

    def _run_steps(self, first: int) -> str:
        total, leaving = self.batch_plan.steps, ""
        self.step = first
        self.events.write("run_start", step=first, steps=total, world=self.world_size, epoch=self.control.epoch)
        self.callbacks.call("on_start", self)
        if first:
            self.callbacks.call("on_resume", self)
        while self.step < total and not leaving:
            try:
                report = self._take_step()
                self.step += 1
                self.callbacks.call("on_step_end", self, report)
            except ReplicaLost:
                self._regroup_replicas()
                continue
            except BehindGroup as error:
                assert self.control.peers is not None
                self.step = self.control.peers.catch_up(self, str(error))
                continue
            except LeavingGroup:
                leaving = "stopped"
                continue
            except MemoryChanged:
                raise self.comparison.memory_changed(self) from None
            leaving = self._leaving_state(report.result)
            self.control.progress(self.step, Phase.TRAINING)
            if report.result.is_round_due and not leaving:
                self._regroup_replicas()
            elif leaving == "reform" and not self._are_replicas_here():
                self._regroup_replicas()
                leaving = ""  # the request stands, and is met with the next step
        if leaving == "reform" and self.step < total:
            self.checkpoints.leave_membership()
            return leaving
        return self._finish_run("stopped" if leaving and self.step < total else "done")

    def _regroup_replicas(self) -> None:
        """A replica was lost, or is back: go on with those that are present, from what the furthest of them has."""
        assert self.control.rounds is not None
        self.pause()
        self.step = self.control.rounds.regroup(self.engine, self.step)
        self.comparison.guard.forget()  # the state may be another's
        self.checkpoints.forget_unwritten()
        self.control.check()
        self.control.progress(self.step, Phase.BUILDING)

    def _are_replicas_here(self) -> bool:
        """Whether all replicas of the round came as far as this, so that none is left behind that needs another.

        All ranks of a replica get the same answer.
        """
        across = self.engine.across
        if across is None:
            return True
        lost = torch.tensor([across.gather(torch.tensor([self.step])) is None], dtype=torch.int32)
        lost = lost.to(self.engine.device)
        if dist.get_world_size() > 1:
            dist.all_reduce(lost, op=dist.ReduceOp.MAX)
        return not lost.item()

    def _take_step(self) -> StepReport:
        step, began_s, compiled = self.step, time.perf_counter(), compiled_s()
        began_cpu_s = time.thread_time()
        self.callbacks.call("on_step_begin", self)  # within the step: what a drill slows down is slow
        asked_s = time.perf_counter()
        tokens, targets = (torch.from_numpy(rows) for rows in self.batches.get(step))
        data_s = time.perf_counter() - asked_s
        seen = self.batch_plan.tokens_before(step + 1)
        self.lr = learning_rate(self.job.optim, tokens_seen=seen, total_tokens=self.plan.duration.tokens)
        copied_step, ready_s = self.checkpoints.copied_step, time.perf_counter()
        before_cpu_s = time.thread_time() - began_cpu_s
        with self.telemetry.observe(step) as samples:
            entered_s = time.perf_counter()
            result = self.engine.step(tokens, targets, lr=self.lr, requests=self._rank_requests)
            ended_s = time.perf_counter()
        self.control.check()
        self.checkpoints.confirm_copies(copied_step, result.requests)
        opening_s = self.telemetry.timeline.opening_s  # telemetry's own: no part of the step
        return StepReport(
            step=step,
            result=result,
            lr=self.lr,
            duration_s=ended_s - began_s - opening_s,
            data_s=data_s,
            before_s=entered_s - began_s - opening_s,
            own_s=result.compute_s + ready_s - began_s - data_s,
            cpu_s=result.cpu_s + before_cpu_s if result.cpu_s is not None else None,
            compile_s=compiled_s() - compiled or None,
            samples=samples,
        )

    def _rank_requests(self) -> tuple[bool, ...]:
        """What this rank asks of all ranks, by StepRequest; they hear of it with the step's numbers."""
        stop = self._stop_requested or self.control.stop()
        return stop, self.checkpoints.is_due(), self.control.reform(), self.checkpoints.is_copy_unsafe()

    def _leaving_state(self, result: StepResult) -> str:
        if result.requests[StepRequest.STOP]:
            return "stopped"
        return "reform" if result.requests[StepRequest.REFORM] or self.step in self.control.leaves_at else ""

    def _finish_run(self, state: str) -> str:
        self.batches.close()
        if state == "done":
            self.evaluation.evaluate(self)
        self.pause()
        self.checkpoints.save_last("stop" if state == "stopped" else "end")
        while not self._are_replicas_here():  # one was lost: perhaps the one that was saving, or before its last step
            self._regroup_replicas()
            self.checkpoints.save_last("stop" if state == "stopped" else "end")
        self.pause()
        dist.barrier()
        self.control.check()
        if state == "stopped":
            self.events.write("stop", step=self.step, reason="asked to stop")
        self.callbacks.call("on_end", self, state)
        self.events.write("run_end", step=self.step, state=state)
        return state

    def close(self) -> None:
        """Give up what runs beside the steps; this membership is over."""
        self.checkpoints.saver.abandon()
        self.batches.close()

    # ---- for callbacks ---------------------------------------------------------------------------------------------

    @property
    def data_digest(self) -> str:
        """Names what is learnt from: a resumed run must find the same."""
        return self.batches.digest

    def stop(self) -> None:
        """End the run after the step that follows, with a checkpoint: one rank that asks is enough."""
        self._stop_requested = True

    def save(self) -> None:
        """Save a checkpoint after the step that follows: one rank that asks is enough."""
        self.checkpoints.request_save()

    def pause(self) -> None:
        """No step for a while: the coordinator and the other ranks are to wait longer."""
        self.control.progress(self.step, Phase.RESTING)
        self.timeouts.lengthen()

    def warn_of_buffers(self, names: Iterable[str], what: str) -> None:
        """Tell of each buffer of the user's own network once."""
        for name, said in sorted({(name, what) for name in names} - self._warned):
            self._warned.add((name, said))
            self.events.write("remark", step=max(self.step - 1, 0), text=f"the buffer {name} {said}", is_warning=True)
