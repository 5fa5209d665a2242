"""Places of a rank where a drill may step in. Outside of drills each is an empty call."""

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
    """Does nothing. Only `drill.inject.Injector` takes its place."""

    records_samples = False  # whether step events list the samples they learnt from

    def joining(self, generation: int, rank: int, world: int) -> None:
        """Before this rank of a new generation meets the others; `world` counts the ranks of the job."""

    def restoring(self, generation: int, rank: int) -> None:
        """Before it takes up its state."""

    def step_begins(self, step: int) -> None:
        """Before the batch is fetched."""

    def targets(self, step: int, targets: Tensor) -> Tensor:
        """The targets that this rank learns from in a step, in place of its own."""
        return targets

    def gradients(self, step: int, grads: Sequence[Tensor]) -> None:
        """The summed gradients this rank holds, before their norm is agreed on; may be changed in place."""

    def updated(self, step: int, weights: Sequence[TensorShard], moments: Sequence[TensorShard]) -> None:
        """After the optimizer, before the digest and the copy in memory; may be changed in place."""

    def save_point(self, name: str) -> None:
        """A point of `checkpoint.save`, perhaps in its thread."""

    def heartbeat_allowed(self) -> bool:
        """Whether this rank may say that it lives."""
        return True


class DrillFaults(Callback):
    """Calls the hooks of a drill at the moments of a step; without a drill there is none to call."""

    def __init__(self, hooks: DrillHooks) -> None:
        self._hooks = hooks

    def on_step_begin(self, training: TrainingContext) -> None:
        """Kill, stop or slow this rank."""
        self._hooks.step_begins(training.step)

    def on_gradients_ready(self, training: TrainingContext, gradients: Sequence[Tensor]) -> None:
        """Poison gradients."""
        self._hooks.gradients(training.step, gradients)

    def on_step_end(self, training: TrainingContext, report: StepReport) -> None:
        """Damage weights or moments."""
        self._hooks.updated(report.step, training.engine.shards, training.engine.optimizer.state())


def drill_hooks_of(run: Run, rank: int, slot: int) -> DrillHooks:
    """The injector where the launcher says that this is a drill and there is a schedule; else nothing.

    Two conditions, so that a file that strays into a run folder never hurts a real run.
    """
    if run.launch().get("drill") is not True:
        return DrillHooks()
    from phalanx.train.drill.firings import schedule_path

    if not schedule_path(run).is_file():
        return DrillHooks()
    from phalanx.train.drill.inject import Injector

    return Injector.of(run, rank=rank, slot=slot)
