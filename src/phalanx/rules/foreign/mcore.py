"""What Megatron-LM, NeMo and Megatron-Bridge share: Megatron Core's words for the model, its split and its training.

Names are Megatron-LM's arguments with underscores (megatron/training/arguments.py); readers map their spelling to them.
"""

from __future__ import annotations

import re

from phalanx.rules.facts.trainers import MEGATRON
from phalanx.rules.foreign.book import NEVER, UNSET, Book

DTYPES = {"bf16": 2, "fp32": 4, "fp16": 2}


def translate(book: Book, *, whole: bool = True) -> None:
    """Fill the book with all that Megatron Core has words for; a file that is not `whole` may leave them to code."""
    translate_shape(book)
    _degrees(book)
    _sharding(book)
    _recompute(book)
    _batch(book)
    _precision(book)
    _optimizer(book)
    _learning_rate(book)
    _checkpoint(book, whole)
    _resume(book)
    _timeouts(book)
    _telemetry(book)


def _degrees(book: Book) -> None:
    book.put("parallel.mode", "fixed", note=f"{book.title} searches nothing")
    for name, ours in (
        ("tensor_model_parallel_size", "tensor"),
        ("pipeline_model_parallel_size", "pipeline"),
        ("context_parallel_size", "context"),
        ("expert_model_parallel_size", "expert"),
    ):
        if (degree := book.whole(name)) is not None and degree > 0:
            book.put(f"parallel.{ours}", degree, name)
    if (split := book.flag("sequence_parallel")) is not None:
        book.put("parallel.sequence_parallel", split, "sequence_parallel")
    kinds = {"p2p": "ring", "a2a": "ulysses", "all_gather": "allgather", "a2a+p2p": "ring"}
    if (kind := book.text("cp_comm_type")) in kinds:
        book.put("parallel.context_kind", kinds[kind], "cp_comm_type")
    if (own := book.whole("expert_tensor_parallel_size")) is not None:
        same = own == book.int_of("parallel.tensor") or not book.int_of("model.experts", 0)
        why = "experts split over tensor ranks as the rest" if same else "the planner splits experts whole"
        book.skip("expert_tensor_parallel_size", why) if same else book.lacks("expert_tensor_parallel_size", why)
    _virtual(book)


def _virtual(book: Book) -> None:
    layers, stages = book.int_of("model.layers", 0), book.int_of("parallel.pipeline")
    chunks, name = 1, ""
    for name in ("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank"):
        if (found := book.whole(name)) is not None:
            chunks = found
            break
    else:
        name = "num_layers_per_virtual_pipeline_stage"
        each = book.whole(name)
        chunks = max(1, layers // stages // each) if each and layers else 1
    if stages > 1 and chunks > 1:
        book.put("parallel.virtual_pipeline", chunks, name)
        book.put("parallel.schedule", "interleaved", name)
    elif book.has(name):
        book.skip(name, "one chunk per stage, or one stage")


STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def _sharding(book: Book) -> None:
    own, torch = bool(book.flag("use_megatron_fsdp") or book.flag("use_custom_fsdp")), book.flag("use_torch_fsdp2")
    flags = ("use_megatron_fsdp", "use_custom_fsdp", "use_torch_fsdp2")
    strategy = book.text("data_parallel_sharding_strategy")
    if own or torch:
        stage = STRATEGIES.get(strategy, 3) if own and strategy else 3
        book.put("parallel.zero", stage, "data_parallel_sharding_strategy", *flags, note="FSDP")
        book.used("use_distributed_optimizer", by="parallel.zero")
    else:
        on = bool(book.flag("use_distributed_optimizer"))
        note = "distributed optimizer" if on else "no distributed optimizer"
        book.put("parallel.zero", int(on), "use_distributed_optimizer", note=note)
        book.skip("data_parallel_sharding_strategy", "no effect without Megatron-FSDP")
        for name in flags:
            book.used(name, by="parallel.zero")
    if book.flag("optimizer_cpu_offload"):
        book.put("parallel.offload", "optimizer", "optimizer_cpu_offload")
    elif book.has("optimizer_cpu_offload"):
        book.used("optimizer_cpu_offload", by="parallel.offload")
    if (copies := book.whole("num_distributed_optimizer_instances")) is not None:
        if copies == 1:
            book.used("num_distributed_optimizer_instances", by="parallel.shard = auto: all data ranks")
        else:
            book.put("parallel.shard_copies", copies, "num_distributed_optimizer_instances")


def _recompute(book: Book) -> None:
    kind = book.text("recompute_granularity")
    if not kind and (book.flag("recompute_activations") or book.flag("checkpoint_activations")):
        kind = "selective" if book.flag("recompute_activations") else "full"
    names = ("recompute_granularity", "recompute_activations", "checkpoint_activations")
    if kind in ("selective", "full"):
        book.put("parallel.recompute", kind, *names)
    else:
        book.put("parallel.recompute", "none", *names)
    count = book.whole("recompute_num_layers")
    if kind == "full" and book.text("recompute_method") == "block" and count:
        book.put("parallel.recompute_layers", count, "recompute_num_layers", "recompute_method")
    else:
        for name in ("recompute_num_layers", "recompute_method"):
            book.skip(name, "uniform recomputation covers every layer; only its chunks differ")


def _batch(book: Book) -> None:
    sequence = book.whole("seq_length")
    if sequence:
        book.put("data.sequence", sequence, "seq_length")
    book.put("batch.micro", book.whole("micro_batch_size") or 1, "micro_batch_size")
    if (total := book.whole("global_batch_size")) is not None and total > 0:
        book.put("batch.global_sequences", total, "global_batch_size")
    else:
        book.put("batch.per_replica", book.int_of("batch.micro"), "micro_batch_size", note="one micro-batch each")
    if samples := book.whole("train_samples"):
        book.put("data.samples", samples, "train_samples")
    elif steps := book.whole("train_iters"):
        book.put("data.steps", steps, "train_iters")
    if (seed := book.whole("seed")) is not None:
        book.put("data.seed", abs(seed), "seed")
    book.put("batch.ramp_of", _ramp(book), "rampup_batch_size") if book.has("rampup_batch_size") else None
    if (per_token := book.flag("calculate_per_token_loss")) is not None:
        book.practice["token_weighted_loss"] = per_token
        book.used("calculate_per_token_loss", by="practice: token_weighted_loss")


def _ramp(book: Book) -> list[int]:
    """[first batch, increment, sequences over which it grows], or nothing usable."""
    leaf = book.leaf("rampup_batch_size")
    parts = leaf.value if leaf is not None and isinstance(leaf.value, list) else []
    numbers = [int(str(one)) for one in parts if str(one).isdigit() and len(str(one)) < 16]
    return numbers if len(numbers) == 3 else []


def _precision(book: Book) -> None:
    base = "bf16" if book.flag("bf16") else "fp16" if book.flag("fp16") else "fp32"
    flags = [name for name in ("bf16", "fp16") if book.has(name)]
    eight = next((name for name in ("fp8_format", "fp8") if book.text(name) not in ("", "none", "false")), "")
    four = next((name for name in ("fp4_format", "fp4") if book.text(name) not in ("", "none", "false")), "")
    if four or eight:
        book.put("precision.compute", "fp4" if four else "fp8", four or eight)
        book.used(*flags, by="precision.compute: what is not in few bits")
    else:
        book.put("precision.compute", base, *flags, note="" if flags else "neither --bf16 nor --fp16")
    wide = book.flag("accumulate_allreduce_grads_in_fp32")
    wide = book.flag("grad_reduce_in_fp32") if wide is None else wide
    if wide is None:
        wide = base != "fp16" and not book.flag("grad_reduce_in_bf16")
    names = ("accumulate_allreduce_grads_in_fp32", "grad_reduce_in_fp32", "grad_reduce_in_bf16")
    note = "" if any(book.has(name) for name in names) else "bf16 sums in fp32"
    if base == "fp16" and not wide:
        book.practice["sums_in"] = "fp16"
        note = "summed in fp16: the nearest word is bf16"
    book.put("precision.grad_reduce", "fp32" if wide else "bf16", *names, note=note)
    if (scale := book.number("loss_scale")) is not None and base == "fp16" and scale > 0:
        book.put("precision.loss_scale", scale, "loss_scale", note="static")
    elif base == "fp16":
        book.assume("precision.loss_scale", "auto", "dynamic for fp16")
    _state(book)


def _state(book: Book) -> None:
    """What the optimizer updates; formats other than fp32 are for its precision-aware one."""
    kept = book.text("main_params_dtype")
    if kept:
        book.put("precision.master_weights", "32" in kept, "main_params_dtype")
    book.assume("precision.master_weights", True, "fp16 and bf16 weights have an fp32 copy")
    moments = next((book.text(n) for n in ("exp_avg_dtype", "exp_avg_dtype._target_") if book.has(n)), "")
    if "bfloat16" in moments or moments == "bf16":
        book.put("precision.optimizer_state", "bf16", "exp_avg_dtype", "exp_avg_dtype._target_")
    elif "float32" in moments or moments == "fp32":
        book.put("precision.optimizer_state", "fp32", "exp_avg_dtype", "exp_avg_dtype._target_")
    elif not moments:
        book.assume("precision.optimizer_state", "fp32")


def _optimizer(book: Book) -> None:
    name = book.text("optimizer") or "adam"
    if "adam" in name:
        book.put("optim.name", "adamw", "optimizer", note="decoupled weight decay")
    elif "muon" in name:
        book.put("optim.name", "muon", "optimizer")
    else:
        book.lacks("optimizer", "not an optimizer of the job schema")
    book.copy(
        {
            "lr": ("optim.lr", Book.number),
            "weight_decay": ("optim.weight_decay", Book.number),
            "clip_grad": ("optim.clip", Book.number),
            "adam_eps": ("optim.eps", Book.number),
        }
    )
    book.assume("optim.weight_decay", 0.01)
    first, second = book.number("adam_beta1"), book.number("adam_beta2")
    betas = [0.9 if first is None else first, 0.999 if second is None else second]
    book.put("optim.betas", betas, "adam_beta1", "adam_beta2")


def _learning_rate(book: Book) -> None:
    style = book.text("lr_decay_style") or "linear"
    if style == "cosine":
        book.put("optim.schedule", "cosine", "lr_decay_style")
    else:
        book.put("optim.schedule", "wsd", "lr_decay_style", note=style)
        whole, tail = book.number("lr_decay_iters"), book.number("lr_wsd_decay_iters")
        part = tail / whole if style == "wsd" and tail and whole else {"constant": 0.0}.get(style, 1.0)
        book.put("optim.decay", min(1.0, max(0.0, part)), "lr_wsd_decay_iters", "lr_decay_style")
    least, peak = book.number("min_lr"), book.number("lr")
    if least is not None and peak:
        book.put("optim.final_lr", min(1.0, least / peak), "min_lr", note=f"{least:g} / {peak:g}")
    book.assume("optim.final_lr", 0.0)
    if (steps := book.whole("lr_warmup_iters")) is not None:
        book.put("optim.warmup_steps", steps, "lr_warmup_iters")
    elif samples := book.whole("lr_warmup_samples"):
        book.put("optim.warmup_samples", samples, "lr_warmup_samples")
    elif (share := book.number("lr_warmup_fraction")) is not None and (steps := book.whole("lr_decay_iters")):
        book.put("optim.warmup_steps", round(share * steps), "lr_warmup_fraction", note=f"{share:g} of {steps:,} steps")
    for name in ("lr_decay_iters", "lr_decay_samples"):
        book.skip(name, "the job decays over all its tokens")


def _checkpoint(book: Book, whole: bool) -> None:
    save, every = book.leaf("save"), book.whole("save_interval")
    if save is not None and every:
        book.put("checkpoint.steps", every, "save_interval")
    elif save is None and (whole or "checkpoint.save" in book.leaves):  # null says it as well
        book.put("checkpoint.steps", NEVER, "save_interval", note="nothing is saved")
        book.theirs["checkpoint.steps"] = "save"
        book.practice["saves"] = False
    if save is not None:
        text = str(save.value)
        good = text.isprintable() and 0 < len(text) < 1000 and "$" not in text
        book.put("checkpoint.path", text, "save") if good else book.lacks("save", UNSET)
    keep = book.whole("most_recent_k")
    book.put("checkpoint.keep", keep if keep and keep > 0 else 10**6, "most_recent_k", note="" if keep else "keeps all")
    book.put("checkpoint.async", bool(book.flag("async_save")), "async_save")
    kinds = {"torch_dist": "dcp", "torch_dcp": "dcp", "fsdp_dtensor": "dcp", "torch": "torch-pickle", "zarr": "zarr"}
    if (kind := book.text("ckpt_format")) in kinds:
        book.practice["checkpoint_format"] = kinds[kind]
        book.used("ckpt_format", by="practice: checkpoint_format")
    if book.flag("replication") and book.text("non_persistent_ckpt_type") == "local":
        book.practice["memory_copies"] = "other host"
        book.used("replication", "non_persistent_ckpt_type", by="practice: memory_copies")
        if every_local := book.whole("non_persistent_save_interval"):
            book.put("checkpoint.memory_every", every_local, "non_persistent_save_interval")


# Megatron's checkpointing.py: what is left out of a file, or of a resume. The loss scale is part of the optimizer.
LEFT_OUT = {"optim": ("moments", "scheduler", "scaler"), "rng": ("rng",)}


def _resume(book: Book) -> None:
    """`--no-load-optim` of the arguments, `load_optim: false` of Megatron-Bridge."""
    lost: set[str] = set()
    for part, states in LEFT_OUT.items():
        for verb in ("load", "save"):
            off, on = f"no_{verb}_{part}", f"{verb}_{part}"
            if book.flag(off) or book.flag(on) is False:
                lost |= {*states}
            book.used(off, on, by="practice: resumes_exactly")
    if lost:
        book.practice["resumes_exactly"] = tuple(one for one in MEGATRON.resumes_exactly or () if one not in lost)


def _timeouts(book: Book) -> None:
    minutes = book.number("distributed_timeout_minutes")
    limit = 600.0 if minutes is None else 60 * minutes
    note = f"{minutes:g} minutes" if minutes is not None else f"default of {book.title}: 10 minutes"
    book.put("comm.init_timeout_s", limit, "distributed_timeout_minutes", note=note)
    if (after := book.number("distributed_timeout_seconds_after_init")) is not None:
        book.put("train.timeout_s", after, "distributed_timeout_seconds_after_init")
    else:
        book.put("train.timeout_s", limit, "distributed_timeout_minutes", note=note)
        book.theirs["train.timeout_s"] = "distributed_timeout_seconds_after_init"
    _buckets(book)
    if every := book.whole("check_weight_hash_across_dp_replicas_interval"):
        book.put("fault.digest_every", every, "check_weight_hash_across_dp_replicas_interval")
    elif book.has("check_weight_hash_across_dp_replicas_interval"):
        book.used("check_weight_hash_across_dp_replicas_interval", by="fault.digest_every")


def _buckets(book: Book) -> None:
    width = DTYPES[str(book.value("precision.grad_reduce") or "fp32")]
    overlap = book.flag("overlap_grad_reduce")
    book.theirs["comm.bucket_mib"] = "ddp_bucket_size" if overlap else "overlap_grad_reduce"
    size = book.whole("bucket_size")
    if size is not None and size > 0:
        mib = size * width / 2**20
        book.put("comm.bucket_mib", min(65_536.0, mib), "bucket_size", note=f"{size:,} parameters × {width} bytes")
    elif overlap:
        book.put("comm.bucket_width", width)  # its size follows from the number of data ranks
    else:
        book.assume("comm.bucket_mib", 65_536.0, "without overlap of the reduction all gradients are one bucket")
    book.used("overlap_grad_reduce", by="comm.bucket_mib")


def _telemetry(book: Book) -> None:
    written = ["steps"]
    for name, series in (("log_throughput", "utilization"), ("log_energy", "energy")):
        if book.flag(name):
            written.append(series)
            book.used(name, by="practice: telemetry")
    if len(written) > 1:
        book.practice["telemetry"] = tuple(written)


# The model in Megatron Core's words: sizes, norms, positions, experts, latent attention, vocabulary.


GPT2_VOCAB = 50_257

SIZES = {
    "num_layers": "layers",
    "hidden_size": "hidden",
    "ffn_hidden_size": "ffn",
    "num_attention_heads": "heads",
    "q_lora_rank": "q_lora_rank",
    "num_experts": "experts",
    "moe_ffn_hidden_size": "expert_ffn",
    "moe_router_topk": "experts_per_token",
}


def translate_shape(book: Book) -> None:
    """Fill [model]."""
    _shape(book)
    _details(book)
    _experts(book)
    _latent_attention(book)
    _vocabulary(book)


def _shape(book: Book) -> None:
    for name, ours in SIZES.items():
        if (size := book.whole(name)) is not None and size > 0:
            book.put(f"model.{ours}", size, name)
    hidden = book.int_of("model.hidden", 0)
    gated = bool(book.flag("swiglu")) or bool(book.flag("gated_linear_unit"))
    if hidden and "model.ffn" not in book.values:
        width = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
        book.assume("model.ffn", width, "4 × hidden, two thirds of that with SwiGLU")
    if (groups := book.whole("num_query_groups")) is not None and groups > 0:
        book.put("model.kv_heads", groups, "num_query_groups", "group_query_attention")
    elif book.has("group_query_attention"):
        book.used("group_query_attention", by="model.kv_heads")
    if (channels := book.whole("kv_channels")) is not None:
        book.put("model.head_dim", channels, "kv_channels")
    if hidden:
        book.put("model.gated", gated, "swiglu", "gated_linear_unit")


def _details(book: Book) -> None:
    if "model.hidden" not in book.values:
        return
    norm = book.text("normalization") or "layernorm"
    book.put("model.norm", "rms" if "rms" in norm else "layer", "normalization")
    if (epsilon := book.number("norm_epsilon")) is not None:
        book.put("model.norm_eps", epsilon, "norm_epsilon")
    without = book.flag("disable_bias_linear") is True or book.flag("add_bias_linear") is False
    book.put("model.bias", not without, "disable_bias_linear", "add_bias_linear")
    if (biased := book.flag("add_qkv_bias")) is not None:
        book.put("model.qkv_bias", biased, "add_qkv_bias")
    if (normed := book.flag("qk_layernorm")) is not None:
        book.put("model.qk_norm", normed, "qk_layernorm")
    tied = book.flag("share_embeddings_and_output_weights")
    if tied is None:
        tied = not book.flag("untie_embeddings_and_output_weights")
    book.put("model.tied", tied, "share_embeddings_and_output_weights", "untie_embeddings_and_output_weights")
    if not book.flag("swiglu") and not book.flag("gated_linear_unit"):
        book.assume("model.activation", "gelu_tanh")
    _positions(book)


def _positions(book: Book) -> None:
    kind = book.text("position_embedding_type") or "learned_absolute"
    if kind in ("rope", "yarn") or book.flag("use_rotary_position_embeddings"):
        book.put("model.positions", "rope", "position_embedding_type", "use_rotary_position_embeddings")
        if (base := book.number("rotary_base")) is not None:
            book.put("model.rope_theta", base, "rotary_base")
        book.skip("max_position_embeddings", "rotary positions have no table")
        return
    reach = book.whole("max_position_embeddings") or book.whole("seq_length") or 0
    if kind != "learned_absolute":
        book.lacks("position_embedding_type", "the job schema knows rope and learned positions here")
    book.put("model.positions", "learned", "position_embedding_type")
    book.put("model.max_positions", reach, "max_position_embeddings")
    book.skip("rotary_base", "positions are learned")


def _experts(book: Book) -> None:
    if not book.int_of("model.experts", 0):
        for name in ("expert_ffn", "experts_per_token", "experts"):
            book.values.pop(f"model.{name}", None)
        for name in ("num_experts", "moe_ffn_hidden_size", "moe_router_topk"):
            book.skip(name, "the model is dense")
        return
    book.assume("model.experts_per_token", 2)
    book.assume("model.expert_ffn", book.int_of("model.ffn"), "ffn_hidden_size")
    width, name = book.int_of("model.expert_ffn"), "moe_shared_expert_intermediate_size"
    if (shared := book.whole(name)) is not None and shared >= width:
        book.put("model.shared_experts", max(1, shared // width), name, note=f"{shared} / {width}")
    _dense_layers(book)
    if (score := book.text("moe_router_score_function")) in ("softmax", "sigmoid"):
        book.put("model.router_score", score, "moe_router_score_function")
    if (scale := book.number("moe_router_topk_scaling_factor")) is not None:
        book.put("model.routed_scale", scale, "moe_router_topk_scaling_factor")
    _balance(book)


def _dense_layers(book: Book) -> None:
    leaf = book.leaf("moe_layer_freq")
    if leaf is None:
        return
    found = re.fullmatch(r"\(?\[0\]\s*\*\s*(\d{1,4})\s*\+\s*\[1\]\s*\*\s*\d{1,4}\)?", str(leaf.value).strip("\"' "))
    if found:
        book.put("model.dense_layers", int(found.group(1)), "moe_layer_freq")
    elif isinstance(leaf.value, list) and all(one in (0, 1) for one in leaf.value):
        dense = (leaf.value.index(1) if 1 in leaf.value else len(leaf.value)) if leaf.value else 0
        if all(one == 1 for one in leaf.value[dense:]):
            book.put("model.dense_layers", dense, "moe_layer_freq")
    elif str(leaf.value) == "1":
        book.put("model.dense_layers", 0, "moe_layer_freq")
    if leaf.key not in book.settled:
        book.lacks("moe_layer_freq", "the job schema has dense layers at the beginning only")


def _balance(book: Book) -> None:
    if book.flag("moe_router_enable_expert_bias"):
        book.put("model.balance", "bias", "moe_router_enable_expert_bias")
        book.put("model.router_bias", True, "moe_router_enable_expert_bias")
        if (rate := book.number("moe_router_bias_update_rate")) is not None:
            book.put("model.balance_rate", rate, "moe_router_bias_update_rate")
        for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
            book.lacks(name, "the job schema has one way of balancing, here the bias")
        return
    kind = book.text("moe_router_load_balancing_type") or "aux_loss"
    book.put("model.balance", "none" if kind == "none" else "aux", "moe_router_load_balancing_type")
    if (rate := book.number("moe_aux_loss_coeff")) is not None:
        book.put("model.balance_rate", rate, "moe_aux_loss_coeff")


def _latent_attention(book: Book) -> None:
    sizes = ("kv_lora_rank", 512), ("qk_head_dim", 128), ("qk_pos_emb_head_dim", 64), ("v_head_dim", 128)
    if not book.flag("multi_latent_attention"):
        book.values.pop("model.q_lora_rank", None)
        for name in ("q_lora_rank", *(name for name, _ in sizes)):
            book.skip(name, "no latent attention")
        book.used("multi_latent_attention", by="model.kv_lora_rank = 0")
        return
    ours = ("kv_lora_rank", "qk_nope_dim", "qk_rope_dim", "v_head_dim")
    for (name, default), key in zip(sizes, ours, strict=True):
        book.put(f"model.{key}", book.whole(name) or default, name, "multi_latent_attention")
    book.put("model.head_dim", book.int_of("model.qk_nope_dim") + book.int_of("model.qk_rope_dim"), "qk_head_dim")
    book.skip("kv_channels", "latent attention has its own sizes")


def _vocabulary(book: Book) -> None:
    size = book.whole("padded_vocab_size") or book.whole("vocab_size")
    name = "padded_vocab_size" if book.has("padded_vocab_size") else "vocab_size"
    if size:
        book.put("model.vocab", size, name)
    elif "gpt2bpe" in book.text("tokenizer_type") or "gpt2" in book.text("vocab_file").rpartition("/")[2]:
        unit = (book.whole("make_vocab_size_divisible_by") or 128) * (book.whole("tensor_model_parallel_size") or 1)
        padded = -(-GPT2_VOCAB // unit) * unit
        note = f"GPT-2's {GPT2_VOCAB:,} padded to {unit}"
        book.put("model.vocab", padded, "tokenizer_type", "make_vocab_size_divisible_by", note=note)
