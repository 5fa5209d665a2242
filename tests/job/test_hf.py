"""config.json of every family, against the preset of the same model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.job.load import load
from phalanx.job.model import known_presets

Write = Callable[[str], Path]
Complaints = Callable[..., str]

JOB = '[model]\nhf_config = "config.json"\n[batch]\nglobal_sequences = 8\n'

# The shape-bearing keys of the published files, and a few that must be ignored.
CONFIGS: dict[str, dict[str, object]] = {
    "llama-3-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    },
    "llama-3.1-405b": {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "max_position_embeddings": 131072,
        "num_attention_heads": 128,
        "num_hidden_layers": 126,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "vocab_size": 128256,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "vocab_size": 32000,
    },
    "mistral-7b": {
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "vocab_size": 32000,
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000,
        "sliding_window": 4096,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000,
        "vocab_size": 151936,
    },
    "gpt2-xl": {
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-05,
        "n_ctx": 1024,
        "n_embd": 1600,
        "n_head": 25,
        "n_inner": None,
        "n_layer": 48,
        "n_positions": 1024,
        "vocab_size": 50257,
    },
    "bloom-176b": {"model_type": "bloom", "hidden_size": 14336, "n_head": 112, "n_layer": 70, "vocab_size": 250880},
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "first_k_dense_replace": 3,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_config_gives_the_same_shape_as_the_preset(write: Write, name: str) -> None:
    Path("config.json").write_text("")
    path = write(JOB)
    Path("config.json").write_text(json.dumps(CONFIGS[name]))
    resolved = load(path, overrides=["data.sequence=1024"])
    assert replace(resolved.job.model, name=name) == known_presets()[name].model()
    assert resolved.origins["model.layers"].where == "config.json"


def test_qwen2_has_biases_on_q_k_v_only(write: Write) -> None:
    path = write(JOB)
    config = CONFIGS["llama-3-8b"] | {"model_type": "qwen2", "tie_word_embeddings": True}
    Path("config.json").write_text(json.dumps(config))
    model = load(path).job.model
    assert (model.qkv_bias, model.bias, model.tied) == (True, False, True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "config.json:1: is not JSON: Expecting value"),
        ("[1]", "config.json: is not a model configuration: the file must hold one JSON object"),
        ("[" * 100_000, "config.json: is not a model configuration: it nests too deep"),
        ("{}", "config.json: has no model_type"),
        (
            '{"model_type": "lama"}',
            'model_type = "lama" is not a family we can read\n  the nearest is llama; the known families are',
        ),
        ('{"model_type": "llama"}', "config.json: has no num_hidden_layers\n  a llama model needs it"),
        (json.dumps(CONFIGS["llama-3-8b"] | {"num_hidden_layers": "x"}), 'config.json: model.layers = "x" is text'),
        (json.dumps(CONFIGS["gpt2-xl"] | {"n_embd": -5}), "config.json: model.hidden = -5 is below 1"),
        (
            json.dumps(CONFIGS["qwen3-30b-a3b"] | {"mlp_only_layers": [3]}),
            "config.json: mlp_only_layers = [3] is not supported\n  only leading layers may stay dense",
        ),
        (json.dumps(CONFIGS["deepseek-v3"] | {"moe_layer_freq": 2}), "moe_layer_freq = 2 is not supported"),
    ],
)
def test_bad_configs(complaints: Complaints, tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.json").write_text(content)
    assert message in complaints(JOB)


def test_missing_config_and_both_sources(complaints: Complaints, tmp_path: Path) -> None:
    (tmp_path / "config2.json").write_text("{}")
    assert complaints(JOB) == "config.json: there is no such config.json\n  did you mean config2.json?"
    both = "job.toml:3: [model] names both a preset and an hf_config\n  keep one of the two"
    assert both in complaints('[model]\npreset = "gpt2"\nhf_config = "config2.json"\n')
