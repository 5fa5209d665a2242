"""nanotron's YAML as job settings: nanotron/config/config.py and config/parallelism_config.py."""

from __future__ import annotations

from phalanx.rules.foreign.conversion import Conversion

SHAPE = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden",
    "intermediate_size": "ffn",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "vocab_size": "vocab",
}
IRRELEVANT = {
    "general.": "names and folders",
    "logging.": "logging",
    "profiler.": "profiler traces",
    "lighteval.": "evaluation",
    "metrics_logging.": "logging",
    "s3_upload.": "where checkpoints go afterwards",
    "data_stages.": "which text is read does not change the work of a step",
    "tokenizer.": "the tokenizer does not change the work of a step",
    "model.init_method.": "initial weights do not change the work of a step",
    "model.model_config.": "a detail of the model that costs nothing, or follows from the others",
    "model.": "a detail of the model",
    "checkpoints.": "a detail of checkpoints",
    "tokens.": "evaluation",
    "optimizer.": "a detail of the optimizer",
}
UNMAPPED = {
    "parallelism.": "a detail of the split that the job schema has no word for",
    "model.ddp_bucket_cap_mb": "",
}


def translate_config(config: Conversion) -> None:
    """Translate a nanotron configuration into job settings."""
    _read_model(config)
    _read_degrees(config)
    _read_batch(config)
    _read_precision(config)
    _read_optimizer(config)
    if (steps := config.read_whole("checkpoints.checkpoint_interval")) and steps > 0:
        config.set_value("checkpoint.steps", steps, "checkpoints.checkpoint_interval")
    if (size := config.read_number("model.ddp_bucket_cap_mb")) is not None and size > 0:
        config.set_value("comm.bucket_mib", size, "model.ddp_bucket_cap_mb")
    config.assume_default("comm.init_timeout_s", 600, "that of NCCL")
    config.assume_default("train.timeout_s", 600, "that of NCCL")
    config.settle_rest(irrelevant=IRRELEVANT, unmapped=UNMAPPED, seen=lambda key: key)


def _read_model(config: Conversion) -> None:
    m = "model.model_config."
    for foreign_key, model_key in SHAPE.items():
        if size := config.read_whole(f"{m}{foreign_key}"):
            config.set_value(f"model.{model_key}", size, f"{m}{foreign_key}")
    if config.read_flag(f"{m}is_starcoder2_config") and not config.has_leaf(f"{m}intermediate_size"):
        ffn_width = config.read_whole(f"{m}n_inner") or 4 * config.int_of("model.hidden", 0)
        config.set_value("model.ffn", ffn_width, f"{m}n_inner", note="four times the hidden size")
        if kv_heads := config.read_whole(f"{m}num_kv_heads"):
            config.set_value("model.kv_heads", kv_heads, f"{m}num_kv_heads")
    if (tied := config.read_flag(f"{m}tie_word_embeddings")) is not None:
        config.set_value("model.tied", tied, f"{m}tie_word_embeddings")
    names = [f"{m}{name}" for name in ("moe_config.num_experts", "num_local_experts", "moe_num_experts", "num_experts")]
    if experts := next((count for name in names if (count := config.read_whole(name))), None):
        config.set_value("model.experts", experts, *names)
        top_k_keys, width = (f"{m}moe_config.top_k", f"{m}num_experts_per_tok"), f"{m}moe_config.moe_intermediate_size"
        experts_per_token = next((count for name in top_k_keys if (count := config.read_whole(name))), 1)
        config.set_value("model.experts_per_token", experts_per_token, *top_k_keys)
        expert_width = config.read_whole(width) or config.int_of("model.ffn", 0)
        config.set_value("model.expert_ffn", expert_width, width, f"{m}intermediate_size")


def _read_degrees(config: Conversion) -> None:
    p = "parallelism."
    config.set_value("parallel.mode", "fixed", note="nanotron searches nothing")
    for foreign_key, axis in (
        ("tp", "tensor"),
        ("pp", "pipeline"),
        ("context_parallel_size", "context"),
        ("expert_parallel_size", "expert"),
        ("dp", "data"),
    ):
        if (degree := config.read_whole(f"{p}{foreign_key}")) is not None and degree > 0:
            config.set_value(f"parallel.{axis}", degree, f"{p}{foreign_key}")
    tensor = config.int_of("parallel.tensor")
    scatter = config.read_word(f"{p}tp_mode") == "reduce_scatter"
    config.set_value("parallel.sequence_parallel", scatter and tensor > 1, f"{p}tp_mode")
    config.set_value("parallel.zero", config.read_whole("optimizer.zero_stage") or 0, "optimizer.zero_stage")
    config.set_value(
        "parallel.recompute", "full" if config.read_flag(f"{p}recompute_layer") else "none", f"{p}recompute_layer"
    )
    engine = config.read_word(f"{p}pp_engine")
    if engine in ("1f1b", "afab") and config.int_of("parallel.pipeline") > 1:
        config.set_value("parallel.schedule", "1f1b" if engine == "1f1b" else "gpipe", f"{p}pp_engine")
    else:
        config.skip_leaf(f"{p}pp_engine", "no effect with one stage")
    config.skip_leaf(f"{p}tp_linear_async_communication", "overlap is part of the efficiency profile")


def _read_batch(config: Conversion) -> None:
    micro = config.read_whole("tokens.micro_batch_size") or 1
    passes = config.read_whole("tokens.batch_accumulation_per_replica") or 1
    config.set_value("batch.micro", micro, "tokens.micro_batch_size")
    note = f"{micro} × {passes} passes"
    names = ("tokens.batch_accumulation_per_replica", "tokens.micro_batch_size")
    config.set_value("batch.per_replica", micro * passes, *names, note=note)
    if sequence := config.read_whole("tokens.sequence_length"):
        config.set_value("data.sequence", sequence, "tokens.sequence_length")
    if steps := config.read_whole("tokens.train_steps"):
        config.set_value("data.steps", steps, "tokens.train_steps")


def _read_precision(config: Conversion) -> None:
    formats = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    if (kind := formats.get(config.read_word("model.dtype"), "")) != "":
        config.set_value("precision.compute", kind, "model.dtype")
    sums_in_fp32 = config.read_flag("optimizer.accumulate_grad_in_fp32")
    config.set_value(
        "precision.grad_reduce", "bf16" if sums_in_fp32 is False else "fp32", "optimizer.accumulate_grad_in_fp32"
    )
    config.assume_default("precision.master_weights", True)


def _read_optimizer(config: Conversion) -> None:
    s, f = "optimizer.learning_rate_scheduler.", "optimizer.optimizer_factory."
    if "adam" in (config.read_word(f"{f}name") or "adamw"):
        config.set_value("optim.name", "adamw", f"{f}name")
    config.copy_keys(
        {
            f"{s}learning_rate": ("optim.lr", Conversion.read_number),
            "optimizer.weight_decay": ("optim.weight_decay", Conversion.read_number),
            "optimizer.clip_grad": ("optim.clip", Conversion.read_number),
            f"{f}adam_eps": ("optim.eps", Conversion.read_number),
        }
    )
    first, second = config.read_number(f"{f}adam_beta1"), config.read_number(f"{f}adam_beta2")
    if first is not None and second is not None:
        config.set_value("optim.betas", [first, second], f"{f}adam_beta1", f"{f}adam_beta2")
    if (steps := config.read_whole(f"{s}lr_warmup_steps")) is not None:
        config.set_value("optim.warmup_steps", steps, f"{s}lr_warmup_steps")
    if config.read_word(f"{s}lr_decay_style") == "cosine":
        config.set_value("optim.schedule", "cosine", f"{s}lr_decay_style")
    min_lr, peak = config.read_number(f"{s}min_decay_lr"), config.read_number(f"{s}learning_rate")
    if min_lr is not None and peak:
        config.set_value("optim.final_lr", min(1.0, min_lr / peak), f"{s}min_decay_lr", note=f"{min_lr:g} / {peak:g}")
