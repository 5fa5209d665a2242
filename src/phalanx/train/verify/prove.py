"""`prove`: a plan's layout against one process, on a small copy of the model, on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.job.schema import Job
from phalanx.plan.layout import Layout
from phalanx.train.check import refuse_layout
from phalanx.train.models.support import refuse_untrainable
from phalanx.train.settings import Settings
from phalanx.train.verify.compare import Bounds, Comparison, compare
from phalanx.train.verify.ranks import LIMIT_S
from phalanx.train.verify.shrink import Change, alone, changes, left_out, refuse_own, shrink
from phalanx.train.verify.trial import run_trial
from phalanx.units import plural


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """What was run, how far it was from one process, and what the proof does not cover."""

    job: str
    model: str
    layout: Layout
    small: Layout
    ranks: int
    steps: int
    optimizer: str
    changes: list[Change]
    left_out: list[str]
    comparison: Comparison
    bounds: Bounds
    one_s: float
    split_s: float
    total_s: float

    @property
    def holds(self) -> bool:
        """Whether the layout gives what one process gives."""
        return self.comparison.first is None


def prove(
    job: Job,
    layout: Layout,
    *,
    steps: int = 5,
    on_gpu: bool = False,
    limit_s: float = LIMIT_S,
    debug: bool = False,
    tell: Callable[[str], None] = lambda text: None,
    began_s: float | None = None,
) -> Proof:
    """Run both and compare. Raises UserError for what cannot be trained, WorldError when a process fails.

    `on_gpu` says where the job would run; the proof runs on CPUs. `began_s` (time.monotonic) starts the clock earlier.
    """
    began_s = time.monotonic() if began_s is None else began_s
    refuse_own(job)
    refuse_untrainable(job.model)
    settings = Settings.of(job, layout, on_gpu=on_gpu)
    refuse_layout(job.model, settings)
    trial = shrink(job, layout, steps=steps)
    small = trial.settings.layout
    tell(f"one process, {plural(trial.shape.layers, 'layer')}, {plural(steps, 'step')} in float64")
    wanted = run_trial(alone(trial), limit_s=limit_s, debug=debug)
    tell(f"{plural(small.devices, 'rank')}: {small.name}")
    found = run_trial(trial, limit_s=limit_s, debug=debug)
    bounds = Bounds()
    return Proof(
        job=job.name,
        model=job.model.name,
        layout=layout,
        small=small,
        ranks=small.devices,
        steps=steps,
        optimizer=trial.optim.name,
        changes=changes(job, layout, trial),
        left_out=left_out(job, layout, compiled=settings.compile),
        comparison=compare(found, wanted, bounds),
        bounds=bounds,
        one_s=wanted.seconds,
        split_s=found.seconds,
        total_s=time.monotonic() - began_s,
    )
