"""A small copy of a job that splits as the large one does: every axis that is used stays used, every remainder remains.

What matters to a layout is which axes there are, what divides what, and in which order things happen; not how much of
each. So degrees fall to 2 (4 where a group lies inside a group), and the model to a few layers of a few columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from phalanx.errors import mistake
from phalanx.job.model import ModelShape
from phalanx.job.schema import Job, Optim
from phalanx.plan.layout import Layout
from phalanx.train.settings import Settings
from phalanx.train.verify.trial import Trial

HIDDEN, HEAD, FFN, EXPERT_FFN, VOCAB, SEQUENCE = 32, 8, 48, 16, 64, 16
EXACT = "fp64"
ROUNDING = ("adamw8bit",)  # optimizers that round on purpose: a last bit becomes a visible step


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One number of the job and what it is in the copy."""

    name: str
    real: object
    small: object


def refuse_own(job: Job) -> None:
    """Raises UserError for a network of the user's own."""
    if job.model.module:
        raise mistake(
            "model.module",
            f"{job.model.module!r} cannot be made smaller by anyone but its author",
            why="phalanx verify proves a layout on a small copy of the model",
            fix="verify the layout with a preset of the same family, or train a few steps with precision.compute = "
            '"fp32" under both layouts',
        )


def shrink(job: Job, layout: Layout, *, steps: int) -> Trial:
    """The trial that stands for a job under a layout. The layout must be one that `check_layout` lets pass."""
    refuse_own(job)
    small = shrink_layout(job.model, layout)
    kind, some = job.parallel.context_kind, job.parallel.recompute_layers != "auto"
    shape = shrink_model(job.model, layout, small, ulysses=kind == "ulysses")
    if some:  # one of two layers is recomputed on every stage
        shape = replace(shape, layers=max(shape.layers, 2 * small.pipeline * small.virtual_pipeline))
    settings = Settings(
        layout=small,
        sequence=SEQUENCE,
        compute=EXACT,
        reduce=EXACT,
        master=EXACT,
        context_kind=kind,
        loss_parallel=job.parallel.loss_parallel,
        recompute_layers=1 if some else None,
        reproducible=job.numerics.reproducible,
        seed=job.data.seed,
    )
    sequences = small.data * small.micro_batch * small.accumulation
    return Trial(shape=shape, settings=settings, sequences=sequences, optim=_optim(job.optim), steps=steps)


def alone(trial: Trial) -> Trial:
    """The same trial on one process, with nothing split, recomputed or moved."""
    layout = trial.settings.layout
    one = replace(
        layout,
        data=1,
        shard=1,
        tensor=1,
        context=1,
        pipeline=1,
        virtual_pipeline=1,
        expert=1,
        zero=0,
        sequence_parallel=False,
        accumulation=trial.sequences // layout.micro_batch,
        recompute="none",
        schedule="1f1b",
        offload="none",
    )
    return replace(trial, settings=replace(trial.settings, layout=one, reproducible=False))


def changes(job: Job, layout: Layout, trial: Trial) -> list[Change]:
    """Everything of the model and of the batch that is smaller in the copy."""
    return [change for change in _pairs(job, layout, trial) if change.real != change.small]


def left_out(job: Job, layout: Layout, *, compiled: bool) -> list[str]:
    """What the proof says nothing about, each with its reason."""
    found = []
    if job.precision.compute != EXACT:
        found.append(f"{job.precision.compute} arithmetic (float64 here: rounding would hide mistakes)")
    if layout.compression != "none":
        found.append(f"{layout.compression} gradients (they round on purpose)")
    if job.optim.name in ROUNDING or job.precision.optimizer_state != "fp32":
        found.append("the compact optimizer state (it rounds on purpose; AdamW here)")
    if compiled:
        found.append("compiled blocks (eager here)")
    return found


# ---- the layout ------------------------------------------------------------------------------------------------------


def shrink_layout(shape: ModelShape, real: Layout) -> Layout:
    """Degrees of 2 where there is a split, of 4 where a group of ranks lies inside another; kept micro-batch rounds."""
    sizes = {name: min(getattr(real, name), 2) for name in ("tensor", "context", "pipeline", "data")}
    replicas = real.data * real.context
    if real.zero and 1 < real.shard < replicas and sizes["data"] * sizes["context"] < 4:
        sizes["data" if real.data >= 4 else "context"] = 4
    expert = _expert(shape, real, sizes)
    data, context, tensor = sizes["data"], sizes["context"], sizes["tensor"]
    shard = 1
    if real.zero:
        shard = data * context if real.shard >= replicas else min(real.shard, 2)
    return replace(
        real,
        data=data,
        context=context,
        tensor=tensor,
        pipeline=sizes["pipeline"],
        expert=expert,
        shard=shard,
        virtual_pipeline=_chunks(real),
        micro_batch=min(real.micro_batch, 2),
        accumulation=_micro_batches(real, sizes["pipeline"]),
        precision="fp32",
        compression="none",
    )


def _expert(shape: ModelShape, real: Layout, sizes: dict[str, int]) -> int:
    """Expert ranks: above the tensor ranks if they were, below the stage's ranks if they were. May double the data."""
    if real.expert == 1 or not shape.is_moe:
        return 1
    small = 4 if real.expert > real.tensor > 1 else 2
    whole = real.expert == real.data * real.context * real.tensor
    wanted = small if whole else 2 * small
    stage = sizes["data"] * sizes["context"] * sizes["tensor"]
    if stage < wanted and real.data >= 2 * sizes["data"]:
        sizes["data"] *= 2
        stage *= 2
    return min(small, stage)


def _chunks(real: Layout) -> int:
    """Two chunks of the zero-bubble schedule make it V-shaped, three do not."""
    return min(real.virtual_pipeline, 3 if real.schedule == "zero-bubble" else 2)


def _micro_batches(real: Layout, pipeline: int) -> int:
    if real.accumulation == 1 or pipeline == 1:
        return min(real.accumulation, 2)
    return 1 if real.accumulation < real.pipeline else 2 * pipeline


# ---- the model -------------------------------------------------------------------------------------------------------


def shrink_model(shape: ModelShape, real: Layout, small: Layout, *, ulysses: bool) -> ModelShape:
    """A model of the same family, with every switch as it was."""
    stages = small.pipeline * small.virtual_pipeline
    uneven = shape.layers % (real.pipeline * real.virtual_pipeline) > 0
    dense = min(shape.dense_layers, 1)
    kv_heads = small.tensor * (2 if shape.kv_heads > real.tensor else 1)
    heads = kv_heads * (2 if shape.heads > shape.kv_heads else 1)
    while ulysses and heads // small.tensor % small.context:
        heads, kv_heads = 2 * heads, 2 * kv_heads
    parts, real_parts = small.tensor * small.shard, real.tensor * real.shard
    small_model = replace(
        shape,
        name=f"{shape.name}, small",
        layers=min(shape.layers, max(2, stages, dense + 1) + uneven),
        hidden=_alike(HIDDEN, shape.hidden, parts, real_parts),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=HEAD,
        ffn=FFN,
        vocab=_alike(VOCAB, shape.vocab, parts, real_parts),
        max_positions=SEQUENCE if shape.positions == "learned" else shape.max_positions,
        rope_original_positions=SEQUENCE // 2 if shape.rope_original_positions else 0,
        dense_layers=dense,
    )
    return _shrink_experts(small_model, real, small) if shape.is_moe else small_model


def _shrink_experts(shape: ModelShape, real: Layout, small: Layout) -> ModelShape:
    chosen = min(shape.experts_per_token, 2)
    experts = small.expert * (2 if shape.experts > real.expert else 1)
    while experts <= chosen:
        experts *= 2
    return replace(
        shape,
        experts=experts,
        experts_per_token=chosen,
        expert_ffn=EXPERT_FFN,
        shared_experts=min(shape.shared_experts, 1),
    )


def _alike(small: int, real: int, parts: int, real_parts: int) -> int:
    """`small`, or one less where the real size leaves a remainder too."""
    return small if real % real_parts == 0 or parts == 1 else small - 1


def _optim(optim: Optim) -> Optim:
    return replace(optim, name="adamw") if optim.name in ROUNDING else optim


def _pairs(job: Job, layout: Layout, trial: Trial) -> Iterator[Change]:
    names = ["layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab"]
    names += ["experts", "experts_per_token", "expert_ffn", "shared_experts"] if job.model.is_moe else []
    for name in names:
        yield Change(name=name, real=getattr(job.model, name), small=getattr(trial.shape, name))
    yield Change(name="sequence", real=job.data.sequence, small=trial.settings.sequence)
    small = trial.settings.layout
    yield Change(name="micro-batch", real=layout.micro_batch, small=small.micro_batch)
    yield Change(name="micro-batches", real=layout.accumulation, small=small.accumulation)
