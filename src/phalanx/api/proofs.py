"""Proofs without a cluster: a layout compared with a single process, and ranks' steps traced on fake tensors."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.api.jobs import AnyJob, override_texts, read_job
from phalanx.api.results import Overrides, PublicResult, Tell, teller, warn
from phalanx.errors import mistake
from phalanx.hardware.types import Cluster
from phalanx.io.codec import json_values
from phalanx.io.limits import MAX_RANKS_PER_GPU, MAX_SECONDS, MAX_WORKERS
from phalanx.job.schema import PluginReferences
from phalanx.units import format_seconds, number_text, plural

if TYPE_CHECKING:
    from phalanx.plan.plan import Plan
    from phalanx.train.tracing.hang_check import TraceHang
    from phalanx.train.tracing.log import RankTrace
    from phalanx.train.tracing.trace_report import PlanLine, TracedFit
    from phalanx.train.tracing.traced_ranks import TracedStep
    from phalanx.train.verify.proof import LayoutProof
    from phalanx.train.verify.terms import Terms

MOST_STEPS = 1000
FORMATS = {"float64": "fp64", "fp32": "fp32", "bf16": "bf16", "fp8": "fp8"}
LONG_TIMEOUT_S = 600.0  # compiling for 8 ranks on 2 cores takes minutes
# With `ranks="all"`: each takes a minute or two for a large model.
MOST_RANKS = 64


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class VerifyResult(PublicResult):
    """The comparison of a layout with a single process, and the differences."""

    proof: LayoutProof

    @property
    def holds(self) -> bool:
        """True if nothing differs beyond rounding."""
        return self.proof.holds

    def __str__(self) -> str:
        from phalanx.train.verify.proof import render_proof

        return render_proof(self.proof)

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict and every comparison."""
        return {"proven": self.holds, "proof": json_values(self.proof)}

    @property
    def exit_code(self) -> int:
        """0 if the layout is proven, 1 if something differs."""
        return 0 if self.holds else 1


def verify(
    job: AnyJob,
    *,
    overrides: Overrides = (),
    cluster: str | Cluster | None = None,
    plan: str | Path | Plan | None = None,
    device: str = "cpu",
    ranks_per_gpu: int | None = None,
    compile: bool = False,
    precision: str = "float64",
    full_size: bool = False,
    steps: int = 5,
    timeout: float | None = None,
    allow_code: bool = False,
    progress: bool | Tell = False,
) -> VerifyResult:
    """Prove on this machine that a job's layout computes the same as a single process.

    The model is reduced in size, the layout keeps its axes, and both take `steps` optimizer steps from the same
    weights and data. `precision` float64 proves to 1e-12, fp32, bf16 and fp8 to their rounding. `device` cuda runs
    over NCCL. Your own loss and optimizer take part, with `allow_code`; the data is random tokens in any case.

    >>> verify("job.toml", cluster="8xH100:1").holds  # doctest: +SKIP
    True
    """
    tell = teller(progress)
    where = "phalanx verify"
    if not 1 <= steps <= MOST_STEPS:
        raise mistake(where, f"--steps {steps} is not between 1 and {MOST_STEPS:,}", fix="use 5")
    if timeout is not None and not timeout > 0:
        raise mistake(where, f"--timeout {timeout:g} is not above 0", fix="use 120")
    if timeout is not None and timeout > MAX_SECONDS:
        raise mistake(where, f"--timeout {number_text(timeout)} is above {MAX_SECONDS:g} seconds", fix="use 120")
    if ranks_per_gpu is not None and device == "cpu":
        message = f"--ranks-per-gpu {ranks_per_gpu} without --device cuda has no effect"
        raise mistake(where, message, fix="add --device cuda, or leave it out")
    if ranks_per_gpu is not None and not 1 <= ranks_per_gpu <= MAX_RANKS_PER_GPU:
        message = f"--ranks-per-gpu {ranks_per_gpu} is not between 1 and {MAX_RANKS_PER_GPU}"
        raise mistake(where, message, fix="use 4")
    if plan is not None and cluster:
        raise mistake(where, "--plan and --cluster exclude each other", fix="give one of them")
    began_s = time.monotonic()
    from phalanx.train.prepare import check_code, need_torch

    need_torch()
    # A plan is final; how many ranks share a GPU here is not part of it.
    sharing = ranks_per_gpu if plan is None else None
    proof_plan = _verify_plan(job, overrides=overrides, cluster=cluster, plan=plan, ranks_per_gpu=sharing)
    from phalanx.train.models.support import refuse_untrainable
    from phalanx.train.plugins import refuse_plugins
    from phalanx.train.verify.ranks import warm_up
    from phalanx.train.verify.small_trial import refuse_own_model

    refuse_own_model(proof_plan.job)
    refuse_untrainable(proof_plan.job.model)
    # Of the user's code a proof runs only loss and optimizer.
    plugins = PluginReferences(loss=proof_plan.job.plugins.loss, optimizer=proof_plan.job.plugins.optimizer)
    check_code(replace(proof_plan.job, plugins=plugins), allowed=allow_code)
    refuse_plugins(proof_plan.job.plugins, proof_plan.layout, loss_parallel=proof_plan.job.parallel.loss_parallel)
    terms, gpus = _proof_terms(
        proof_plan,
        device=device,
        precision=precision,
        compile=compile,
        full_size=full_size,
        share=ranks_per_gpu,
        tell=tell,
    )
    warm_up()  # both processes import torch at the same time
    from phalanx.train.verify.proof import prove_layout

    proof = prove_layout(
        proof_plan.job,
        proof_plan.layout,
        steps=steps,
        terms=terms,
        on_gpu=proof_plan.cluster.accelerator.family != "cpu",
        gpus=gpus,
        limit_s=timeout or (LONG_TIMEOUT_S if compile or full_size else None),
        debug=os.environ.get("PHALANX_DEBUG") == "1",
        allow_code=allow_code,
        tell=tell,
        began_s=began_s,
    )
    return VerifyResult(proof=proof)


def _verify_plan(
    job: AnyJob,
    *,
    overrides: Overrides,
    cluster: str | Cluster | None,
    plan: str | Path | Plan | None,
    ranks_per_gpu: int | None,
) -> Plan:
    from phalanx.plan.make import make_plan
    from phalanx.plan.plan import Plan
    from phalanx.train.prepare import load_job, plan_for_run, read_plan

    if isinstance(plan, Plan):
        return plan
    sharing = [f"train.ranks_per_gpu={ranks_per_gpu}"] if ranks_per_gpu is not None else []
    texts = [*override_texts(overrides), *sharing]
    if isinstance(cluster, Cluster):
        return make_plan(read_job(job, texts, where="phalanx.verify"), cluster)
    if isinstance(job, str | Path):
        resolved = load_job(str(job), overrides=texts, cluster=cluster, steps=0)
    else:
        resolved = read_job(job, overrides, where="phalanx.verify")
    if plan is not None:
        return read_plan(str(plan), resolved)
    return plan_for_run(resolved) if isinstance(job, str | Path) else make_plan(resolved, cluster)


def _proof_terms(
    plan: Plan, *, device: str, precision: str, compile: bool, full_size: bool, share: int | None, tell: Tell
) -> tuple[Terms, int]:
    """Return the terms of the proof and the number of GPUs; problems are raised before torch is imported."""
    from phalanx.hardware.this_machine import allowed_ranks
    from phalanx.train.prepare import check_gpus
    from phalanx.train.verify.terms import RANKS, Terms, refuse_terms

    gpus, ranks = 0, RANKS
    if device == "cuda":
        allowed = max(share or 1, allowed_ranks(plan.job.train.ranks_per_gpu, os.environ))
        gpus = check_gpus(allowed, where="--device cuda", tell=tell)
        ranks = gpus * allowed
    terms = Terms(device=device, precision=FORMATS[precision], compile=compile, full_size=full_size, ranks=ranks)
    refuse_terms(terms, layout_ranks=plan.layout.devices)
    return terms, gpus


# ---- trace -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Trace(PublicResult):
    """The traced steps of some ranks, a check that they cannot hang, and a comparison with the plan."""

    plan: Plan
    ranks: tuple[RankTrace, ...]
    hang: TraceHang | None
    against_plan: tuple[PlanLine, ...]
    fit: TracedFit | None

    def __str__(self) -> str:
        from phalanx.train.tracing import trace_report as text

        pages = []
        if len(self.ranks) == 1:
            pages.append(text.render_rank(self.ranks[0]))
        else:
            fullest = max(self.ranks, key=lambda trace: trace.peak.nbytes)
            pages.append("\n".join(["RANKS", *text.render_ranks(self.ranks), ""]))
            pages.append("HIGHEST PEAK MEMORY: " + text.render_rank(fullest) + "\n")
            meet = "no hang: the collectives of the traced ranks match"
            pages.append(f"HANG: {self.hang.render()}" if self.hang is not None else meet)
        if self.against_plan:
            pages.append("\n" + text.render_against(list(self.against_plan)))
        if self.fit is not None:
            pages.append("\n" + text.render_fit(self.fit, recompute=self.plan.layout.recompute))
        return "\n".join(pages)

    def to_dict(self) -> dict[str, Any]:
        """Return per rank its place, messages, FLOPs, peak memory; then hang, fit and differences from the plan."""
        from phalanx.train.tracing.log import message_rows

        ranks = [
            {
                "rank": trace.rank,
                "place": trace.place,
                "stages": trace.stages,
                "layers": trace.layers,
                "operations": len(trace.operations),
                "messages": message_rows(trace),
                "flops": trace.flops,
                "peak": trace.peak,
                "seconds": trace.seconds,
                "rss_bytes": trace.rss_bytes,
            }
            for trace in self.ranks
        ]
        values = {
            "layout": self.plan.layout.name,
            "devices": self.plan.layout.devices,
            "ranks": ranks,
            "hang": None if self.hang is None else self.hang.render(),
            "fit": self.fit,
            "against_plan": self.against_plan,
        }
        return dict(json_values(values))

    def log_lines(self) -> Iterator[str]:
        """Yield every operation of every traced rank, one JSON object per line."""
        for trace in self.ranks:
            for index, operation in enumerate(trace.operations):
                value = {
                    "rank": trace.rank,
                    "index": index,
                    "kind": operation.kind,
                    "bytes": operation.nbytes,
                    "dtype": operation.dtype,
                    "axis": operation.group.axis,
                    "ranks": len(operation.group.ranks),
                    "first_rank": operation.group.ranks[0],
                    "stride": operation.group.stride,
                    "phase": operation.phase,
                }
                if operation.is_message:
                    value |= {"peer": operation.peer, "batch": operation.batch}
                yield json.dumps(value) + "\n"

    @property
    def exit_code(self) -> int:
        """1 if ranks would hang, the plan is wrong, or the step does not fit."""
        wrong = self.hang is not None or not all(line.agrees for line in self.against_plan)
        return 1 if wrong or (self.fit is not None and not self.fit.fits) else 0


def trace(
    job: AnyJob,
    cluster: str | Path | Cluster | None = None,
    *,
    overrides: Overrides = (),
    rank: int | None = None,
    ranks: str = "one",
    against_plan: bool = False,
    workers: int = 0,
    allow_code: bool = False,
    progress: bool | Tell = False,
) -> Trace:
    """Trace the real training step of one rank on fake tensors, for a job of any size, on this machine.

    `ranks` "stages" traces one rank of every pipeline stage and checks that they meet in every operation; "all" traces
    every rank of a job of up to 64. `against_plan` compares messages, FLOPs and memory of all stages with the plan.
    `workers` ranks are traced at a time, one per core by default.

    >>> print(trace("job.toml", "8xH100:16", against_plan=True))  # doctest: +SKIP
    """
    from phalanx.plan.make import make_plan
    from phalanx.train.prepare import check_code, need_torch, with_absolute_files

    tell = teller(progress)
    need_torch()
    if workers < 0:
        raise mistake("phalanx trace", f"--workers {workers} is below 0", fix="use 1 or more")
    if workers > MAX_WORKERS:
        message = f"--workers {number_text(workers)} is above {MAX_WORKERS:,}"
        raise mistake("phalanx trace", message, fix="use the number of cores, which is the default")
    resolved = with_absolute_files(read_job(job, overrides, where="phalanx.trace"))
    warn(resolved.warnings, tell)
    plan = make_plan(resolved, cluster)
    check_code(plan.job, allowed=allow_code)
    from phalanx.train.tracing.hang_check import find_hang
    from phalanx.train.tracing.traced_ranks import TracedStep, trace_ranks

    step = TracedStep.of(plan.job, plan.layout, on_gpu=plan.cluster.accelerator.family != "cpu", allow_code=allow_code)
    chosen = _traced_ranks(plan, rank=rank, ranks="stages" if against_plan and ranks == "one" else ranks)
    _tell_differences(step, tell)
    tell(f"{plan.job.name}: {plan.layout.name}, {len(chosen)} of {plan.layout.devices:,} ranks")

    def done(one: RankTrace) -> None:
        if len(chosen) > 1:
            tell(f"rank {one.rank:,} traced in {one.seconds:.0f} s")

    def still(running: Sequence[int], seconds: float) -> None:
        names = ", ".join(f"{running_rank:,}" for running_rank in running)
        tell(
            f"{format_seconds(seconds)} so far: tracing {'rank' if len(running) == 1 else 'ranks'} {names}, "
            f"{plural(plan.layout.accumulation, 'micro-batch')} each"
        )

    traces = tuple(trace_ranks(step, chosen, workers=workers, done=done, still=still))
    lines, fit = _compare_with_plan(plan, traces) if against_plan else ([], None)
    hang = find_hang(traces) if len(traces) > 1 else None
    return Trace(plan=plan, ranks=traces, hang=hang, against_plan=tuple(lines), fit=fit)


def _traced_ranks(plan: Plan, *, rank: int | None, ranks: str) -> list[int]:
    from phalanx.train.tracing.traced_ranks import check_rank, stage_ranks

    if ranks == "all":
        if plan.layout.devices > MOST_RANKS:
            raise mistake(
                "phalanx trace --all-ranks",
                f"{plan.layout.name} has {plan.layout.devices:,} ranks, more than {MOST_RANKS}",
                why="only pipeline stages make ranks differ",
                fix="use --all-stages",
            )
        return list(range(plan.layout.devices))
    if ranks == "stages" and rank is None:
        return stage_ranks(plan.layout)
    check_rank(rank or 0, plan.layout)
    return [rank or 0]


def _tell_differences(step: TracedStep, tell: Tell) -> None:
    """Print where the traced step differs from the step on a GPU."""
    if step.settings.compute == "fp8":
        tell("fp8 is traced as bf16, and compared with the plan's count for bf16: a CPU has no fp8 products")
    if step.settings.layout.offload == "activations":
        tell("offloaded activations are counted on the device: on a CPU host and device are one")
    if step.settings.layout.compression != "none":
        tell("compressed gradient exchange of replicated weights runs in a thread of its own and is not seen")


def _compare_with_plan(plan: Plan, traces: Sequence[RankTrace]) -> tuple[list[PlanLine], TracedFit]:
    from phalanx.plan.request import request_from_job
    from phalanx.train.tracing.trace_report import against_plan, traced_fit

    request, _ = request_from_job(plan.job, plan.cluster)
    return against_plan(request, plan.layout, traces), traced_fit(request, plan.layout, plan.memory, traces)
