"""Routing, experts and balance, against the same written token by token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from phalanx.job.model import ModelShape
from phalanx.train.models.decoder import Block, Decoder
from phalanx.train.models.moe import Moe
from phalanx.train.parallel.recompute import recompute_blocks

SHAPE = ModelShape(
    name="m",
    layers=1,
    hidden=16,
    heads=2,
    kv_heads=2,
    head_dim=8,
    ffn=16,
    vocab=31,
    experts=6,
    experts_per_token=2,
    expert_ffn=12,
)


def made(shape: ModelShape) -> Moe:
    model = Decoder(shape)
    model.init_weights(3)
    moe = model.double().layers["0"].mlp
    assert isinstance(moe, Moe)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.mul_(20.0)  # away from even scores
    return moe


def inputs(batch: int = 3, length: int = 7) -> Tensor:
    return torch.randn(batch, length, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def by_hand(moe: Moe, x_TD: Tensor, shape: ModelShape) -> Tensor:
    """One token and one expert at a time."""
    rows = []
    for x_D in x_TD:
        logits_E = moe.router.weight @ x_D
        scores_E = logits_E.sigmoid() if shape.router_score == "sigmoid" else logits_E.softmax(0)
        ranked_E = scores_E if moe.router.bias is None else scores_E + moe.router.bias
        chosen = ranked_E.argsort(descending=True)[: shape.experts_per_token].tolist()
        total = sum(scores_E[e] for e in chosen) if shape.renormalise else 1.0
        y_D = torch.zeros_like(x_D)
        for e in chosen:
            up_F = moe.experts.up[e] @ x_D
            gate = moe.experts.gate
            inner_F = F.gelu(up_F) if gate is None else F.silu(gate[e] @ x_D) * up_F
            y_D = y_D + shape.routed_scale * scores_E[e] / total * (moe.experts.down[e] @ inner_F)
        rows.append(y_D if moe.shared is None else y_D + moe.shared(x_D))
    return torch.stack(rows)


@pytest.mark.parametrize(
    "shape",
    [
        SHAPE,
        replace(SHAPE, renormalise=False, shared_experts=2),
        replace(SHAPE, router_score="sigmoid", router_bias=True, balance="bias", routed_scale=2.5),
        replace(SHAPE, gated=False, activation="gelu", experts_per_token=1),
    ],
)
def test_every_token_reaches_its_experts(shape: ModelShape) -> None:
    moe, x_BSD = made(shape), inputs().requires_grad_()
    if moe.router.bias is not None:
        moe.router.bias[2] += 0.4
    ours, written_out = moe(x_BSD), by_hand(moe, x_BSD.flatten(0, 1), shape).view_as(x_BSD)
    torch.testing.assert_close(ours, written_out)
    wanted = [x_BSD, *moe.parameters()]
    direction = torch.randn(ours.shape, dtype=ours.dtype, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(
        torch.autograd.grad(ours, wanted, direction), torch.autograd.grad(written_out, wanted, direction)
    )


@pytest.mark.parametrize("gated", [True, False])
def test_the_grouped_kernel_is_the_loop(gated: bool) -> None:
    """GPUs take this path; in bfloat16 the kernel also exists on the CPU."""
    experts = made(replace(SHAPE, gated=gated, expert_ffn=24)).to(torch.bfloat16).experts
    x_MD = inputs(1, 20)[0].to(torch.bfloat16).requires_grad_()
    counts_E = torch.tensor([5, 0, 7, 1, 7, 0])
    wanted = [x_MD, *experts.parameters()]
    loop, grouped = experts(x_MD, counts_E), experts.run_grouped(x_MD, counts_E)
    torch.testing.assert_close(grouped, loop, rtol=0.02, atol=0.02)
    direction = torch.ones_like(loop)
    ours, theirs = (torch.autograd.grad(y, wanted, direction, retain_graph=True) for y in (grouped, loop))
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).norm() < 0.02 * other.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_grouped_kernel_on_a_gpu() -> None:
    moe = made(replace(SHAPE, hidden=64, head_dim=32, expert_ffn=128)).to("cuda", torch.bfloat16)
    x_BSD = torch.randn(2, 50, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y_BSD = moe(x_BSD)
    (y_BSD * x_BSD.detach()).sum().backward()
    slow = moe.double()
    exact = slow(x_BSD.detach().double())
    assert (y_BSD.double() - exact).norm() < 0.03 * exact.norm()


def test_an_expert_nobody_chose_has_a_gradient_of_zero() -> None:
    moe = made(replace(SHAPE, router_bias=True, balance="bias"))
    assert moe.router.bias is not None
    moe.router.bias[4] = -100.0
    moe(inputs()).sum().backward()
    assert moe.counts_E[4] == 0
    assert moe.experts.up.grad is not None
    assert moe.experts.up.grad[4].abs().max() == 0
    assert moe.experts.up.grad[0].abs().max() > 0


@pytest.mark.filterwarnings("ignore")  # what dynamo touches while it reads a block
@pytest.mark.parametrize("compiled", [False, True])
def test_tokens_are_counted_once(compiled: bool) -> None:
    """Compiled in one graph: a graph break in every block would keep its halves apart."""
    from torch._dynamo.testing import CompileCounterWithBackend  # under the filter: what it imports warns, by version

    counted = CompileCounterWithBackend("aot_eager")
    model = Decoder(SHAPE)
    model.init_weights(0)
    block = model.layers["0"]
    assert isinstance(block, Block)
    assert isinstance(block.mlp, Moe)
    block.mlp.experts.forward = lambda x_MD, counts_E: x_MD  # type: ignore[method-assign]  # a CPU waits for the counts
    x_BSD = inputs().float().requires_grad_()
    if compiled:
        recompute_blocks([block], "full")
        block.compile(backend=counted, fullgraph=True)
    for real in ([1, 1, 1], [1, 0, 1]):
        block.mlp.real_B = torch.tensor(real)
        checkpoint(block, x_BSD, None, use_reentrant=False).sum().backward()  # computes the block twice
    with torch.no_grad():
        block(x_BSD, None)  # an evaluation
    assert block.mlp.counts_E.sum() == (3 + 2) * 7 * 2
    assert counted.frame_count == (2 if compiled else 0)
    block.mlp.update_bias(block.mlp.counts_E)
    assert block.mlp.counts_E.sum() == 0


def test_bias_moves_towards_the_idle_and_stays_float32() -> None:
    moe = made(replace(SHAPE, router_bias=True, balance="bias", balance_rate=0.01))
    assert moe.router.bias is not None
    moe.update_bias(torch.tensor([10, 0, 4, 4, 4, 2]))
    assert moe.router.bias.tolist() == pytest.approx([-0.01, 0.01, 0.0, 0.0, 0.0, 0.01])
    assert moe.to(torch.bfloat16).router.bias.dtype is torch.float32  # type: ignore[union-attr]
    assert moe.router.bias.tolist() == pytest.approx([-0.01, 0.01, 0.0, 0.0, 0.0, 0.01])


def crowded(moe: Moe) -> Tensor:
    """Tokens that nearly all prefer the same experts."""
    return inputs(4, 16) * 0.3 + moe.router.weight[1].detach()


def test_bias_evens_out_the_load() -> None:
    moe = made(replace(SHAPE, router_bias=True, balance="bias", balance_rate=0.04))
    x_BSD = crowded(moe)
    moe(x_BSD)
    assert moe.counts_E.max() == 64  # of 128 visits
    late = torch.zeros_like(moe.counts_E)
    for step in range(60):
        moe.update_bias(moe.counts_E)
        moe(x_BSD)
        late += moe.counts_E * (step >= 40)
    assert late.max() < 0.25 * late.sum()
    assert late.min() > 0.10 * late.sum()


def aux_gradient(moe: Moe, parts: list[Tensor], scale: float) -> Tensor:
    moe.zero_grad()
    moe.aux_scale = scale
    for x_BSD in parts:
        (moe(x_BSD) * 0.0).sum().backward()
    assert moe.router.weight.grad is not None
    return moe.router.weight.grad.clone()


def test_aux_loss_is_deepseeks_and_the_same_in_any_batches() -> None:
    shape = replace(SHAPE, balance="aux", balance_rate=0.3)
    moe, x_BSD = made(shape), inputs(4)
    loss = torch.zeros((), dtype=torch.float64)
    for x_SD in x_BSD:  # arXiv:2412.19437 eq. 17-20
        scores_SE = (x_SD @ moe.router.weight.T).softmax(-1)
        visits_E = F.one_hot(scores_SE.topk(2).indices, 6).sum((0, 1))
        f_E = 6 / (2 * len(x_SD)) * visits_E
        loss = loss + 0.3 * (f_E * scores_SE.mean(0)).sum()
    expected = torch.autograd.grad(loss / 4, moe.router.weight)[0]
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(aux_gradient(moe, [x_BSD], 1 / 4), expected)
    torch.testing.assert_close(aux_gradient(moe, list(x_BSD.split(1)), 1 / 4), expected)
    torch.testing.assert_close(moe(x_BSD), by_hand(moe, x_BSD.flatten(0, 1), shape).view_as(x_BSD))
    assert aux_gradient(moe, [x_BSD], 0.0).abs().max() == 0


def test_aux_loss_of_a_sequence_split_over_ranks() -> None:
    """Two halves of each sequence, each with the visits of both, give the gradient of the whole."""
    moe, x_BSD = made(replace(SHAPE, balance="aux")), inputs(2, 8)
    whole = aux_gradient(moe, [x_BSD], 0.5)
    halves = list(x_BSD.split(4, dim=1))
    visits: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        visits.append(tensor)
        return tensor

    moe.sum_over_sequence = note
    aux_gradient(moe, halves, 0.5)
    moe.sum_over_sequence = lambda _: visits[0] + visits[1]
    torch.testing.assert_close(aux_gradient(moe, halves, 0.5), whole)


def test_the_loss_evens_out_the_load() -> None:
    moe = made(replace(SHAPE, balance="aux", balance_rate=1.0))
    x_BSD = crowded(moe)
    moe.aux_scale = 1 / 4
    optimizer = torch.optim.SGD([moe.router.weight], lr=0.5)
    for _ in range(40):
        optimizer.zero_grad()
        moe.counts_E.zero_()
        (moe(x_BSD) * 0.0).sum().backward()
        optimizer.step()
    assert moe.counts_E.max() < 50
