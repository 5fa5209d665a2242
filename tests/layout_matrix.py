"""Every kind of layout the planner can emit, crossed with formats, compiling, recompute, offload and compression.

`MATRIX_CASES` is the list; `refusals` says what the trainer refuses of a case before anything starts, `trial_of` makes
the rest of it a few steps of a tiny model, `reference_of` the same on one process. The list is made by rule, not by
hand: each layout in bf16 eager and compiled, then formats, recompute, offload and compression on one layout of each
kind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from phalanx.errors import Problem
from phalanx.hardware.cluster import resolve_cluster
from phalanx.job.model import ModelShape
from phalanx.job.schema import SECTIONS, Batch, Data, Job, Parallel, Precision, Train
from phalanx.plan.layout import Layout
from phalanx.plan.trainable import splits_backward, trainer_problems
from phalanx.train.rank_settings import Settings
from phalanx.train.verify.compare import OutcomeComparison, Tolerances, compare_outcomes
from phalanx.train.verify.small_trial import GENTLE_LR, reference_trial
from phalanx.train.verify.trial import Trial, TrialOutcome

SEQUENCE, SEQUENCES, STEPS = 64, 16, 5
DENSE = ModelShape(name="dense", layers=2, hidden=64, heads=8, kv_heads=4, head_dim=16, ffn=128, vocab=256)
DEEP = replace(DENSE, name="deep", layers=4)
EXPERTS = replace(DENSE, name="experts", experts=4, experts_per_token=2, expert_ffn=64)
SHAPES = {shape.name: shape for shape in (DENSE, DEEP, EXPERTS)}
# What a gradient loses on the wire, relative: bf16 keeps 8 bits, int8 a step in 127 of its block's largest, fp8 4 bits.
COMPRESSED = {"none": 0.0, "bf16": 2.0**-8, "int8": 2.0**-7, "fp8": 2.0**-4}

Sizes = dict[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixCase:
    """One combination."""

    layout_name: str
    shape: str
    layout: tuple[tuple[str, object], ...]  # of Layout, and `context_kind`
    precision: str = "bf16"
    compiled: bool = False
    recompute: str = "none"
    offload: str = "none"
    compression: str = "none"

    @property
    def name(self) -> str:
        """All of it, short."""
        parts = [self.layout_name, self.precision, "compiled" if self.compiled else "eager"]
        parts += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        parts += [f"offload {self.offload}"] if self.offload != "none" else []
        parts += [f"grads {self.compression}"] if self.compression != "none" else []
        return ", ".join(parts)

    @property
    def sizes(self) -> dict[str, object]:
        """The layout's changes by name."""
        return dict(self.layout)


SP: Sizes = {"tensor": 4, "sequence_parallel": True}
TWO_SP: Sizes = {"tensor": 2, "sequence_parallel": True}
ZERO3: Sizes = {"data": 2, "shard": 2, "zero": 3}
KINDS = ("ring", "allgather", "ulysses")
# (shape, sizes): of 4 ranks unless the sizes say 8.
LAYOUTS: dict[str, tuple[str, Sizes]] = {
    "dp4": ("dense", {"data": 4}),
    "zero1": ("dense", {"data": 4, "shard": 4, "zero": 1}),
    "zero2": ("dense", {"data": 4, "shard": 4, "zero": 2}),
    "zero3": ("dense", {"data": 4, "shard": 4, "zero": 3}),
    "hsdp 2x2": ("dense", {"data": 4, "shard": 2, "zero": 3}),
    "tp4": ("dense", {"tensor": 4}),
    "tp4 sp": ("dense", SP),
    "tp2 x dp2": ("dense", {"data": 2} | TWO_SP),
    "tp2 x zero3": ("dense", ZERO3 | TWO_SP),
    **{f"cp4 {kind}": ("dense", {"context": 4, "context_kind": kind}) for kind in KINDS},
    **{f"cp2 {kind} x zero3": ("dense", ZERO3 | {"context": 2, "shard": 4, "context_kind": kind}) for kind in KINDS},
    **{f"tp2 x cp2 {kind}": ("dense", {"context": 2, "context_kind": kind} | TWO_SP) for kind in KINDS},
    "cp2 ring x hsdp": ("dense", ZERO3 | {"context": 2}),
    "pp4 gpipe": ("deep", {"pipeline": 4, "schedule": "gpipe"}),
    "pp4 1f1b": ("deep", {"pipeline": 4}),
    "pp4 zero-bubble": ("deep", {"pipeline": 4, "schedule": "zero-bubble"}),
    "pp2 interleaved x dp2": ("deep", {"pipeline": 2, "virtual_pipeline": 2, "schedule": "interleaved", "data": 2}),
    "pp2 zero-bubble V x zero1": (
        "deep", {"pipeline": 2, "virtual_pipeline": 2, "schedule": "zero-bubble", "data": 2, "shard": 2, "zero": 1}
    ),
    "pp2 x zero1": ("deep", {"pipeline": 2} | ZERO3 | {"zero": 1}),
    "pp2 x zero3": ("deep", {"pipeline": 2} | ZERO3),
    "pp2 x tp2": ("deep", {"pipeline": 2} | TWO_SP),
    "pp2 x cp2 ring": ("deep", {"pipeline": 2, "context": 2}),
    "pp2 x cp2 ulysses": ("deep", {"pipeline": 2, "context": 2, "context_kind": "ulysses"}),
    "ep4": ("experts", {"data": 4, "expert": 4}),
    "ep2 x dp2": ("experts", {"data": 4, "expert": 2}),
    "ep2 x zero3": ("experts", {"data": 4, "expert": 2, "shard": 4, "zero": 3}),
    "ep4 x tp2": ("experts", {"data": 2, "expert": 4} | TWO_SP),
    "ep2 x cp2": ("experts", {"data": 2, "context": 2, "expert": 2}),
    "pp2 x ep2": ("experts", {"pipeline": 2, "data": 2, "expert": 2}),
    "tp2 x cp2 ulysses x zero3": ("dense", ZERO3 | TWO_SP | {"context": 2, "shard": 4, "context_kind": "ulysses"}),
    "pp2 x tp2 x zero1": ("deep", {"pipeline": 2} | ZERO3 | TWO_SP | {"zero": 1}),
    "pp2 x tp2 x cp2 ring": ("deep", {"pipeline": 2, "context": 2} | TWO_SP),
    "pp2 interleaved x tp2 x dp2": (
        "deep", {"pipeline": 2, "virtual_pipeline": 2, "schedule": "interleaved", "data": 2} | TWO_SP
    ),
    "hsdp 4x2": ("dense", {"data": 8, "shard": 2, "zero": 3}),
    "ep4 x tp2 x zero3": ("experts", {"data": 4, "expert": 4, "shard": 4, "zero": 3} | TWO_SP),
}  # fmt: skip
FP8 = (
    "dp4",
    "zero3",
    "hsdp 2x2",
    "cp4 ulysses",
    "cp2 ring x zero3",
    "pp2 interleaved x dp2",
    "pp2 x zero1",
    "ep2 x dp2",
    "tp4 sp",
    "tp2 x dp2",
    "tp2 x zero3",
    "pp2 x tp2",
    "tp2 x cp2 ulysses x zero3",
)
FP32 = ("zero3", "tp4 sp", "cp4 ulysses", "cp4 ring", "pp2 interleaved x dp2")
RECOMPUTED = ("zero3", "tp2 x zero3", "cp4 ulysses", "cp4 ring", "pp4 1f1b", "ep4")
OFFLOADED = {
    "optimizer": ("zero2", "tp2 x dp2"),
    "parameters": ("zero3",),
    "activations": ("zero3", "tp4 sp", "cp4 ulysses", "pp4 1f1b"),
}
WIRED = {
    "bf16": ("dp4", "zero1"),
    "int8": ("dp4", "zero3", "pp2 x zero1"),
    "fp8": ("dp4", "zero1"),
    "powersgd": ("dp4",),
}


def _cases() -> list[MatrixCase]:
    def case(name: str, **more: object) -> MatrixCase:
        shape, sizes = LAYOUTS[name]
        return MatrixCase(layout_name=name, shape=shape, layout=tuple(sorted(sizes.items(), key=str)), **more)  # type: ignore[arg-type]

    def splits(name: str) -> bool:
        return LAYOUTS[name][1].get("schedule") == "zero-bubble"

    found = [case(name, compiled=True) for name in LAYOUTS if not splits(name)]
    found += [case(name) for name in LAYOUTS]
    found += [case(name, precision="fp8", compiled=True) for name in FP8]
    found += [case(name, precision="fp32", compiled=True) for name in FP32]
    found += [case(name, recompute=kind, compiled=True) for kind in ("full", "selective") for name in RECOMPUTED]
    found += [
        case("pp4 zero-bubble", recompute="full"),
        case("zero3", precision="fp8", recompute="full", compiled=True),
        case("tp2 x zero3", precision="fp8"),
        case("tp4", precision="fp8"),
    ]
    found += [case(name, offload=kind, compiled=True) for kind, names in OFFLOADED.items() for name in names]
    found += [case(name, compression=kind, compiled=True) for kind, names in WIRED.items() for name in names]
    # Refused, every one of them, with the reason.
    found += [case("dp4", compression="topk", compiled=True), case("zero1", compression="powersgd", compiled=True)]
    found += [case("pp4 zero-bubble", compiled=True), case("pp4 zero-bubble", recompute="selective")]
    found += [case("dp4", offload="parameters", compiled=True), case("dp4", precision="fp4", compiled=True)]
    wrong = replace(case("pp2 zero-bubble V x zero1"), layout_name="pp2 zero-bubble V x zero3")
    found.append(replace(wrong, layout=tuple(sorted((wrong.sizes | {"zero": 3}).items(), key=str))))
    return found


MATRIX_CASES = _cases()


def sample_cases(cases: Sequence[MatrixCase], count: int, seed: str) -> list[MatrixCase]:
    """`count` of the cases: those whose name has the lowest digest with the seed. The same seed, the same cases."""
    return sorted(cases, key=lambda case: hashlib.sha256(f"{seed}:{case.name}".encode()).hexdigest())[:count]


def layout_of(case: MatrixCase) -> Layout:
    """The layout of a case, for a global batch of 16 sequences."""
    sizes = {name: value for name, value in case.sizes.items() if name != "context_kind"}
    base = Layout(
        data=1, shard=1, tensor=1, context=1, pipeline=1, virtual_pipeline=1, expert=1, zero=0, sequence_parallel=False,
        micro_batch=2, accumulation=1, recompute=case.recompute, precision=case.precision, schedule="1f1b",
        offload=case.offload, compression=case.compression,
    )  # fmt: skip
    made = replace(base, **sizes)  # type: ignore[arg-type]
    # Two micro-batches at least, and two rounds in a pipeline; more would only take longer.
    micro = 2 if made.pipeline > 1 else SEQUENCES // (2 * made.data)
    micro = max(1, min(micro, SEQUENCES // (made.data * 2 * made.pipeline)))
    return replace(made, micro_batch=micro, accumulation=SEQUENCES // (made.data * micro))


def job_of(case: MatrixCase) -> Job:
    """The job that a person would write for it."""
    sections = {name: made() for name, made in SECTIONS.items()}
    sections |= {
        "data": Data(sequence=SEQUENCE, tokens=SEQUENCE * SEQUENCES * STEPS),
        "batch": Batch(global_sequences=SEQUENCES, global_tokens=SEQUENCES * SEQUENCE),
        "precision": Precision(compute=case.precision),
        "parallel": Parallel(context_kind=str(case.sizes.get("context_kind", "ring"))),
        "train": Train(compile=case.compiled),
    }
    return Job(name="matrix", model=SHAPES[case.shape], **sections)  # type: ignore[arg-type]


def refusals(case: MatrixCase, *, device: str) -> list[Problem]:
    """What `phalanx train` refuses of it before anything starts; none when it runs."""
    layout = layout_of(case)
    cluster = resolve_cluster(f"{layout.devices}xH200" if device == "cuda" else f"cpu:{layout.devices}")
    found = trainer_problems(job_of(case), layout, cluster)
    if device == "cpu" and case.precision == "fp8" and not found:
        found = [Problem(where="precision.compute", what='"fp8" has no matrix product on a CPU', fix='use "bf16"')]
    return found


def trial_of(case: MatrixCase, *, device: str) -> Trial:
    """Five steps of it, losses and gradient norms."""
    job, layout = job_of(case), layout_of(case)
    return Trial(
        shape=job.model,
        settings=Settings.of(job, layout, on_gpu=device == "cuda"),
        sequences=SEQUENCES,
        steps=STEPS,
        lr=GENTLE_LR,
        device=device,
        tensors=False,
        evaluate=False,
    )


def exact_trial_of(case: MatrixCase, *, backend: str = "aot_eager") -> Trial:
    """The same in float64 on CPUs, with every tensor compared; compiled graphs without a compiler."""
    trial = trial_of(replace(case, precision="fp32", compression="none"), device="cpu")
    settings = replace(trial.settings, compute="fp64", reduce="fp64", master="fp64", compile_backend=backend)
    return replace(trial, settings=settings, tensors=True, steps=2)


def reference_of(trial: Trial) -> Trial:
    """One process, the same format, compiled or not, and uncompressed."""
    one = reference_trial(trial)
    layout = replace(one.settings.layout, compression="none", micro_batch=4, accumulation=SEQUENCES // 4)
    return replace(one, settings=replace(one.settings, layout=layout, context_kind="ring"))


def reference_name(trial: Trial) -> str:
    """Which reference a trial is held against."""
    settings = trial.settings
    how = "compiled" if settings.compile else "eager"
    recomputed = f", recompute {settings.layout.recompute}" if settings.compile else ""
    return f"one process, {trial.shape.name}, {settings.compute}, {how}{recomputed}"


def bounds_of(case: MatrixCase) -> Tolerances:
    """What counts as equal: the rounding of the format, and of the gradients on the wire."""
    return Tolerances.rounded(case.precision, also=COMPRESSED.get(case.compression, 0.0))


def judge_case(case: MatrixCase, found: TrialOutcome, wanted: TrialOutcome) -> OutcomeComparison:
    """How far a case is from its reference.

    PowerSGD sends approximations of rank 4: their norm is another, and only the losses are held, to a twentieth.
    """
    if case.compression == "powersgd":
        kept = replace(found, norms=wanted.norms)
        return compare_outcomes(kept, wanted, replace(bounds_of(case), later=0.05 / bounds_of(case).loss))
    return compare_outcomes(found, wanted, bounds_of(case))


def runs_compiled(case: MatrixCase) -> bool:
    """Whether anything of it is compiled, so that a second start differs from the first."""
    return case.compiled and not splits_backward(layout_of(case))
