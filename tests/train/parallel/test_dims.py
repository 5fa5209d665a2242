"""Which ranks stand together: the order of the axes, and the groups that share experts."""

from __future__ import annotations

import pytest

from phalanx.train.parallel.dims import ParallelDims, build_meshes


def test_tensor_peers_are_neighbours_and_stages_are_far_apart(ranks):
    """rank = ((pipeline · data + d) · context + c) · tensor + t, for pp2 × tp2."""
    found = ranks(__file__, "places", dims={"pipeline": 2, "tensor": 2})
    assert found == [(0, 0, [0, 1], [0, 2]), (0, 1, [0, 1], [1, 3]), (1, 0, [2, 3], [0, 2]), (1, 1, [2, 3], [1, 3])]


def on_rank_places(rank, group, dims):
    import torch.distributed as dist

    meshes = build_meshes(ParallelDims(**dims), "cpu", experts=False)
    peers = [dist.get_process_group_ranks(meshes.group(axis)) for axis in ("tensor", "pipeline")]
    return (meshes.index("pipeline"), meshes.index("tensor"), *peers)


@pytest.mark.parametrize(
    ("dims", "copies", "shard"),
    [
        ({"data": 8, "expert": 4}, 2, 1),  # without ZeRO nothing of an expert is shared
        ({"data": 8, "expert": 4, "zero": 3, "shard": 8}, 1, 2),
        ({"data": 8, "expert": 2, "zero": 3, "shard": 4}, 2, 2),  # HSDP: two groups of four, experts over pairs
        ({"data": 4, "tensor": 2, "expert": 4, "zero": 1, "shard": 4}, 1, 2),  # tensor ranks are expert ranks too
        ({"data": 2, "expert": 2, "zero": 3, "shard": 2}, 1, 1),
    ],
)
def test_copies_of_an_expert(dims, copies, shard):
    made = ParallelDims(**dims)
    assert (made.expert_copies, made.expert_shard) == (copies, shard)
    assert made.expert * made.expert_copies * made.expert_shard == made.stage


def test_context_ranks_share_shards():
    """A context rank holds the same weights as its neighbour: ZeRO may split them over both."""
    made = ParallelDims(data=2, context=2, zero=3, shard=4)
    assert (made.copies, made.stage, made.world) == (1, 4, 4)
