"""A comparison names the first thing that is wrong, by the order in which a step computes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from phalanx.train.verify.compare import Tolerances, compare_outcomes
from phalanx.train.verify.trial import OutcomeShard, RankOutcome, TrialOutcome, join_rank_outcomes


def outcome(**changes) -> TrialOutcome:
    tensors = {"embed.tokens.weight": np.ones((4, 2)), "layers.0.attn.wq.weight": np.full((2, 2), 0.5)}
    made = TrialOutcome(
        losses=[4.0, 3.9],
        norms=[1.0, 0.9],
        skipped=[False, False],
        tokens=[8, 8],
        evaluations=[(32.0, 8), (31.0, 8)],
        grads=[dict(tensors), dict(tensors)],
        params=[dict(tensors), dict(tensors)],
        quarrels=[],
        loss_scale=1.0,
        seconds=1.0,
    )
    return replace(made, **changes)


def test_the_same_is_the_same():
    found = compare_outcomes(outcome(), outcome())
    assert (found.first, found.loss, found.parameter) == (None, 0.0, 0.0)


def test_rounding_passes():
    near = {name: values + 1e-14 for name, values in outcome().params[0].items()}
    found = compare_outcomes(outcome(params=[near, near], grads=[near, near]), outcome())
    assert found.first is None
    assert 0 < found.parameter < 1e-13


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"losses": [4.0, 3.8]}, "loss differs by 1.0e-01 at step 2"),
        ({"norms": [1.5, 0.9]}, "gradient norm differs by 5.0e-01 at step 1"),
        ({"evaluations": [(40.0, 8), (31.0, 8)]}, "held-out loss differs by 1.0e+00 before the first step"),
        ({"evaluations": [(32.0, 8), (39.0, 8)]}, "held-out loss differs by 1.0e+00 at step 2"),
        ({"quarrels": ["rank 1 holds another copy of x"]},
         "ranks that should hold the same do not: rank 1 holds another copy of x"),
    ],
)  # fmt: skip
def test_numbers(changes, text):
    assert compare_outcomes(outcome(**changes), outcome()).first.render() == text


def test_a_gradient_is_named_before_what_follows_from_it():
    wrong = outcome().grads[1] | {"layers.0.attn.wq.weight": np.zeros((2, 2))}
    changes = {"grads": [outcome().grads[0], wrong], "norms": [1.0, 0.5], "params": [outcome().params[0], wrong]}
    first = compare_outcomes(outcome(**changes), outcome()).first
    assert first.render() == "gradient of layers.0.attn.wq.weight differs by 5.0e-01 at step 2, 0 of 1 other tensor too"


def test_small_gradients_must_be_right_too():
    small = {"embed.tokens.weight": np.full((4, 2), 1e-9)}
    wrong = {"embed.tokens.weight": np.full((4, 2), 2e-9)}
    args = {"params": [small, small]}
    first = compare_outcomes(outcome(grads=[wrong, wrong], **args), outcome(grads=[small, small], **args)).first
    assert first.render().startswith("gradient of embed.tokens.weight differs by 1.0e-09 at step 1")


def test_nan_is_a_difference():
    bad = outcome().params[0] | {"embed.tokens.weight": np.full((4, 2), np.nan)}
    assert compare_outcomes(outcome(params=[outcome().params[0], bad]), outcome()).first.what == "embed.tokens.weight"
    assert compare_outcomes(outcome(losses=[4.0, float("nan")]), outcome()).first.what == "loss"


def test_a_missing_tensor_is_a_difference():
    less = {"embed.tokens.weight": np.ones((4, 2))}
    assert compare_outcomes(outcome(params=[less, less]), outcome()).first.what == "layers.0.attn.wq.weight"


# ---- narrower formats: bounds are shares, multiples of the format's rounding -----------------------------------------


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp8"])
def test_an_error_like_that_of_compiled_ulysses_is_far_outside(compute):
    """Gradient norm 2.370 instead of 3.569 in the first step, its loss right; then 5.702 instead of 5.962."""
    bounds = Tolerances.rounded(compute)
    wanted = outcome(losses=[6.3, 5.962], norms=[3.569, 3.5])
    first = compare_outcomes(outcome(losses=[6.3, 5.702], norms=[2.370, 3.5]), wanted, bounds).first
    assert (first.what, first.step) == ("gradient norm", 1)
    assert first.size > 3 * bounds.norm
    if compute != "fp8":  # there 4 % lies within four times the bound of the first step
        assert compare_outcomes(outcome(losses=[6.3, 5.702], norms=[3.569, 3.5]), wanted, bounds).first.step == 2


def test_one_rounding_passes_and_a_part_of_a_gradient_does_not():
    bounds, (wanted, *_) = Tolerances.rounded("bf16"), outcome().grads
    noise = np.random.default_rng(0)
    near = {name: values * (1 + noise.uniform(-(2**-8), 2**-8, values.shape)) for name, values in wanted.items()}
    # Parameters are not held: Adam turns a rounding into a whole step.
    far = {name: values + 0.02 for name, values in wanted.items()}
    assert compare_outcomes(outcome(grads=[near, far], params=[far, far]), outcome(), bounds).first is None
    part = wanted | {"layers.0.attn.wq.weight": wanted["layers.0.attn.wq.weight"] * 0.9}
    first = compare_outcomes(outcome(grads=[part, wanted]), outcome(), bounds).first
    assert first.render().startswith("gradient of layers.0.attn.wq.weight differs by ")
    # What is next to nothing beside the others may be all rounding; what is missing may not.
    small = wanted | {"bias": np.full(2, 1e-5)}
    other = wanted | {"bias": np.full(2, -1e-5)}
    assert compare_outcomes(outcome(grads=[other, wanted]), outcome(grads=[small, wanted]), bounds).first is None
    assert (
        compare_outcomes(outcome(grads=[wanted, wanted]), outcome(grads=[small, wanted]), bounds).first.what == "bias"
    )
    assert compare_outcomes(outcome(losses=[4.0, float("nan")]), outcome(), bounds).first.what == "loss"


# ---- putting the boxes of all ranks together -------------------------------------------------------------------------


def rank(*parts, loss=4.0) -> RankOutcome:
    return RankOutcome(
        losses=[loss], norms=[1.0], skipped=[False], tokens=[8], evaluations=[(1.0, 1)], grads=[], params=[list(parts)],
        loss_scale=1.0, seconds=1.0,
    )  # fmt: skip


def part(first, values, *, owner=True, whole=4) -> OutcomeShard:
    array = np.array(values, dtype=float)
    return OutcomeShard(
        name="w", shape=(whole,), start=(first,), size=array.shape, owner=owner, digest=str(values),
        values=array if owner else None,
    )  # fmt: skip


def test_boxes_make_a_whole():
    made = join_rank_outcomes([rank(part(0, [1, 2])), rank(part(2, [3, 4]))])
    assert made.quarrels == []
    assert made.params[0]["w"].tolist() == [1, 2, 3, 4]


def test_empty_boxes_are_no_copies_of_full_ones():
    made = join_rank_outcomes([rank(part(0, [1, 2])), rank(part(2, [])), rank(part(2, [3, 4]))])
    assert made.quarrels == []


def test_copies_that_differ_are_told():
    made = join_rank_outcomes([rank(part(0, [1, 2, 3, 4])), rank(part(0, [1, 2, 3, 5], owner=False))])
    assert made.quarrels == ["step 1: rank 1 holds another copy of w"]


def test_holes_and_double_owners_are_told():
    assert join_rank_outcomes([rank(part(0, [1, 2]))]).quarrels == ["step 1: w has 4 values, owners hold 2"]
    twice = join_rank_outcomes([rank(part(0, [1, 2, 3, 4])), rank(part(0, [1, 2, 3, 4]))])
    assert twice.quarrels == ["step 1: w has 4 values, owners hold 8"]


def test_ranks_must_see_the_same_loss():
    made = join_rank_outcomes([rank(part(0, [1] * 4)), rank(part(0, [1] * 4, owner=False), loss=4.1)])
    assert made.quarrels == ["rank 1 saw other losses than rank 0"]
