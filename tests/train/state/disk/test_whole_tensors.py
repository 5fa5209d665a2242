"""Whole tensors out of any layout, and digests that layouts cannot change."""

import random

import pytest
import torch

from phalanx.errors import UserError
from phalanx.train.state.checkpoint_index import DamagedCheckpoint
from phalanx.train.state.reader import CheckpointReader
from phalanx.train.state.whole_tensors import read_state, read_whole_tensors, shards_digest, state_digest


def test_the_whole_model_without_the_optimizer(kit, saved):
    tensors = kit.some_tensors(200)
    state = read_state(saved / "step-00000200")
    assert list(state) == sorted(name for name in tensors if "#" not in name)
    assert all(kit.same_bits(state[name], tensors[name]) for name in state)
    moments = dict(read_whole_tensors(saved / "step-00000200", lambda name: name.endswith("#exp_avg")))
    assert list(moments) == ["norm.weight#exp_avg"]


def test_a_damaged_tensor_is_never_handed_out(saved):
    folder = saved / "step-00000200"
    for path in folder.glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match="its digest differs"):
        read_state(folder)


def test_the_digest_is_of_the_values_and_not_of_the_layout(kit, tmp_path):
    tensors, rng = kit.some_tensors(), random.Random(4)
    expected = shards_digest([kit.shard(name, value) for name, value in tensors.items()])
    for world in (1, 2, 5):
        folder = kit.save_all(tmp_path / str(world), kit.cut(tensors, world, rng)).path
        assert state_digest(folder) == expected
    tensors["norm.weight"][3] += 1
    assert shards_digest([kit.shard(name, value) for name, value in tensors.items()]) != expected
    assert state_digest(folder, lambda name: name == "scale") != expected


def test_a_digest_of_a_part_is_refused(kit):
    with pytest.raises(UserError) as caught:
        shards_digest([kit.shard("w", torch.ones(2), (4,))])
    assert str(caught.value) == (
        "w: is [2] of [4] on this rank\n  a digest of a part depends on the layout\n  save, then state_digest"
    )


def test_rows(kit, tmp_path):
    w = torch.ones(4, 3)
    ranks = [
        [kit.shard("w", w[:2], w.shape), kit.shard("a", torch.tensor(1))],
        [kit.shard("w", w[2:], w.shape, (2, 0))],
    ]
    found = CheckpointReader(kit.save_all(tmp_path, ranks).path).tensors().values()
    assert [(one.name, one.dtype, one.shape, len(one.shards)) for one in found] == [
        ("a", "int64", (), 1),
        ("w", "float32", (4, 3), 2),
    ]
    assert [(shard.rank, shard.size_bytes) for one in found for shard in one.shards] == [(0, 8), (0, 24), (1, 24)]
