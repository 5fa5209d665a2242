"""Attention by a named kernel: what the process did before decides nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from phalanx.job.model import ModelShape
from phalanx.plan.layout import Layout
from phalanx.train.kernels import attention
from phalanx.train.kernels.attention import (
    CORES,
    AttentionSizes,
    choose_attention,
    is_right,
    make_inputs,
    use_attention,
)
from phalanx.train.kernels.selector import Timing, time_in_turn
from phalanx.train.models.decoder import Decoder
from phalanx.train.models.layers import causal_attention
from phalanx.train.parallel.context import UlyssesCore
from phalanx.train.rank_settings import Settings

CPU = torch.device("cpu")
SHAPE = ModelShape(name="tiny", layers=2, hidden=64, heads=8, kv_heads=4, head_dim=8, ffn=128, vocab=64)
ORDERS = {
    "cudnn first": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
    "flash first": [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
    "efficient alone": [SDPBackend.EFFICIENT_ATTENTION],
}


def layout_of(**changes) -> Layout:
    plain = {
        "data": 1, "shard": 1, "tensor": 1, "context": 1, "pipeline": 1, "virtual_pipeline": 1, "expert": 1, "zero": 0,
        "sequence_parallel": False, "micro_batch": 2, "accumulation": 1, "recompute": "none", "precision": "bf16",
        "schedule": "1f1b", "offload": "none", "compression": "none",
    }  # fmt: skip
    return Layout(**(plain | changes))


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("name", CORES)
def test_the_traced_kernel_is_the_named_one_whatever_the_priority_of_the_process(name: str, order) -> None:
    """A compiled block keeps the kernel of its trace: `F.scaled_dot_product_attention` would keep the priority's."""
    operator = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention").default
    with FakeTensorMode(), sdpa_kernel(order, set_priority=True):
        query = torch.empty(2, 64, 8, 64, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
        key = torch.empty(2, 64, 2, 64, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
        graph = make_fx(CORES[name])(query, key, key).graph
    called = [node.target for node in graph.nodes if "scaled_dot_product" in str(node.target)]
    assert called == [operator]


def test_all_layers_take_the_fastest_kernel_and_it_is_remembered(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, settings = Decoder(SHAPE), Settings(layout=layout_of(), sequence=32, compute="bf16", compile=True)
    assert choose_attention([model], settings, CPU, world=1, folder=tmp_path) is None  # torch selects
    asked = []

    def measure(sizes, dtype, device):
        asked.append((sizes, dtype))
        return {"flash": Timing(median_ms=2.0), "cudnn": Timing(median_ms=1.0)}

    monkeypatch.setattr(attention, "measure_attention", measure)
    monkeypatch.setattr(attention, "choice_key", lambda *given: "key")
    real = torch.tensor
    monkeypatch.setattr(attention.torch, "tensor", lambda values, device: real(values))
    monkeypatch.setattr(attention.torch.cuda, "reset_peak_memory_stats", lambda device: None)
    for is_remembered in (False, True):
        model = Decoder(SHAPE)
        choice = choose_attention([model], settings, torch.device("cuda"), world=1, folder=tmp_path)
        assert choice is not None
        assert choice.describe() == "attention: cudnn, 1.00 ms (flash 2.00 ms)"
        assert choice.is_remembered == is_remembered
        assert [block.attn.core for block in model.layers.values()] == [CORES["cudnn"]] * 2
    assert asked == [(AttentionSizes(batch=2, sequence=32, heads=8, kv_heads=4, head=8), torch.bfloat16)]


def test_where_no_kernel_is_right_torch_selects(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, settings = Decoder(SHAPE), Settings(layout=layout_of(), sequence=32, compute="bf16")
    monkeypatch.setattr(attention, "measure_attention", lambda *given: {})
    monkeypatch.setattr(attention, "choice_key", lambda *given: "key")
    real = torch.tensor
    monkeypatch.setattr(attention.torch, "tensor", lambda values, device: real(values))
    monkeypatch.setattr(attention.torch.cuda, "reset_peak_memory_stats", lambda device: None)
    choice = choose_attention([model], settings, torch.device("cuda"), world=1, folder=tmp_path)
    assert choice is not None
    assert choice.describe() == "attention: builtin"
    assert {block.attn.core for block in model.layers.values()} == {causal_attention}


@pytest.mark.parametrize("compute", ["fp32", "fp64"])
def test_in_wide_formats_torch_selects(compute: str, tmp_path) -> None:
    settings = Settings(layout=layout_of(), sequence=32, compute=compute)
    assert choose_attention([Decoder(SHAPE)], settings, torch.device("cuda"), world=1, folder=tmp_path) is None


def test_a_ring_keeps_its_own_kernel(tmp_path) -> None:
    model = Decoder(SHAPE)
    for block in model.layers.values():
        block.attn.core = lambda q, k, v: q
    settings = Settings(layout=layout_of(context=2), sequence=32, compute="bf16")
    assert choose_attention([model], settings, torch.device("cuda"), world=1, folder=tmp_path) is None


def test_ulysses_keeps_its_exchange_and_measures_whole_sequences_of_some_heads() -> None:
    model = Decoder(SHAPE)
    cores = [UlyssesCore(None) for _ in model.layers]  # type: ignore[arg-type]
    for block, core in zip(model.layers.values(), cores, strict=True):
        block.attn.core = core
    assert cores[0].local is causal_attention
    use_attention(list(model.layers.values()), CORES["flash"])
    assert [block.attn.core for block in model.layers.values()] == cores
    assert all(core.local is CORES["flash"] for core in cores)
    split = Settings(layout=layout_of(tensor=2, context=4), sequence=32, compute="bf16")
    assert AttentionSizes.of(SHAPE, split) == AttentionSizes(batch=2, sequence=32, heads=1, kv_heads=1, head=8)


def test_inputs_lie_in_memory_as_a_layer_lays_them() -> None:
    query, key, _ = make_inputs(AttentionSizes(batch=1, sequence=5, heads=4, kv_heads=2, head=8), torch.float32, CPU, 0)
    assert (query.shape, key.shape) == ((1, 4, 5, 8), (1, 2, 5, 8))
    assert query.stride() == (160, 8, 32, 1)  # heads of a token next to each other


WRONG = {
    "not causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
    "other scale": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=0.3),
    "wrong group": lambda q, k, v: causal_attention(q, k.flip(1), v.flip(1)),
    "last tile lost": lambda q, k, v: torch.cat(
        [causal_attention(q, k, v)[:, :, : q.shape[2] // 128 * 128], q[:, :, q.shape[2] // 128 * 128 :]], 2
    ),
    "gradient of keys lost": lambda q, k, v: causal_attention(q, k.detach() + 0 * k, v),
    "not finite": lambda q, k, v: causal_attention(q, k, v) / 0.0,
    "no such kernel": lambda q, k, v: torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, True
    )[0],
    "one head": lambda q, k, v: causal_attention(q, k, v)[:, :1],
}


@pytest.mark.parametrize("core", WRONG.values(), ids=WRONG)
def test_a_wrong_kernel_is_not_selected(core) -> None:
    sizes = AttentionSizes(batch=1, sequence=256, heads=4, kv_heads=2, head=16)
    assert is_right(causal_attention, sizes, torch.bfloat16, CPU)
    assert not is_right(core, sizes, torch.bfloat16, CPU)


def test_only_right_kernels_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "CORES", {"right": causal_attention, "wrong": WRONG["not causal"]})
    sizes = AttentionSizes(batch=1, sequence=64, heads=2, kv_heads=1, head=8)
    assert list(attention.measure_attention(sizes, torch.bfloat16, CPU)) == ["right"]


def test_calls_are_timed_in_turn_in_alternating_order() -> None:
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    timings = time_in_turn(calls, CPU, rounds=4)
    assert list(timings) == ["a", "b"]
    assert order == list("aaabbb") + list("abba") * 2


def test_a_call_without_memory_is_left_out_and_the_others_are_timed() -> None:
    def refuse() -> None:
        raise torch.OutOfMemoryError("full")

    assert list(time_in_turn({"full": refuse, "fits": lambda: None}, CPU, rounds=3)) == ["fits"]


def test_a_timing_is_the_median_and_half_the_interquartile_range() -> None:
    assert Timing.of([3.0, 1.0, 100.0, 2.0, 4.0]) == Timing(median_ms=3.0, spread_ms=1.0)
    assert Timing.of([7.0]) == Timing(median_ms=7.0, spread_ms=0.0)
