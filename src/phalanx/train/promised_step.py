"""Compares a run's step time with the measured times of the kernels that were selected for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.train.callbacks import Callback

if TYPE_CHECKING:
    from phalanx.train.step_result import StepReport
    from phalanx.train.training_context import TrainingContext

CHECKED_STEP = 3  # the first step compiles, and the second may still allocate


class PromisedStep(Callback):
    """Records, once, whether the third step without compilation takes as long as its kernels were measured to take."""

    def __init__(self) -> None:
        self._steps = 0

    def on_step_end(self, training: TrainingContext, report: StepReport) -> None:
        """Compare the step's time, without its wait for data, with the sum of the measured kernel times."""
        if self._steps >= CHECKED_STEP or report.compile_s or report.samples:
            return
        self._steps += 1
        if self._steps < CHECKED_STEP:
            return
        engine = training.engine
        promise = engine.kernels.promise(
            layers=sum(len(part.model.layers) for part in engine.parts),
            micro_batches=engine.settings.layout.accumulation,
        )
        if promise is None:
            return
        text, is_broken = promise.compare(report.duration_s - report.data_s)
        training.events.write(
            "remark", step=training.step, text=text, **({"is_warning": True} if is_broken else {"is_told": True})
        )
