"""Recomputing changes when things are computed, never what; and what it keeps is what was meant."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from phalanx.train.parallel.recompute import offload_activations, recompute_blocks


class Block(nn.Module):
    """Counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.forwards = 0

    def forward(self, x):
        self.forwards += 1
        return x + self.down(torch.relu(self.up(x)))


def grads(change, rows: int = 4) -> tuple[Block, list[torch.Tensor]]:
    torch.manual_seed(0)
    block = Block()
    change(block)
    block(torch.ones(rows, 64, requires_grad=True)).sum().backward()
    return block, [param.grad for param in block.parameters()]


@pytest.mark.parametrize(("kind", "forwards"), [("none", 1), ("full", 2), ("selective", 2)])
def test_same_gradients(kind, forwards):
    block, found = grads(lambda block: recompute_blocks([block], kind))
    _, wanted = grads(lambda block: None)
    assert block.forwards == forwards
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


def test_names_stay():
    """Checkpoints and optimizers go by name."""
    plain = list(dict(Block().named_parameters()))
    block, _ = grads(lambda block: recompute_blocks([block], "full"))
    assert list(dict(block.named_parameters())) == plain


def test_selective_keeps_matrix_products():
    """They are not done again: one of each linear in forward, two in backward. Full recompute does the first again."""
    from torch.utils.flop_counter import FlopCounterMode

    def flops(kind):
        torch.manual_seed(0)
        block = Block()
        recompute_blocks([block], kind)
        with FlopCounterMode(display=False) as counter:
            block(torch.ones(4, 64, requires_grad=True)).sum().backward()
        return counter.get_total_flops()

    assert flops("selective") == flops("none")
    assert flops("full") * 6 == flops("none") * 7  # what nothing after it needs is not computed again


def test_offloaded_activations_give_the_same_gradients():
    """512 rows: smaller tensors are not moved."""
    _, found = grads(lambda block: offload_activations([block]), rows=512)
    _, wanted = grads(lambda block: None, rows=512)
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)
