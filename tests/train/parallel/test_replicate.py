"""Buckets: launched in one order on every rank, summed in the reduce format, complete even where nothing arrived."""

from __future__ import annotations

import torch
from torch import nn

from phalanx.train.parallel.replicate import Replicas


def parameters(*sizes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(size)) for size in sizes]


def test_last_parameters_fill_the_first_bucket():
    params = parameters(10, 20, 30)
    made = Replicas(params, None, reduce=torch.float32, bucket_bytes=200)
    assert [[param.numel() for param in bucket.params] for bucket in made.buckets] == [[30, 20], [10]]


def test_micro_batches_add_up_and_steps_do_not():
    (param,) = parameters(2)
    made = Replicas([param], None, reduce=torch.float32)
    for _ in range(2):
        made.begin(2)
        for _ in range(2):
            (param * 3.0).sum().backward()
        made.finish()
        assert made.gradient(param).tolist() == [6.0, 6.0]
        assert param.grad is None


def test_a_parameter_without_a_gradient_has_zeros():
    used, idle = parameters(2, 2)
    made = Replicas([used, idle], None, reduce=torch.float32)
    for value in (1.0, 2.0):
        made.begin(1)
        (used * value).sum().backward()
        if value == 1.0:
            (idle * 5.0).sum().backward()
        made.finish()
    assert made.gradient(used).tolist() == [2.0, 2.0]
    assert made.gradient(idle).tolist() == [0.0, 0.0]  # not the 5 of the step before


def test_sums_over_ranks_whatever_order_they_arrive_in(ranks):
    """Each rank fills its buckets in another order: without a fixed launch order they would be paired wrongly."""
    assert ranks(__file__, "uneven") == [[[10.0], [1.0], [2.0], [3.0]]] * 4


def on_rank_uneven(rank, group):
    params = parameters(1, 1, 1, 1)
    made = Replicas(params, group, reduce=torch.float32, bucket_bytes=4)
    made.begin(1)
    order = [(rank + step) % 4 for step in range(4)]
    for index in order:
        if index == 0:
            (params[0] * (rank + 1)).sum().backward()
        elif index == rank:
            (params[index] * float(index)).sum().backward()  # the others have no gradient for it
    made.finish()
    return [made.gradient(param).tolist() for param in params]


def test_narrow_gradients_are_summed_wide(ranks):
    """bfloat16 gradients in a float32 bucket: 256 + 1 is 257, not 256."""
    assert ranks(__file__, "wide", size=2) == [[257.0]] * 2


def on_rank_wide(rank, group):
    param = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    made = Replicas([param], group, reduce=torch.float32)
    made.begin(1)
    (param * (256.0 if rank else 1.0)).sum().backward()
    made.finish()
    return made.gradient(param).tolist()
