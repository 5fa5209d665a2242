"""How long ranks wait for each other: long until steps are steady and while training pauses, short between.

A collective takes its timeout when it is begun, so a change holds for all that follow; gloo's sends and receives (of
pipelines on CPUs) keep what their group was made with: there the supervisor finds who is stuck. torch gives groups of
some ranks its own default (30 minutes, 2.13), whatever the group of all was made with.
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

WARM_UP_STEPS = 5  # of a membership, before its steps count as steady: as NVIDIA's resiliency extension


def set_collective_timeouts(seconds: float) -> None:
    """Let every collective that is begun from now on give up after so long, in all groups of this rank."""
    c10d = dist.distributed_c10d
    for group in list(c10d._world.pg_map):
        c10d._set_pg_timeout(timedelta(seconds=seconds), group)


class CollectiveTimeouts(Callback):
    """Follows the steps of one membership, and changes the timeout where what is waited for changes."""

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
        """Of a planned job."""
        job = plan.job
        steady_s, auto = steady_timeout_s(job, plan.prediction), job.train.timeout_s == "auto"
        if auto:  # whoever is silent is found by the supervisor, which knows more than that a wait was long
            steady_s = max(steady_s, job.fault.dead_after_s)
        return cls(first_s=job.comm.init_timeout_s, steady_s=steady_s, measured=auto)

    def on_start(self, training: TrainingContext) -> None:
        """All groups are made: none is to wait for longer than the job says."""
        self._apply(self.timeout_s)

    def on_step_end(self, training: TrainingContext, report: StepReport) -> None:
        """A step is done: after a few of them waits are short."""
        self.count_step(report.duration_s)

    def lengthen(self) -> None:
        """Ranks evaluate or save, each at its own pace: until the next step is done they may wait long."""
        self._set_timeout(max(self._first_s, self._steady_s))

    def count_step(self, seconds: float) -> None:
        """A step took so long."""
        self._steps += 1
        if self._steps <= WARM_UP_STEPS:
            # The first may compile. A prediction that is too low must not end a run that is only slow.
            self._slowest_s = max(self._slowest_s, seconds if self._steps > 1 else 0.0)
        if self._steps >= WARM_UP_STEPS:
            seen_s = bounded_timeout_s(self._slowest_s) if self._measured else 0.0
            self._set_timeout(max(self._steady_s, seen_s))

    def _set_timeout(self, seconds: float) -> None:
        if seconds != self.timeout_s:
            self.timeout_s = seconds
            self._apply(seconds)
