"""muP and CompleteP: what the papers' tables say, and that updates of activations do not grow with the width."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from phalanx.job.model import ModelShape
from phalanx.job.schema import Scale
from phalanx.plan.parametrization import STANDARD, parameter_scales

ROOT = Path(__file__).parents[2]
LLAMA = ModelShape(name="l", layers=8, hidden=256, heads=4, kv_heads=4, head_dim=64, ffn=768, vocab=512)
MUP = Scale(parametrization="mup", base_width=64)
COMPLETE = Scale(parametrization="completep", base_width=64, base_depth=2)
MATRIX, VECTOR = 2, 1


@pytest.fixture(scope="module")
def transfer() -> Iterator[ModuleType]:
    """benchmarks/mup_transfer.py, within a process group of this process alone."""
    spec = importlib.util.spec_from_file_location("mup_transfer", ROOT / "benchmarks" / "mup_transfer.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mup_transfer"] = module
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with module.lone_group():
        yield module
    torch.set_num_threads(threads)


def test_the_standard_changes_nothing() -> None:
    scales = parameter_scales(LLAMA, Scale(base_width=64, base_depth=2), optimizer="adamw")
    names = ("embed.tokens.weight", "layers.0.attn.wq.weight", "norm.weight", "head.weight")
    assert all(scales(name, MATRIX) is STANDARD for name in names)


def test_at_the_base_nothing_changes() -> None:
    scales = parameter_scales(replace(LLAMA, hidden=64, layers=2), COMPLETE, optimizer="adamw")
    for name in ("embed.tokens.weight", "layers.0.attn.wq.weight", "layers.1.mlp.down.weight", "norm.weight"):
        assert scales(name, MATRIX) == STANDARD


def test_mup_table() -> None:
    """Yang et al. 2022, table 8, for Adam: hidden lr and variance 1 / width, logits 1 / width, the rest as it is."""
    scales = parameter_scales(LLAMA, MUP, optimizer="adamw")
    hidden = scales("layers.3.mlp.up.weight", MATRIX)
    assert (hidden.lr, hidden.init**2, hidden.weight_decay) == pytest.approx((1 / 4, 1 / 4, 4))
    assert scales("layers.3.mlp.down.weight", MATRIX) == hidden  # no depth in muP
    assert scales("norm.weight", VECTOR).init == pytest.approx(1 / 4)
    assert (scales("head.weight", MATRIX).lr, scales("embed.tokens.weight", MATRIX).lr) == (1, 1)
    assert scales("layers.3.attn_norm.weight", VECTOR).lr == 1
    narrow_heads = parameter_scales(replace(LLAMA, head_dim=16), MUP, optimizer="adamw")
    # 1 / head_dim instead of 1 / √head_dim, the same at 64: queries are √(64 / 16) times as large.
    assert narrow_heads("layers.0.attn.wq.weight", MATRIX).init == pytest.approx(2 * hidden.init)


def test_completep_table() -> None:
    """Dey et al. 2025, table 1, alpha = 1: branches times base_depth / depth, their lr as muP's."""
    scales = parameter_scales(LLAMA, COMPLETE, optimizer="adamw")
    up, down = scales("layers.3.mlp.up.weight", MATRIX), scales("layers.3.mlp.down.weight", MATRIX)
    assert up.lr == pytest.approx(1 / 4)
    assert down.lr == pytest.approx(up.lr / 4)  # carries the branch's multiplier
    # Of first values: the base's 1 / √(2 · 2) times the branch's 1/4, where the standard has 1 / √(2 · 8).
    assert down.init / math.sqrt(2 * LLAMA.layers) == pytest.approx(up.init / math.sqrt(2 * 2) / 4)
    assert down.lr * down.weight_decay == pytest.approx(1.0)
    assert (up.eps, down.eps, scales("embed.tokens.weight", MATRIX).eps) == pytest.approx((1 / 16, 1 / 4, 1 / 4))


def test_muon_updates_grow_with_the_root_of_the_width() -> None:
    scales = parameter_scales(LLAMA, MUP, optimizer="muon")
    assert scales("layers.3.mlp.up.weight", MATRIX).lr == pytest.approx(1 / 2)


def test_norms_of_queries_carry_the_attention_scale() -> None:
    scales = parameter_scales(replace(LLAMA, qk_norm=True, head_dim=16), MUP, optimizer="adamw")
    assert scales("layers.0.attn.q_norm.weight", VECTOR).init == pytest.approx(2)
    assert scales("layers.0.attn.wq.weight", MATRIX) == scales("layers.0.attn.wk.weight", MATRIX)


def moved_by(transfer: ModuleType, width: int, scale: Scale) -> tuple[float, float]:
    """How far a few steps move the logits and the last activations, root mean square."""
    batches = transfer.made_up_batches(4, batch=4, sequence=16, vocab=64)
    engine = transfer.make_engine(width, scale, layers=2, batch=4, sequence=16, vocab=64)
    model = engine.parts[0].model
    kept: list[torch.Tensor] = []
    model.norm.register_forward_pre_hook(lambda module, inputs: kept.append(inputs[0].detach().clone()))
    rows = torch.from_numpy(batches[0])
    with torch.no_grad():
        before = model(rows[:, :-1])
    for one in batches:
        tokens = torch.from_numpy(one)
        engine.step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), lr=2**-7)
    with torch.no_grad():
        after = model(rows[:, :-1])
    return (after - before).square().mean().sqrt().item(), (kept[-1] - kept[0]).square().mean().sqrt().item()


def test_updates_do_not_grow_with_the_width(transfer: ModuleType) -> None:
    """The coordinate check of Yang et al. 2022, appendix D.1; under the standard both grow."""
    scale = Scale(parametrization="mup", base_width=32, base_head_dim=16)
    narrow, wide = (moved_by(transfer, width, scale) for width in (32, 256))
    plain_narrow, plain_wide = (moved_by(transfer, width, Scale()) for width in (32, 256))
    assert narrow == plain_narrow  # at the base they are one
    for small, large in zip(narrow, wide, strict=True):
        assert 1 / 2 < large / small < 3 / 2
    assert plain_wide[0] / plain_narrow[0] > 2 * wide[0] / narrow[0]
    assert plain_wide[1] / plain_narrow[1] > 2 * wide[1] / narrow[1]


def test_the_best_learning_rate_stays(transfer: ModuleType) -> None:
    """In little; benchmarks/mup_transfer.py has widths 64 to 512."""
    batches = transfer.made_up_batches(24, batch=4, sequence=16, vocab=64)
    rates = [2.0**power for power in range(-8, -2)]

    def best(width: int, scale: Scale) -> float:
        losses = [transfer.final_loss(width, rate, scale, batches, vocab=64) for rate in rates]
        return float(transfer.best_rate(rates, losses))

    base = best(32, Scale())
    assert abs(best(256, Scale(parametrization="mup", base_width=32, base_head_dim=16)) - base) < 1.0
    assert base - best(256, Scale()) > 1.0  # the standard's best rate falls as the model grows
