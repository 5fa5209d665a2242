"""Tokens to experts and back by the kernels' operations, alone and in a mixture of experts; which is taken."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from phalanx.job.model import ModelShape
from phalanx.plan.layout import Layout
from phalanx.train.kernels import expert_choice
from phalanx.train.kernels.expert_choice import COMBINE, GATHER, choose_in_layer, expert_shape, layer_call
from phalanx.train.kernels.model_kernels import LayerKernels, asked_shapes, use_kernels
from phalanx.train.kernels.moe_permute import EXPERT_GATHER, combine_rows, gather_rows
from phalanx.train.kernels.selector import KernelChoice, Timing
from phalanx.train.models import moe as moe_layers
from phalanx.train.models.decoder import Decoder
from phalanx.train.rank_settings import Settings

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SHAPE = ModelShape(
    name="m", layers=2, hidden=16, heads=2, kv_heads=2, head_dim=8, ffn=16, vocab=31, experts=6, experts_per_token=2,
    expert_ffn=12, shared_experts=1,
)  # fmt: skip
LAYOUT = Layout(
    data=1, shard=1, tensor=1, context=1, pipeline=1, virtual_pipeline=1, expert=1, zero=0, sequence_parallel=False,
    micro_batch=2, accumulation=1, recompute="none", precision="bf16", schedule="1f1b", offload="none",
    compression="none",
)  # fmt: skip
SETTINGS = Settings(layout=LAYOUT, sequence=8)


def written_out(x_TD: Tensor, back_TK: Tensor, weight_TK: Tensor) -> tuple[Tensor, Tensor]:
    """A visit at a time; the experts double what they get."""
    rows = [x_TD.new_empty(0)] * back_TK.numel()
    for token, places in enumerate(back_TK.tolist()):
        for place in places:
            rows[place] = x_TD[token]
    sums = [
        sum(2 * rows[place] * weight_TK[token, k] for k, place in enumerate(places))
        for token, places in enumerate(back_TK.tolist())
    ]
    return torch.stack(rows), torch.stack(sums)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("tokens", "chosen", "width"), [(5, 1, 70), (1, 3, 5), (4, 6, 2500)])
def test_rows_reach_their_places_and_come_back(tokens: int, chosen: int, width: int, device: str) -> None:
    generator = torch.Generator().manual_seed(tokens)
    back_TK = torch.randperm(tokens * chosen, generator=generator).view(tokens, chosen).to(device)
    x_TD, grad_TD = (torch.randn(width, tokens, generator=generator).to(device).t() for _ in range(2))  # by column
    weight_TK = torch.rand(tokens, chosen, generator=generator).to(device)
    leaves = x_TD.requires_grad_(), weight_TK.requires_grad_()
    rows_MD = gather_rows(x_TD, back_TK)
    sum_TD = combine_rows(2 * rows_MD, back_TK, weight_TK)
    truth_MD, truth_TD = written_out(*(one.detach().double() for one in leaves[:1]), back_TK, weight_TK.double())
    assert torch.equal(rows_MD.double(), truth_MD)
    torch.testing.assert_close(sum_TD, truth_TD.float(), rtol=1e-5, atol=1e-5)
    exact = [one.detach().double().requires_grad_() for one in leaves]
    wanted = torch.autograd.grad(written_out(exact[0], back_TK, exact[1])[1], exact, grad_TD.double())
    found = torch.autograd.grad(sum_TD, leaves, grad_TD, retain_graph=True)
    for one, other in zip(found, wanted, strict=True):
        assert (one.double() - other).norm() < 1e-6 * other.norm() + 1e-5 * grad_TD.norm()
    again = torch.autograd.grad(combine_rows(2 * gather_rows(x_TD, back_TK), back_TK, weight_TK), leaves, grad_TD)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_no_token_has_no_rows(device: str) -> None:
    x_TD = torch.randn(0, 8, device=device, requires_grad=True)
    back_TK = torch.empty(0, 3, dtype=torch.int64, device=device)
    sum_TD = combine_rows(gather_rows(x_TD, back_TK), back_TK, torch.empty(0, 3, device=device))
    (found,) = torch.autograd.grad(sum_TD.sum(), x_TD)
    assert sum_TD.shape == found.shape == (0, 8)


def loss_and_gradients(model: Decoder) -> list[Tensor]:
    tokens = torch.randint(0, 31, (2, 12), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    loss = model(tokens).logsumexp(-1).mean()
    loss.backward()
    return [loss.detach(), *(one.grad.clone() for one in model.parameters())]


@pytest.mark.parametrize("compiled", [False, True])
def test_experts_take_what_was_chosen(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Decoder(SHAPE)
    model.init_weights(3)
    before = loss_and_gradients(model)
    permuted: list[int] = []
    plain = moe_layers.permute_rows
    monkeypatch.setattr(moe_layers, "permute_rows", lambda *given: permuted.append(1) or plain(*given))
    for gather, combine in ((True, True), (True, False), (False, True), (False, False)):
        taken = {GATHER: gather, COMBINE: combine}
        choices = {
            op: KernelChoice(op=op, variant="triton" if ours else "builtin", times_ms={"builtin": 2.0, "triton": 1.0})
            for op, ours in taken.items()
        }
        chosen = LayerKernels(choices=choices, compiled=compiled)
        use_kernels([model], chosen)
        permuted.clear()
        for one, other in zip(before, loss_and_gradients(model), strict=True):
            torch.testing.assert_close(one, other, rtol=2e-5, atol=1e-6)
        assert len(permuted) == 2 * (2 - gather - combine)
        assert any(line.startswith(f"expert-gather: {choices[GATHER].variant}") for line in chosen.describe())


def test_what_is_asked_for() -> None:
    """Sizes of the job; in compiled blocks only where experts' products are one kernel."""
    sizes = {"tokens": 2 * 8, "width": 16, "experts": 6, "chosen": 2}
    for shape, kind, compiled, is_asked in (
        (SHAPE, "bf16", True, True),
        (SHAPE, "bf16", False, True),
        (SHAPE, "fp32", False, True),
        (SHAPE, "fp32", True, False),
        (replace(SHAPE, experts=0), "bf16", True, False),
    ):
        settings = replace(SETTINGS, compute=kind, compile=compiled)
        asked = asked_shapes(shape, settings, torch.device("cuda"))
        assert [asked.get(op) for op in (GATHER, COMBINE)] == [sizes if is_asked else None] * 2


@pytest.mark.filterwarnings("ignore")  # what torch's compiler touches when it is imported, by version
def test_a_compiled_layer_is_timed_each_way_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU the layers are built and run as they are, and the times are given."""
    asked: list[bool] = []

    def layer(*given: object, ours: str, **options: object) -> object:
        asked.append(bool(ours))
        call = layer_call(*given, ours=ours, **options)  # type: ignore[arg-type]
        assert call()[0].shape == (1, 40, 16)
        return call

    compiled: list[str] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, backend: compiled.append(backend))
    monkeypatch.setattr(expert_choice, "layer_call", layer)
    times = {"builtin": Timing(median_ms=2.0), "triton": Timing(median_ms=1.0)}
    monkeypatch.setattr(
        expert_choice, "time_in_turn", lambda calls, *given, **options: {name: times[name] for name in calls}
    )
    monkeypatch.setattr(expert_choice, "NARROW", 8)
    device, shape = torch.device("cpu"), replace(SHAPE, balance="bias", router_bias=True)
    for is_remembered in (False, True):
        found = choose_in_layer(
            EXPERT_GATHER, shape, expert_shape(shape, 40), torch.float32, device, backend="eager", folder=tmp_path
        )
        assert (found.variant, found.is_remembered) == ("triton", is_remembered)
    assert (asked, compiled) == ([False, True], ["eager", "eager"])
