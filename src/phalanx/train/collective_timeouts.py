"""Timeouts of collectives: long until steps are steady and while training pauses, short in between.

A collective takes its timeout when it begins, so a change applies to all later ones. gloo's sends and receives (of
pipelines on CPUs) keep the timeout with which their group was made; there the coordinator finds the rank that hangs.
torch gives groups of some ranks its own default (30 minutes, 2.13), whatever the group of all ranks was made with.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from phalanx.plan.auto_settings import bounded_timeout_s, steady_timeout_s
from phalanx.plan.plan import Plan
from phalanx.train.callbacks import Callback

if TYPE_CHECKING:
    from phalanx.train.step_result import StepReport
    from phalanx.train.training_context import TrainingContext

# Steps of a membership before its steps count as steady; as in NVIDIA's resiliency extension.
WARM_UP_STEPS = 5


def set_collective_timeouts(seconds: float) -> None:
    """Set the timeout of every collective that begins from now on, in all groups of this rank."""
    c10d = dist.distributed_c10d
    for group in list(c10d._world.pg_map):
        c10d._set_pg_timeout(timedelta(seconds=seconds), group)


class CollectiveTimeouts(Callback):
    """The callback that sets the collectives' timeout by the steps of one membership."""

    def __init__(
        self,
        *,
        first_s: float,
        steady_s: float,
        measured: bool,
        apply: Callable[[float], None] = set_collective_timeouts,
    ) -> None:
        self.timeout_s = self._first_s = first_s
        self._steady_s, self._measured, self._apply = steady_s, measured, apply
        self._steps, self._slowest_s = 0, 0.0

    @classmethod
    def of(cls, plan: Plan) -> CollectiveTimeouts:
        """Return the timeouts of a planned job."""
        job = plan.job
        steady_s, auto = steady_timeout_s(job, plan.prediction), job.train.timeout_s == "auto"
        # A silent rank is found by the coordinator, which knows more than a timeout.
        if auto:
            steady_s = max(steady_s, job.fault.dead_after_s)
        return cls(first_s=job.comm.init_timeout_s, steady_s=steady_s, measured=auto)

    def on_start(self, training: TrainingContext) -> None:
        """Apply the first timeout to all groups, which are made by now."""
        self._apply(self.timeout_s)

    def on_step_end(self, training: TrainingContext, report: StepReport) -> None:
        """Count the step; after a few steps the timeout is short."""
        self.count_step(report.duration_s)

    def lengthen(self) -> None:
        """Allow long waits until the next step is done: ranks evaluate or save, each at its own pace."""
        self._set_timeout(max(self._first_s, self._steady_s))

    def count_step(self, seconds: float) -> None:
        """Count a step of `seconds`, and set the timeout that follows from the steps so far."""
        self._steps += 1
        if self._steps <= WARM_UP_STEPS:
            # Without the first step, which may compile. The slowest measured step counts because a prediction that is
            # too low must not end a run that is only slow.
            self._slowest_s = max(self._slowest_s, seconds if self._steps > 1 else 0.0)
        if self._steps >= WARM_UP_STEPS:
            measured_s = bounded_timeout_s(self._slowest_s) if self._measured else 0.0
            self._set_timeout(max(self._steady_s, measured_s))

    def _set_timeout(self, seconds: float) -> None:
        if seconds != self.timeout_s:
            self.timeout_s = seconds
            self._apply(seconds)
