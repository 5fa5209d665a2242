"""What one layout writes, any other layout reads, bit for bit."""

import random
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from phalanx.errors import UserError
from phalanx.train.state.checkpoint_index import DamagedCheckpoint
from phalanx.train.state.reader import (
    CheckpointReader,
    newest_checkpoint,
    read_checkpoint_meta,
    read_rank_meta,
    verify_checkpoint,
)
from phalanx.train.state.restore import load_shards, prepare_restore
from phalanx.train.state.save import save_checkpoint

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]
SHAPES = st.lists(st.integers(0, 9), max_size=4)


@settings(max_examples=150, deadline=None)
@given(
    shapes=st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1, max_size=5),
    worlds=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    seed=st.integers(0, 2**32),
)
def test_any_layout_to_any_other(kit, tmp_path_factory, shapes, worlds, seed):
    rng, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    raw = [torch.randint(0, 256, (*shape, dtype.itemsize), generator=draw).byte() for shape, dtype in shapes]
    tensors = {
        f"t{place}": data.view(dtype).reshape(shape)  # any bits at all: NaN, infinity, minus zero
        for place, (data, (shape, dtype)) in enumerate(zip(raw, shapes, strict=True))
    }
    root = tmp_path_factory.mktemp("checkpoints")
    with patch("os.fsync"):  # ten times as many cases in the same time; no power cut is tried here
        folder = kit.save_all(root, kit.cut(tensors, worlds[0], rng)).path
    verify_checkpoint(folder)
    right = kit.cut(tensors, worlds[1], rng)
    for expected, shards in zip(right, kit.emptied(right), strict=True):
        load_shards(folder, shards)
        assert all(kit.same_bits(a.tensor, b.tensor) for a, b in zip(expected, shards, strict=True))


def test_parameters_and_strided_views_are_filled_in_place(kit, tmp_path):
    weight = torch.randn(6, 4)
    folder = kit.save_all(tmp_path, [[kit.shard("w", weight.t().contiguous().t())]]).path
    storage = torch.zeros(4, 6)
    target = torch.nn.Parameter(storage.t())
    load_shards(folder, [kit.shard("w", target)])
    assert torch.equal(storage.t(), weight)
    assert target.grad_fn is None


def test_a_rank_reads_only_the_files_it_overlaps(kit, tmp_path):
    w = torch.arange(32.0).reshape(8, 4)
    ranks = [[kit.shard("w", w[2 * r : 2 * r + 2].clone(), w.shape, (2 * r, 0))] for r in range(4)]
    folder = kit.save_all(tmp_path, ranks).path
    (folder / "rank-00003.safetensors").write_bytes(b"broken")
    (folder / "rank-00003.json").write_bytes(b"broken")
    mine = kit.shard("w", torch.zeros(3, 4), w.shape, (1, 0))
    ready = prepare_restore(folder, [mine])
    assert sorted(ready.route.copies) == [0, 1]
    assert not mine.tensor.any()  # nothing changes before everything is known to be sound
    ready.fill()
    assert torch.equal(mine.tensor, w[1:4])


def test_a_rank_that_restarts_in_its_old_layout_reads_its_own_index_and_its_owners(kit, tmp_path):
    w = torch.arange(64.0).reshape(16, 4)
    ranks = [[kit.shard("w", w[r : r + 1].clone(), w.shape, (r, 0))] for r in range(16)]
    folder = kit.save_all(tmp_path, ranks).path
    for rank, (mine,) in enumerate(ranks):
        ready = prepare_restore(folder, [mine], rank=rank, world=16)
        assert ready.route.num_indexes_read == 1
    assert prepare_restore(folder, ranks[12], rank=3, world=4).route.num_indexes_read == 1
    assert prepare_restore(folder, ranks[15]).route.num_indexes_read == 16  # without a hint: from the first on


def test_ranks_that_own_nothing_are_not_asked(kit, tmp_path):
    w = torch.arange(4.0)
    copies = [[kit.shard("w", w.clone(), owner=rank == 0)] for rank in range(8)]  # plain data parallel
    folder = kit.save_all(tmp_path, copies).path
    ready = prepare_restore(folder, copies[7], rank=7, world=8)
    assert (ready.route.num_indexes_read, list(ready.route.copies)) == (1, [0])


@pytest.mark.parametrize("copies", [4, 3])
def test_a_rank_of_another_copy_finds_the_writer_of_its_shard(kit, tmp_path, copies):
    """2 stages, copies, 8 shards: only the first copy writes. Restored with as many copies, and with one fewer."""

    def shards(rank, copies):
        stage, shard = rank // (copies * 8), rank % 8
        name, owner = f"layers.{stage}.w", rank // 8 % copies == 0
        return [kit.shard(name, torch.full((1, 2), float(rank)), (8, 2), (shard, 0), owner)]

    folder = kit.save_all(tmp_path, [shards(rank, 4) for rank in range(64)]).path
    world = 2 * copies * 8
    for rank in range(world):
        mine = shards(rank, copies)
        ready = prepare_restore(folder, mine, rank=rank, world=world)
        assert ready.route.num_indexes_read <= 3, rank
        ready.fill()
        assert mine[0].tensor[0, 0] == rank // (copies * 8) * 32 + rank % 8


def test_files_are_plain_safetensors_with_owned_shards_only(kit, tmp_path):
    ranks = [
        [kit.shard("a", torch.ones(3)), kit.shard("b", torch.zeros(0, 4), (2, 4), (2, 0))],
        [kit.shard("a", torch.ones(3), owner=False), kit.shard("b", torch.full((2, 4), 2.0).bfloat16())],
    ]
    folder = kit.save_all(tmp_path, ranks).path
    with safe_open(folder / "rank-00000.safetensors", "pt") as first:
        assert {name: first.get_tensor(name).tolist() for name in first.keys()} == {"a": [1.0] * 3}  # noqa: SIM118
    with safe_open(folder / "rank-00001.safetensors", "pt") as second:
        assert {name: second.get_tensor(name).dtype for name in second.keys()} == {"b": torch.bfloat16}  # noqa: SIM118


def test_every_tensor_is_aligned_for_readers_that_map_the_file(kit, tmp_path):
    shards = [kit.shard(f"t{place}", torch.ones(3, dtype=dtype)) for place, dtype in enumerate(reversed(DTYPES))]
    folder = kit.save_all(tmp_path, [[*shards, kit.shard("a", torch.ones(5, dtype=torch.uint8))]]).path
    for shard in CheckpointReader(folder).index(0).shards:
        assert shard.offset % (shard.size_bytes // shard.region.volume) == 0, shard.name


def test_meta_comes_back(kit, tmp_path):
    meta = {"tokens": 12345678901234567, "layout": {"data": 2}, "lr": 0.1, "note": "größer"}
    for rank in (1, 0):
        save_checkpoint(
            tmp_path, step=7, attempt="x", shards=[], meta=meta, rank=rank, world=2, rank_meta={"rng": f"state {rank}"}
        )
    found = newest_checkpoint(tmp_path, verify=True)
    assert (found.step, found.world, found.meta, found.warnings) == (7, 2, meta, ())
    assert read_checkpoint_meta(found.path) == {**meta, "step": 7, "world": 2}
    assert read_rank_meta(found.path, 1) == {"rng": "state 1"}


@pytest.fixture
def folder(kit, tmp_path):
    w = torch.arange(12.0).reshape(4, 3)
    ranks = [
        [kit.shard("layers.0.w", w[:2].clone(), w.shape)],
        [kit.shard("layers.0.w", w[2:].clone(), w.shape, (2, 0))],
    ]
    return kit.save_all(tmp_path, ranks).path


def refused(error, folder, shards, **options):
    before = [shard.tensor.clone() for shard in shards]
    with pytest.raises(error) as caught:
        load_shards(folder, shards, **options)
    assert all(torch.equal(old, shard.tensor) for old, shard in zip(before, shards, strict=True))
    return str(caught.value)


def test_another_model_is_refused_with_all_its_differences(kit, folder):
    shards = [kit.shard("layers.0.v", torch.zeros(4, 3)), kit.shard("layers.0.w", torch.zeros(4, 4))]
    assert refused(UserError, folder, shards) == (
        f"{folder}: holds no layers.0.v\n  it holds layers.0.w\n"
        f"{folder}: layers.0.w is [4, 3] there and [4, 4] in this model\n"
        "  resume with the job file of the run that wrote it"
    )


def test_another_dtype_is_refused_unless_asked_for(kit, folder):
    target = kit.shard("layers.0.w", torch.zeros(4, 3, dtype=torch.bfloat16))
    assert refused(UserError, folder, [target]) == (
        f"{folder}: layers.0.w is float32 there and bfloat16 in this model\n"
        "  values would be rounded\n  load with cast=True if that is meant"
    )
    load_shards(folder, [target], cast=True)
    assert torch.equal(target.tensor, torch.arange(12.0).reshape(4, 3).bfloat16())


def test_a_hole_is_refused(kit, tmp_path):
    ranks = [[kit.shard("w", torch.ones(2, 3), (5, 3))], [kit.shard("w", torch.ones(2, 3), (5, 3), (3, 0))]]
    folder = kit.save_all(tmp_path, ranks).path
    message = refused(DamagedCheckpoint, folder, [kit.shard("w", torch.zeros(5, 3))])
    assert message.startswith("w: has a hole: no rank wrote elements [2, 0] to [3, 3] (end excluded)")
    load_shards(folder, [kit.shard("w", torch.zeros(2, 3), (5, 3), (3, 0))])  # a rank that needs only what is there
    with pytest.raises(DamagedCheckpoint, match="has a hole"):
        verify_checkpoint(folder)


def test_two_owners_of_one_element_are_refused(kit, tmp_path):
    ranks = [[kit.shard("w", torch.ones(3, 3), (4, 3))], [kit.shard("w", torch.ones(2, 3), (4, 3), (2, 0))]]
    folder = kit.save_all(tmp_path, ranks).path
    message = refused(DamagedCheckpoint, folder, [kit.shard("w", torch.zeros(4, 3))])
    assert message.startswith("w: is there twice: ranks 0, 1 all wrote elements [2, 0] to [3, 3]")


def test_ranks_that_disagree_are_refused(kit, tmp_path):
    ranks = [[kit.shard("w", torch.ones(2), (4,))], [kit.shard("w", torch.ones(2).double(), (4,), (2,))]]
    folder = kit.save_all(tmp_path, ranks).path
    message = refused(DamagedCheckpoint, folder, [kit.shard("w", torch.zeros(4))])
    assert message.startswith(f"{folder}: w is float32 [4] for rank 0 and float64 [4] for rank 1")
