"""A digest changes with any bit, and with nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.train.guard import divergence
from phalanx.train.guard.divergence import digest_shards, fold_tensor
from phalanx.train.parallel.tensor_shard import TensorShard

SIZES = [0, 1, 3, 4096, 4097, 3 * 4096, 70_001]


def shard(tensor: torch.Tensor, name: str = "w") -> TensorShard:
    start = (0,) * tensor.dim()
    return TensorShard(
        name=name, tensor=tensor, shape=tuple(tensor.shape), start=start, replicas=1, owner=True, groups={}
    )


def numbers(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)


@given(count=st.sampled_from(SIZES[1:]), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(max_examples=60, deadline=None)
def test_any_bit(count: int, place: float, bit: int) -> None:
    tensor = numbers(count)
    before = digest_shards([shard(tensor)])
    raw = tensor.view(torch.uint8)
    where = int(place * len(raw))
    raw[where] ^= 1 << bit
    assert digest_shards([shard(tensor)]) != before
    raw[where] ^= 1 << bit
    assert digest_shards([shard(tensor)]) == before


def test_signs_of_several_values_do_not_cancel() -> None:
    tensor = numbers(4096)
    seen = {digest_shards([shard(tensor)])}
    for count in (2, 3, 64, 4096):
        turned = tensor.clone()
        turned[:count] *= -1
        seen.add(digest_shards([shard(turned)]))
    assert len(seen) == 5


def test_order_counts() -> None:
    tensor = numbers(8192)
    swapped = tensor.clone()
    swapped[[0, 1]] = tensor[[1, 0]]
    rows = torch.cat([tensor[4096:], tensor[:4096]])
    assert len({digest_shards([shard(one)]) for one in (tensor, swapped, rows)}) == 3


def test_names_places_and_kinds_count() -> None:
    one = shard(numbers(64).view(8, 8))
    moved = replace(one, start=(8, 0), shape=(16, 8))
    turned = replace(one, tensor=one.tensor.view(64), shape=(64,), start=(0,))
    assert len({digest_shards([p]) for p in (one, replace(one, name="v"), moved, turned)}) == 4
    zeros = [shard(torch.zeros(4, dtype=kind)) for kind in (torch.float32, torch.int32)]
    assert digest_shards(zeros[:1]) != digest_shards(zeros[1:])
    assert digest_shards([one, moved]) != digest_shards([moved, one])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_where_the_memory_lies_does_not_count(dtype: torch.dtype, first: int) -> None:
    whole = numbers(70_001, dtype)
    for count in (40_003, 40_004):
        part = whole[first : first + count]
        assert digest_shards([shard(part)]) == digest_shards([shard(part.clone())])
    matrix = whole[:10_000].view(100, 100)
    assert digest_shards([shard(matrix.t())]) == digest_shards([shard(matrix.t().contiguous())])


@pytest.mark.parametrize("count", SIZES)
def test_how_much_is_folded_at_a_time_does_not_count(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = numbers(count)
    before = fold_tensor(tensor)
    monkeypatch.setattr(divergence, "PASS", {"cpu": 1})
    assert torch.equal(fold_tensor(tensor), before)
    assert len(before) == -(-count // 4096)


def test_the_formula() -> None:
    """Σ w·x modulo 2^64 with signed x, so that any device, or another program, can say the same."""
    tensor = torch.tensor([1, -2, 2**31 - 1], dtype=torch.int32)
    weights = divergence._digest_weights(torch.device("cpu"))[:3].tolist()
    # The first numbers of splitmix64 from 0 as published, made odd.
    assert [w % 2**64 for w in weights] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4 | 1, 0x06C45D188009454F]
    wanted = sum(w * x for w, x in zip(weights, tensor.tolist(), strict=True)) % 2**64
    assert int(fold_tensor(tensor)) % 2**64 == wanted
    assert all(w % 2 for w in weights)
    assert digest_shards([shard(tensor)]) == "fe4ab69d37e4db1017f8d354e8b5c4b6", (
        "runs of different versions compare their digests"
    )
    assert len(np.unique(divergence._digest_weights(torch.device("cpu")).numpy())) == 4096


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("count", SIZES[1:])
def test_a_gpu_gives_the_same_digest(count: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        tensor = numbers(count, dtype)
        assert digest_shards([shard(tensor.cuda())]) == digest_shards([shard(tensor)])
