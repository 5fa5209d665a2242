"""Split experts against the whole mixture on one process, in float64: outputs and every gradient."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.errors import UserError
from phalanx.job.model import ModelShape
from phalanx.train.models.initial_values import draw_values
from phalanx.train.models.moe import Moe
from phalanx.train.parallel.dims import Meshes, ParallelDims, build_meshes
from phalanx.train.parallel.expert import (
    ExpertExchange,
    _check_divides,
    balance_routing,
    even_sizes,
    expert_imbalance,
    expert_offset,
    split_experts,
)

B, S, D, F, E = 4, 8, 16, 24, 8


def mixture(chosen: int, *, balance: str = "none", skew: bool = False, shared: int = 1) -> Moe:
    """The whole mixture, the same on every rank. `skew` makes all tokens choose the first experts."""
    shape = ModelShape(
        name="tiny", layers=1, hidden=D, heads=2, kv_heads=2, head_dim=8, ffn=F, vocab=32, experts=E,
        experts_per_token=chosen, expert_ffn=F, shared_experts=shared, router_bias=skew, balance=balance,
        balance_rate=0.1,
    )  # fmt: skip
    moe = Moe(shape).double()
    with torch.no_grad():
        for name, parameter in moe.named_parameters():
            parameter.copy_(draw_values(name, parameter.shape, seed=3, layers=1, dtype=torch.float64) * 10)
        if moe.router.bias is not None:
            moe.router.bias.copy_(-10.0 * torch.arange(E))
    moe.aux_scale = 1.0
    return moe


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(11)
    x, grad = (torch.randn(B, S, D, generator=draws, dtype=torch.float64) for _ in range(2))
    return x, grad


def run(moe: Moe, x_BSD: torch.Tensor, grad_BSD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x_BSD = x_BSD.clone().requires_grad_()
    y_BSD = moe(x_BSD)
    y_BSD.backward(grad_BSD)
    assert x_BSD.grad is not None
    return y_BSD.detach(), x_BSD.grad


def my_part(x_BSD: torch.Tensor, meshes: Meshes, *, sequence_parallel: bool) -> torch.Tensor:
    """Sequences by data rank, positions by context and, with sequence parallelism, tensor rank."""
    dims = meshes.dims
    x_BSD = x_BSD.chunk(dims.data)[meshes.index("data")].chunk(dims.context, dim=1)[meshes.index("context")]
    return x_BSD.chunk(dims.tensor, dim=1)[meshes.index("tensor")] if sequence_parallel else x_BSD


def on_rank_layout(
    rank: int, group: Any, *, degrees: dict[str, int], sequence_parallel: bool, chosen: int, skew: bool, balance: str
) -> dict[str, Any]:
    """Largest differences of this rank's part of output and gradients from the whole mixture's."""
    whole, split = (mixture(chosen, balance=balance, skew=skew) for _ in range(2))
    y_BSD, dx_BSD = run(whole, *batch())
    meshes = build_meshes(ParallelDims(**degrees), "cpu", experts=True)
    split_experts(split, meshes, sequence_parallel=sequence_parallel)
    mine = [my_part(one, meshes, sequence_parallel=sequence_parallel) for one in (*batch(), y_BSD, dx_BSD)]
    y, dx = run(split, mine[0], mine[1])
    apart = {"y": (y - mine[2]).abs().max().item(), "dx": (dx - mine[3]).abs().max().item()}
    offsets, theirs = expert_offset(split), dict(whole.named_parameters())
    for name, parameter in split.named_parameters():
        gradient, expected = parameter.grad, theirs[name].grad
        assert gradient is not None
        assert expected is not None
        reduce_gradient(name, gradient, meshes, sequence_parallel=sequence_parallel)
        if name in offsets:
            dim, start, _ = offsets[name]
            expected = expected.narrow(dim, start, gradient.shape[dim])
        assert gradient.shape == expected.shape, name
        apart[name] = (gradient - expected).abs().max().item()
    return {"apart": apart, "offsets": offsets, "arrived": arrived(split)}


def reduce_gradient(name: str, gradient: torch.Tensor, meshes: Meshes, *, sequence_parallel: bool) -> None:
    """As the engine does: dense weights over data and context, experts over their copies."""
    if name.startswith("experts.") and meshes.experts is not None:
        for axis in ("copies", "shard"):
            dist.all_reduce(gradient, group=meshes.experts.get_group(axis))
        return
    for axis in ("data", "context"):
        dist.all_reduce(gradient, group=meshes.group(axis))
    if name.startswith("shared.") and sequence_parallel:
        dist.all_reduce(gradient, group=meshes.group("tensor"))  # tensor.py splits it; here every rank holds it whole


def arrived(moe: Moe) -> int:
    """Rows that reached this rank's experts, from the last gradient of `up`: zero rows leave zero gradients."""
    assert moe.experts.up.grad is not None
    return int(moe.experts.up.grad.abs().sum() > 0)


LAYOUTS = {
    "ep2": ({"data": 2, "expert": 2}, False),
    "ep4": ({"data": 4, "expert": 4}, False),
    "ep2 with 2 copies": ({"data": 4, "expert": 2}, False),
    "ep2 with context": ({"data": 2, "context": 2, "expert": 2}, False),
    "ep2 in a tensor group": ({"tensor": 2, "expert": 2}, False),
    "ep2 in a sequence parallel group": ({"tensor": 2, "expert": 2}, True),
    "ep4 across tensor groups": ({"data": 2, "tensor": 2, "expert": 4}, False),
    "ep4 across sequence parallel groups": ({"data": 2, "tensor": 2, "expert": 4}, True),
    "width over tensor ranks": ({"tensor": 2}, False),
    "width over sequence parallel ranks": ({"data": 2, "tensor": 2}, True),
    "no split": ({"data": 2}, False),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("chosen", [1, 2])
def test_outputs_and_gradients_equal_the_whole(ranks: Any, layout: str, chosen: int) -> None:
    degrees, sequence_parallel = LAYOUTS[layout]
    asked = {"degrees": degrees, "sequence_parallel": sequence_parallel, "chosen": chosen}
    for answer in ranks(__file__, "layout", 4, **fill(asked), skew=False, balance="none"):
        assert max(answer["apart"].values()) < 1e-12, answer["apart"]


def fill(asked: dict[str, Any]) -> dict[str, Any]:
    """The same layout with as many pipeline stages as make it four ranks: DeviceMesh covers the whole world."""
    degrees = asked["degrees"]
    used = degrees.get("data", 1) * degrees.get("context", 1) * degrees.get("tensor", 1)
    return {**asked, "degrees": {**degrees, "pipeline": 4 // used}}


@pytest.mark.parametrize("layout", ["ep4", "ep4 across sequence parallel groups"])
def test_a_rank_may_receive_no_token(ranks: Any, layout: str) -> None:
    degrees, sequence_parallel = LAYOUTS[layout]
    asked = {"degrees": degrees, "sequence_parallel": sequence_parallel, "chosen": 2}
    answers = ranks(__file__, "layout", 4, **fill(asked), skew=True, balance="none")
    assert [answer["arrived"] for answer in answers] == [1, 0, 0, 0]
    assert max(max(answer["apart"].values()) for answer in answers) < 1e-12


@pytest.mark.parametrize(
    "layout", ["ep2 with context", "ep4 across sequence parallel groups", "ep4 across tensor groups"]
)
def test_the_auxiliary_loss_counts_whole_sequences(ranks: Any, layout: str) -> None:
    degrees, sequence_parallel = LAYOUTS[layout]
    asked = {"degrees": degrees, "sequence_parallel": sequence_parallel, "chosen": 2}
    for answer in ranks(__file__, "layout", 4, **fill(asked), skew=False, balance="aux"):
        assert max(answer["apart"].values()) < 1e-12, answer["apart"]


def test_offsets_say_which_part_is_held(ranks: Any) -> None:
    asked = {"sequence_parallel": False, "chosen": 1, "skew": False, "balance": "none"}
    experts = ranks(__file__, "layout", 4, degrees={"data": 4, "expert": 4}, **asked)
    assert [answer["offsets"]["experts.down"] for answer in experts] == [(0, start, E) for start in (0, 2, 4, 6)]
    widths = ranks(__file__, "layout", 4, degrees={"data": 2, "tensor": 2}, **asked)
    assert [answer["offsets"]["experts.down"] for answer in widths] == [(2, start, F) for start in (0, 12, 0, 12)]
    assert widths[1]["offsets"]["experts.up"] == (1, 12, F)


def on_rank_balanced(rank: int, group: Any, *, tokens: int) -> list[int]:
    """Rows that reach this rank when every expert is taken to be chosen equally often."""
    moe = mixture(2, skew=True)
    split_experts(moe, build_meshes(ParallelDims(data=4, expert=4), "cpu", experts=True), sequence_parallel=False)
    balance_routing(moe)
    seen: list[int] = []
    moe.experts.register_forward_pre_hook(lambda _, given: seen.extend(given[1]))
    run(moe, torch.randn(1, tokens, D, dtype=torch.float64), torch.randn(1, tokens, D, dtype=torch.float64))
    return seen


@pytest.mark.parametrize("tokens", [8, 7])
def test_balanced_routing_gives_every_expert_its_share(ranks: Any, tokens: int) -> None:
    seen = [count for counts in ranks(__file__, "balanced", 4, tokens=tokens) for count in counts]
    assert seen == [4 * size for size in even_sizes(2 * tokens, E)]


FAKE = """
import torch, torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from phalanx.job.model import ModelShape
from phalanx.train.models.moe import Moe
from phalanx.train.parallel.dims import ParallelDims, build_meshes
from phalanx.train.parallel.expert import balance_routing, expert_offset, split_experts
dist.init_process_group("fake", store=FakeStore(), rank=37, world_size=64)
meshes = build_meshes(ParallelDims(data=16, tensor=4, expert=16), "cpu", experts=True)
shape = ModelShape(name="x", layers=1, hidden=32, heads=2, kv_heads=2, head_dim=16, ffn=64, vocab=8, experts=32,
                   experts_per_token=2, expert_ffn=48)
with torch.device("meta"):
    moe = Moe(shape)
split_experts(moe, meshes, sequence_parallel=True)
balance_routing(moe)
with FakeTensorMode(allow_non_fake_inputs=True):
    moe.to_empty(device="cpu")
    moe(torch.empty(1, 20, 32, requires_grad=True)).sum().backward()
    print(*moe.experts.up.grad.shape, expert_offset(moe)["experts.up"])
"""


def test_a_rank_of_64_traces_on_fake_tensors() -> None:
    done = subprocess.run([sys.executable, "-c", FAKE], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["2 48 32 (0, 10, 32)"], done.stderr


def test_imbalance_names_the_busiest() -> None:
    found = expert_imbalance(torch.tensor([1, 1, 1, 5, 2, 2, 2, 2]), 4)
    assert (found.expert, found.rank, found.busiest_expert, found.busiest_rank) == (2.5, 1.5, 3, 1)
    assert expert_imbalance(torch.zeros(8, dtype=torch.int64), 4).rank == 1.0


def test_experts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UserError) as caught:
        _check_divides(60, 8)
    assert str(caught.value) == (
        "parallel.expert: 8 expert ranks do not divide the model's 60 experts\n"
        "  each expert rank must hold whole experts\n"
        "  use 6"
    )


def test_a_plain_mixture_keeps_its_dispatch() -> None:
    assert not isinstance(mixture(2).dispatch, ExpertExchange)
    assert expert_offset(mixture(2)) == {}
