"""Parameter counts against what the makers of the models publish."""

from dataclasses import replace

import pytest

from phalanx.job.model import ModelShape, known_presets
from phalanx.job.parameter_counts import count_parameters, mlp_parameters

# safetensors metadata of each model's repository, or its paper; active parameters from the model cards.
TOTALS = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "bloom-176b": 176_247_271_424,
    "llama-2-7b": 6_738_415_616,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v3": 671_026_419_200,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
}
ACTIVE_BILLIONS = {"mixtral-8x7b": 12.9, "deepseek-v3": 37.0, "qwen3-30b-a3b": 3.3, "qwen3-235b-a22b": 22.0}


def counts(name):
    return count_parameters(known_presets()[name].model())


@pytest.mark.parametrize(("name", "total"), TOTALS.items())
def test_published_totals_exactly(name, total):
    assert counts(name).total == total


@pytest.mark.parametrize(("name", "billions"), ACTIVE_BILLIONS.items())
def test_published_active_parameters(name, billions):
    # Cards round to one or two digits, and some leave the embedding out.
    assert counts(name).active / 1e9 == pytest.approx(billions, rel=0.03)


@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b", "bloom-176b"])
def test_dense_models_touch_every_parameter(name):
    assert counts(name).active == counts(name).total


@pytest.mark.parametrize("name", list(known_presets()))
def test_the_parts_add_up(name):
    model, parts = known_presets()[name].model(), counts(name)
    sparse = model.layers - model.dense_layers if model.is_moe else 0
    layers = model.layers * (parts.attention_per_layer + parts.norms_per_layer)
    layers += (model.layers - sparse) * parts.dense_mlp_per_layer
    layers += sparse * (parts.moe_fixed_per_layer + model.experts * parts.expert)
    assert parts.total == parts.embedding + parts.head + parts.final_norm + layers


TINY = ModelShape(name="t", layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, ffn=16, vocab=10)


def test_a_tiny_model_by_hand():
    # q 8x8, k and v 8x4 each, out 8x8; gate, up and down 8x16; two norms of 8; tables of 10x8 twice; a last norm
    assert count_parameters(TINY).total == 2 * (64 + 32 + 32 + 64 + 3 * 128 + 16) + 2 * 80 + 8


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"tied": True}, -80),
        ({"gated": False}, -2 * 128),
        ({"qk_norm": True}, 2 * 2 * 4),
        ({"qkv_bias": True}, 2 * (8 + 4 + 4)),
        ({"norm": "layer"}, 5 * 8),  # a shift beside each of the five scales
        ({"positions": "learned", "max_positions": 5}, 40),
        ({"bias": True}, 2 * (8 + 4 + 4 + 8 + 2 * 16 + 8)),
        ({"embedding_norm": True}, 8),
    ],
)
def test_each_switch_changes_what_it_says(changes, difference):
    assert count_parameters(replace(TINY, **changes)).total - count_parameters(TINY).total == difference


def test_experts_count_in_total_and_topk_in_active():
    moe = replace(TINY, experts=4, experts_per_token=1, expert_ffn=16)
    one = mlp_parameters(8, 16, gated=True, bias=False)
    assert count_parameters(moe).total - count_parameters(TINY).total == 2 * (3 * one + 8 * 4)
    assert count_parameters(moe).total - count_parameters(moe).active == 2 * 3 * one
