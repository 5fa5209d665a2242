"""A model that learns nothing is said to, once, and one that learns is left alone."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.train.guard.safeguards import STILL_STEPS, StalledTraining


def remarks(steps: list[tuple[float, float]], *, rank: int = 0, skipped: bool = False, tokens: int = 64) -> list[str]:
    """What is said of steps with these losses and gradient norms."""
    said: list[dict[str, Any]] = []
    training: Any = SimpleNamespace(
        rank=rank, events=SimpleNamespace(write=lambda kind, **fields: said.append({"kind": kind, **fields}))
    )
    callback = StalledTraining()
    for step, (loss, norm) in enumerate(steps):
        result = SimpleNamespace(loss=loss, grad_norm=norm, skipped=skipped, tokens=tokens)
        report: Any = SimpleNamespace(step=step, result=result)
        callback.on_step_end(training, report)
    assert all(one["kind"] == "remark" and one["is_warning"] for one in said)
    return [one["text"] for one in said]


def usual(step: int) -> tuple[float, float]:
    return 3.0 - 0.001 * step + 0.01 * math.sin(step), 0.5


def test_nothing_is_said_of_a_model_that_learns() -> None:
    assert remarks([usual(step) for step in range(100)]) == []


def test_a_gradient_of_zero_is_said_at_once_and_once() -> None:
    (said,) = remarks([usual(0), *[(usual(step)[0], 0.0) for step in range(1, 20)]])
    assert said.startswith("step 1: the gradient norm is exactly 0: no weight learns from this step; ")
    assert len(remarks([usual(0), (2.0, 0.0), usual(2), (2.1, 0.0)])) == 2, "again when it begins again"
    assert len(remarks([(2.0, 0.0), (2.1, 0.0)])) == 1, "in the first step too"


def test_a_loss_that_does_not_move_is_said() -> None:
    (said,) = remarks([(math.log(512), 0.1)] * (STILL_STEPS + 40))
    assert said.startswith(f"step {STILL_STEPS - 1}: the loss has been 6.23832 for {STILL_STEPS} steps")
    assert remarks([(math.log(512), 0.1)] * (STILL_STEPS - 1)) == []


def test_one_rank_speaks_and_skipped_steps_do_not_count() -> None:
    assert remarks([(2.0, 0.0)] * 50, rank=1) == []
    assert remarks([(2.0, 0.0)] * 50, skipped=True) == []
    assert remarks([(2.0, 0.0)] * 50, tokens=0) == [], "a step without valid tokens has no gradient"


@pytest.mark.parametrize(
    ("low", "high", "is_reported"),
    [
        (1.0, 1.0 + 1.5e-6, False),
        (1.0, 1.0 + 0.9e-6, True),
        (10.0, 10.0 + 5e-6, True),  # the spread is relative to the loss
        (0.1, 0.1 + 0.9e-6, False),
        (0.0, 0.0, True),
    ],
)
def test_a_loss_moves_if_it_spreads_by_more_than_a_millionth(low: float, high: float, is_reported: bool) -> None:
    assert bool(remarks([(low, 0.1), (high, 0.1)] * (STILL_STEPS // 2))) == is_reported
    assert STILL_STEPS == 32
