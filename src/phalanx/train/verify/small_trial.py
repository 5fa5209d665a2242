"""Small copy of a job for `phalanx verify` that splits as the original does, with the same axes and remainders.

For a layout it matters which axes are used, which sizes divide which, and in which order things happen; not the sizes
themselves. A layout that this machine has ranks for is kept; in a larger one degrees fall to 2 (4 for a group inside
a group) and grow again while ranks are available. The model shrinks to a few layers and columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from phalanx.errors import mistake
from phalanx.job.model import ModelShape
from phalanx.job.schema import Job
from phalanx.plan.layout import Layout
from phalanx.plan.trainable import splits_backward
from phalanx.train.rank_settings import Settings
from phalanx.train.verify.terms import EXACT, EXACTLY, RANKS, Terms
from phalanx.train.verify.trial import Trial

HIDDEN, HEAD, FFN, EXPERT_FFN, VOCAB, SEQUENCE = 32, 8, 48, 16, 64, 16
# For narrow formats: at 1e-2, where float64 agrees too, these models train on the edge of stability, and rounding
# of 4e-5 in the first gradient norm (bf16) became 1e-1 in the fifth; at 1e-3 it stayed below 3e-4.
GENTLE_LR = 1e-3
# Optimizers that round on purpose: a last bit becomes a visible step
ROUNDING = ("adamw8bit",)


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeChange:
    """One number of the job and its value in the copy."""

    name: str
    real: object
    small: object


def refuse_own_model(job: Job) -> None:
    """Raise UserError for a user's own network."""
    if job.model.module:
        raise mistake(
            "model.module",
            f"{job.model.module!r} can only be scaled down by its author",
            why="phalanx verify proves a layout on a small copy of the model",
            fix="verify the layout with a preset of the same family, or train a few steps with precision.compute = "
            '"fp32" under both layouts',
        )


def make_small_trial(
    job: Job, layout: Layout, *, steps: int, terms: Terms = EXACTLY, allow_code: bool = False
) -> Trial:
    """Return the trial that represents a job under a layout, which must have passed `check_layout`."""
    refuse_own_model(job)
    context_kind, recomputes_some = job.parallel.context_kind, job.parallel.recompute_layers != "auto"
    if terms.full_size:
        small, shape, sequence = replace(layout, compression="none"), job.model, job.data.sequence
        recompute_layers = int(job.parallel.recompute_layers) if recomputes_some else None
    else:
        small = scale_down_layout(job.model, layout, ranks=terms.ranks)
        shape = shrink_model(job.model, layout, small, ulysses=context_kind == "ulysses")
        sequence = _round_up(SEQUENCE, 2 * small.context * small.tensor)
        recompute_layers = 1 if recomputes_some else None
        if recomputes_some:  # one of two layers is recomputed on every stage
            shape = replace(shape, layers=max(shape.layers, 2 * small.pipeline * small.virtual_pipeline))
        if shape.positions == "learned":
            shape = replace(shape, max_positions=sequence)
        # fp8 products need multiples of 16
        if terms.precision == "fp8":
            shape = replace(shape, hidden=HIDDEN, head_dim=2 * HEAD)
    exact = terms.precision == EXACT
    settings = Settings(
        layout=small,
        sequence=sequence,
        compute=terms.precision,
        reduce=EXACT if exact else job.precision.grad_reduce if terms.precision != "fp32" else "fp32",
        master=EXACT if exact else "fp32" if job.precision.master_weights or terms.precision == "fp32" else "bf16",
        context_kind=context_kind,
        loss_parallel=job.parallel.loss_parallel,
        recompute_layers=recompute_layers,
        compile=terms.compile and not splits_backward(layout),
        reproducible=job.numerics.reproducible,
        seed=job.data.seed,
        allow_code=allow_code,
        loss=job.plugins.loss,
        optimizer=job.plugins.optimizer,
        scale=job.scale,
    )
    sequences = small.data * small.micro_batch * small.accumulation
    return Trial(
        shape=shape,
        settings=settings,
        sequences=sequences,
        optim=replace(job.optim, name="adamw") if job.optim.name in ROUNDING else job.optim,
        steps=steps,
        lr=1e-2 if exact else GENTLE_LR,
        device=terms.device,
        # A large model's tensors would not fit through a pipe
        tensors=not terms.full_size,
    )


def reference_trial(trial: Trial) -> Trial:
    """Return the same trial on one process, with nothing split, offloaded or recomputed.

    A compiled trial keeps its recomputation: that decides what is fused, and kernels must be the same.
    """
    layout = trial.settings.layout
    one_process_layout = replace(
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
        recompute=layout.recompute if trial.settings.compile else "none",
        schedule="1f1b",
        offload="none",
    )
    return replace(trial, settings=replace(trial.settings, layout=one_process_layout, reproducible=False))


def eager_trial(trial: Trial) -> Trial:
    """Return the same trial without compilation."""
    return replace(trial, settings=replace(trial.settings, compile=False))


def size_changes(job: Job, layout: Layout, trial: Trial) -> list[SizeChange]:
    """Return every size of the model and the batch that differs in the copy."""
    return [change for change in _size_changes(job, layout, trial) if change.real != change.small]


def features_left_out(job: Job, layout: Layout, trial: Trial, *, compiled: bool, on_gpu: bool) -> list[str]:
    """Return the features that the proof does not cover, with reasons.

    `compiled` and `on_gpu` describe the job's training.
    """
    features, small, is_exact = [], trial.settings.layout, trial.settings.compute == EXACT
    degrees = ("tensor", "context", "pipeline", "virtual_pipeline", "data", "shard", "expert")
    reduced_degrees = [
        f"{name} {getattr(layout, name):,} ({getattr(small, name):,} here)"
        for name in degrees
        if getattr(layout, name) != getattr(small, name) and (name != "shard" or layout.zero)
    ]
    if reduced_degrees:
        features.append(", ".join(reduced_degrees))
    if on_gpu and trial.device == "cpu":
        features.append("NCCL and the kernels of GPUs (gloo and CPUs here; --device cuda runs them)")
    if job.precision.compute != trial.settings.compute:
        reason = "float64 here: rounding would hide mistakes" if is_exact else f"{trial.settings.compute} here"
        features.append(f"{job.precision.compute} arithmetic ({reason})")
    if is_exact and trial.device == "cuda":
        features.append("attention kernels of cuDNN and FlashAttention (float64 has none; --precision bf16 runs them)")
    if layout.compression != "none":
        features.append(f"{layout.compression} gradients (they round on purpose)")
    if job.optim.name in ROUNDING or job.precision.optimizer_state != "fp32":
        features.append("the compact optimizer state (it rounds on purpose; AdamW here)")
    if compiled and not trial.settings.compile:
        features.append("compiled blocks (eager here; --compile compiles them)")
    if job.plugins.data:
        features.append(f"data of your own, {job.plugins.data} (random tokens here)")
    if not trial.tensors:
        features.append("single tensors (losses and gradient norms are compared at full size)")
    return features


# ---- the layout ------------------------------------------------------------------------------------------------------


def scale_down_layout(shape: ModelShape, real: Layout, *, ranks: int = RANKS) -> Layout:
    """Scale a layout down to at most `ranks` ranks, if it has more: 2 for a split axis, 4 for groups inside groups.

    Spare ranks go to context, then tensor and pipeline: a ring of 2 has no rank that passes data on. Rounds of
    micro-batches stay rounds.
    """
    axes = ("tensor", "context", "pipeline", "data")
    if real.devices <= ranks:
        sizes, expert = {name: getattr(real, name) for name in axes}, real.expert
    else:
        sizes = {name: min(getattr(real, name), 2) for name in axes}
        replicas = real.data * real.context
        if real.zero and 1 < real.shard < replicas and sizes["data"] * sizes["context"] < 4:
            sizes["data" if real.data >= 4 else "context"] = 4
        expert = _expert_degree(shape, real, sizes)
        # Experts across tensor and context groups need these in the same proportions
        if expert == 1:
            _grow_degrees(real, sizes, ranks)
    replicas = real.data * real.context
    data, context, tensor = sizes["data"], sizes["context"], sizes["tensor"]
    shard = 1
    if real.zero and real.devices <= ranks:
        shard = real.shard
    elif real.zero:
        shard = data * context if real.shard >= replicas else min(real.shard, 2)
    # The zero-bubble schedule is V-shaped with two chunks, not with three.
    return replace(
        real,
        data=data,
        context=context,
        tensor=tensor,
        pipeline=sizes["pipeline"],
        expert=expert,
        shard=shard,
        virtual_pipeline=real.virtual_pipeline
        if real.devices <= ranks
        else min(real.virtual_pipeline, 3 if real.schedule == "zero-bubble" else 2),
        micro_batch=min(real.micro_batch, 2),
        accumulation=_micro_batches(real, sizes["pipeline"]),
        precision="fp32",
        compression="none",
    )


def _grow_degrees(real: Layout, sizes: dict[str, int], ranks: int) -> None:
    """Double degrees towards the real ones while ranks are available."""
    for name in ("context", "tensor", "pipeline"):
        while getattr(real, name) % (2 * sizes[name]) == 0 and 2 * math.prod(sizes.values()) <= ranks:
            sizes[name] *= 2


def _expert_degree(shape: ModelShape, real: Layout, sizes: dict[str, int]) -> int:
    """Return the expert degree: above the tensor degree if it was, below the stage's ranks if it was.

    It may double the data degree in `sizes`.
    """
    if real.expert == 1 or not shape.is_moe:
        return 1
    small_degree = 4 if real.expert > real.tensor > 1 else 2
    spans_stage = real.expert == real.data * real.context * real.tensor
    min_stage = small_degree if spans_stage else 2 * small_degree
    stage = sizes["data"] * sizes["context"] * sizes["tensor"]
    if stage < min_stage and real.data >= 2 * sizes["data"]:
        sizes["data"] *= 2
        stage *= 2
    return min(small_degree, stage)


def _micro_batches(real: Layout, pipeline: int) -> int:
    if real.accumulation == 1 or pipeline == 1:
        return min(real.accumulation, 2)
    return 1 if real.accumulation < real.pipeline else 2 * pipeline


# ---- the model -------------------------------------------------------------------------------------------------------


def shrink_model(shape: ModelShape, real: Layout, small: Layout, *, ulysses: bool) -> ModelShape:
    """Return a small model of the same family, with every option unchanged."""
    stages = small.pipeline * small.virtual_pipeline
    is_uneven = shape.layers % (real.pipeline * real.virtual_pipeline) > 0
    dense_layers = min(shape.dense_layers, 1)
    kv_heads = small.tensor * (2 if shape.kv_heads > real.tensor else 1)
    heads = kv_heads * (2 if shape.heads > shape.kv_heads else 1)
    while ulysses and heads // small.tensor % small.context:
        heads, kv_heads = 2 * heads, 2 * kv_heads
    parts, real_parts = small.tensor * small.shard, real.tensor * real.shard
    small_model = replace(
        shape,
        name=f"{shape.name}, small",
        layers=min(shape.layers, max(2, stages, dense_layers + 1) + is_uneven),
        hidden=_same_remainder(HIDDEN, shape.hidden, parts, real_parts),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=HEAD,
        ffn=_round_up(FFN, small.tensor),
        vocab=_same_remainder(VOCAB, shape.vocab, parts, real_parts),
        max_positions=SEQUENCE if shape.positions == "learned" else shape.max_positions,
        rope_original_positions=SEQUENCE // 2 if shape.rope_original_positions else 0,
        dense_layers=dense_layers,
    )
    return _shrink_experts(small_model, real, small) if shape.is_moe else small_model


def _shrink_experts(shape: ModelShape, real: Layout, small: Layout) -> ModelShape:
    experts_per_token = min(shape.experts_per_token, 2)
    experts = small.expert * (2 if shape.experts > real.expert else 1)
    while experts <= experts_per_token:
        experts *= 2
    return replace(
        shape,
        experts=experts,
        experts_per_token=experts_per_token,
        expert_ffn=_round_up(EXPERT_FFN, small.tensor),
        shared_experts=min(shape.shared_experts, 1),
    )


def _same_remainder(small: int, real: int, parts: int, real_parts: int) -> int:
    """Return `small`, or one less if the real size leaves a remainder."""
    return small if real % real_parts == 0 or parts == 1 else small - 1


def _round_up(size: int, unit: int) -> int:
    """Return the next multiple of a unit."""
    return -(-size // unit) * unit


def _size_changes(job: Job, layout: Layout, trial: Trial) -> Iterator[SizeChange]:
    names = ["layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab"]
    names += ["experts", "experts_per_token", "expert_ffn", "shared_experts"] if job.model.is_moe else []
    for name in names:
        yield SizeChange(name=name, real=getattr(job.model, name), small=getattr(trial.shape, name))
    yield SizeChange(name="sequence", real=job.data.sequence, small=trial.settings.sequence)
    small = trial.settings.layout
    yield SizeChange(name="micro-batch", real=layout.micro_batch, small=small.micro_batch)
    yield SizeChange(name="micro-batches", real=layout.accumulation, small=small.accumulation)
