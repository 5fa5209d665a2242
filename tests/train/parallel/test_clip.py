"""The gradient norm: each value counted once, however many ranks hold it."""

from __future__ import annotations

import torch

from phalanx.train.parallel.gradients import scale_gradients, squared_norm
from phalanx.train.parallel.tensor_shard import TensorShard


def shard(replicas: int) -> TensorShard:
    owner = replicas == 1
    return TensorShard(
        name="w", tensor=torch.zeros(2), shape=(2,), start=(0,), replicas=replicas, owner=owner, groups={}
    )


def test_a_copy_counts_on_one_rank_only():
    grads = [torch.tensor([3.0, 4.0]), torch.tensor([6.0, 8.0]), torch.empty(0)]
    assert squared_norm([shard(1), shard(4), shard(1)], grads).item() == 25.0


def test_a_copy_that_is_not_finite_is_heard_of_from_every_rank():
    grads = [torch.tensor([3.0, 4.0]), torch.tensor([6.0, float("inf")])]
    assert torch.isnan(squared_norm([shard(1), shard(4)], grads))


def test_a_rank_that_holds_nothing_adds_nothing():
    assert squared_norm([], []).item() == 0.0
    assert squared_norm([shard(1)], [torch.empty(0)]).item() == 0.0


def test_an_infinity_shows():
    assert torch.isinf(squared_norm([shard(1)], [torch.tensor([1.0, float("inf")])]))
    assert torch.isnan(squared_norm([shard(1)], [torch.tensor([1.0, float("nan")])]))


def test_scaling_is_in_place_and_exact_for_one():
    grads = [torch.tensor([2.0]), torch.tensor([4.0])]
    scale_gradients(grads, 0.5)
    assert [grad.item() for grad in grads] == [1.0, 2.0]
    scale_gradients([], 0.5)
