"""`prove`: a plan's layout against one process, on a small copy of the model or the model itself, on this machine."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.job.schema import Job
from phalanx.plan.layout import Layout
from phalanx.train.models.support import refuse_untrainable
from phalanx.train.settings import Settings, refuse_layout
from phalanx.train.verify.compare import Bounds, Comparison, compare_outcomes
from phalanx.train.verify.ranks import LIMIT_S, RankPlace
from phalanx.train.verify.small_trial import (
    SizeChange,
    eager_trial,
    features_left_out,
    make_small_trial,
    reference_trial,
    refuse_own_model,
    size_changes,
)
from phalanx.train.verify.terms import EXACT, EXACTLY, Terms, format_name, refuse_ranks
from phalanx.train.verify.trial import Trial, TrialOutcome, run_trial
from phalanx.units import plural

CACHE = "TORCHINDUCTOR_CACHE_DIR"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutProof:
    """What was run, how far it was from one process, and what the proof does not cover."""

    job: str
    model: str
    layout: Layout
    small: Layout
    terms: Terms
    ranks: int
    gpus: int  # that the ranks ran on; 0 is CPUs
    compiled: bool
    steps: int
    optimizer: str
    size_changes: list[SizeChange]
    features_left_out: list[str]
    comparison: Comparison
    again: Comparison | None  # of a second start, which finds the compiled code of the first in its cache
    cached: int  # graphs that the second start found there, of all ranks
    bounds: Bounds
    one_s: float
    split_s: float
    total_s: float

    @property
    def holds(self) -> bool:
        """Whether the layout gives what one process gives."""
        return self.comparison.first is None and (self.again is None or self.again.first is None)


def prove_layout(
    job: Job,
    layout: Layout,
    *,
    steps: int = 5,
    terms: Terms = EXACTLY,
    on_gpu: bool = False,
    gpus: int = 0,
    limit_s: float = LIMIT_S,
    debug: bool = False,
    tell: Callable[[str], None] = lambda text: None,
    began_s: float | None = None,
) -> LayoutProof:
    """Run both and compare. Raises UserError for what cannot be trained, SystemFailure when a process fails.

    `on_gpu` says where the job would run, `terms` where and how the proof does, `gpus` how many there are for it.
    `began_s` (time.monotonic) starts the clock earlier.
    """
    began_s = time.monotonic() if began_s is None else began_s
    refuse_own_model(job)
    refuse_untrainable(job.model)
    settings = Settings.of(job, layout, on_gpu=on_gpu)
    refuse_layout(job.model, settings)
    trial = make_small_trial(job, layout, steps=steps, terms=terms)
    refuse_layout(trial.shape, trial.settings)
    small = trial.settings.layout
    refuse_ranks(terms, ranks=small.devices, gpus=gpus)
    bounds = Bounds() if terms.precision == EXACT else Bounds.rounded(terms.precision)
    with tempfile.TemporaryDirectory(prefix="phalanx-compiled-") as folder:
        place = RankPlace(
            shared=terms.device == "cuda" and small.devices > gpus,
            environ={CACHE: folder} if trial.settings.compile else {},
        )

        def run(one: Trial) -> TrialOutcome:
            return run_trial(one, limit_s=limit_s, debug=debug, place=place)

        how = f"{'compiled, ' if trial.settings.compile else ''}{format_name(terms.precision)}"
        tell(f"one process, {plural(trial.shape.layers, 'layer')}, {plural(steps, 'step')}, {how}")
        # In float64 kernels may not matter, so the one process is plain; elsewhere it must run the same ones.
        wanted = run(reference_trial(trial if terms.precision != EXACT else eager_trial(trial)))
        tell(f"{plural(small.devices, 'rank')}: {small.name}")
        found = run(trial)
        again = None
        if trial.settings.compile and small.devices > 1:
            tell("the same again, from the compile cache")
            again = run(trial)
    return LayoutProof(
        job=job.name,
        model=job.model.name,
        layout=layout,
        small=small,
        terms=terms,
        ranks=small.devices,
        gpus=min(gpus, small.devices) if terms.device == "cuda" else 0,
        compiled=trial.settings.compile,
        steps=steps,
        optimizer=trial.optim.name,
        changes=size_changes(job, layout, trial),
        left_out=features_left_out(job, layout, trial, compiled=settings.compile, on_gpu=on_gpu),
        comparison=compare_outcomes(found, wanted, bounds),
        again=compare_outcomes(again, wanted, bounds) if again is not None else None,
        cached=again.graphs[0] if again is not None else 0,
        bounds=bounds,
        one_s=wanted.seconds,
        split_s=found.seconds,
        total_s=time.monotonic() - began_s,
    )
