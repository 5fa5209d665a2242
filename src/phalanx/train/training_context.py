"""The training context: everything a rank's training consists of; callbacks get it as `training`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
from phalanx.train.guard.safeguards import (
    ChangedBuffers,
    CompiledCodeCheck,
    ReplicaComparison,
    SkippedSteps,
    StalledTraining,
)
from phalanx.train.memory_use import MemoryMeter
from phalanx.train.plugins import LoadedPlugins
from phalanx.train.promised_step import PromisedStep
from phalanx.train.rank_control import RankControl
from phalanx.train.slow_links.peer_batches import PeerBatches
from phalanx.train.telemetry.step_events import StepTelemetry


class TrainingContext:
    """Everything a run needs between its first and its last step in one membership."""

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
        if engine.across is not None:  # torch's world is one model replica
            self.rank, self.world_size = engine.across.rank, engine.across.replicas.layout.devices
        self.step = 0  # number of steps done, which is also the number of the step being taken
        self.lr = 0.0  # learning rate of that step
        self._stop_requested = False
        plugins = plugins or LoadedPlugins()
        self.batch_plan = BatchPlan.of(self.job.batch, sequence=self.job.data.sequence, tokens=plan.duration.tokens)
        self.batches: Batches | OwnBatches | PeerBatches
        if control.peers is not None:
            self.batches, self.dataset = control.peers.open_batches(folder.path, self.job, self.batch_plan, engine)
        else:
            self.batches, self.dataset = open_batches(folder.path, self.job, self.batch_plan, engine, plugins.data)
        self.timeouts = CollectiveTimeouts.of(plan)
        # Not in every step if the user's own callbacks, or peers, may change weights between two updates.
        self.comparison = ReplicaComparison(self, each_step=not plugins.callbacks and control.peers is None)
        self.telemetry = StepTelemetry(self)
        self.evaluation = Evaluator(self, metrics=plugins.metrics)
        self.skipped_steps = SkippedSteps(self.job.train.skipped_steps)
        self.checkpoints = Checkpointing(self)
        self.callbacks = CallbackList(
            [
                self.timeouts,
                CompiledCodeCheck(),
                # Before the checks, which have to find its damage.
                *([DrillFaults(control.hooks)] if control.hooks.records_samples else []),
                self.comparison,  # before any callback records numbers of the step
                self.telemetry,
                ChangedBuffers(),
                StalledTraining(),
                self.skipped_steps,
                PromisedStep(),
                *plugins.callbacks,
                # Before evaluation and checkpoints, so that the weights scored and saved are those that peers share.
                *([control.peers] if control.peers is not None else []),
                self.evaluation,
                # After all callbacks with state, so that it saves their state after this step.
                self.checkpoints,
                TextSamples(),
            ],
            own=plugins.callbacks,
            rank=self.rank,
        )
        self.callbacks.attach_to(engine, self)
        if control.rounds is not None:
            engine.wants_round = control.rounds.is_due

    def restore_extras(self, extras: Mapping[str, Any]) -> None:
        """Restore the part of a checkpoint that is not the engine's: callbacks' states and the data position."""
        self.callbacks.load_state_dict(extras.get("callbacks") or {})
        self.batches.restore_position(extras.get("data_position"))
        self.skipped_steps.in_a_row = int(extras.get("skipped_in_a_row") or 0)

    def rank_requests(self) -> tuple[bool, ...]:
        """Return this rank's requests, indexed by StepRequest; all ranks get them with the step's numbers."""
        stop = self._stop_requested or self.control.stop()
        return stop, self.checkpoints.is_due(), self.control.reform(), self.checkpoints.is_copy_unsafe()

    def close(self) -> None:
        """Stop the threads of saves and batches; this membership is over."""
        self.checkpoints.saver.abandon()
        self.batches.close()

    # ---- for callbacks ---------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End the run after the next step, with a checkpoint; a request by one rank is enough."""
        self._stop_requested = True

    def save(self) -> None:
        """Save a checkpoint after the next step; a request by one rank is enough."""
        self.checkpoints.request_save()

    def pause(self) -> None:
        """Announce a pause without steps: the coordinator and the other ranks wait longer until the next step."""
        self.control.progress(self.step, Phase.RESTING)
        self.timeouts.lengthen()
