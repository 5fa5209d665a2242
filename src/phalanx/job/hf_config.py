"""Convert a Hugging Face config.json to a model shape and back; known keys are read, nothing is executed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import Problem, UserError, mistake, nearest
from phalanx.io.files import read_text
from phalanx.job.model import ModelShape

Shape = dict[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A `model_type`: for each ModelShape key its own keys in order of preference, and the values it implies."""

    keys: Mapping[str, tuple[str, ...]]
    implies: Mapping[str, object]


_DENSE = {
    "layers": ("num_hidden_layers",),
    "hidden": ("hidden_size",),
    "heads": ("num_attention_heads",),
    "ffn": ("intermediate_size",),
    "vocab": ("vocab_size",),
}
_GPT2 = {"layers": ("n_layer",), "hidden": ("n_embd",), "heads": ("n_head",), "vocab": ("vocab_size",)}
_BLOOM = {
    "layers": ("n_layer", "num_hidden_layers"),
    "hidden": ("hidden_size", "n_embed"),
    "heads": ("n_head", "num_attention_heads"),
    "vocab": ("vocab_size",),
}
_MIXTRAL = {"experts": ("num_local_experts",), "experts_per_token": ("num_experts_per_tok",)}
_QWEN_MOE = {
    "experts": ("num_experts", "num_local_experts"),  # transformers 5 writes the second
    "experts_per_token": ("num_experts_per_tok",),
    "expert_ffn": ("moe_intermediate_size",),
}
_DEEPSEEK = {
    "experts": ("n_routed_experts",),
    "experts_per_token": ("num_experts_per_tok",),
    "expert_ffn": ("moe_intermediate_size",),
    "shared_experts": ("n_shared_experts",),
    "dense_layers": ("first_k_dense_replace",),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_nope_dim": ("qk_nope_head_dim",),
    "qk_rope_dim": ("qk_rope_head_dim",),
    "v_head_dim": ("v_head_dim",),
}
# GPT-2 and BLOOM tie embeddings by default; both use the tanh form of GELU.
_OLD = {"gated": False, "norm": "layer", "bias": True, "tied": True, "activation": "gelu_tanh"}
_NEW = {"norm_eps": 1e-6}  # the default of transformers where a file does not set it

_LLAMA_LIKE = Family(keys=_DENSE, implies=_NEW)
_DEEPSEEK_LIKE = Family(
    keys={**_DENSE, **_DEEPSEEK},
    implies={**_NEW, "router_bias": True, "balance": "bias", "router_score": "sigmoid"},
)

FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA_LIKE,
    "mistral": _LLAMA_LIKE,
    "mixtral": Family(keys={**_DENSE, **_MIXTRAL}, implies={"rope_theta": 1e6, "balance": "aux"}),
    "qwen2": Family(keys=_DENSE, implies={**_NEW, "qkv_bias": True}),
    "qwen3": Family(keys=_DENSE, implies={**_NEW, "qk_norm": True}),
    "qwen3_moe": Family(
        keys={**_DENSE, **_QWEN_MOE}, implies={**_NEW, "qk_norm": True, "renormalise": False, "balance": "aux"}
    ),
    "gpt2": Family(keys={**_GPT2, "max_positions": ("n_positions",)}, implies={**_OLD, "positions": "learned"}),
    "bloom": Family(keys=_BLOOM, implies={**_OLD, "positions": "alibi", "embedding_norm": True}),
    "deepseek_v3": _DEEPSEEK_LIKE,
    "kimi_k2": _DEEPSEEK_LIKE,
}


_MAY_SAY = (
    ("kv_heads", "num_key_value_heads"),
    ("head_dim", "head_dim"),
    ("tied", "tie_word_embeddings"),
    ("activation", "hidden_act"),
    ("activation", "activation_function"),
    ("norm_eps", "rms_norm_eps"),
    ("norm_eps", "layer_norm_epsilon"),
    ("renormalise", "norm_topk_prob"),
    ("balance_rate", "router_aux_loss_coef"),
    ("router_score", "scoring_func"),
    ("routed_scale", "routed_scaling_factor"),
)
ACTIVATIONS = {"swish": "silu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"}
_ROPE = (
    ("rope_theta", "rope_theta"),
    ("rope_factor", "factor"),
    ("rope_low_factor", "low_freq_factor"),
    ("rope_high_factor", "high_freq_factor"),
    ("rope_original_positions", "original_max_position_embeddings"),
)


def read_config(path: Path) -> Shape:
    """Return the ModelShape keys of a config.json; raises UserError for an unreadable file or unknown family."""
    config = _parse_config(path)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise _unknown_family(path, kind)
    family = FAMILIES[kind]
    shape: Shape = dict(family.implies)
    for shape_key, config_keys in family.keys.items():
        shape[shape_key] = _first_key(config, config_keys, path)
    shape.update(_optional_keys(config, shape, path))
    shape.update(_rope_keys(config))
    return {"name": kind, **shape}


def _parse_config(path: Path) -> dict[str, object]:
    text = read_text(path, noun="config.json")
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise mistake(f"{path}:{error.lineno}", f"is not JSON: {error.msg}") from error
    except (RecursionError, ValueError) as error:
        raise mistake(
            str(path), "is not a model configuration: it nests too deep or holds a number too long"
        ) from error
    if not isinstance(config, dict):
        raise mistake(str(path), "is not a model configuration: the file must hold one JSON object")
    return config


def _first_key(config: Mapping[str, object], keys: tuple[str, ...], path: Path) -> object:
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    raise mistake(str(path), f"has no {' or '.join(keys)}", why=f"a {config['model_type']} model needs it")


def _optional_keys(config: Mapping[str, object], shape: Shape, path: Path) -> Shape:
    """Return the keys that may be absent or null, each with the default of the model's own code."""
    values: Shape = {}
    for shape_key, config_key in _MAY_SAY:
        if config.get(config_key) is not None:
            values[shape_key] = config[config_key]
    if isinstance(values.get("activation"), str):
        values["activation"] = ACTIVATIONS.get(str(values["activation"]), values["activation"])
    if "kv_lora_rank" in shape:
        values |= {"q_lora_rank": config.get("q_lora_rank") or 0, "kv_heads": shape["heads"]}
        values["head_dim"] = _sum_counts(shape["qk_nope_dim"], shape["qk_rope_dim"])
    if "ffn" not in shape:
        # GPT-2's code uses four times the hidden width where n_inner is null.
        values["ffn"] = config.get("n_inner") or _sum_counts(*[shape["hidden"]] * 4)
    if shape.get("experts") and "expert_ffn" not in shape:
        values["expert_ffn"] = shape["ffn"]
    # A Mistral file names a window that is used; a Qwen file may name one that is not used, and has a key for that.
    is_windowed = config.get("use_sliding_window", config.get("model_type") in ("mistral", "mixtral"))
    if is_windowed and config.get("sliding_window") is not None:
        values["sliding_window"] = config["sliding_window"]
    if config.get("attention_bias") is True:
        # Llama's switch also adds a bias to the output projection, `hidden` values a layer: under 1e-6 of any model.
        values["bias" if config.get("mlp_bias") is True else "qkv_bias"] = True
    return values | _dense_layers(config, path)


def _rope_keys(config: Mapping[str, object]) -> Shape:
    """Return rotary positions from `rope_parameters`, as transformers 5 writes them, or from the keys of older files.

    An unknown scaling is passed on by its name, so that the shape rules report it.
    """
    values: Shape = {"rope_theta": config["rope_theta"]} if config.get("rope_theta") is not None else {}
    for name in ("rope_scaling", "rope_parameters"):
        table = config.get(name)
        if not isinstance(table, Mapping):
            continue
        kind = table.get("rope_type", table.get("type", "default"))
        values["rope_scaling"] = "none" if kind == "default" else kind
        values |= {shape_key: table[config_key] for shape_key, config_key in _ROPE if table.get(config_key) is not None}
    if values.get("rope_scaling") == "yarn" and "rope_original_positions" not in values:
        values["rope_original_positions"] = config.get("max_position_embeddings", 0)
    return {} if config.get("model_type") in ("gpt2", "bloom") else values


def _dense_layers(config: Mapping[str, object], path: Path) -> Shape:
    """Return the number of dense layers of a mixture-of-experts model; only leading ones can be expressed."""
    dense_layers = config.get("mlp_only_layers") or []
    for key in ("decoder_sparse_step", "moe_layer_freq"):
        if config.get(key) not in (None, 1):
            raise mistake(
                str(path),
                f"{key} = {config[key]!r:.40} is not supported",
                why="every layer after the leading dense ones must route to experts",
                fix="use a model whose value is 1",
            )
    if not isinstance(dense_layers, list) or dense_layers != list(range(len(dense_layers))):
        raise mistake(
            str(path),
            f"mlp_only_layers = {dense_layers!r:.40} is not supported",
            why="only leading layers may stay dense",
            fix="use a list such as [0, 1, 2]",
        )
    return {"dense_layers": len(dense_layers)} if dense_layers else {}


def _sum_counts(*values: object) -> object:
    """Return a sum of counts; a value of a wrong type is passed on, so that the shape rules report it."""
    counts = [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
    return sum(counts) if len(counts) == len(values) else values[0]


def _unknown_family(path: Path, kind: object) -> UserError:
    family_names = ", ".join(FAMILIES)
    if not isinstance(kind, str):
        return mistake(
            str(path), "has no model_type", why="it names the family whose keys follow", fix=f"one of {family_names}"
        )
    suggestion = nearest(kind, FAMILIES)
    hint = f"the nearest is {suggestion}; " if suggestion else ""
    fix = f"{hint}the known families are {family_names}; or write the shape as keys of [model]"
    return mistake(str(path), f'model_type = "{kind[:60]}" is not a family we can read', fix=fix)


# A model shape as a Hugging Face config.json: the inverse of read_config, for the families that can be exported.


_CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
# Written where the longest sequence is unknown; transformers' own default for Llama.
USUAL_POSITIONS = 2048


def family_of(shape: ModelShape) -> str:
    """Return the `model_type` whose code computes this shape; raises UserError if there is none."""
    if shape.norm == "layer":
        family = "gpt2"
    elif shape.is_moe:
        family = "qwen3_moe" if shape.qk_norm else "mixtral"
    elif shape.qk_norm:
        family = "qwen3"
    else:
        family = "qwen2" if shape.qkv_bias and not shape.bias else "llama"
    problems = list(_family_mismatches(shape, family))
    if problems:
        raise UserError(problems)
    return family


def to_config(shape: ModelShape, *, positions: int = 0, dtype: str = "float32") -> dict[str, object]:
    """Return the keys of config.json. `positions` is the longest sequence the model is meant for."""
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
    return common | (_gpt2_keys(shape) if family == "gpt2" else _llama_like(shape, family, positions))


def _gpt2_keys(shape: ModelShape) -> dict[str, object]:
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
    scaled_positions = int(shape.rope_original_positions * shape.rope_factor)
    config: dict[str, object] = {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "hidden_act": {"gelu_tanh": "gelu_pytorch_tanh"}.get(shape.activation, shape.activation),
        "rms_norm_eps": shape.norm_eps,
        "max_position_embeddings": max(positions, scaled_positions) or USUAL_POSITIONS,
        "rope_parameters": _rope_config(shape),
        "rope_theta": shape.rope_theta,  # this and the next key are for transformers before 5
        "rope_scaling": None if shape.rope_scaling == "none" else _rope_config(shape),
        "use_sliding_window": False,
        "sliding_window": None,
    }
    if family in ("llama", "qwen3", "qwen3_moe"):
        config |= {"attention_bias": shape.bias, "mlp_bias": shape.bias}
    if shape.is_moe:
        config |= _moe_keys(shape, family)
    return config


def _moe_keys(shape: ModelShape, family: str) -> dict[str, object]:
    keys: dict[str, object] = {
        "num_local_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "router_aux_loss_coef": shape.balance_rate if shape.balance == "aux" else 0.0,
    }
    if family == "mixtral":
        return keys | {"intermediate_size": shape.expert_ffn}
    return keys | {
        "num_experts": shape.experts,
        "moe_intermediate_size": shape.expert_ffn,
        "norm_topk_prob": shape.renormalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(shape.dense_layers)),
    }


def _rope_config(shape: ModelShape) -> dict[str, object]:
    table: dict[str, object] = {"rope_theta": shape.rope_theta, "rope_type": "default"}
    if shape.rope_scaling != "none":
        table |= {"rope_type": shape.rope_scaling, "factor": shape.rope_factor}
    if shape.rope_scaling in ("llama3", "yarn"):
        table["original_max_position_embeddings"] = shape.rope_original_positions
    if shape.rope_scaling == "llama3":
        table |= {"low_freq_factor": shape.rope_low_factor, "high_freq_factor": shape.rope_high_factor}
    return table


def _family_mismatches(shape: ModelShape, family: str) -> Iterator[Problem]:
    """Yield the differences between this shape and the family's code."""
    required: dict[str, object] = {
        "embedding_norm": False,
        "kv_lora_rank": 0,
        "shared_experts": 0,
        "router_bias": False,
        "router_score": "softmax",
        "routed_scale": 1.0,
        "module": "",
    }
    if family == "gpt2":
        required |= {"positions": "learned", "bias": True, "gated": False, "qk_norm": False, "experts": 0}
        required |= {"kv_heads": shape.heads, "head_dim": shape.hidden // shape.heads}
    else:
        required |= {"positions": "rope", "gated": True}
        required |= {"qkv_bias": family == "qwen2"} if not shape.bias else {}
        required |= {"bias": False} if family != "llama" else {}
    if family == "mixtral":
        required |= {"renormalise": True, "dense_layers": 0}
    for key, value in required.items():
        if getattr(shape, key) != value:
            yield Problem(
                where=f"model {shape.name}",
                what=f"{key} = {getattr(shape, key)!r} has no place in a Hugging Face {family} model, "
                f"which has {value!r}",
                why="the exported weights would compute something else there",
            )
