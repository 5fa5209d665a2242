"""An optimizer in host memory: shard by shard while gradients come and weights go."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from phalanx.train.optim import host_transfers
from phalanx.train.optim.adamw import AdamW
from phalanx.train.optim.host_transfers import HostTransfers
from phalanx.train.parallel.tensor_shard import TensorShard

SIZES = ((40, 8), (8,), (0, 8), (33, 5))


def shards_of(tensors: Sequence[torch.Tensor]) -> list[TensorShard]:
    return [
        TensorShard(
            name=f"w{i}", tensor=one, shape=tuple(one.shape), start=(0,) * one.ndim, replicas=1, owner=True, groups={}
        )
        for i, one in enumerate(tensors)
    ]


def optimizer_of(tensors: Sequence[torch.Tensor]) -> AdamW:
    return AdamW(
        shards_of(tensors), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, decays=lambda name: name in ("w0", "w3")
    )


def test_shard_by_shard_is_the_same_update_in_the_order_of_the_shards() -> None:
    torch.manual_seed(0)
    together = [torch.randn(size) for size in SIZES]
    apart = [one.clone() for one in together]
    whole, each = optimizer_of(together), optimizer_of(apart)
    heard: list[tuple[str, int]] = []
    for _ in range(3):
        for one, other in zip(together, apart, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = None

        def arrive(place: int) -> None:
            heard.append(("before", place))
            apart[place].grad = together[place].grad  # not there any earlier

        whole.step(0.01)
        each.step_each(0.01, before=arrive, after=lambda place: heard.append(("after", place)))
    assert all(torch.equal(one, other) for one, other in zip(together, apart, strict=True))
    assert heard[:6] == [(when, place) for place in (0, 1, 3) for when in ("before", "after")]
    assert each.steps == whole.steps == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_weights_come_back_from_host_memory_as_they_were_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_transfers, "PIECE_VALUES", 100)  # so that a weight comes in several pieces
    torch.manual_seed(0)
    masters = [torch.randn(size).pin_memory() for size in SIZES]
    alone = [one.clone() for one in masters]
    weights = [torch.zeros(size, dtype=torch.bfloat16, device="cuda") for size in SIZES]
    moving, optimizer, other = HostTransfers(weights, masters), optimizer_of(masters), optimizer_of(alone)
    for _ in range(3):
        grads = [torch.randn(size, device="cuda") for size in SIZES]
        moving.send_gradients(grads)
        for one, host in zip(masters, moving.gradients, strict=True):
            one.grad = host
        for one, grad in zip(alone, grads, strict=True):
            one.grad = grad.cpu()
        optimizer.step_each(0.01, before=moving.await_gradient, after=moving.return_weight)
        moving.finish()
        other.step(0.01)
        for weight, master, one in zip(weights, masters, alone, strict=True):
            assert torch.equal(master, one)
            assert torch.equal(weight.cpu(), one.bfloat16())
