"""Checks that involve two keys and no hardware; each is skipped if one of its keys was already refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from phalanx.job.draft import Draft
from phalanx.job.schema import Job
from phalanx.units import all_divisors, plural

Check = Callable[[Draft, Job], None]

HEADS, LAYERS = "model.heads", "model.layers"


def check_keys(draft: Draft, job: Job) -> None:
    """Run every check whose keys were read without mistakes."""
    # A copy of the present set: a mistake found by one check must not hide what the next would find.
    refused_keys = frozenset(draft.bad)
    for keys, function in CHECKS:
        if not refused_keys & set(keys):
            function(draft, job)


def whole_heads(draft: Draft, job: Job) -> None:
    tensor, heads, kv_heads = job.parallel.tensor, job.model.heads, job.model.kv_heads
    if tensor == "auto":
        return
    if heads % tensor:
        valid_sizes = [size for size in all_divisors(heads) if kv_heads % size == 0 or size % kv_heads == 0]
        draft.complain(
            "parallel.tensor",
            f"parallel.tensor = {tensor} does not divide the model's {heads} attention heads",
            why="each tensor rank must hold whole heads",
            fix=use_nearest(valid_sizes, tensor),
        )
    elif kv_heads % tensor and tensor % kv_heads:
        valid_sizes = [size for size in all_divisors(heads) if kv_heads % size == 0 or size % kv_heads == 0]
        draft.complain(
            "parallel.tensor",
            f"parallel.tensor = {tensor} neither divides nor is a multiple of the model's {kv_heads} key-value heads",
            why="each tensor rank must hold whole key-value heads or one shared copy",
            fix=use_nearest(valid_sizes, tensor),
        )


def grouped_heads(draft: Draft, job: Job) -> None:
    heads, kv_heads = job.model.heads, job.model.kv_heads
    if heads % kv_heads:
        draft.complain(
            written_key(draft, "model.kv_heads", HEADS),
            f"model.kv_heads = {kv_heads} does not divide the model's {heads} attention heads",
            why="every key-value head serves the same number of query heads",
            fix=use_nearest(all_divisors(heads), kv_heads),
        )


def enough_layers(draft: Draft, job: Job) -> None:
    stages, chunks, layers = job.parallel.pipeline, job.parallel.virtual_pipeline, job.model.layers
    if stages == "auto":
        return
    if stages > layers:
        draft.complain(
            "parallel.pipeline",
            f"parallel.pipeline = {stages} is more than the model's {layers} layers",
            why="every stage must hold at least one layer",
            fix=f"use {layers} or fewer",
        )
        return
    # Llama 3 405B had the embedding and the head in separate chunks (arXiv 2407.21783, section 3.3.2), so other
    # frameworks may have two more chunks than layers; our trainer puts both next to a layer.
    max_chunks = layers if job.parallel.framework == "phalanx" else layers + 2
    if chunks != "auto" and stages * chunks > max_chunks:
        draft.complain(
            written_key(draft, "parallel.virtual_pipeline", "parallel.pipeline"),
            f"parallel.virtual_pipeline = {chunks} cuts {stages} stages into {stages * chunks} chunks, "
            f"more than the model's {layers} layers",
            why="every chunk must hold at least one layer",
            fix=f"use {layers // stages} or fewer",
        )


def chunks_need_interleaving(draft: Draft, job: Job) -> None:
    parallel = job.parallel
    if parallel.virtual_pipeline == "auto":
        return
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        draft.complain(
            "parallel.virtual_pipeline",
            f"parallel.virtual_pipeline = {parallel.virtual_pipeline} with parallel.pipeline = 1",
            why="only a pipeline of two or more stages can be interleaved",
            fix="use virtual_pipeline = 1, or pipeline = 2 or more",
        )
    elif parallel.virtual_pipeline > 1 and parallel.schedule in ("gpipe", "1f1b"):
        draft.complain(
            written_key(draft, "parallel.schedule", "parallel.virtual_pipeline"),
            f'parallel.schedule = "{parallel.schedule}" runs one chunk per stage, '
            f"not parallel.virtual_pipeline = {parallel.virtual_pipeline}",
            fix='use schedule = "interleaved", or virtual_pipeline = 1',
        )
    elif parallel.virtual_pipeline == 1 and parallel.schedule == "interleaved":
        draft.complain(
            written_key(draft, "parallel.schedule", "parallel.virtual_pipeline"),
            'parallel.schedule = "interleaved" with parallel.virtual_pipeline = 1',
            why="there is nothing to interleave",
            fix='use schedule = "1f1b", or virtual_pipeline = 2 or more',
        )


def own_order(draft: Draft, job: Job) -> None:
    parallel = job.parallel
    if not parallel.order:
        return
    splits_backward = any("I" in order or "W" in order for order in parallel.order)
    required_schedule = "zero-bubble" if splits_backward else "1f1b"
    if parallel.pipeline != len(parallel.order):
        draft.complain(
            written_key(draft, "parallel.order", "parallel.pipeline"),
            f"parallel.order has {plural(len(parallel.order), 'rank')}, parallel.pipeline is {parallel.pipeline}",
            why="an order says what every pipeline rank does",
            fix=f"use pipeline = {len(parallel.order)}, or leave order out",
        )
    if parallel.virtual_pipeline != 1 and parallel.virtual_pipeline != "auto":
        draft.complain(
            written_key(draft, "parallel.order", "parallel.virtual_pipeline"),
            f"parallel.order with parallel.virtual_pipeline = {parallel.virtual_pipeline}",
            why="an order has one chunk of layers per rank",
            fix="use virtual_pipeline = 1",
        )
    if parallel.schedule != required_schedule and not (parallel.schedule == "gpipe" and not splits_backward):
        draft.complain(
            written_key(draft, "parallel.order", "parallel.schedule"),
            f'parallel.order with parallel.schedule = "{parallel.schedule}"',
            why="the plan prices such an order so, and a batch that it does not fit runs so",
            fix=f'use schedule = "{required_schedule}"',
        )


def whole_experts(draft: Draft, job: Job) -> None:
    ranks, experts = job.parallel.expert, job.model.experts
    if ranks == "auto" or ranks == 1:
        return
    if not experts:
        draft.complain(
            "parallel.expert",
            f"parallel.expert = {ranks}, but {job.model.name} is a dense model",
            why="there are no experts to split",
            fix="use 1 or leave it out",
        )
    elif experts % ranks:
        draft.complain(
            "parallel.expert",
            f"parallel.expert = {ranks} does not divide the model's {experts} experts",
            why="each expert rank must hold whole experts",
            fix=use_nearest(all_divisors(experts), ranks),
        )


def expert_shape(draft: Draft, job: Job) -> None:
    model = job.model
    if not model.experts:
        for name in ("experts_per_token", "expert_ffn", "shared_experts", "dense_layers"):
            if getattr(model, name):
                draft.complain(
                    f"model.{name}",
                    f"model.{name} = {getattr(model, name)}, but model.experts = 0",
                    why="a dense model routes to no experts",
                    fix=f"give model.experts, or drop {name}",
                )
        return
    if not 1 <= model.experts_per_token <= model.experts:
        draft.complain(
            written_key(draft, "model.experts_per_token", "model.experts"),
            f"model.experts_per_token = {model.experts_per_token} with model.experts = {model.experts}",
            why="each token goes to at least one expert and at most all",
            fix=f"use 1 to {model.experts}",
        )
    if not model.expert_ffn:
        draft.complain(
            written_key(draft, "model.expert_ffn", "model.experts"),
            f"model.expert_ffn = 0 with model.experts = {model.experts}",
            why="the width of an expert is not known",
            fix=f"give expert_ffn; Mixtral-like models use their ffn, {model.ffn}",
        )


def leading_dense_layers(draft: Draft, job: Job) -> None:
    if job.model.dense_layers > job.model.layers:
        draft.complain(
            written_key(draft, "model.dense_layers", LAYERS),
            f"model.dense_layers = {job.model.dense_layers} is more than the model's {job.model.layers} layers",
            fix=f"use {job.model.layers} or fewer",
        )


def latent_attention(draft: Draft, job: Job) -> None:
    if not job.model.is_mla:
        return
    missing = [name for name in ("qk_nope_dim", "qk_rope_dim", "v_head_dim") if not getattr(job.model, name)]
    if missing:
        draft.complain(
            written_key(draft, "model.kv_lora_rank", f"model.{missing[0]}"),
            f"model.kv_lora_rank = {job.model.kv_lora_rank} without {', '.join(missing)}",
            why="latent attention needs the sizes of its heads",
            fix="DeepSeek-V3 has qk_nope_dim = 128, qk_rope_dim = 64, v_head_dim = 128",
        )


def positions_reach(draft: Draft, job: Job) -> None:
    model, sequence = job.model, job.data.sequence
    if model.positions == "learned" and sequence > model.max_positions:
        draft.complain(
            written_key(draft, "data.sequence", "model.max_positions"),
            f"data.sequence = {sequence} is longer than the model's {model.max_positions} learned positions",
            why="a position without a learned row cannot be embedded",
            fix=f"use sequence = {model.max_positions} or less" if model.max_positions else "give model.max_positions",
        )


def whole_sequence_slices(draft: Draft, job: Job) -> None:
    context, tensor, sequence = job.parallel.context, job.parallel.tensor, job.data.sequence
    if context != "auto" and sequence % context:
        draft.complain(
            "parallel.context",
            f"parallel.context = {context} does not divide data.sequence = {sequence}",
            why="each context rank must hold an equal slice of every sequence",
            fix=use_nearest(all_divisors(sequence), context),
        )
    elif job.parallel.sequence_parallel is True and tensor != "auto":
        slices = tensor * (1 if context == "auto" else context)
        if sequence % slices:
            draft.complain(
                "parallel.sequence_parallel",
                f"parallel.sequence_parallel = true cuts data.sequence = {sequence} into {slices} slices",
                why="tensor × context must divide the sequence",
                fix="use sequence_parallel = false or another tensor size",
            )


def whole_batches(draft: Draft, job: Job) -> None:
    micro, data, total = job.batch.micro, job.parallel.data, job.batch.global_sequences
    if micro != "auto" and total % micro:
        draft.complain(
            written_key(draft, "batch.micro", "batch.global_sequences", "batch.global_tokens"),
            f"batch.micro = {micro} does not divide the global batch of {total:,} sequences",
            why="every step is a whole number of micro-batches",
            fix=use_nearest(all_divisors(total), micro),
        )
    elif data != "auto" and total % (data * (1 if micro == "auto" else micro)):
        share = f"parallel.data = {data}" + ("" if micro == "auto" else f" × batch.micro = {micro}")
        valid_sizes = all_divisors(total if micro == "auto" else total // micro)
        draft.complain(
            written_key(draft, "parallel.data", "batch.micro"),
            f"{share} does not divide the global batch of {total:,} sequences",
            why="every replica takes the same number of micro-batches",
            fix=f"parallel.data: {use_nearest(valid_sizes, data)}",
        )


def whole_shard_groups(draft: Draft, job: Job) -> None:
    data, shard = job.parallel.data, job.parallel.shard
    if data != "auto" and shard != "auto" and data % shard:
        draft.complain(
            written_key(draft, "parallel.shard", "parallel.data"),
            f"parallel.shard = {shard} does not divide parallel.data = {data}",
            why="replicas form equal shard groups",
            fix=use_nearest(all_divisors(data), shard),
        )


def rising_ramp(draft: Draft, job: Job) -> None:
    previous_end = 0
    for index, stage in enumerate(job.batch.ramp):
        key = f"batch.ramp.{index}"
        if stage.until_tokens <= previous_end:
            draft.complain(
                key,
                f"batch.ramp[{index}].until_tokens = {stage.until_tokens:,} does not come after {previous_end:,}",
                why="the stages of a ramp follow each other",
                fix="sort the stages by until_tokens",
            )
        if stage.global_tokens % job.data.sequence:
            draft.complain(
                key,
                f"batch.ramp[{index}].global_tokens = {stage.global_tokens:,} is not a whole number of sequences "
                f"of {job.data.sequence:,}",
                fix=use_multiples(stage.global_tokens, job.data.sequence),
            )
        previous_end = stage.until_tokens


def scaled_model(draft: Draft, job: Job) -> None:
    """Check the settings that muP and CompleteP need, and refuse the models they do not support."""
    scale, key = job.scale, "scale.parametrization"
    if scale.parametrization == "standard":
        for name in ("base_width", "base_depth"):
            if getattr(scale, name):
                draft.warn(f"scale.{name}", f'scale.{name} has no effect with parametrization = "standard"')
        return
    setting = f'{key} = "{scale.parametrization}"'
    required_keys = {"base_width": "model.hidden"} | (
        {"base_depth": LAYERS} if scale.parametrization == "completep" else {}
    )
    for name, source_key in required_keys.items():
        if not getattr(scale, name):
            draft.complain(
                key,
                f"{setting} without scale.{name}",
                why="multipliers are ratios of the model's size to the size at which [optim] was tuned",
                fix=f"give {name}: {source_key} of the small model that was tuned",
            )
    if scale.base_depth and scale.parametrization == "mup":
        draft.warn("scale.base_depth", 'scale.base_depth has no effect with "mup"; "completep" follows depth too')
    unsupported = (
        (job.model.is_moe, "a model with experts", "neither paper says how routers and experts scale"),
        (bool(job.model.module), "model.module", "which of its parameters are hidden matrices is not known"),
        (bool(job.plugins.optimizer), "plugins.optimizer", "how its updates grow with the width is not known"),
        (bool(job.train.weights), "train.weights", "weights that were trained have the size they have"),
    )
    for is_set, what, why in unsupported:
        if is_set:
            draft.complain(key, f"{setting} with {what}", why=why, fix='use parametrization = "standard"')


def without_effect(draft: Draft, job: Job) -> None:
    """Warn of settings that are legal but have no effect."""
    parallel = job.parallel
    if parallel.sequence_parallel is True and parallel.tensor == 1:
        draft.warn("parallel.sequence_parallel", "parallel.sequence_parallel has no effect with parallel.tensor = 1")
    if parallel.zero == 0 and parallel.shard not in ("auto", 1):
        draft.warn("parallel.shard", f"parallel.shard = {parallel.shard} has no effect with parallel.zero = 0")
    if parallel.pipeline == 1 and parallel.schedule not in ("auto", "1f1b"):
        draft.warn("parallel.schedule", f'parallel.schedule = "{parallel.schedule}" has no effect with one stage')
    scale, compute = job.precision.loss_scale, job.precision.compute
    if not isinstance(scale, str) and scale != 1.0 and compute != "fp16":
        draft.warn("precision.loss_scale", f'precision.loss_scale = {scale:g} has no effect with compute = "{compute}"')
    if job.batch.ramp and job.data.tokens != "auto" and job.batch.ramp[-1].until_tokens > job.data.tokens:
        draft.warn("batch.ramp", "batch.ramp ends after data.tokens: the full batch is never reached")


CHECKS: tuple[tuple[tuple[str, ...], Check], ...] = (
    ((HEADS, "model.kv_heads"), grouped_heads),
    (("model.experts", "model.experts_per_token", "model.expert_ffn"), expert_shape),
    (("model.dense_layers", LAYERS), leading_dense_layers),
    (("model.kv_lora_rank",), latent_attention),
    (("data.sequence", "model.positions", "model.max_positions"), positions_reach),
    (("parallel.tensor", HEADS, "model.kv_heads"), whole_heads),
    (("parallel.pipeline", "parallel.virtual_pipeline", LAYERS), enough_layers),
    (("parallel.pipeline", "parallel.virtual_pipeline", "parallel.schedule"), chunks_need_interleaving),
    (("parallel.order", "parallel.pipeline", "parallel.virtual_pipeline", "parallel.schedule"), own_order),
    (("parallel.expert", "model.experts"), whole_experts),
    (("parallel.context", "parallel.tensor", "data.sequence"), whole_sequence_slices),
    (
        ("batch.micro", "batch.global_sequences", "batch.global_tokens", "batch", "data.sequence", "parallel.data"),
        whole_batches,
    ),
    (("parallel.shard", "parallel.data"), whole_shard_groups),
    (("batch.ramp", "data.sequence"), rising_ramp),
    (("scale", "model.experts", "plugins.optimizer", "train.weights"), scaled_model),
    (
        ("parallel", "precision", "precision.loss_scale", "precision.compute", "data.tokens", "batch.ramp"),
        without_effect,
    ),
)


def written_key(draft: Draft, *keys: str) -> str:
    """Return the first of the conflicting keys that was written by hand."""
    return next((key for key in keys if key in draft.origins and draft.origins[key].by_hand), keys[0])


def use_nearest(fits: Sequence[int], wanted: int) -> str:
    """Suggest the valid sizes on both sides of a wrong one.

    >>> use_nearest([1, 2, 4, 8], 6)
    'use 4 or 8'
    """
    below = [size for size in fits if size < wanted][-1:]
    above = [size for size in fits if size > wanted][:1]
    return "use " + " or ".join(f"{size:,}" for size in below + above)


def use_multiples(wanted: int, unit: int) -> str:
    """Suggest the multiples on both sides of a wrong number.

    >>> use_multiples(10_000, 4096)
    'use 8,192 (2 sequences) or 12,288 (3 sequences)'
    """
    lower = wanted // unit
    return "use " + " or ".join(f"{n * unit:,} ({n:,} sequences)" for n in (lower, lower + 1) if n)
