"""Telemetry as a callback: the `step` event of every step, and the timeline of sampled steps."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from phalanx.train.callbacks import Callback
from phalanx.train.parallel.expert import expert_imbalance
from phalanx.train.step_result import StepReport, StepResult
from phalanx.train.telemetry.clock import compiled_s
from phalanx.train.telemetry.timeline import Sample, TimelineSampler

if TYPE_CHECKING:
    from phalanx.train.training_context import TrainingContext


class StepTimer:
    """Times the parts of one step, from its creation on."""

    def __init__(self, step: int, timeline: TimelineSampler) -> None:
        self._step, self._timeline = step, timeline
        self._samples: Sequence[Sample] = ()
        self._data_s = self._ready_s = self._before_cpu_s = self._entered_s = self._ended_s = 0.0
        self._compiled_s = compiled_s()
        self._began_s, self._began_cpu_s = time.perf_counter(), time.thread_time()

    @contextmanager
    def data(self) -> Iterator[None]:
        """Time the wait for the batch."""
        began_s = time.perf_counter()
        yield
        self._data_s = time.perf_counter() - began_s

    @contextmanager
    def engine(self) -> Iterator[None]:
        """Time the engine's step, and sample its timeline if one is due."""
        self._ready_s, self._before_cpu_s = time.perf_counter(), time.thread_time() - self._began_cpu_s
        with self._timeline.step(self._step) as self._samples:
            self._entered_s = time.perf_counter()
            yield
            self._ended_s = time.perf_counter()

    def report(self, result: StepResult, *, lr: float) -> StepReport:
        """Return the step's report, after the engine's step."""
        # The time to start a sample, which is not part of the step
        opening_s = self._timeline.opening_s
        return StepReport(
            step=self._step,
            result=result,
            lr=lr,
            duration_s=self._ended_s - self._began_s - opening_s,
            data_s=self._data_s,
            before_s=self._entered_s - self._began_s - opening_s,
            own_s=result.compute_s + self._ready_s - self._began_s - self._data_s,
            cpu_s=result.cpu_s + self._before_cpu_s if result.cpu_s is not None else None,
            compile_s=compiled_s() - self._compiled_s or None,
            samples=self._samples,
        )


class StepTelemetry(Callback):
    """Writes the results and times of every step."""

    def __init__(self, training: TrainingContext) -> None:
        self._step = 0
        self.timeline = TimelineSampler(
            training.engine.meshes,
            training.engine.device,
            every=training.job.telemetry.timeline_every,
            compiled=training.engine.settings.compile,
            tell=lambda text: training.events.write("remark", step=self._step, text=text),
        )
        # The timeline's `spent_s` at the last step, without the time to write that step's event
        self._spent_s = 0.0

    def begin_step(self, step: int) -> StepTimer:
        """Start the timer of a step."""
        self._step = step
        return StepTimer(step, self.timeline)

    def on_start(self, training: TrainingContext) -> None:
        """Make a resumed run measure gradient noise at the same steps."""
        if training.engine.listener is not None:
            training.engine.listener.norms.next = training.step

    def on_step_end(self, training: TrainingContext, report: StepReport) -> None:
        """Write the step's event, and its timeline if it was sampled."""
        result, noise, timeline = report.result, report.result.noise, self.timeline
        inside = timeline.inside(report.samples, result.phases, data_s=report.data_s, before_s=report.before_s)
        digest, guard_s = training.comparison.digest(training)
        proof: dict[str, object] = {} if digest is None else {"digest": digest}
        if training.control.hooks.records_samples:
            proof["samples"] = training.batches.indices(report.step).tolist()
        training.control.check()
        began_s = time.perf_counter()
        checkpoints = training.checkpoints
        training.events.write(
            "step",
            step=report.step,
            epoch=training.control.generation,
            loss=result.loss,
            tokens=result.tokens,
            duration_s=report.duration_s,
            grad_norm=result.grad_norm,
            lr=report.lr,
            tokens_per_s=result.tokens / report.duration_s,
            memory_bytes=training.memory.peak_bytes(),
            compute_s=report.own_s,
            wait_s=result.wait_s,
            cpu_s=report.cpu_s,
            core_wait_s=result.core_wait_s,
            data_s=report.data_s,
            compile_s=report.compile_s,
            noise_scale=result.noise_samples,
            noise_trace=noise.trace if noise is not None else None,
            grad_squared=noise.squared if noise is not None else None,
            skipped=result.skipped,
            bytes_sent=result.bytes_sent,
            collective_s=inside.collective_s,
            collective_bytes=inside.collective_bytes,
            expert_imbalance=_expert_imbalance(training),
            held=checkpoints.safe_step if checkpoints.safe_step >= 0 else None,
            hold_s=checkpoints.copy_s,
            guard_s=guard_s,
            telemetry_s=timeline.spent_s - self._spent_s,
            **proof,
        )
        if inside.timeline is not None:
            fields = {"seconds": report.duration_s, **inside.timeline}
            training.events.write("timeline", step=report.step, epoch=training.control.generation, **fields)
        self._spent_s = timeline.spent_s - (time.perf_counter() - began_s)
        checkpoints.copy_s = None
        # A kill must not lose the proof
        if training.control.hooks.records_samples:
            training.events.flush()


def _expert_imbalance(training: TrainingContext) -> float | None:
    """Return tokens of the busiest expert over the mean, in the worst layer of this stage; None without experts."""
    loads = training.engine.experts.loads
    if loads is None:
        return None
    return max(expert_imbalance(load_E, training.engine.dims.expert).expert for load_E in loads)
