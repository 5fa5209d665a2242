"""Narrower formats: float32 within 1e-5, bfloat16 within a stated bound, float16 with its loss scale and overflows."""

from __future__ import annotations

import math

import pytest

from phalanx.train.verify.trial import run_trial

FEW = {"micro_batch": 4, "tensor": 2, "sequence_parallel": True}
LAYOUTS = {
    "dp2": {"data": 2},
    "fsdp2": {"data": 2, "shard": 2, "zero": 3},
    "tp2": FEW,
    "pp2": {"pipeline": 2},
    "cp2": {"context": 2},
}

# A bfloat16 has 8 bits: products are off by 2^-9, half a unit. Over 5 steps the losses of right layouts were within
# 2e-3 of each other (4.2 nats); 1e-2 leaves room, and a lost gradient changes the loss by more (1e-1 in test_parity).
BF16_LOSS = 1e-2


def relative(found, wanted):
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", LAYOUTS)
def test_float32_loss_within_1e_5(name, trial, once):
    found = run_trial(trial(kind="fp32", **LAYOUTS[name]))
    wanted = once(trial(kind="fp32"))
    assert relative(found.losses, wanted.losses) < 1e-5
    assert relative(found.norms, wanted.norms) < 1e-4
    assert found.quarrels == []


@pytest.mark.parametrize("name", LAYOUTS)
def test_bfloat16_with_float32_master_stays_within_its_bound(name, trial, once):
    found = run_trial(trial(kind="bf16", **LAYOUTS[name]))
    exact = once(trial())
    assert max(abs(a - b) for a, b in zip(found.losses, exact.losses, strict=True)) < BF16_LOSS
    assert found.quarrels == []
    assert all(values.dtype == "float32" for values in found.params[-1].values())


def test_bfloat16_is_not_float32_by_mistake(trial, once):
    """A bound is no proof that the narrow format was used at all."""
    found, exact = once(trial(kind="bf16", data=2)), once(trial())
    assert max(abs(a - b) for a, b in zip(found.losses, exact.losses, strict=True)) > 1e-6


@pytest.mark.parametrize("name", LAYOUTS)
def test_float16_overflow_is_skipped_by_all_ranks_and_scaled_away(name, trial):
    """2^24 / 128 tokens is above the largest float16: the first steps overflow, the scale halves until one does not."""
    layout = LAYOUTS[name]
    found = run_trial(trial(kind="fp16", loss_scale=2.0**24, steps=12, **layout))
    assert found.skipped[0]
    assert False in found.skipped  # a later step may overflow again: gradients grow at this learning rate
    assert found.loss_scale == 2.0 ** (24 - sum(found.skipped))
    assert found.quarrels == []  # every rank saw the same, and all copies stayed equal
    assert all(math.isfinite(loss) for loss in found.losses)


def test_a_loss_scale_that_the_job_fixes_stays(trial):
    found = run_trial(trial(kind="fp16", fixed_loss_scale=2.0**24, steps=3))
    assert (found.loss_scale, found.skipped) == (2.0**24, [True] * 3)


def test_a_skipped_step_leaves_no_trace(trial):
    """The parameters after k skipped steps and one that counts are those of that one alone, but for its data."""
    found = run_trial(trial(kind="fp16", loss_scale=2.0**24, steps=12, data=2))
    skipped = found.skipped.index(False)
    first = found.params[0]
    for name, values in found.params[skipped - 1].items():
        assert (values == first[name]).all(), name
    assert any((values != first[name]).any() for name, values in found.params[skipped].items())


@pytest.mark.parametrize(
    "layout", [{"data": 2}, {"data": 2, "shard": 2, "zero": 3}, {"pipeline": 2}], ids=["dp2", "fsdp2", "pp2"]
)
def test_one_bad_rank_makes_every_rank_skip(layout, trial):
    """An infinity on rank 1 alone: nobody updates in that step, everybody does in the next."""
    found = run_trial(trial(broken_rank=1, steps=3, **layout))
    assert found.skipped == [True, False, False]
    assert found.quarrels == []
