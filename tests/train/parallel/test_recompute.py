"""Recomputing changes when things are computed, never what; and what it keeps is what was meant."""

from __future__ import annotations

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from phalanx.train.parallel import float8
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


@pytest.mark.parametrize("product", ["linear", "fp8"])
def test_compiled_blocks_recompute_too(product, monkeypatch):
    """What a compiled block keeps for backward is in its forward graph: full recompute keeps inputs and weights only,
    selective the matrix products as well. torch.compile passes over a `functools.partial` around `checkpoint`."""
    if product == "fp8":  # CPUs have no fp8 products: exact ones take their place
        monkeypatch.setattr(float8, "round_rows", lambda rows: (rows, rows))
        monkeypatch.setattr(float8, "float8_transposed", lambda rows, _: rows.t())
        monkeypatch.setattr(float8, "multiply_fp8", lambda left, right, *_, **__: left[0] @ right[0].t())

    class Plain(Block):
        """Without the counter, which torch would not compile."""

        def forward(self, x):
            return x + self.down(torch.relu(self.up(x)))

    def kept_between(kind):
        kept = []

        def split(joint, inputs, **options):
            forward, backward = min_cut_rematerialization_partition(joint, inputs, **options)
            outputs = next(node for node in forward.graph.nodes if node.op == "output").args[0]
            kept.append([tuple(one.meta["val"].shape) for one in outputs[1:] if one.op != "placeholder"])
            return forward, backward

        torch.manual_seed(0)
        block = Plain().bfloat16()
        if product == "fp8":
            float8.use_float8([block], recomputed=1)
        recompute_blocks([block], kind)
        block.compile(backend=aot_autograd(fw_compiler=_as_it_is, bw_compiler=_as_it_is, partition_fn=split))
        x = torch.ones(32, 64, dtype=torch.bfloat16, requires_grad=True)
        block(x).sum().backward()
        return kept, [param.grad for param in block.parameters()]

    full, selective = kept_between("full"), kept_between("selective")
    assert full[0] == [[]]  # one graph
    assert (32, 128) in selective[0][0]
    for a, b in zip(full[1], selective[1], strict=True):
        assert torch.equal(a, b)


def _as_it_is(graph, _):
    return make_boxed_func(graph.forward)
