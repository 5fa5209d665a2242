"""The [model] section from Megatron Core's settings: sizes, norms, positions, experts, latent attention, vocabulary."""

from __future__ import annotations

import re

from phalanx.rules.foreign.conversion import Conversion
from phalanx.rules.foreign.tokenizer_sizes import padded_size, vocabulary_of

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


def translate_shape(config: Conversion) -> None:
    """Translate the model's shape into the [model] section."""
    _read_shape(config)
    _read_details(config)
    _read_experts(config)
    _latent_attention(config)
    _read_vocabulary(config)


def _read_shape(config: Conversion) -> None:
    for name, model_key in SIZES.items():
        if (size := config.read_whole(name)) is not None and size > 0:
            config.set_value(f"model.{model_key}", size, name)
    hidden = config.int_of("model.hidden", 0)
    gated = bool(config.read_flag("swiglu")) or bool(config.read_flag("gated_linear_unit"))
    if hidden and "model.ffn" not in config.values:
        # Megatron's default of the feed-forward width, rounded down to a multiple of 64 with SwiGLU.
        width = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
        config.assume_default("model.ffn", width, "4 × hidden, two thirds of that with SwiGLU")
    if (groups := config.read_whole("num_query_groups")) is not None and groups > 0:
        config.set_value("model.kv_heads", groups, "num_query_groups", "group_query_attention")
    elif config.has_leaf("group_query_attention"):
        config.mark_used("group_query_attention", by="model.kv_heads")
    if (channels := config.read_whole("kv_channels")) is not None:
        config.set_value("model.head_dim", channels, "kv_channels")
    if hidden:
        config.set_value("model.gated", gated, "swiglu", "gated_linear_unit")


def _read_details(config: Conversion) -> None:
    if "model.hidden" not in config.values:
        return
    norm = config.read_word("normalization") or "layernorm"
    config.set_value("model.norm", "rms" if "rms" in norm else "layer", "normalization")
    if (epsilon := config.read_number("norm_epsilon")) is not None:
        config.set_value("model.norm_eps", epsilon, "norm_epsilon")
    has_no_bias = config.read_flag("disable_bias_linear") is True or config.read_flag("add_bias_linear") is False
    config.set_value("model.bias", not has_no_bias, "disable_bias_linear", "add_bias_linear")
    if (has_qkv_bias := config.read_flag("add_qkv_bias")) is not None:
        config.set_value("model.qkv_bias", has_qkv_bias, "add_qkv_bias")
    if (has_qk_norm := config.read_flag("qk_layernorm")) is not None:
        config.set_value("model.qk_norm", has_qk_norm, "qk_layernorm")
    is_tied = config.read_flag("share_embeddings_and_output_weights")
    if is_tied is None:
        is_tied = not config.read_flag("untie_embeddings_and_output_weights")
    config.set_value(
        "model.tied", is_tied, "share_embeddings_and_output_weights", "untie_embeddings_and_output_weights"
    )
    if not config.read_flag("swiglu") and not config.read_flag("gated_linear_unit"):
        config.assume_default("model.activation", "gelu_tanh")
    _read_positions(config)


def _read_positions(config: Conversion) -> None:
    kind = config.read_word("position_embedding_type") or "learned_absolute"
    if kind in ("rope", "yarn") or config.read_flag("use_rotary_position_embeddings"):
        config.set_value("model.positions", "rope", "position_embedding_type", "use_rotary_position_embeddings")
        if (base := config.read_number("rotary_base")) is not None:
            config.set_value("model.rope_theta", base, "rotary_base")
        config.skip_leaf("max_position_embeddings", "rotary positions have no table")
        return
    if kind == "alibi":
        config.set_value("model.positions", "alibi", "position_embedding_type")
        config.skip_leaf("max_position_embeddings", "ALiBi has no table")
        return
    max_positions = config.read_whole("max_position_embeddings") or config.read_whole("seq_length") or 0
    if kind != "learned_absolute":
        config.leave_unmapped("position_embedding_type", "the job schema knows rope and learned positions here")
    config.set_value("model.positions", "learned", "position_embedding_type")
    config.set_value("model.max_positions", max_positions, "max_position_embeddings")
    config.skip_leaf("rotary_base", "positions are learned")


def _read_experts(config: Conversion) -> None:
    # Megatron-DeepSpeed writes 1 for a dense model
    if config.int_of("model.experts", 0) <= 1:
        for name in ("expert_ffn", "experts_per_token", "experts"):
            config.values.pop(f"model.{name}", None)
        for name in ("num_experts", "moe_ffn_hidden_size", "moe_router_topk"):
            config.skip_leaf(name, "the model is dense")
        return
    config.assume_default("model.experts_per_token", 2)
    config.assume_default("model.expert_ffn", config.int_of("model.ffn"), "ffn_hidden_size")
    width, name = config.int_of("model.expert_ffn"), "moe_shared_expert_intermediate_size"
    if (shared := config.read_whole(name)) is not None and shared >= width:
        config.set_value("model.shared_experts", max(1, shared // width), name, note=f"{shared} / {width}")
    _dense_layers(config)
    if (score := config.read_word("moe_router_score_function")) in ("softmax", "sigmoid"):
        config.set_value("model.router_score", score, "moe_router_score_function")
    if (scale := config.read_number("moe_router_topk_scaling_factor")) is not None:
        config.set_value("model.routed_scale", scale, "moe_router_topk_scaling_factor")
    _read_balance(config)


def _dense_layers(config: Conversion) -> None:
    leaf = config.find_leaf("moe_layer_freq")
    if leaf is None:
        return
    match = re.fullmatch(r"\(?\[0\]\s*\*\s*(\d{1,4})\s*\+\s*\[1\]\s*\*\s*\d{1,4}\)?", str(leaf.value).strip("\"' "))
    if match:
        config.set_value("model.dense_layers", int(match.group(1)), "moe_layer_freq")
    elif isinstance(leaf.value, list) and all(flag in (0, 1) for flag in leaf.value):
        num_dense = (leaf.value.index(1) if 1 in leaf.value else len(leaf.value)) if leaf.value else 0
        if all(flag == 1 for flag in leaf.value[num_dense:]):
            config.set_value("model.dense_layers", num_dense, "moe_layer_freq")
    elif str(leaf.value) == "1":
        config.set_value("model.dense_layers", 0, "moe_layer_freq")
    if leaf.key not in config.settled:
        config.leave_unmapped("moe_layer_freq", "the job schema has dense layers at the beginning only")


def _read_balance(config: Conversion) -> None:
    if config.read_flag("moe_router_enable_expert_bias"):
        config.set_value("model.balance", "bias", "moe_router_enable_expert_bias")
        config.set_value("model.router_bias", True, "moe_router_enable_expert_bias")
        if (rate := config.read_number("moe_router_bias_update_rate")) is not None:
            config.set_value("model.balance_rate", rate, "moe_router_bias_update_rate")
        for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
            config.leave_unmapped(name, "the job schema has one way of balancing, here the bias")
        return
    kind = config.read_word("moe_router_load_balancing_type") or "aux_loss"
    config.set_value("model.balance", "none" if kind == "none" else "aux", "moe_router_load_balancing_type")
    if (rate := config.read_number("moe_aux_loss_coeff")) is not None:
        config.set_value("model.balance_rate", rate, "moe_aux_loss_coeff")


def _latent_attention(config: Conversion) -> None:
    sizes = ("kv_lora_rank", 512), ("qk_head_dim", 128), ("qk_pos_emb_head_dim", 64), ("v_head_dim", 128)
    if not config.read_flag("multi_latent_attention"):
        config.values.pop("model.q_lora_rank", None)
        for name in ("q_lora_rank", *(name for name, _ in sizes)):
            config.skip_leaf(name, "no latent attention")
        config.mark_used("multi_latent_attention", by="model.kv_lora_rank = 0")
        return
    job_keys = ("kv_lora_rank", "qk_nope_dim", "qk_rope_dim", "v_head_dim")
    for (name, default), key in zip(sizes, job_keys, strict=True):
        config.set_value(f"model.{key}", config.read_whole(name) or default, name, "multi_latent_attention")
    config.set_value(
        "model.head_dim", config.int_of("model.qk_nope_dim") + config.int_of("model.qk_rope_dim"), "qk_head_dim"
    )
    config.skip_leaf("kv_channels", "latent attention has its own sizes")


def _read_vocabulary(config: Conversion) -> None:
    """Read the vocabulary size, given or of a known tokenizer; Megatron pads it to divide over the tensor ranks."""
    size = config.read_whole("padded_vocab_size") or config.read_whole("pad_vocab_size_to")
    name = "padded_vocab_size" if config.has_leaf("padded_vocab_size") else "pad_vocab_size_to"
    if size:
        config.set_value("model.vocab", size, name)
        return
    vocab_size = config.read_whole("vocab_size")
    if vocab_size:
        config.set_value("model.vocab", vocab_size, "vocab_size")
        return
    tokenizer_names = {
        name: str(leaf.value)
        for name in ("tokenizer_type", "tokenizer_model", "tokenizer_name_or_path", "vocab_file")
        if (leaf := config.find_leaf(name)) is not None and not leaf.unknown
    }
    tokenizer_size = vocabulary_of(tokenizer_names)
    if tokenizer_size is None:
        return
    if extra := config.read_whole("extra_vocab_size"):
        tokenizer_size += extra
    multiple = config.read_whole("make_vocab_size_divisible_by") or 128
    unit = multiple * config.int_of("parallel.tensor", config.read_whole("tensor_model_parallel_size") or 1)
    note = f"{tokenizer_size:,} of the tokenizer padded to {unit}"
    config.set_value(
        "model.vocab", padded_size(tokenizer_size, unit), *tokenizer_names, "make_vocab_size_divisible_by", note=note
    )
