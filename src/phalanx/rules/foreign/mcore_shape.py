"""The model in Megatron Core's words: sizes, norms, positions, experts, latent attention, vocabulary."""

from __future__ import annotations

import re

from phalanx.rules.foreign.book import Book

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


def translate(book: Book) -> None:
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
