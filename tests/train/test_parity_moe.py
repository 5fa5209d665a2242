"""Mixtures of experts under every way to split them; float64 as in test_parity."""

from __future__ import annotations

from dataclasses import replace

import pytest

MOE = {"layers": 2, "experts": 4, "experts_per_token": 2, "expert_ffn": 16}
SHARED = MOE | {"shared_experts": 1, "dense_layers": 1}
BIAS = MOE | {"balance": "bias", "router_bias": True, "balance_rate": 0.05, "router_score": "sigmoid"}
AUX = MOE | {"balance": "aux", "balance_rate": 0.1}
FSDP = {"data": 2, "shard": 2, "zero": 3}
SP = {"tensor": 2, "sequence_parallel": True, "micro_batch": 8}

CASES = {
    "dp2": (SHARED, {"data": 2}),
    "fsdp2": (SHARED, FSDP),
    "ep2": (SHARED, {"data": 2, "expert": 2}),
    "ep4": (MOE, {"data": 4, "expert": 4}),
    "ep2×dp2": (MOE, {"data": 4, "expert": 2}),
    "ep2×fsdp2": (SHARED, {"data": 4, "expert": 2, "shard": 4, "zero": 3, "micro_batch": 1}),
    "ep2 inside fsdp2": (MOE, {"expert": 2} | FSDP),
    "ep2 zero1": (MOE, {"expert": 2} | FSDP | {"zero": 1}),
    "pp2×ep2": (MOE, {"pipeline": 2, "data": 2, "expert": 2}),
    "pp2 V×ep2": (
        MOE | {"layers": 4}, {"pipeline": 2, "data": 2, "expert": 2, "virtual_pipeline": 2, "schedule": "zero-bubble"}
    ),
    "ep2 of context ranks": (MOE, {"context": 2, "expert": 2}),
    "tp2": (SHARED, {"tensor": 2, "micro_batch": 8}),
    "tp2 sp": (SHARED, SP),
    "ep2 of tensor ranks": (MOE, {"tensor": 2, "expert": 2, "micro_batch": 8}),
    "ep2 of tensor ranks, sp": (SHARED, {"expert": 2} | SP),
    "ep4×tp2": (MOE, {"data": 2, "expert": 4} | SP | {"micro_batch": 4}),
    "bias ep2": (BIAS, {"data": 2, "expert": 2}),
    "bias pp2": (BIAS, {"pipeline": 2}),
    "bias cp2": (BIAS, {"context": 2}),
    "bias fsdp2 tp2": (BIAS, FSDP | SP | {"micro_batch": 4}),
    "aux dp2": (AUX, {"data": 2}),
    "aux ep2": (AUX, {"data": 2, "expert": 2}),
    "aux cp2": (AUX, {"context": 2}),
    "aux tp2": (AUX, {"tensor": 2, "micro_batch": 8}),
    "aux tp2 sp": (AUX, SP),
    "aux pp2": (AUX, {"pipeline": 2}),
    "ep2 recompute full": (BIAS, {"data": 2, "expert": 2, "recompute": "full"}),
    "ep2 recompute selective": (BIAS, {"data": 2, "expert": 2, "recompute": "selective"}),
    "ep2 inside fsdp2, selective": (MOE, {"expert": 2, "recompute": "selective"} | FSDP),
    "ep2 inside fsdp2, full": (MOE, {"expert": 2, "recompute": "full"} | FSDP),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name, trial, prove, llama):
    shape, layout = CASES[name]
    prove(trial(replace(llama, **shape), **layout))
