"""Layers by chosen kernels compute what they computed before; the winner of a search is one more variant to choose."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from phalanx.api import planning
from phalanx.evolve.kernel_templates import render_source
from phalanx.hardware.kernel_choices import read_winners, write_choice, write_winner
from phalanx.job.model import ModelShape
from phalanx.train.kernels.evolved_norm import evolved_norm, find_winner, remember_winner, winner_name, with_winner
from phalanx.train.kernels.model_kernels import LayerKernels, use_kernels
from phalanx.train.kernels.operations import load_all
from phalanx.train.kernels.selector import KernelChoice, Timing, choose_measured, is_right
from phalanx.train.models import layers
from phalanx.train.models.decoder import Decoder

CPU = torch.device("cpu")
GENOME = {"template": "chunked", "rows": 4}
SHAPE = ModelShape(
    name="small",
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn=48,
    vocab=64,
    qk_norm=True,
    tied=True,
    norm_eps=1e-6,
)


def chosen(variant: str, *, compiled: bool = False) -> LayerKernels:
    choices = {op: KernelChoice(op=op, variant=variant, times_ms={}) for op in ("rms-norm", "rope", "swiglu")}
    return LayerKernels(choices=choices, compiled=compiled)


def loss_and_gradients(model: Decoder) -> list[torch.Tensor]:
    tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    loss = model(tokens).logsumexp(-1).mean()
    loss.backward()
    return [loss.detach(), *(one.grad.clone() for one in model.parameters())]


def test_chosen_kernels_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Decoder(SHAPE)
    model.init_weights(3)
    before = loss_and_gradients(model)
    asked: list[str] = []
    counted = layers.by_kernel
    monkeypatch.setattr(layers, "by_kernel", lambda *given: asked.append("") or counted(*given))
    source = render_source(GENOME, "cpu")
    for variant in ("triton", winner_name(source)):
        asked.clear()
        use_kernels([model], chosen(variant), source)
        for one, other in zip(before, loss_and_gradients(model), strict=True):
            torch.testing.assert_close(one, other, rtol=2e-5, atol=1e-6)
        # five norms; with triton also two rotations and a product in each of two layers
        assert len(asked) == (11 if variant == "triton" else 5)
    asked.clear()
    use_kernels([model], chosen("builtin"))
    loss_and_gradients(model)
    assert asked == []
    use_kernels([model], chosen("triton", compiled=True))
    assert model.norm is not None
    assert model.norm.kernel is not None
    assert model.layers["0"].attn_norm.kernel is None  # the compiler fuses it


def test_a_winner_is_right_with_gradients_and_any_eps() -> None:
    source = render_source(GENOME, "cpu")
    op = with_winner(load_all()["rms-norm"], source)
    assert is_right(op, winner_name(source), torch.float32, CPU)
    wrong = with_winner(load_all()["rms-norm"], source.replace("* by)", ")"))
    assert not is_right(wrong, list(wrong.variants)[-1], torch.float32, CPU)
    x, weight = torch.randn(3, 8) * 1e-3, torch.ones(8)
    found = evolved_norm(source)(x, weight, 1e-2)
    torch.testing.assert_close(found, torch.nn.functional.rms_norm(x, (8,), weight, 1e-2))


def test_a_winner_is_found_again_and_only_values_of_our_lists_are(tmp_path) -> None:
    def find(width: int = 64) -> str:
        return find_winner("rms-norm", width, torch.bfloat16, CPU, tmp_path)

    assert find() == ""
    remember_winner("rms-norm", {**GENOME, "source": "import os"}, 64, "cpu", tmp_path)
    assert (find(), find(65)) == (render_source(GENOME, "cpu"), "")
    (key,) = read_winners(tmp_path)
    for bad in ({**GENOME, "rows": "4); import os"}, {"template": ["chunked"]}, {}):
        write_winner(key, bad, tmp_path)
        assert find() == ""


def test_a_new_winner_is_measured_against_what_was_chosen(tmp_path) -> None:
    times = {"builtin": 2.0, "triton": 1.0, "evolved-1": 0.5}
    for variants, variant in ((("builtin", "triton"), "triton"), (tuple(times), "evolved-1")):
        for is_remembered in (False, True):
            measured = {name: Timing(median_ms=times[name]) for name in variants}
            found = choose_measured("norm", "key", variants, lambda measured=measured: measured, folder=tmp_path)
            assert (found.variant, found.is_remembered) == (variant, is_remembered)
    slow = replace(found, variant="builtin")
    assert slow.describe().startswith("norm: builtin, 2.00 ms")


def test_a_plan_for_this_machine_tells_what_was_chosen(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(planning, "discover", lambda: SimpleNamespace(gpus=(SimpleNamespace(name="NVIDIA H200"),)))
    assert planning._kernels_here() == ""
    entry = {"variant": "triton", "times_ms": {"builtin": 2.0, "triton": 1.0}, "of": ["builtin", "triton"]}
    for device in ("NVIDIA H200 driver 1", "NVIDIA B200 driver 1"):
        write_choice(f"rope | batch=1 | bfloat16 | {device} | torch 2", entry, tmp_path / "phalanx" / "kernels")
    assert planning._kernels_here() == "rope triton"
