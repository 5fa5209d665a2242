from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from phalanx.train.optim.scaler import FIRST, LEAST, MOST, PATIENCE, LossScale


def after(outcomes: list[bool]) -> LossScale:
    scale = LossScale()
    for finite in outcomes:
        scale = scale.after(finite=finite)
    return scale


def test_an_overflow_halves_and_patience_doubles() -> None:
    assert after([False, False]).scale == FIRST / 4
    assert after([True] * (PATIENCE - 1)).scale == FIRST
    assert after([True] * PATIENCE).scale == FIRST * 2


def test_an_overflow_starts_the_wait_anew() -> None:
    assert after([True] * (PATIENCE - 1) + [False] + [True] * (PATIENCE - 1)).scale == FIRST / 2


def test_it_stays_in_bounds() -> None:
    assert after([False] * 100).scale == LEAST
    assert after([True] * PATIENCE * 20).scale == MOST


@given(st.lists(st.booleans(), max_size=30))
def test_a_checkpoint_keeps_it(outcomes: list[bool]) -> None:
    scale = after(outcomes)
    assert LossScale.load(json.loads(json.dumps(scale.state()))) == scale


@given(st.lists(st.booleans(), max_size=30))
def test_a_fixed_scale_never_changes(outcomes: list[bool]) -> None:
    scale = LossScale.of(1024.0)
    for finite in outcomes:
        scale = scale.after(finite=finite)
    assert scale == LossScale(scale=1024.0, fixed=True)
    assert LossScale.of(None) == LossScale()
