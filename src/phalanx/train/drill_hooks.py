"""Hooks at which a drill can inject faults into a rank; outside of drills each does nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from phalanx.record.run import Run
from phalanx.train.callbacks import Callback

if TYPE_CHECKING:
    from torch import Tensor

    from phalanx.train.parallel.tensor_shard import TensorShard
    from phalanx.train.step_result import StepReport
    from phalanx.train.training_context import TrainingContext


class DrillHooks:
    """Hooks that do nothing; in a drill `drill.inject.Injector` replaces them."""

    records_samples = False  # True if step events list the samples of their batch

    def joining(self, generation: int, rank: int, world: int) -> None:
        """Called before this rank meets the others of a new generation; `world` is the number of ranks of the job."""

    def restoring(self, generation: int, rank: int) -> None:
        """Called before this rank restores its state."""

    def step_begins(self, step: int) -> None:
        """Called before the batch is fetched."""

    def targets(self, step: int, targets: Tensor) -> Tensor:
        """Return the targets that this rank learns from in a step, instead of `targets`."""
        return targets

    def gradients(self, step: int, grads: Sequence[Tensor]) -> None:
        """Called with this rank's summed gradients, before their norm is computed; may change them in place."""

    def updated(self, step: int, weights: Sequence[TensorShard], moments: Sequence[TensorShard]) -> None:
        """Called after the update, before digest and copy in memory; may change weights and moments in place."""

    def save_point(self, name: str) -> None:
        """Called at the named point of `save_checkpoint`, perhaps in the thread that saves."""

    def heartbeat_allowed(self) -> bool:
        """Return True if this rank may send heartbeats."""
        return True


class DrillFaults(Callback):
    """The callback that calls a drill's hooks at the moments of a step."""

    def __init__(self, hooks: DrillHooks) -> None:
        self._hooks = hooks

    def on_step_begin(self, training: TrainingContext) -> None:
        """Call the hook that may kill, stop or slow this rank."""
        self._hooks.step_begins(training.step)

    def on_gradients_ready(self, training: TrainingContext, gradients: Sequence[Tensor]) -> None:
        """Call the hook that may damage gradients."""
        self._hooks.gradients(training.step, gradients)

    def on_step_end(self, training: TrainingContext, report: StepReport) -> None:
        """Call the hook that may damage weights or moments."""
        self._hooks.updated(report.step, training.engine.shards, training.engine.optimizer.state())


def drill_hooks_of(run: Run, rank: int, slot: int) -> DrillHooks:
    """Return the injector if the launch record marks a drill and the run has a fault schedule, else empty hooks.

    Both are required, so that a stray file in a run folder never injects faults into a real run.
    """
    if run.launch().get("drill") is not True:
        return DrillHooks()
    from phalanx.train.drill.firings import schedule_path

    if not schedule_path(run).is_file():
        return DrillHooks()
    from phalanx.train.drill.inject import Injector

    return Injector.of(run, rank=rank, slot=slot)
