"""`phalanx verify`: compare a plan's layout with one process, on a small copy of the model or the model itself."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.io.tables import text_table
from phalanx.job.schema import Job
from phalanx.plan.layout import Layout
from phalanx.train.models.support import refuse_untrainable
from phalanx.train.rank_settings import Settings, refuse_layout
from phalanx.train.verify.compare import OutcomeComparison, Tolerances, compare_outcomes
from phalanx.train.verify.ranks import TrialPlace
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
from phalanx.units import format_seconds, plural

CACHE = "TORCHINDUCTOR_CACHE_DIR"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutProof:
    """The trial that was run, its difference from one process, and the features that the proof does not cover."""

    job: str
    model: str
    layout: Layout
    small: Layout
    terms: Terms
    ranks: int
    gpus: int  # GPUs that the ranks used; 0 means CPUs
    compiled: bool
    steps: int
    optimizer: str
    changes: list[SizeChange]
    left_out: list[str]
    comparison: OutcomeComparison
    # Of a second start, which loads the compiled code of the first from the cache
    again: OutcomeComparison | None
    cached: int  # graphs that the second start loaded from the cache, over all ranks
    bounds: Tolerances
    one_s: float
    split_s: float
    total_s: float

    @property
    def holds(self) -> bool:
        """True if the layout computes what one process computes."""
        return self.comparison.first is None and (self.again is None or self.again.first is None)


def prove_layout(
    job: Job,
    layout: Layout,
    *,
    steps: int = 5,
    terms: Terms = EXACTLY,
    on_gpu: bool = False,
    gpus: int = 0,
    limit_s: float | None = None,
    debug: bool = False,
    allow_code: bool = False,
    tell: Callable[[str], None] = lambda text: None,
    began_s: float | None = None,
) -> LayoutProof:
    """Run the layout and one process, and compare.

    Raises UserError for untrainable jobs, SystemFailure if a process fails.

    Args:
        job: The job.
        layout: The planned layout to verify.
        steps: Training steps of the trial.
        terms: Device, precision and size of the proof.
        on_gpu: Whether the job itself would run on GPUs.
        gpus: Number of GPUs available for the proof.
        limit_s: Seconds after which the ranks are given up; the default adapts to the load of the machine.
        debug: Show the ranks' output and tracebacks.
        allow_code: Whether a user's own loss and optimizer may run.
        tell: Called with progress messages.
        began_s: Start of the total time (time.monotonic), default now.
    """
    began_s = time.monotonic() if began_s is None else began_s
    refuse_own_model(job)
    refuse_untrainable(job.model)
    settings = Settings.of(job, layout, on_gpu=on_gpu)
    refuse_layout(job.model, settings)
    trial = make_small_trial(job, layout, steps=steps, terms=terms, allow_code=allow_code)
    refuse_layout(trial.shape, trial.settings)
    small = trial.settings.layout
    refuse_ranks(terms, ranks=small.devices, gpus=gpus)
    bounds = Tolerances() if terms.precision == EXACT else Tolerances.rounded(terms.precision)
    with tempfile.TemporaryDirectory(prefix="phalanx-compiled-") as folder:
        place = TrialPlace(
            shared=terms.device == "cuda" and small.devices > gpus,
            environ={CACHE: folder} if trial.settings.compile else {},
        )

        def run(one: Trial) -> TrialOutcome:
            return run_trial(one, limit_s=limit_s, debug=debug, place=place)

        trial_kind = f"{'compiled, ' if trial.settings.compile else ''}{format_name(terms.precision)}"
        tell(f"one process, {plural(trial.shape.layers, 'layer')}, {plural(steps, 'step')}, {trial_kind}")
        # In float64 the choice of kernels may not matter, so the one process runs eagerly; in other formats it must
        # run the same.
        reference = run(reference_trial(trial if terms.precision != EXACT else eager_trial(trial)))
        tell(f"{plural(small.devices, 'rank')}: {small.name}")
        outcome = run(trial)
        second_outcome = None
        if trial.settings.compile and small.devices > 1:
            tell("the same again, from the compile cache")
            second_outcome = run(trial)
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
        optimizer=trial.settings.optimizer or trial.optim.name,
        changes=size_changes(job, layout, trial),
        left_out=features_left_out(job, layout, trial, compiled=settings.compile, on_gpu=on_gpu),
        comparison=compare_outcomes(outcome, reference, bounds),
        again=compare_outcomes(second_outcome, reference, bounds) if second_outcome is not None else None,
        cached=second_outcome.graphs[0] if second_outcome is not None else 0,
        bounds=bounds,
        one_s=reference.seconds,
        split_s=outcome.seconds,
        total_s=time.monotonic() - began_s,
    )


# The report of `phalanx verify`.


AXES = ("tensor", "context", "pipeline", "virtual_pipeline", "data", "shard", "expert")


def render_proof(proof: LayoutProof) -> str:
    """Return the report: verdict, degrees of the axes, differences and notes."""
    blocks = [
        [f"{proof.job}: {proof.model}, {proof.layout.name}", _verdict_line(proof)],
        _axis_lines(proof),
        _difference_lines(proof),
        _note_lines(proof),
    ]
    return "\n\n".join("\n".join(block) for block in blocks)


def _verdict_line(proof: LayoutProof) -> str:
    ranks = plural(proof.ranks, "rank")
    if proof.gpus:
        ranks += f" on {plural(proof.gpus, 'GPU')} over NCCL"
    participants = f"{ranks} and one process"
    method = f"{plural(proof.steps, 'step')} of {proof.optimizer} in {format_name(proof.terms.precision)}"
    method += ", compiled" if proof.compiled else ""
    if proof.comparison.first is not None:
        return f"DIFFERS: {proof.comparison.first.render()}\n({participants}, {method})"
    if proof.again is not None and proof.again.first is not None:
        return f"DIFFERS from the compile cache: {proof.again.first.render()}\n({participants}, {method}, second start)"
    cache_note = (
        f", twice: {plural(proof.cached, 'graph')} of the second start came from the compile cache"
        if proof.again
        else ""
    )
    return f"VERIFIED: {participants} compute the same, {method}{cache_note}"


def _axis_lines(proof: LayoutProof) -> list[str]:
    axes = [name for name in AXES if getattr(proof.layout, name) > 1 or name == "data"]
    rows = [(name, getattr(proof.layout, name), getattr(proof.small, name)) for name in axes]
    rows.append(("ranks", proof.layout.devices, proof.small.devices))
    cells = [(name, f"{job_degree:,}", f"{verified_degree:,}") for name, job_degree, verified_degree in rows]
    return text_table([("axis", "job", "verified"), *cells], right=(1, 2), indent=2)


def _difference_lines(proof: LayoutProof) -> list[str]:
    """Return the table of differences and bounds; of two starts it shows the larger difference."""
    bounds = proof.bounds
    rows = [
        ("loss", "loss", _allowed_text(bounds.loss, bounds)),
        ("held-out loss", "evaluation", _allowed_text(bounds.loss, bounds)),
        ("gradient norm", "norm", _allowed_text(bounds.norm, bounds)),
    ]
    if not proof.terms.full_size:
        reference = "each tensor, first step" if bounds.rounding else "each tensor's largest"
        rows.append(("gradients", "gradient", f"{_size_text(bounds.gradient, bounds)} of {reference}"))
        if bounds.parameter is not None:
            rows.append(("parameters", "parameter", _size_text(bounds.parameter, bounds)))
    head = "relative difference" if bounds.rounding else "largest difference"
    comparisons = [comparison for comparison in (proof.comparison, proof.again) if comparison is not None]
    cells = [
        (name, f"{max(getattr(comparison, key) for comparison in comparisons):.0e}", allowed)
        for name, key, allowed in rows
    ]
    return text_table([(head, "found", "allowed"), *cells], right=(1,), indent=2)


def _allowed_text(size: float, bounds: Tolerances) -> str:
    later = f" (later steps {size * bounds.later:.1e})" if bounds.rounding else ""
    return f"{_size_text(size, bounds)}{later}"


def _size_text(size: float, bounds: Tolerances) -> str:
    return f"{size:.1e}" if bounds.rounding else f"{size:.0e}"


def _note_lines(proof: LayoutProof) -> list[str]:
    lines = []
    if proof.changes:
        changes = ", ".join(f"{change.name} {change.real:,} → {change.small:,}" for change in proof.changes)
        lines.append(f"  scaled down: {changes}")
    if proof.bounds.rounding:
        lines.append(
            f"  allowed: the loss 1, the gradient norm 4, each gradient 16 roundings of {proof.bounds.rounding:.1e} "
            f"({proof.terms.precision}); 4 times that after the first update"
        )
    if proof.left_out:
        lines.append(f"  not covered: {'; '.join(proof.left_out)}")
    split_time = f"{plural(proof.ranks, 'rank')} {format_seconds(proof.split_s)}"
    lines.append(f"  took {format_seconds(proof.total_s)}: one process {format_seconds(proof.one_s)}, {split_time}")
    return lines
