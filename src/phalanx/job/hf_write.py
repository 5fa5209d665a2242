"""A model shape as a Hugging Face config.json: the inverse of hf.py, for the families that can be exported."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.errors import Problem, UserError
from phalanx.job.model import ModelShape

_CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
USUAL_POSITIONS = 2048  # written where nobody says how long sequences were; transformers' own default for Llama


def family_of(shape: ModelShape) -> str:
    """The `model_type` whose code computes what this shape does. Raises UserError where there is none."""
    if shape.norm == "layer":
        family = "gpt2"
    elif shape.is_moe:
        family = "qwen3_moe" if shape.qk_norm else "mixtral"
    elif shape.qk_norm:
        family = "qwen3"
    else:
        family = "qwen2" if shape.qkv_bias and not shape.bias else "llama"
    problems = list(_mismatches(shape, family))
    if problems:
        raise UserError(problems)
    return family


def to_config(shape: ModelShape, *, positions: int = 0, dtype: str = "float32") -> dict[str, object]:
    """The keys of config.json. `positions` is the longest sequence the model is meant for."""
    family = family_of(shape)
    common: dict[str, object] = {
        "architectures": [_CLASSES[family]],
        "model_type": family,
        "dtype": dtype,
        "torch_dtype": dtype,  # the name before transformers 4.56
        "tie_word_embeddings": shape.tied,
        "vocab_size": shape.vocab,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return common | (_gpt2(shape) if family == "gpt2" else _llama_like(shape, family, positions))


def _gpt2(shape: ModelShape) -> dict[str, object]:
    return {
        "n_layer": shape.layers,
        "n_embd": shape.hidden,
        "n_head": shape.heads,
        "n_inner": shape.ffn,
        "n_positions": shape.max_positions,
        "activation_function": {"gelu_tanh": "gelu_new"}.get(shape.activation, shape.activation),
        "layer_norm_epsilon": shape.norm_eps,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


def _llama_like(shape: ModelShape, family: str, positions: int) -> dict[str, object]:
    stretched = int(shape.rope_original_positions * shape.rope_factor)
    config: dict[str, object] = {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "hidden_act": {"gelu_tanh": "gelu_pytorch_tanh"}.get(shape.activation, shape.activation),
        "rms_norm_eps": shape.norm_eps,
        "max_position_embeddings": max(positions, stretched) or USUAL_POSITIONS,
        "rope_parameters": _rope(shape),
        "rope_theta": shape.rope_theta,  # this and the next for transformers before 5
        "rope_scaling": None if shape.rope_scaling == "none" else _rope(shape),
        "use_sliding_window": False,
        "sliding_window": None,
    }
    if family in ("llama", "qwen3", "qwen3_moe"):
        config |= {"attention_bias": shape.bias, "mlp_bias": shape.bias}
    if shape.is_moe:
        config |= _moe(shape, family)
    return config


def _moe(shape: ModelShape, family: str) -> dict[str, object]:
    found: dict[str, object] = {
        "num_local_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "router_aux_loss_coef": shape.balance_rate if shape.balance == "aux" else 0.0,
    }
    if family == "mixtral":
        return found | {"intermediate_size": shape.expert_ffn}
    return found | {
        "num_experts": shape.experts,
        "moe_intermediate_size": shape.expert_ffn,
        "norm_topk_prob": shape.renormalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(shape.dense_layers)),
    }


def _rope(shape: ModelShape) -> dict[str, object]:
    table: dict[str, object] = {"rope_theta": shape.rope_theta, "rope_type": "default"}
    if shape.rope_scaling != "none":
        table |= {"rope_type": shape.rope_scaling, "factor": shape.rope_factor}
    if shape.rope_scaling in ("llama3", "yarn"):
        table["original_max_position_embeddings"] = shape.rope_original_positions
    if shape.rope_scaling == "llama3":
        table |= {"low_freq_factor": shape.rope_low_factor, "high_freq_factor": shape.rope_high_factor}
    return table


def _mismatches(shape: ModelShape, family: str) -> Iterator[Problem]:
    """What the family's code does differently from this shape."""
    wanted: dict[str, object] = {
        "embedding_norm": False,
        "kv_lora_rank": 0,
        "shared_experts": 0,
        "router_bias": False,
        "router_score": "softmax",
        "routed_scale": 1.0,
        "module": "",
    }
    if family == "gpt2":
        wanted |= {"positions": "learned", "bias": True, "gated": False, "qk_norm": False, "experts": 0}
        wanted |= {"kv_heads": shape.heads, "head_dim": shape.hidden // shape.heads}
    else:
        wanted |= {"positions": "rope", "gated": True}
        wanted |= {"qkv_bias": family == "qwen2"} if not shape.bias else {}
        wanted |= {"bias": False} if family != "llama" else {}
    if family == "mixtral":
        wanted |= {"renormalise": True, "dense_layers": 0}
    for key, value in wanted.items():
        if getattr(shape, key) != value:
            yield Problem(
                where=f"model {shape.name}",
                what=f"{key} = {getattr(shape, key)!r} has no place in a Hugging Face {family} model, "
                f"which has {value!r}",
                why="the exported weights would compute something else there",
            )
