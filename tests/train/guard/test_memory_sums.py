"""Sums of memory: any bit shows, every implementation gives the same, and the step after a flip is not taken."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.train.guard import memory_sums
from phalanx.train.guard.divergence import ReplicaGuard
from phalanx.train.guard.memory_sums import MemorySums, chunk_table, sum_in_host, sum_on_gpu, sum_with_torch
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
        monkeypatch.setattr(memory_sums, "load_kernel", lambda loaded=loaded: loaded)
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
    assert not sums.compare()
    assert not sums.compare(), "nothing is known any more"
    assert sums.changed() == []
    sums.remember(shards)
    for tensor in tensors[1:]:
        tensor.view(torch.uint8)[3] ^= 1
    assert sums.compare().item() == 1.0
    assert [name for name, _ in sums.changed()] == ["t1", "t2"]
    sums.remember(shards[:2])
    assert not sums.compare(), "an optimizer may make more state later"


def test_offloaded_tensors_are_added_up_beside_the_steps() -> None:
    """As where a GPU trains and its optimizer works in host memory: the result is asked for by `compare` alone."""
    shards = [shard(numbers(5000)), shard(numbers(300_000), "v")]
    sums = MemorySums(HOST, in_background=True)
    for flipped in (False, True):
        sums.remember(shards)
        assert sums._kept is not None
        sums._kept.in_host()  # the thread has read them
        if flipped:
            shards[1].tensor.view(torch.int32)[77] ^= 1
        assert bool(sums.compare()) == flipped
    assert [name for name, _ in sums.changed()] == ["v"]


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
    assert sums.compare()
    assert [name for name, _ in sums.changed()] == ["w#exp_avg_sq"]


@pytest.mark.parametrize(
    ("first", "second", "changed"),
    [
        ("ab", "ac", "c"),  # another tensor in the same place
        ("ab", "cb", "c"),
        ("a", "ab", "b"),
        ("ab", "a", "a"),
        ("ab", "a", ""),
        ("ab", "ba", "a"),
    ],
)
def test_the_tensors_remembered_last_are_compared(first: str, second: str, changed: str) -> None:
    shards = {name: shard(numbers(100 + index), name) for index, name in enumerate("abc")}
    sums = MemorySums(HOST)
    sums.remember([shards[name] for name in first])
    sums.remember([shards[name] for name in second])
    for name in changed:
        shards[name].tensor[5] += 1.0
    assert bool(sums.compare()) == bool(changed)
    assert [name for name, _ in sums.changed()] == list(changed)


def test_changes_of_a_tensor_that_is_no_longer_remembered_do_not_count() -> None:
    shards = [shard(numbers(100), "a"), shard(numbers(101), "b")]
    sums = MemorySums(HOST)
    sums.remember(shards)
    sums.remember(shards[:1])
    shards[1].tensor[5] += 1.0
    assert not sums.compare()


def test_the_present_sum_of_a_changed_tensor_is_returned() -> None:
    tensor = torch.tensor([1, 2], dtype=torch.int64)
    sums = MemorySums(HOST)
    sums.remember([shard(tensor)])
    tensor[0] = 40
    assert sums.compare()
    assert sums.changed() == [("w", 42)]


def test_one_thread_adds_up_only_where_a_gpu_computes_meanwhile() -> None:
    shards = [shard(numbers(100))]
    for in_background in (None, False):
        sums = MemorySums(HOST, in_background=in_background)
        sums.remember(shards)
        assert sums._thread is None
    sums = MemorySums(HOST, in_background=True)
    sums.remember(shards)
    thread = sums._thread
    assert thread is not None
    sums.remember(shards)
    assert sums._thread is thread
    assert MemorySums(torch.device("cuda"))._in_background


@pytest.mark.parametrize(
    ("device", "settings", "is_added_up"),
    [
        ("cpu", {}, True),
        ("cpu", {"offloaded": False}, True),
        ("cuda", {}, True),
        ("cuda", {"offloaded": True}, True),
        ("cuda", {"offloaded": False}, False),
    ],
)
def test_tensors_in_host_memory_are_left_out_only_where_they_are_offloaded(
    device: str, settings: dict[str, bool], is_added_up: bool
) -> None:
    sums = MemorySums(torch.device(device), in_background=False)
    sums.remember([shard(numbers(100))], **settings)
    assert sums._kept is not None
    assert sums._kept.places == ((HOST,) if is_added_up else ())
    assert len(sums._kept.in_host()) == is_added_up


def test_large_tensors_are_added_up_by_torch_on_several_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [numbers(40), numbers(5), numbers(41)]
    wanted = sum_in_host(tensors)
    by_torch: list[int] = []

    def count(tensor: torch.Tensor) -> torch.Tensor:
        by_torch.append(len(tensor))
        return sum_with_torch(tensor)

    monkeypatch.setattr(memory_sums, "FEW_WORDS", 20)
    monkeypatch.setattr(memory_sums, "sum_with_torch", count)
    for threads, expected in ((1, []), (2, [40, 41])):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert sum_in_host(tensors) == wanted
        assert by_torch == expected


@pytest.mark.parametrize(("word", "byte", "total"), [(2**63 - 1, 1, -(2**63)), (-1, 1, 0), (-(2**63), 0, -(2**63))])
def test_sums_wrap_around(word: int, byte: int, total: int) -> None:
    raw = torch.frombuffer(bytearray(word.to_bytes(8, "little", signed=True) + bytes([byte])), dtype=torch.uint8)
    assert sum_in_host([raw]) == [total]
    assert int(sum_with_torch(raw)) == total


def test_a_table_of_chunks_is_made_anew_when_tensors_move_or_are_others() -> None:
    tensors = [numbers(4096), numbers(8192)]
    chunks = chunk_table(tensors, HOST, None)
    shorter = [tensors[0][:64], tensors[1]]  # at the same addresses
    assert chunk_table(shorter, HOST, chunks).lengths.tolist() == [32, 4096]
    tensors[1].data = numbers(8192)
    moved = chunk_table(tensors, HOST, chunks)
    assert moved is not chunks
    assert moved.addresses.tolist() == [tensor.data_ptr() for tensor in tensors]


def test_a_kernel_gets_only_what_it_can_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty grid cannot be launched, and nothing cannot be stacked."""
    calls: list[list[int]] = []

    def kernel(addresses: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor, sums: torch.Tensor) -> None:
        assert len(addresses) == len(lengths) == len(rows)
        calls.append(rows.tolist())

    monkeypatch.setattr(memory_sums, "load_kernel", lambda: kernel)
    odd, even = [numbers(5)], [numbers(4096)]
    assert sum_on_gpu(odd, chunk_table(odd, HOST, None)).tolist() == sum_in_host(odd)
    assert calls == []
    assert sum_on_gpu(even, chunk_table(even, HOST, None)).tolist() == [0]
    assert calls == [[0]]


@pytest.fixture
def gpu_sums(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Tensors in host memory count as being on two GPUs, by name; return the GPUs whose kernel was called."""
    kernel_calls: list[torch.device] = []

    def place_by_name(names: list[str], tensors: list[torch.Tensor]) -> memory_sums._Resting:
        places: dict[torch.device, list[int]] = {}
        for index, name in enumerate(names):
            places.setdefault(torch.device(name.split("/")[0]), []).append(index)
        tensors_at = {place: [tensors[index] for index in indices] for place, indices in places.items()}
        return memory_sums._Resting(names=names, tensors=tensors, places=places, tensors_at=tensors_at)

    def make_table(tensors: list[torch.Tensor], device: torch.device, last: object) -> memory_sums.ChunkTable:
        kernel_calls.append(device)
        return chunk_table(tensors, HOST, None)

    monkeypatch.setattr(memory_sums._Resting, "of", place_by_name)
    monkeypatch.setattr(memory_sums, "chunk_table", make_table)
    monkeypatch.setattr(memory_sums, "load_kernel", lambda: None)
    return kernel_calls


PLACED = ("cpu/a", "cuda:0/b", "cuda:1/c", "cuda:0/d")


@pytest.mark.parametrize("changed", [(), ("cpu/a",), ("cuda:0/b",), ("cuda:0/d",), ("cuda:1/c", "cuda:0/d"), PLACED])
def test_changes_on_each_device_are_found(changed: tuple[str, ...], gpu_sums: list[torch.device]) -> None:
    """Before the kernel is loaded and after; the names come in the order of the tensors."""
    shards = [shard(numbers(64 + index), name) for index, name in enumerate(PLACED)]
    sums = MemorySums(HOST)
    for number in range(1, 5):
        sums.remember(shards)
        for one in shards:
            if one.name in changed:
                one.tensor[3] += 1.0
        assert bool(sums.compare()) == bool(changed)
        assert tuple(name for name, _ in sums.changed()) == changed
        # Both sums of a step, on both GPUs, from the third step on.
        assert len(gpu_sums) == 4 * max(0, number - 2)


def test_offloaded_tensors_are_left_out_and_those_on_a_gpu_are_not(gpu_sums: list[torch.device]) -> None:
    shards = [shard(numbers(64), name) for name in PLACED[:2]]
    sums = MemorySums(torch.device("cuda"))
    sums.remember(shards, offloaded=False)
    assert sums._kept is not None
    assert sums._kept.places == (torch.device("cuda:0"),)
