"""Skipped steps: how long a streak may be, and which steps are trusted while it lasts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.train.checkpointing import Checkpointing
from phalanx.train.guard.safeguards import SkippedSteps
from phalanx.train.rank_control import UntrustedState
from phalanx.train.training_context import TrainingContext


def take(callback: SkippedSteps, step: int, *, skipped: bool) -> None:
    """`step` steps are done, and the last was skipped or not."""
    training: Any = SimpleNamespace(step=step)
    report: Any = SimpleNamespace(step=step - 1, result=SimpleNamespace(skipped=skipped))
    callback.on_step_end(training, report)


def test_the_steps_before_a_streak_are_trusted_until_a_step_is_taken() -> None:
    callback = SkippedSteps(3)
    assert callback.trusted_step == 0, "no step is trusted before the run starts"
    seen = []
    for step, skipped in enumerate((False, True, True, False, True), 21):
        take(callback, step, skipped=skipped)
        seen.append((callback.in_a_row, callback.trusted_step))
    assert seen == [(0, 21), (1, 21), (2, 21), (0, 24), (1, 24)]


def test_a_streak_that_is_too_long_goes_back_to_before_it() -> None:
    callback = SkippedSteps(3)
    take(callback, 21, skipped=True)
    take(callback, 22, skipped=True)
    with pytest.raises(UntrustedState, match="in 3 steps in a row") as caught:
        take(callback, 23, skipped=True)
    assert (caught.value.step, caught.value.sound) == (23, 20)
    assert callback.trusted_step == 20, "a save that is still being written prunes nothing from before"


def test_a_streak_goes_on_after_a_restart() -> None:
    """Its length is part of every checkpoint."""
    before = TrainingContext.__new__(TrainingContext)
    before.skipped_steps = SkippedSteps(3)
    take(before.skipped_steps, 21, skipped=True)
    take(before.skipped_steps, 22, skipped=True)
    after = TrainingContext.__new__(TrainingContext)
    after.skipped_steps, after.step = SkippedSteps(3), 22
    after.callbacks = SimpleNamespace(load_state_dict=lambda states: None)  # type: ignore[assignment]
    after.batches = SimpleNamespace(restore_position=lambda position: None)  # type: ignore[assignment]
    after.restore_extras({"skipped_in_a_row": before.skipped_steps.in_a_row})
    after.skipped_steps.on_start(after)
    assert after.skipped_steps.trusted_step == 20
    after.restore_extras({})  # a checkpoint of an earlier version
    after.skipped_steps.on_start(after)
    assert after.skipped_steps.trusted_step == 22


def test_the_saver_asks_for_the_trusted_step_of_now() -> None:
    checkpoints = Checkpointing.__new__(Checkpointing)
    checkpoints._training = TrainingContext.__new__(TrainingContext)
    checkpoints._training.skipped_steps = SkippedSteps(3)
    take(checkpoints._training.skipped_steps, 21, skipped=True)
    assert checkpoints._trusted_step() == 20
