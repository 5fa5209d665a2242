"""What a model may have besides plain blocks, under the layouts that could get it wrong; float64 as in test_parity."""

from __future__ import annotations

from dataclasses import replace

import pytest

GPT2 = {
    "tied": True, "kv_heads": 4, "gated": False, "norm": "layer", "bias": True, "positions": "learned",
    "max_positions": 16, "activation": "gelu_tanh",
}  # fmt: skip
SP = {"tensor": 2, "sequence_parallel": True, "micro_batch": 8}

CASES = {
    "tied dp2": ({"tied": True}, {"data": 2}),
    "tied fsdp2": ({"tied": True}, {"data": 2, "shard": 2, "zero": 3}),
    "tied tp2": ({"tied": True, "layers": 2}, SP),
    "tied pp2": ({"tied": True}, {"pipeline": 2}),
    "tied pp4": ({"tied": True}, {"pipeline": 4}),
    "tied pp2 interleaved": ({"tied": True}, {"pipeline": 2, "virtual_pipeline": 2, "schedule": "interleaved"}),
    "tied pp2 V": ({"tied": True}, {"pipeline": 2, "virtual_pipeline": 2, "schedule": "zero-bubble"}),
    "tied pp2×fsdp2": ({"tied": True}, {"pipeline": 2, "data": 2, "shard": 2, "zero": 3}),
    "tied pp2×tp2": ({"tied": True, "layers": 2}, {"pipeline": 2} | SP | {"micro_batch": 4}),
    "gpt2 fsdp2": (GPT2, {"data": 2, "shard": 2, "zero": 3}),
    "gpt2 tp2": (GPT2 | {"layers": 2}, {"tensor": 2, "micro_batch": 8}),
    "gpt2 tp2 sp": (GPT2 | {"layers": 2}, SP),
    "gpt2 cp2": (GPT2, {"context": 2}),
    "gpt2 pp2": (GPT2, {"pipeline": 2}),
    "qk_norm fsdp2": ({"qk_norm": True}, {"data": 2, "shard": 2, "zero": 3}),
    "qk_norm tp2": ({"qk_norm": True, "layers": 2}, {"tensor": 2, "micro_batch": 8}),
    "qk_norm tp2 sp": ({"qk_norm": True, "layers": 2}, SP),
    "qk_norm cp2": ({"qk_norm": True}, {"context": 2}),
    "qkv_bias tp2": ({"qkv_bias": True, "layers": 2}, SP),
    "odd vocabulary tp2": ({"vocab": 63, "layers": 2}, SP),
    "odd vocabulary pp2×tp2": ({"vocab": 63, "layers": 2}, {"pipeline": 2} | SP | {"micro_batch": 4}),
    "embedding norm tp2": ({"embedding_norm": True, "norm": "layer", "layers": 2}, SP),
    "own order pp4": (  # whole backwards beside split ones

        {"tied": True},
        {"pipeline": 4, "schedule": "zero-bubble"}
        | {"order": ("FFFFIWIWIIWW", "FFFBFBBB", "FFIFIWFIWIWW", "FIFIFIWWWFIW")},
    ),
    "stretched rope cp2": (
        {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_positions": 8}, {"context": 2}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name, trial, prove, llama):
    shape, layout = CASES[name]
    prove(trial(replace(llama, **shape), **layout))
