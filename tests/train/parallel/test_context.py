"""Context parallel attention against one process: every kind, on 2 and 4 real ranks, in float64 and bfloat16."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.errors import UserError
from phalanx.train.parallel import context
from phalanx.train.parallel.context import (
    KINDS,
    attend_backward,
    attend_block,
    check_heads,
    context_core,
    join_all,
    kv_copies,
    local_positions,
    split_all,
    split_sequence,
)

B, N, L, H = 2, 8, 32, 16


class Wire(TorchDispatchMode):
    """Bytes this rank puts on the wire, and messages."""

    def __init__(self) -> None:
        super().__init__()
        self.sent_bytes = 0
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("c10d.").removesuffix(".default")
        if name in ("send", "_allgather_base_", "_reduce_scatter_base_", "alltoall_base_"):
            tensor = args[0][0] if name == "send" else args[1]
            ranks = torch.distributed.distributed_c10d.ProcessGroup.unbox(args[1 if name == "send" else 2]).size()
            share = {"send": 1.0, "_allgather_base_": ranks - 1}.get(name, (ranks - 1) / ranks)
            self.sent_bytes += int(tensor.numel() * tensor.element_size() * share)
            self.calls.append(name)
        return func(*args, **(kwargs or {}))


def whole(kv_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(7)
    sizes = [N, kv_heads, kv_heads, N]
    return [torch.randn(B, heads, L, H, generator=draw, dtype=torch.float64).to(dtype) for heads in sizes]


def reference(kv_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Output and gradients of q, k, v on one process, by matrix products and a mask alone."""
    q, k, v, grad = whole(kv_heads, dtype)
    q, k, v = (one.double().requires_grad_() for one in (q, k, v))
    keys, values = (one.repeat_interleave(N // kv_heads, 1) for one in (k, v))
    scores = (q @ keys.mT / H**0.5).masked_fill(~torch.ones(L, L, dtype=torch.bool).tril(), float("-inf"))
    out = scores.softmax(-1) @ values
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad.double())]


def on_rank_attention(rank: int, group: Any, *, kind: str, kv_heads: int, dtype: str) -> dict[str, Any]:
    precision = getattr(torch, dtype)
    ranks = group.size()
    q, k, v, grad = (split_sequence(one, rank, ranks, dim=2) for one in whole(kv_heads, precision))
    leaves = [one.requires_grad_() for one in (q, k, v)]
    with Wire() as forward:
        out = context_core(kind, group)(*leaves)
    with Wire() as backward:
        gradients = torch.autograd.grad(out, leaves, grad)
    expected = [split_sequence(one, rank, ranks, dim=2) for one in reference(kv_heads, precision)]
    got = [out.detach(), *gradients]
    return {
        "apart": max((a.double() - b).abs().max().item() for a, b in zip(got, expected, strict=True)),
        "dtypes": {str(one.dtype) for one in got},
        "sent_bytes": (forward.sent_bytes, backward.sent_bytes),
        "calls": forward.calls + backward.calls,
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kv_heads", [8, 2, 1])
def test_output_and_gradients_equal_one_process(ranks: Any, kind: str, size: int, kv_heads: int) -> None:
    answers = ranks(__file__, "attention", size, kind=kind, kv_heads=kv_heads, dtype="float64")
    assert max(one["apart"] for one in answers) < 1e-12
    assert all(one["dtypes"] == {"torch.float64"} for one in answers)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_stays_within_its_rounding(ranks: Any, kind: str) -> None:
    answers = ranks(__file__, "attention", 4, kind=kind, kv_heads=2, dtype="bfloat16")
    assert max(one["apart"] for one in answers) < 0.05  # values of a few units, 8 bits of mantissa
    assert all(one["dtypes"] == {"torch.bfloat16"} for one in answers)


@pytest.mark.parametrize("kind", ["ring", "allgather"])
@pytest.mark.parametrize("size", [2, 4])
def test_keys_and_values_travel_once_forward_and_twice_backward(ranks: Any, kind: str, size: int) -> None:
    kv_bytes = 2 * B * 2 * (L // size) * H * 8
    for one in ranks(__file__, "attention", size, kind=kind, kv_heads=2, dtype="float64"):
        assert one["sent_bytes"] == ((size - 1) * kv_bytes, 2 * (size - 1) * kv_bytes)


@pytest.mark.parametrize(("kv_heads", "held"), [(8, 8), (2, 4), (1, 4)])
def test_ulysses_sends_every_head_that_another_rank_needs(ranks: Any, kv_heads: int, held: int) -> None:
    row_bytes = B * (L // 4) * H * 8
    for one in ranks(__file__, "attention", 4, kind="ulysses", kv_heads=kv_heads, dtype="float64"):
        expected = (N + 2 * held + N) * row_bytes * 3 // 4
        assert one["sent_bytes"] == (expected, expected)
        assert one["calls"] == ["alltoall_base_"] * 8


FAKE = """
import torch, torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from phalanx.train.parallel.context import KINDS, context_core
dist.init_process_group("fake", store=FakeStore(), rank=37, world_size=64)
for kind in KINDS:
    with FakeTensorMode():
        q, k, v = (torch.empty(1, n, 128, 64, dtype=torch.bfloat16, requires_grad=True) for n in (64, 8, 8))
        out = context_core(kind, dist.group.WORLD)(q, k, v)
        out.sum().backward()
        print(kind, *out.shape, *k.grad.shape)
"""


def test_a_rank_of_64_traces_on_fake_tensors() -> None:
    done = subprocess.run([sys.executable, "-c", FAKE], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [f"{kind} 1 64 128 64 1 8 128 64" for kind in KINDS], done.stderr


def test_slices_of_every_rank_make_the_sequence() -> None:
    x = torch.arange(2 * 24 * 3).view(2, 24, 3)
    parts = split_all(x, 3, dim=1)
    assert torch.equal(join_all(parts, dim=1), x)
    for rank in range(3):
        assert torch.equal(parts[rank], x[:, local_positions(24, rank, 3)])
        assert torch.equal(parts[rank], split_sequence(x, rank, 3))


def test_every_rank_sees_as_many_keys() -> None:
    assert {int((local_positions(64, rank, 4) + 1).sum()) for rank in range(4)} == {64 * 65 // 2 // 4}


def test_a_sequence_that_does_not_divide_is_refused() -> None:
    with pytest.raises(UserError) as caught:
        local_positions(1000, 0, 16)
    assert str(caught.value) == (
        "job: data.sequence: 1000 tokens do not divide into 32 slices for 16 context ranks\n"
        "  each context rank holds one slice from the head and one from the tail of every sequence\n"
        "  use 992 or another multiple of 32, or fewer context ranks"
    )


def test_ulysses_refuses_heads_that_do_not_divide() -> None:
    check_heads("ring", 6, 4)
    with pytest.raises(UserError) as caught:
        check_heads("ulysses", 6, 4)
    assert str(caught.value) == (
        "parallel.context: 4 context ranks do not divide the 6 query heads of each tensor rank\n"
        "  Ulysses gives every context rank whole heads\n"
        '  use 3 context ranks, or the kind "ring" or "allgather", which split no heads'
    )


def test_an_unknown_kind_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError) as caught:
        context_core("ulises", None)  # type: ignore[arg-type]
    assert 'did you mean "ulysses"?' in str(caught.value)


@pytest.mark.parametrize("heads", [4, 12, 32])
@pytest.mark.parametrize("ranks", [2, 4])
def test_copied_heads_stand_beside_their_queries(heads: int, ranks: int) -> None:
    for kv_heads in (n for n in range(1, heads + 1) if heads % n == 0):
        held = kv_heads * kv_copies(heads, kv_heads, ranks)
        assert held % ranks == 0
        for head in range(heads):
            rank, place = divmod(head, heads // ranks)
            stored = rank * (held // ranks) + place // (heads // held)
            assert stored // (held // kv_heads) == head // (heads // kv_heads)


def test_the_fallback_equals_the_kernel() -> None:
    q, k, v, grad = whole(2, torch.float64)
    for causal in (False, True):
        out, lse = attend_block(q, k, v, causal=causal)
        expected = attend_backward(grad, q, k, v, out, lse, causal=causal)
        scores = context._attention_scores(q, k, causal=causal)
        assert torch.allclose(lse, scores.logsumexp(-1), atol=1e-12)
        got = context._math_backward(grad, q, k, v, out, lse, causal=causal)
        assert max((a - b).abs().max().item() for a, b in zip(expected, got, strict=True)) < 1e-12
        assert torch.allclose(
            out, F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True), atol=1e-12
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_on_cuda_equal_those_on_the_cpu(causal: bool, dtype: torch.dtype) -> None:
    q, k, v, grad = whole(2, dtype)
    half = slice(0, L) if causal else slice(L // 2, L)  # the ring cuts queries: not contiguous
    expected_out, expected_lse = attend_block(q[:, :, half].double(), k.double(), v.double(), causal=causal)
    on_gpu = [one.cuda() for one in (q, k, v, grad)]
    q, k, v, grad = on_gpu[0][:, :, half], on_gpu[1], on_gpu[2], on_gpu[3][:, :, half]
    out, lse = attend_block(q, k, v, causal=causal)
    assert torch.allclose(out.cpu().double(), expected_out, atol=2e-2)
    assert torch.allclose(lse.cpu().double(), expected_lse, atol=1e-2)
    cpu = [one.cpu().double() for one in (grad, q, k, v)]
    expected = attend_backward(*cpu, expected_out, expected_lse, causal=causal)
    for got, want in zip(attend_backward(grad, q, k, v, out, lse, causal=causal), expected, strict=True):
        assert got.shape == want.shape
        assert torch.allclose(got.cpu().double(), want, atol=4e-2)
