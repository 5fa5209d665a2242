"""GPT-NeoX's YAML: Megatron's keys together with DeepSpeed's (megatron/neox_arguments, configs/README.md)."""

from __future__ import annotations

from difflib import get_close_matches

from phalanx.rules.foreign import mcore
from phalanx.rules.foreign.conversion import Conversion
from phalanx.rules.foreign.megatron import IRRELEVANT as MEGATRON_IRRELEVANT

RENAMED = {
    "model_parallel_size": "tensor_model_parallel_size",
    "pipe_parallel_size": "pipeline_model_parallel_size",
    "context_parallel_size": "context_parallel_size",
    "expert_model_parallel_size": "expert_model_parallel_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "train_batch_size": "global_batch_size",
    "optimizer.params.lr": "lr",
    "optimizer.params.eps": "adam_eps",
    "gradient_clipping": "clip_grad",
    "warmup": "lr_warmup_fraction",
    "checkpoint_factor": "save_interval",
    "intermediate_size": "ffn_hidden_size",
    "num_kv_heads": "num_query_groups",
    "rotary_emb_base": "rotary_base",
    "no_weight_tying": "untie_embeddings_and_output_weights",
    "moe_num_experts": "num_experts",
    "keep_last_n_checkpoints": "most_recent_k",
}
IRRELEVANT = {
    **MEGATRON_IRRELEVANT,
    "zero_optimization.": "a detail of ZeRO",
    "fp16.": "a detail of loss scaling",
    "bf16.": "a detail of bf16",
    "optimizer.": "a detail of the optimizer",
    "data_": "which text is read does not change the work of a step",
    "train_data_": "which text is read does not change the work of a step",
    "valid_data_": "which text is read does not change the work of a step",
    "test_data_": "which text is read does not change the work of a step",
    "steps_per_print": "logging",
    "wall_clock_breakdown": "logging",
    "keep_last_": "checkpoints that are kept",
    "attention_config": "which kernels",
    "activation": "which kernels",
    "partition_activations": "how recomputed activations are stored",
    "synchronize_each_layer": "how recomputed activations are stored",
    "checkpoint_": "how recomputed activations are stored",
    "output_layer_": "a detail of the model",
    "init_method": "initial weights do not change the work of a step",
    "rotary_": "how much of a head is rotated costs nothing",
    "launcher": "the launcher's own business",
    "hostfile": "the launcher's own business",
    "use_wandb": "logging",
    "gpt_j_residual": "attention and MLP side by side; the planner adds them",
}


def translate_config(config: Conversion) -> None:
    """Translate a GPT-NeoX configuration into job settings."""
    config.names |= {key.replace("-", "_"): key for key in config.leaves}
    for foreign_key, megatron_name in RENAMED.items():
        config.rename_leaf(megatron_name, config.names.get(foreign_key, foreign_key))
    for name in ("pipeline_model_parallel_size", "tensor_model_parallel_size"):
        leaf = config.find_leaf(name)
        # 0 turns the pipeline off
        if leaf is not None and str(leaf.value) == "0":
            config.read_as[name] = type(leaf)(key=leaf.key, value=1, line=leaf.line)
    _read_positions(config)
    _read_formats(config)
    mcore.translate_config(config, whole=False)
    if (stage := config.read_whole("zero_optimization.stage")) is not None:
        config.set_value("parallel.zero", stage, "zero_optimization.stage")
    device = config.read_word("zero_optimization.offload_optimizer.device")
    if device in ("cpu", "nvme") or config.read_flag("zero_optimization.cpu_offload"):
        names = ("zero_optimization.offload_optimizer.device", "zero_optimization.cpu_offload")
        config.set_value("parallel.offload", "optimizer", *names)
    # Nothing is saved, unless another file of the same launch gives the folder
    if not config.has_leaf("save"):
        config.values.pop("checkpoint.keep", None)
        config.leave_unmapped("most_recent_k", "the file names no folder to save to")
    _read_batch(config)
    config.settle_rest(irrelevant=IRRELEVANT, unmapped={}, seen=lambda key: key.replace("-", "_"))
    _note_misspelt(config)


# Valid keys; a key that is similar to one of them is reported as a typing error
# (megatron/neox_arguments/neox_args.py, deepspeed_args.py).
KNOWN = (
    *RENAMED,
    *(key for key in IRRELEVANT if key[-1] not in "._"),
    *("num_layers", "hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings", "norm", "pos_emb"),
    *(
        "train_iters",
        "lr_decay_iters",
        "lr_decay_style",
        "min_lr",
        "distributed_backend",
        "eval_interval",
        "eval_iters",
    ),
    *("log_interval", "save", "load", "finetune", "weight_decay", "hidden_dropout", "attention_dropout", "precision"),
    *("gradient_accumulation_steps", "tokenizer_type", "vocab_file", "merge_file", "split", "num_workers", "seed"),
    *("scaled_upper_triang_masked_softmax_fusion", "bias_gelu_fusion", "rope_fusion", "rotary_pct", "gated_mlp"),
    *("make_vocab_size_divisible_by", "use_bias_in_norms", "use_bias_in_attn_linear", "use_bias_in_mlp", "mlp_type"),
    *("train_data_paths", "valid_data_paths", "test_data_paths"),
    *("weight_by_num_documents", "weighted_sampler_alpha", "tensorboard_dir", "log_dir", "save_iters", "mup_lr"),
)


# Similarity with one or two different letters; no key is longer
ALIKE, MOST_KEY = 0.9, 60


def _note_misspelt(config: Conversion) -> None:
    """Note keys that are similar to a valid one; GPT-NeoX stops at unknown keys, but unknown ones may also be new."""
    for key, settled in config.settled.items():
        name = key.replace("-", "_")
        if settled.fate == "mapped" or "." in name or name in KNOWN or len(name) > MOST_KEY:
            continue
        if suggestions := get_close_matches(name, KNOWN, n=1, cutoff=ALIKE):
            line = config.leaves[key].line
            config.notes.append(
                f"line {line}: {key} is no key of GPT-NeoX that we know; did you mean {suggestions[0]}?"
            )


def _read_positions(config: Conversion) -> None:
    position_types = {"rotary": "rope", "alibi": "alibi", "learned": "learned_absolute"}
    kind = config.read_word("pos_emb") or "learned"
    if kind in position_types:
        config.rename_leaf("position_embedding_type", config.names.get("pos_emb", "pos_emb"), position_types[kind])
    if (norm := config.read_word("norm")) != "":
        config.rename_leaf(
            "normalization", config.names.get("norm", "norm"), "RMSNorm" if "rms" in norm else "LayerNorm"
        )
    if config.read_word("activation") in ("swiglu", "geglu"):
        config.rename_leaf("swiglu", config.names.get("activation", "activation"), True)


def _read_formats(config: Conversion) -> None:
    if (word := config.read_word("precision")) in ("bfloat16", "bf16"):
        config.rename_leaf("bf16", config.names.get("precision", "precision"), True)
    elif word == "fp16":
        config.rename_leaf("fp16", config.names.get("precision", "precision"), True)
    for kind in ("bf16", "fp16"):
        enabled = config.read_flag(f"{kind}.enabled")
        is_bf16_typed = config.read_word("fp16.type") == "bfloat16"
        if enabled and not (kind == "fp16" and (is_bf16_typed or config.has_leaf("bf16"))):
            config.rename_leaf(kind, f"{kind}.enabled", True)
        elif enabled and is_bf16_typed:
            config.rename_leaf("bf16", "fp16.type", True)


def _read_batch(config: Conversion) -> None:
    passes = config.read_whole("gradient_accumulation_steps")
    if passes and not config.has_leaf("global_batch_size"):
        micro = config.int_of("batch.micro")
        names = (config.names.get("gradient_accumulation_steps", "gradient_accumulation_steps"),)
        config.set_value("batch.per_replica", micro * passes, *names, note=f"{micro} × {passes} passes")
    elif passes:
        config.mark_used("gradient_accumulation_steps", by="batch.global_sequences / (micro × data)")
