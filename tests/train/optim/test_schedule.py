from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.job.schema import Optim
from phalanx.train.optim.learning_rate import learning_rate

optims = st.builds(
    Optim,
    lr=st.floats(1e-6, 1.0),
    schedule=st.sampled_from(["wsd", "cosine"]),
    warmup_tokens=st.integers(0, 10**9),
    decay=st.floats(0.0, 1.0),
    final_lr=st.floats(0.0, 1.0),
)


@given(optims, st.integers(0, 10**13), st.integers(1, 10**13))
def test_the_rate_is_never_negative_nor_above_the_peak(optim: Optim, seen: int, total: int) -> None:
    assert 0.0 <= learning_rate(optim, tokens_seen=seen, total_tokens=total) <= optim.lr * (1 + 1e-12)


@given(optims, st.integers(1, 10**12), st.integers(0, 10**12), st.integers(0, 10**12))
def test_it_rises_through_the_warm_up_and_never_after(optim: Optim, total: int, one: int, other: int) -> None:
    early, late = sorted((one, other))
    rates = [learning_rate(optim, tokens_seen=seen, total_tokens=total) for seen in (early, late)]
    if late <= optim.warmup_tokens:
        assert rates[0] <= rates[1]
    if early >= optim.warmup_tokens:
        assert rates[0] >= rates[1]


@given(optims, st.integers(1, 10**12))
def test_the_last_step_takes_the_last_rate(optim: Optim, total: int) -> None:
    short = replace(optim, warmup_tokens=min(optim.warmup_tokens, total - 1), decay=max(optim.decay, 1e-3))
    last = learning_rate(short, tokens_seen=total, total_tokens=total)
    assert last == pytest.approx(short.lr * short.final_lr, rel=1e-6, abs=1e-12)


@given(optims, st.integers(1, 10**6), st.floats(0.0, 1.2), st.integers(1, 1000))
def test_only_the_share_of_the_tokens_matters(optim: Optim, total: int, share: float, scale: int) -> None:
    optim = replace(optim, warmup_tokens=optim.warmup_tokens % total)
    seen = int(share * total)
    longer = replace(optim, warmup_tokens=optim.warmup_tokens * scale)
    there = learning_rate(longer, tokens_seen=seen * scale, total_tokens=total * scale)
    here = learning_rate(optim, tokens_seen=seen, total_tokens=total)
    assert there == pytest.approx(here, rel=1e-6, abs=1e-7 * optim.lr)


def test_wsd_by_hand() -> None:
    optim = Optim(lr=1.0, schedule="wsd", warmup_tokens=100, decay=0.2, final_lr=0.1)
    rate = {seen: learning_rate(optim, tokens_seen=seen, total_tokens=1000) for seen in (0, 50, 100, 800, 850, 1000)}
    assert rate == pytest.approx({0: 0.0, 50: 0.5, 100: 1.0, 800: 1.0, 850: 0.1 + 0.9 * 0.5, 1000: 0.1})


def test_cosine_by_hand() -> None:
    optim = Optim(lr=2.0, schedule="cosine", warmup_tokens=0, final_lr=0.0)
    assert learning_rate(optim, tokens_seen=250, total_tokens=1000) == pytest.approx(1 + math.cos(math.pi / 4))


def test_no_decay_keeps_the_peak_to_the_end() -> None:
    optim = Optim(lr=1.0, schedule="wsd", decay=0.0)
    assert [learning_rate(optim, tokens_seen=seen, total_tokens=10) for seen in (9, 10, 11)] == [1.0, 1.0, 1.0]
