"""Presets against parameter counts published by their makers, with arithmetic independent of phalanx.arch."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from phalanx.job.model import ModelShape, known_presets
from phalanx.job.model_section import shape_rules

# safetensors metadata of each model's repository, or its paper.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "bloom-176b": 176_247_271_424,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v3": 671_026_419_200,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
}


def parameters(m: ModelShape) -> int:
    """Straight from the modules of the reference implementations, one linear at a time."""

    def linear(into: int, out: int, bias: bool = False) -> int:
        return into * out + (out if bias else 0)

    norm = m.hidden * (2 if m.norm == "layer" else 1)
    if m.kv_lora_rank:
        queries = linear(m.hidden, m.q_lora_rank) + m.q_lora_rank + linear(m.q_lora_rank, m.heads * m.head_dim)
        latent = linear(m.hidden, m.kv_lora_rank + m.qk_rope_dim) + m.kv_lora_rank
        keys_values = linear(m.kv_lora_rank, m.heads * (m.qk_nope_dim + m.v_head_dim))
        attention = queries + latent + keys_values + linear(m.heads * m.v_head_dim, m.hidden)
    else:
        qkv = m.bias or m.qkv_bias
        attention = linear(m.hidden, m.heads * m.head_dim, qkv) + 2 * linear(m.hidden, m.kv_heads * m.head_dim, qkv)
        attention += linear(m.heads * m.head_dim, m.hidden, m.bias) + (2 * m.head_dim if m.qk_norm else 0)

    def mlp(width: int) -> int:
        up = (2 if m.gated else 1) * linear(m.hidden, width, m.bias)
        return up + linear(width, m.hidden, m.bias)

    sparse = m.layers - m.dense_layers if m.experts else 0
    router = linear(m.hidden, m.experts) + (m.experts if m.router_bias else 0)
    experts = (m.experts + m.shared_experts) * mlp(m.expert_ffn) + router
    table = m.vocab * m.hidden + (m.max_positions * m.hidden if m.positions == "learned" else 0)
    table += (norm if m.embedding_norm else 0) + (0 if m.tied else m.vocab * m.hidden)
    blocks = m.layers * (attention + 2 * norm) + (m.layers - sparse) * mlp(m.ffn) + sparse * experts
    return table + blocks + norm


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_parameters_are_exact(name: str, count: int) -> None:
    assert parameters(known_presets()[name].model()) == count


def test_models_without_an_exact_published_count() -> None:
    assert 174.5e9 < parameters(known_presets()["gpt3-175b"].model()) < 175e9  # "175.0B", arXiv:2005.14165
    assert 1.02e12 < parameters(known_presets()["kimi-k2"].model()) < 1.04e12  # "1.04T", arXiv:2507.20534 counts more
    assert parameters(known_presets()["phalanx-tiny"].model()) < 1_000_000


@pytest.mark.parametrize("name", known_presets())
def test_presets_obey_the_rules_they_are_read_with(name: str) -> None:
    preset = known_presets()[name]
    assert preset.source
    assert set(preset.train) <= {"sequence", "global_tokens", "tokens"}
    for key, value in asdict(preset.model()).items():
        assert shape_rules()[key].read(value) == value
    assert preset.train.get("global_tokens", 0) % preset.train.get("sequence", 1) == 0
