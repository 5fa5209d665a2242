"""fp8 products split over tensor ranks: with an exact product in place of fp8's, the same numbers as one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from phalanx.job.model import ModelShape
from phalanx.train.models.decoder import Decoder
from phalanx.train.parallel import float8
from phalanx.train.parallel.tensor import split_tensors

SHAPE = ModelShape(name="t", layers=2, hidden=64, heads=8, kv_heads=4, head_dim=16, ffn=128, vocab=64)


@pytest.mark.parametrize("sequence", [False, True])
def test_split_products_equal_whole_ones(ranks, sequence: bool) -> None:
    for largest, replaced in ranks(__file__, "products", 4, sequence=sequence):
        assert largest < 1e-12
        assert replaced == 2 * 7  # every linear of both blocks


def test_parts_too_narrow_for_fp8_stay_as_they_are() -> None:
    blocks = [nn.Sequential(nn.Linear(16, 24), nn.Linear(32, 16))]
    float8.use_float8(blocks)
    assert [type(one).__name__ for one in blocks[0]] == ["Linear", "Float8Linear"]


def on_rank_products(rank, group, *, sequence):
    torch.manual_seed(0)
    whole = Decoder(SHAPE).double()
    for value in whole.parameters():
        nn.init.normal_(value, std=0.1)
    split = Decoder(SHAPE).double()
    mesh = init_device_mesh("cpu", (4,))
    split_tensors(split, mesh, sequence=sequence, loss_parallel=False)
    float8.use_float8(list(split.layers.values()))
    ours, theirs = dict(split.named_parameters()), dict(whole.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        full = theirs[name].detach()
        assert not isinstance(value, DTensor) or value.shape == full.shape
        with torch.no_grad():
            value.copy_(distribute_tensor(full, mesh, value.placements) if isinstance(value, DTensor) else full)
    tokens = torch.randint(0, SHAPE.vocab, (2, 16))
    patch = pytest.MonkeyPatch()
    patch.setattr(float8, "round_rows", lambda rows: (rows, rows))
    patch.setattr(float8, "float8_transposed", lambda rows, _: rows.t())
    patch.setattr(float8, "multiply_fp8", lambda left, right, *_, **__: left[0] @ right[0].t())
    try:
        out = split(tokens)
        out = out.full_tensor() if isinstance(out, DTensor) else out
        out.square().mean().backward()
    finally:
        patch.undo()
    expected = whole(tokens)
    expected.square().mean().backward()
    differences = [(out - expected).detach().abs().max()]
    for name, value in ours.items():
        grad = value.grad.full_tensor() if isinstance(value.grad, DTensor) else value.grad
        differences.append((grad - theirs[name].grad).abs().max() / theirs[name].grad.abs().max())
    replaced = sum(isinstance(module, float8.Float8Linear) for module in split.modules())
    return max(float(one) for one in differences), replaced
