"""Checks of what our trainer can run, before any process starts and without torch, for `plan`, `check`, `train`.

`layout_problems` lists what is wrong with a layout of a model; `trainer_problems` lists everything in a planned job
that the trainer cannot do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.errors import Problem
from phalanx.hardware.types import Cluster
from phalanx.job.model import ModelShape
from phalanx.job.schema import Job
from phalanx.plan.layout import Layout
from phalanx.plan.model_replicas import ModelReplicas
from phalanx.plan.pipeline_order import order_mistake
from phalanx.plan.schedules import is_v_shaped

COMPRESSIONS = ("none", "bf16", "fp8", "int8", "powersgd")  # phalanx.train.parallel.compress.KINDS


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """The settings besides the layout that decide whether a model can be trained this way."""

    layout: Layout
    sequence: int
    compute: str = "fp32"
    context_kind: str = "ring"
    reproducible: bool = False


def layout_problems(shape: ModelShape, demand: Demand) -> list[Problem]:
    """Return every reason why the trainer cannot run this layout of this model; empty if it can."""
    layout = demand.layout
    return [
        *model_problems(shape),
        *_tensor_problems(shape, layout),
        *_context_problems(shape, demand),
        *_pipeline_problems(shape, layout),
        *_expert_problems(shape, demand),
        *_data_problems(layout),
        *_reproducible_problems(demand),
        *_precision_problems(demand),
    ]


def trainer_problems(job: Job, layout: Layout, cluster: Cluster) -> list[Problem]:
    """Return every reason why `phalanx train` cannot run a planned job; empty if it can."""
    demand = Demand(
        layout=layout,
        sequence=job.data.sequence,
        compute=job.precision.compute,
        context_kind=job.parallel.context_kind,
        reproducible=job.numerics.reproducible,
    )
    return [
        *device_problems(cluster),
        *_compile_problems(job, layout),
        *(leave_out_problems(job, layout, cluster) if job.fault.on_loss == "leave-out" else ()),
        *precision_problems(job),
        *layout_problems(job.model, demand),
        *_order_problems(job, layout),
    ]


def splits_backward(layout: Layout) -> bool:
    """Return whether the schedule computes gradients of inputs and of weights separately."""
    return layout.pipeline > 1 and layout.schedule == "zero-bubble"


def _compile_problems(job: Job, layout: Layout) -> Iterator[Problem]:
    if job.train.compile is True and splits_backward(layout):
        yield Problem(
            where="train.compile",
            what='true with schedule = "zero-bubble"',
            why="torch cannot split the backward of a compiled block in two",
            fix='use compile = "auto", which leaves these blocks plain, or schedule = "interleaved" or "1f1b"',
        )


def leave_out_problems(job: Job, layout: Layout, cluster: Cluster) -> Iterator[Problem]:
    """Yield every reason why the trainer could not leave a lost model replica out, whatever the job sets."""
    where, fix = "fault.on_loss", 'use on_loss = "rebuild"'
    if ModelReplicas.of(layout).count < 2:
        yield Problem(
            where=where,
            what=f'"leave-out" with the one model replica of {layout.name}',
            why="every rank holds a part of the model that no other has",
            fix=f"{fix}, or plan two or more replicas (parallel.shard below the number of data ranks, or zero = 0)",
        )
    if cluster.accelerator.family != "cpu":
        yield Problem(
            where=where,
            what=f'"leave-out" on {cluster.accelerator.name}',
            why="replicas are connected anew through gloo, in host memory; through NCCL that is not done yet",
            fix=fix,
        )
    if job.fault.recovery in ("shrink", "stop"):
        yield Problem(
            where=where,
            what=f'"leave-out" with fault.recovery = "{job.fault.recovery}"',
            why="a replica that is left out is built again by new processes in its places",
            fix='use recovery = "auto" or "replace"',
        )
    for is_present, what, why in (
        (job.model.is_moe, "a model with experts", "routers are balanced, and experts exchanged, across replicas"),
        (job.numerics.reproducible, "numerics.reproducible", "a step without a replica has other bits"),
        (bool(job.model.module), "model.module", "buffers of a network of your own are exchanged across replicas"),
        (layout.compression != "none", f'compression "{layout.compression}"', "replicas sum gradients uncompressed"),
        (bool(job.plugins.callbacks), "plugins.callbacks", "they may count on all ranks being one torch world"),
        (bool(job.plugins.data), "plugins.data", "an iterable cannot give the batch of a repeated step again"),
        (bool(job.plugins.optimizer), "plugins.optimizer", "its state cannot be handed to another process"),
    ):
        if is_present:
            yield Problem(where=where, what=f'"leave-out" with {what}', why=why, fix=fix)


def why_not_left_out(job: Job, layout: Layout, cluster: Cluster) -> str:
    """Return why the trainer would refuse to leave a lost replica out, as a sentence; empty if it would not."""
    problems = list(leave_out_problems(job, layout, cluster))
    return f"`phalanx train` refuses {problems[0].what}: {problems[0].why}" if problems else ""


def precision_problems(job: Job) -> list[Problem]:
    """Return the problems of precision formats that can be planned but not trained."""
    if job.precision.compute == "fp4":
        return [
            Problem(where="precision.compute", what="fp4 is planned but not trained", fix='use "fp8", "bf16" or "fp32"')
        ]
    if job.precision.fp8_head and job.precision.compute != "fp8":
        return [
            Problem(
                where="precision.fp8_head",
                what=f'fp8_head = true with compute = "{job.precision.compute}"',
                why="the head is never narrower than the layers before it",
                fix='set compute = "fp8", or leave fp8_head out',
            )
        ]
    if job.precision.compute == "fp16" and not job.precision.master_weights:
        return [
            Problem(
                where="precision.master_weights",
                what="fp16 without master weights loses small updates altogether",
                why="a step of 1e-4 of a weight is below half of fp16's spacing",
                fix='set master_weights = true, or compute = "bf16"',
            )
        ]
    return []


def device_problems(cluster: Cluster) -> Iterator[Problem]:
    """Yield the problem of devices that can be planned and priced, but not trained on."""
    if cluster.accelerator.family.startswith("tpu"):
        yield Problem(
            where=cluster.name,
            what=f"the trainer does not run on {cluster.accelerator.name}",
            why="it is PyTorch on CUDA, ROCm or CPUs; TPUs are planned and priced only",
            fix="train with another framework (parallel.framework names it), or choose GPUs",
        )


def model_problems(shape: ModelShape) -> Iterator[Problem]:
    """Yield every part of a model that the planner counts but the trainer has no layer for."""
    if shape.module:  # a custom network; the keys of the shape only describe its size
        return
    if shape.is_mla:
        yield Problem(
            where="model",
            what=f"{shape.name} has latent attention (MLA), which the trainer has no layer for",
            why="it would train a model with plain attention instead",
            fix="train with another framework (parallel.framework names it), or bring the model as model.module",
        )
    if shape.positions == "alibi":
        yield Problem(
            where="model.positions",
            what='"alibi" is planned but not trained',
            why="the fused attention kernels take no bias per head",
            fix='use positions = "rope" or "learned"',
        )
    if shape.positions == "rope" and not shape.is_mla and shape.head_dim % 2:
        yield Problem(
            where="model.head_dim",
            what=f"{shape.head_dim} is odd",
            why="rotary positions turn pairs",
            fix=f"use {shape.head_dim + 1}",
        )
    if shape.is_moe and shape.bias:
        yield Problem(where="model.bias", what="biases inside experts are not trained", fix="set bias = false")
    if shape.balance == "bias" and not shape.router_bias:
        yield Problem(where="model.balance", what='"bias" needs the bias it moves', fix="set router_bias = true")


def attention_remarks(shape: ModelShape, sequence: int, *, ours: bool) -> Iterator[Problem]:
    """Yield remarks about attention that is planned differently from the model's definition, but not refused.

    `ours` is true where our trainer trains it in the same way.
    """
    # Up to the window, full attention computes the same.
    if shape.module or not 0 < shape.sliding_window < sequence:
        return
    verb = "planned, and trained by `phalanx train`," if ours else "planned"
    difference = "beyond the window the trained model is not the published one, and " if ours else ""
    yield Problem(
        where="model.sliding_window",
        what=f"{shape.name} has sliding-window attention over {shape.sliding_window:,} tokens; it is {verb} with "
        f"full attention over sequences of {sequence:,}",
        why=f"{difference}full attention takes longer",
        fix=f"use data.sequence = {shape.sliding_window} or less, where both compute the same, or set "
        "model.sliding_window = 0 if you want full attention",
    )


def _tensor_problems(shape: ModelShape, layout: Layout) -> Iterator[Problem]:
    ranks = layout.tensor
    if ranks == 1:
        return
    counts = {
        "attention heads": (shape.heads, "each tensor rank must hold whole heads"),
        "key/value heads": (shape.kv_heads, "each tensor rank must hold whole heads; the trainer does not copy them"),
        "columns of the MLP": (shape.ffn, "each tensor rank holds as many columns"),
    }
    if shape.is_moe and shape.dense_layers == 0:
        del counts["columns of the MLP"]
    common = _largest_divisor(ranks, *(count for count, _ in counts.values()))
    for noun, (count, why) in counts.items():
        if count % ranks:
            yield Problem(
                where="parallel.tensor",
                what=f"{ranks} tensor ranks do not divide the model's {count:,} {noun}",
                why=why,
                fix=f"use {common}",
            )


def _context_problems(shape: ModelShape, demand: Demand) -> Iterator[Problem]:
    layout, length = demand.layout, demand.sequence
    if layout.context > 1 and length % (2 * layout.context):
        num_ranks = _largest_divisor(layout.context, length // 2) if length % 2 == 0 else 1
        yield Problem(
            where="parallel.context",
            what=f"a sequence of {length:,} tokens does not divide into 2 × {layout.context} slices",
            why="each context rank takes an early and a late slice, so that causal work is even",
            fix=f"use {num_ranks} context ranks, or data.sequence = {_round_up(length, 2 * layout.context):,}",
        )
    tokens = length // layout.context
    if layout.tensor > 1 and layout.sequence_parallel and tokens % layout.tensor:
        new_length = _round_up(length, 2 * layout.context * layout.tensor)
        yield Problem(
            where="parallel.sequence_parallel",
            what=f"{tokens:,} tokens per context rank do not divide over {layout.tensor} tensor ranks",
            why="sequence parallelism splits the tokens between the tensor ranks",
            fix=f"use data.sequence = {new_length:,}, or sequence_parallel = false",
        )
    heads = shape.heads // layout.tensor
    if layout.context > 1 and demand.context_kind == "ulysses" and heads % layout.context:
        yield Problem(
            where="parallel.context",
            what=f"{layout.context} context ranks do not divide the {heads} query heads of each tensor rank",
            why="Ulysses gives every context rank whole heads",
            fix=f'use {_largest_divisor(layout.context, heads)}, or context_kind = "ring" or "allgather", which '
            f"split no heads",
        )
    if shape.positions == "learned" and length > shape.max_positions:
        yield Problem(
            where="data.sequence",
            what=f"{length:,} tokens are longer than the {shape.max_positions:,} positions of {shape.name}",
            why="a learned table has no row for the rest",
            fix=f"use data.sequence = {shape.max_positions:,} or fewer",
        )


def _pipeline_problems(shape: ModelShape, layout: Layout) -> Iterator[Problem]:
    ranks, chunks, count = layout.pipeline, max(layout.virtual_pipeline, 1), layout.accumulation
    if ranks == 1:
        if chunks > 1:
            yield Problem(
                where="parallel.virtual_pipeline",
                what=f"{chunks} chunks per stage without a pipeline",
                fix="use virtual_pipeline = 1, or pipeline = 2 or more",
            )
        return
    if ranks * chunks > shape.layers:
        yield Problem(
            where="parallel.pipeline",
            what=f"{ranks} × {chunks} stages cannot share {shape.layers} layers",
            why="each stage holds at least one layer",
            fix=f"use at most {shape.layers} stages (pipeline × virtual_pipeline)",
        )
    if chunks > 1 and layout.schedule in ("gpipe", "1f1b"):
        yield Problem(
            where="parallel.schedule",
            what=f'"{layout.schedule}" runs one chunk of layers per rank, virtual_pipeline is {chunks}',
            fix='use schedule = "interleaved" or "zero-bubble", or virtual_pipeline = 1',
        )
    if layout.schedule == "zero-bubble" and layout.zero == 3:
        # FSDP2 frees a block's weights after the first half of its backward and loses the gradients of the second:
        # measured on torch 2.13, gradients off by 2e-3 where ZeRO 1 and 2 are exact (test_parity_random.py).
        yield Problem(
            where="parallel.schedule",
            what='"zero-bubble" loses gradients with zero = 3',
            why="it computes weight gradients after ZeRO-3 has given the weights back",
            fix='use zero = 1 or 2, or schedule = "interleaved" or "1f1b"',
        )
    if layout.schedule == "zero-bubble" and layout.recompute == "selective":
        yield Problem(
            where="parallel.recompute",
            what='"selective" does not go with the "zero-bubble" schedule',
            why="it splits backward in two, and what selective recompute keeps can be used once",
            fix='use recompute = "none" or "full", or schedule = "interleaved" or "1f1b"',
        )
    yield from _round_problems(layout.schedule, ranks, chunks, count)


def _order_problems(job: Job, layout: Layout) -> Iterator[Problem]:
    """Yield the problem of a custom pipeline order that no pipeline can run, or not this one."""
    orders = job.parallel.order
    if not orders or layout.pipeline == 1:
        return
    make_fix = "phalanx evolve schedules makes one for this job"
    if mistake := order_mistake(orders):
        yield Problem(where="parallel.order", what=mistake, fix=make_fix)
    elif orders[0].count("F") != layout.accumulation:
        yield Problem(
            where="parallel.order",
            what=f"is for {orders[0].count('F')} micro-batches, a step has {layout.accumulation}",
            fix=f"change batch.micro or batch.global_sequences; {make_fix}",
        )


def _round_problems(schedule: str, ranks: int, chunks: int, count: int) -> Iterator[Problem]:
    """Yield the problem of micro-batches that the schedule cannot order."""
    is_one_chunk = schedule == "1f1b" or (schedule == "interleaved" and chunks == 1)
    fix = "change batch.global_sequences, batch.micro or the number of data ranks"
    works_in_rounds = (
        schedule in ("interleaved", "zero-bubble") and not is_one_chunk and not is_v_shaped(schedule, chunks)
    )
    if works_in_rounds and count % max(1, count // ranks):
        lower_count = count // ranks * ranks
        yield Problem(
            where="batch.micro",
            what=f"{count} micro-batches do not make whole rounds of {ranks} pipeline ranks",
            why=f'the "{schedule}" schedule works in rounds',
            fix=f"use {lower_count} or {lower_count + ranks} micro-batches per step: {fix}",
        )


def _expert_problems(shape: ModelShape, demand: Demand) -> Iterator[Problem]:
    layout = demand.layout
    stage = layout.data * layout.context * layout.tensor
    if layout.expert > 1 and not shape.is_moe:
        yield Problem(where="parallel.expert", what=f"{shape.name} has no experts to split", fix="use expert = 1")
        return
    if not shape.is_moe:
        return
    if shape.experts % layout.expert:
        yield Problem(
            where="parallel.expert",
            what=f"{layout.expert} expert ranks do not divide the model's {shape.experts} experts",
            why="each expert rank must hold whole experts",
            fix=f"use {_largest_divisor(layout.expert, shape.experts)}",
        )
    if stage % layout.expert:
        yield Problem(
            where="parallel.expert",
            what=f"{layout.expert} expert ranks do not divide the {stage} ranks of a stage (data × context × tensor)",
            why="experts are shared out among the ranks that see the tokens",
            fix=f"use {_largest_divisor(layout.expert, stage)}",
        )
    if layout.expert > 1:
        yield from _share_problems(layout, demand.sequence)
    if layout.expert == 1 and layout.tensor > 1 and shape.expert_ffn % layout.tensor:
        yield Problem(
            where="parallel.tensor",
            what=f"{layout.tensor} tensor ranks do not divide the experts' width of {shape.expert_ffn:,}",
            why="without expert ranks the tensor group splits every expert along its width",
            fix=f"use {_largest_divisor(layout.tensor, shape.expert_ffn)}, or expert ranks",
        )


def _share_problems(layout: Layout, sequence: int) -> Iterator[Problem]:
    tokens = layout.micro_batch * sequence // layout.context
    if layout.tensor > 1 and tokens % layout.tensor:
        yield Problem(
            where="parallel.tensor",
            what=f"{tokens:,} tokens of a micro-batch do not divide over {layout.tensor} tensor ranks",
            why="each tensor rank sends its own share of the tokens to the experts",
            fix=f"use {_largest_divisor(layout.tensor, tokens)}, or another batch.micro",
        )


def _data_problems(layout: Layout) -> Iterator[Problem]:
    replicas = layout.data * layout.context
    if layout.zero and replicas % layout.shard:
        yield Problem(
            where="parallel.shard",
            what=f"groups of {layout.shard} do not divide the {replicas} data × context ranks",
            why="each group shares one sharded copy",
            fix=f"use {_largest_divisor(layout.shard, replicas)}",
        )
    if layout.offload == "parameters" and not layout.zero:
        yield Problem(
            where="parallel.offload",
            what='"parameters" needs sharded parameters, and ZeRO is off',
            why="weights that every rank holds whole would travel to the device for every use",
            fix="use zero = 3",
        )


def _reproducible_problems(demand: Demand) -> Iterator[Problem]:
    layout = demand.layout
    if not demand.reproducible:
        return
    sizes = {"tensor": layout.tensor, "context": layout.context, "pipeline": layout.pipeline, "expert": layout.expert}
    used_settings = [f"{name} = {size}" for name, size in sizes.items() if size > 1]
    used_settings += [f"zero = {layout.zero}"] if layout.zero else []
    if used_settings:
        yield Problem(
            where="numerics.reproducible",
            what=f"the same bits on any number of ranks are not possible with {', '.join(used_settings)}",
            why="only sums over micro-batches have an order that no number of ranks changes",
            fix='set them to 1 (zero = 0), or parallel.mode = "fixed", which leaves them so',
        )
    for name, size in (("data ranks", layout.data), ("micro-batches per data rank", layout.accumulation)):
        if size & (size - 1):
            yield Problem(
                where="numerics.reproducible",
                what=f"{size} {name} are no power of two",
                why="every rank must hold a whole subtree of the sum",
                fix="choose batch.global_sequences, batch.micro and data ranks so that it is 1, 2, 4, 8, …",
            )


def _precision_problems(demand: Demand) -> Iterator[Problem]:
    if demand.reproducible and demand.layout.compression != "none":
        yield Problem(
            where="parallel.compression",
            what=f'"{demand.layout.compression}" with numerics.reproducible',
            why="what rounding leaves behind depends on the ranks it happened on",
            fix='use compression = "none"',
        )
    if demand.layout.compression not in COMPRESSIONS:
        yield Problem(
            where="parallel.compression",
            what=f'the trainer has no gradient compression "{demand.layout.compression}"',
            why="it is planned only",
            fix=f"use {', '.join(COMPRESSIONS[1:])} or none",
        )
    if demand.layout.compression == "powersgd" and demand.layout.zero:
        yield Problem(
            where="parallel.compression",
            what=f'"powersgd" with zero = {demand.layout.zero}',
            why="ZeRO reduces flat shards, in which matrices are cut at any row: they have no factors",
            fix='use "int8" or "bf16", or zero = 0',
        )


def _largest_divisor(ranks: int, *counts: int) -> int:
    """Return the largest number up to `ranks` that divides all counts."""
    return max(n for n in range(1, ranks + 1) if all(count % n == 0 for count in counts))


def _round_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit
