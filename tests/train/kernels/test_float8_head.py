"""The output head in fp8: its loss and gradients against float64, what becomes of rare words, and who may use it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import phalanx
from phalanx.plan.trainable import precision_problems
from phalanx.train.data.batches import IGNORED
from phalanx.train.kernels import float8_head
from phalanx.train.kernels.float8_head import GRADIENT_SCALE, plain_float8_gradient, turn_bytes
from phalanx.train.kernels.linear_cross_entropy import linear_cross_entropy
from phalanx.train.models.decoder import OutputHead

EXAMPLE = Path(__file__).parents[3] / "examples" / "llama-3-8b-64xH100.toml"
TOKENS, WIDTH, VOCAB = 192, 64, 1040


def head_inputs(tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(tokens, WIDTH, generator=generator)
    weight = torch.randn(VOCAB, WIDTH, generator=generator) * 3 * WIDTH**-0.5
    targets = torch.randint(0, VOCAB, (tokens,), generator=generator)
    targets[::7] = IGNORED
    return hidden.bfloat16(), weight.bfloat16(), targets


def run_head(
    dtype: torch.dtype, *, tokens: int = TOKENS, chunk: int = 0, float8: bool
) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, targets = head_inputs(tokens)
    x, w = hidden.to(dtype).clone().requires_grad_(), weight.to(dtype).clone().requires_grad_()
    loss = linear_cross_entropy(x, w, targets, scale=0.25, chunk=chunk, float8=float8)
    (loss * 0.25).backward()
    assert x.grad is not None
    assert w.grad is not None
    return loss.detach(), x.grad, w.grad


def distance(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


def test_loss_and_gradients_are_near_those_of_float64() -> None:
    truth = run_head(torch.float64, float8=False)
    found = run_head(torch.bfloat16, float8=True)
    assert float(abs(found[0] / truth[0] - 1)) < 2e-3
    assert [distance(one, two) < 0.06 for one, two in zip(found[1:], truth[1:], strict=True)] == [True, True]
    # Far enough from 16 bit to show that it was fp8 that was computed.
    assert distance(found[1], truth[1]) > 0.01
    assert not found[1][::7].any()  # tokens that count for nothing


def test_parts_and_groups_change_nothing_but_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run_head(torch.bfloat16, float8=True)
    parts = run_head(torch.bfloat16, float8=True, chunk=48)
    monkeypatch.setattr(float8_head, "group_tokens", lambda chunk, vocab: 64.0)
    groups = run_head(torch.bfloat16, float8=True, chunk=64)
    for other in (parts, groups):
        torch.testing.assert_close(other[0], whole[0])
        torch.testing.assert_close(other[1], whole[1])
        assert distance(other[2], whole[2].double()) < 0.01


def test_words_of_small_probability_are_still_pushed_down() -> None:
    logits = torch.zeros(1, 64)
    logits[0, 1:] = -16.0  # a probability of 1e-7 each, which e4m3 under the same scale would call zero
    rounded, losses = plain_float8_gradient(logits, torch.tensor([0]))
    probability = float(torch.softmax(logits[0].double(), 0)[5])
    assert float(rounded[0, 5].float()) * GRADIENT_SCALE == pytest.approx(probability, rel=0.125)
    assert float(losses[0]) == pytest.approx(63 * probability, abs=1e-6)


def test_sizes_that_fp8_products_do_not_take_stay_in_16_bit() -> None:
    for found, plain in zip(
        run_head(torch.bfloat16, tokens=TOKENS - 2, float8=True),
        run_head(torch.bfloat16, tokens=TOKENS - 2, float8=False),
        strict=True,
    ):
        assert torch.equal(found, plain)


def test_evaluation_stays_in_16_bit() -> None:
    hidden, weight, targets = head_inputs()
    head = OutputHead(WIDTH, VOCAB, bias=False, dtype=torch.bfloat16)
    head.weight.data.copy_(weight)
    with torch.no_grad():
        plain = head(hidden[None], targets[None])
        head.float8 = True
        assert torch.equal(head(hidden[None], targets[None]), plain)


def test_a_job_says_fp8_head_only_with_fp8_and_its_plan_counts_it() -> None:
    asked = phalanx.load(EXAMPLE, overrides=["precision.fp8_head=true"])
    (problem,) = precision_problems(asked.job)
    assert problem.where == "precision.fp8_head"
    fixed = ["parallel.mode=fixed", "parallel.shard=64", "parallel.zero=2", "batch.micro=1", "parallel.recompute=full"]
    plain, narrow = (
        phalanx.plan(
            EXAMPLE,
            overrides=[*fixed, "precision.compute=fp8", f"precision.fp8_head={str(head).lower()}"],
        )
        for head in (False, True)
    )
    assert narrow.prediction.step_s < plain.prediction.step_s
    assert narrow.memory.total_bytes >= plain.memory.total_bytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_kernels_compute_what_plain_operations_do() -> None:
    hidden, weight, targets = (one.cuda() for one in head_inputs())
    logits = hidden @ weight.t()
    rounded, losses = torch.ops.phalanx.cross_entropy_float8(logits, targets)
    expected, expected_losses = plain_float8_gradient(logits, targets)
    torch.testing.assert_close(losses, expected_losses)
    # exp2 and exp differ in the last bit, which now and then decides how a number is rounded.
    assert (rounded.view(torch.uint8) != expected.view(torch.uint8)).float().mean() < 1e-3
    out = torch.zeros(VOCAB, 2 * TOKENS, dtype=rounded.dtype, device="cuda")
    turn_bytes(rounded, out[:, TOKENS:])
    assert torch.equal(out[:, TOKENS:].contiguous().view(torch.uint8), rounded.t().contiguous().view(torch.uint8))
