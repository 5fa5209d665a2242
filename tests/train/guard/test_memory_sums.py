"""Sums of memory: any bit shows, every implementation gives the same, and the step after a flip is not taken."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.job.schema import Optim
from phalanx.train.guard import memory_sums
from phalanx.train.guard.divergence import ReplicaGuard
from phalanx.train.guard.memory_sums import MemorySums, chunk_table, sum_in_host, sum_on_gpu, sum_with_torch
from phalanx.train.optim.build import build_optimizer
from phalanx.train.optim.compact import CompactAdamW
from phalanx.train.parallel.tensor_shard import TensorShard

SIZES = [0, 1, 3, 5, 4096, 70_001, memory_sums.CHUNK_WORDS * 4 + 2]
HOST = torch.device("cpu")


def shard(tensor: torch.Tensor, name: str = "w") -> TensorShard:
    start = (0,) * tensor.dim()
    return TensorShard(
        name=name, tensor=tensor, shape=tuple(tensor.shape), start=start, replicas=1, owner=True, groups={}
    )


def numbers(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)


def many_tensors() -> list[torch.Tensor]:
    """Of several formats, some of which begin or end in the middle of a word, or are not one run of memory."""
    kinds = (torch.float32, torch.bfloat16, torch.int8)
    tensors = [numbers(count, kind)[first:] for count in SIZES for kind in kinds for first in (0, 1)]
    return [*tensors, numbers(10_000).view(100, 100).t()]


@given(count=st.sampled_from(SIZES[1:]), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(max_examples=60, deadline=None)
def test_any_bit_changes_a_sum(count: int, place: float, bit: int) -> None:
    tensor = numbers(count, torch.bfloat16)[count % 2 :]  # may begin in the middle of a word
    before = sum_in_host([tensor])
    raw = tensor.view(torch.uint8)
    if len(raw):
        raw[int(place * len(raw))] ^= 1 << bit
        assert sum_in_host([tensor]) != before


def test_every_way_of_adding_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy, torch, and the table of chunks that a GPU's kernel reads, here read by a stand-in for the kernel."""
    tensors = many_tensors()
    wanted = sum_in_host(tensors)
    assert [int(sum_with_torch(tensor)) for tensor in tensors] == wanted
    assert len(set(wanted)) > len(SIZES)

    def kernel(addresses: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor, sums: torch.Tensor) -> None:
        for address, length, row in zip(addresses.tolist(), lengths.tolist(), rows.tolist(), strict=True):
            assert address % 16 == 0
            words = (ctypes.c_int64 * length).from_address(address)
            sums[row] += int(np.frombuffer(words, dtype=np.int64).sum())

    chunks = chunk_table(tensors, HOST, None)
    assert chunk_table(tensors, HOST, chunks) is chunks
    assert chunk_table(tensors[1:], HOST, chunks) is not chunks
    assert 0 < len(chunks.odd) < len(tensors)
    assert int(chunks.lengths.max()) == memory_sums.CHUNK_WORDS
    found: dict[str, list[int]] = {}
    for name, loaded in (("kernel", kernel), ("torch", None)):
        monkeypatch.setattr(memory_sums, "present_kernel", lambda loaded=loaded: loaded)
        found[name] = sum_on_gpu(tensors, chunks).tolist()
    assert found == {"kernel": wanted, "torch": wanted}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_gives_the_same_sums() -> None:
    tensors = many_tensors()
    moved = [tensor.cuda() for tensor in tensors]
    assert memory_sums.load_kernel() is not None
    assert sum_on_gpu(moved, chunk_table(moved, moved[0].device, None)).tolist() == sum_in_host(tensors)


def test_what_changed_is_named_once() -> None:
    tensors = [numbers(5000), numbers(4097), numbers(7, torch.bfloat16)]
    shards = [shard(tensor, f"t{number}") for number, tensor in enumerate(tensors)]
    sums = MemorySums(HOST)
    sums.remember(shards)
    assert not sums.compare(shards)
    assert not sums.compare(shards), "nothing is known any more"
    assert sums.changed() == []
    sums.remember(shards)
    for tensor in tensors[1:]:
        tensor.view(torch.uint8)[3] ^= 1
    assert sums.compare(shards).item() == 1.0
    assert [name for name, _ in sums.changed()] == ["t1", "t2"]
    sums.remember(shards[:2])
    assert not sums.compare(shards), "an optimizer may make more state"


@pytest.mark.parametrize("is_saved", [False, True])
def test_memory_is_compared_in_steps_between_digests_too(is_saved: bool) -> None:
    """A bit that flips between two updates, at a step that is not due; where callbacks may write, at saved steps."""
    weights, moments = numbers(5000), numbers(4097)
    shards = [shard(weights), shard(moments, "w#exp_avg")]
    guard = ReplicaGuard(lambda: shards, every=100, each_step=not is_saved)
    for step in range(1, 4):
        assert guard.check(step, is_saved=is_saved) is None
        assert guard.remembers
        assert not guard.compare_memory()
        weights += 1.0  # the update
    assert guard.check(4, is_saved=is_saved) is None
    moments.view(torch.int32)[77] ^= 1 << 3
    assert guard.compare_memory()
    found = guard.name_changed(4)
    assert (found.step, found.kind, found.suspects, found.certain) == (4, "rest", (0,), True)
    assert found.problem().what.endswith("changed between two updates (w#exp_avg)")


def test_no_step_is_compared_where_the_job_says_never() -> None:
    guard = ReplicaGuard(lambda: [shard(numbers(10))], every=0, each_step=True)
    assert guard.check(1, is_saved=True) is None
    assert not guard.remembers


def test_eight_bit_moments_are_compared_as_they_are_stored() -> None:
    """Codes and scales, not floats that are decoded for every look."""
    weight = shard(numbers(600))
    optimizer = CompactAdamW(
        [weight], betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, decays=lambda name: False, kind="int8"
    )
    weight.tensor.grad = torch.ones(600)
    optimizer.step(1e-3)
    stored = optimizer.stored()
    assert [one.name for one in stored] == ["w#exp_avg", "w#exp_avg.scale", "w#exp_avg_sq", "w#exp_avg_sq.scale"]
    sums = MemorySums(HOST)
    sums.remember(stored)
    stored[2].tensor.view(torch.uint8)[5] ^= 1
    assert sums.compare(optimizer.stored())
    assert [name for name, _ in sums.changed()] == ["w#exp_avg_sq"]


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "int8"])
def test_state_is_written_in_place(name: str, state_dtype: str) -> None:
    """The engine gives the guard the same list of tensors in every step."""
    if name == "adafactor" and state_dtype == "int8":
        pytest.skip("not an optimizer of ours")
    weight = shard(numbers(4096).view(64, 64))
    optimizer = build_optimizer([weight], optim=Optim(name=name), state_dtype=state_dtype, decays=lambda name: False)
    before = [(one.name, one.tensor.data_ptr()) for one in optimizer.stored()]
    for _ in range(2):
        weight.tensor.grad = numbers(4096).view(64, 64)
        optimizer.step(1e-3)
    assert [(one.name, one.tensor.data_ptr()) for one in optimizer.stored()] == before


def test_memory_may_be_looked_at_less_often_but_not_where_a_step_is_saved() -> None:
    weights = numbers(100)
    guard = ReplicaGuard(lambda: [shard(weights)], every=100, each_step=True)
    guard.looks_every = 3
    found = []
    for step in range(1, 9):
        assert guard.check(step, is_saved=step == 5) is None
        found.append(guard.remembers)
        guard.compare_memory()
    assert found == [False, False, True, False, True, True, False, False]
    guard.check(9)
    assert not guard.compare_memory()
    assert guard.look_s is not None
