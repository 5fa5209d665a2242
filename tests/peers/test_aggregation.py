"""Aggregation of updates: what each kind makes of liars, and that every member decides and computes alike."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.job.sync_section import AGGREGATIONS as NAMED_BY_JOBS
from phalanx.network.slow_codecs import CODECS
from phalanx.peers.aggregation import AGGREGATIONS, aggregate, agreeing, choose_aggregation, mean_factors
from phalanx.peers.attempt import check_derived
from phalanx.peers.codecs import decode, encode

VALUES = 8192
COMMON = np.random.default_rng(1).standard_normal(VALUES)
ROBUST = AGGREGATIONS[1:]


def honest(count: int, noise: float = 1.0) -> list[np.ndarray]:
    return [COMMON + noise * np.random.default_rng(seed + 10).standard_normal(VALUES) for seed in range(count)]


def result_of(kind: str, updates: list[np.ndarray], weights: list[float] | None = None) -> np.ndarray:
    ids = [f"{place}" for place in range(len(updates))]
    known = dict(zip(ids, weights or [1.0] * len(updates), strict=True))
    norms = {peer: float(np.linalg.norm(update)) for peer, update in zip(ids, updates, strict=True)}
    return aggregate(kind, updates, list(mean_factors(kind, known, norms).values()))


def along(vector: np.ndarray) -> float:
    return float(vector @ COMMON / (COMMON @ COMMON))


ATTACKS = {
    "reversed": lambda update, seed: -3.0 * update,
    "reversed x9": lambda update, seed: -9.0 * update,
    "scaled": lambda update, seed: 9.0 * update,
    "random": lambda update, seed: 9.0 * np.random.default_rng(seed + 1000).standard_normal(VALUES),
    "colluding": lambda update, seed: -9.0 * COMMON,
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize(("count", "liars"), [(3, 1), (4, 1), (5, 1), (6, 2), (7, 2), (9, 3)])
@pytest.mark.parametrize("kind", ROBUST)
def test_up_to_a_third_of_liars_neither_turn_nor_blow_up_the_result(
    kind: str, count: int, liars: int, attack: str
) -> None:
    updates = honest(count, noise=0.5)
    for place in range(liars):
        updates[place] = ATTACKS[attack](updates[place], place)
    weights = [90.0 if place < liars else 1.0 for place in range(count)]
    result = result_of(kind, updates, weights)
    assert 0.45 < along(result) < 1.6
    if kind == "clipped-mean" and "scaled" not in attack:  # the others' values alone decide
        assert agreeing(updates) == [place >= liars for place in range(count)]
        assert np.allclose(result, result_of(kind, updates[liars:]), atol=0.4)


@pytest.mark.parametrize("kind", AGGREGATIONS)
@pytest.mark.parametrize("count", range(1, 8))
def test_honest_updates_are_all_counted(kind: str, count: int) -> None:
    updates = honest(count, noise=0.2)
    assert agreeing(updates) == [True] * count
    assert along(result_of(kind, updates)) == pytest.approx(1.0, abs=0.1)
    assert np.array_equal(result_of(kind, [COMMON] * count), COMMON) or np.allclose(
        result_of(kind, [COMMON] * count), COMMON, rtol=1e-12
    )


def test_updates_with_nothing_in_common_are_all_counted() -> None:
    noise = [np.random.default_rng(seed).standard_normal(VALUES) for seed in range(5)]
    assert agreeing(noise) == [True] * 5
    assert agreeing([np.zeros(1)] * 4) == [True] * 4
    assert agreeing([COMMON, -COMMON]) == [True, True]  # two have no majority


def test_half_the_usual_agreement_is_the_edge() -> None:
    """Signs that agree in all values, in three quarters (half of the usual agreement), and in one less."""
    usual, half, less = (np.ones(1000) for _ in range(3))
    half[:250] = less[:251] = -1.0
    assert agreeing([usual, usual, usual, half]) == [True] * 4
    assert agreeing([usual, usual, usual, less]) == [True, True, True, False]


def test_sparse_liars_are_left_out() -> None:
    values = 65_536
    common = np.random.default_rng(1).standard_normal(values)
    updates = [common + 0.5 * np.random.default_rng(seed + 10).standard_normal(values) for seed in range(4)]
    updates[1] = -3.0 * updates[1]
    sent = [decode("topk-2bit", encode("topk-2bit", update.astype(np.float32)), values) for update in updates]
    assert agreeing(sent) == [True, False, True, True]


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_the_bits_depend_on_values_alone(kind: str) -> None:
    updates = [update.astype(np.float32) for update in honest(5)]
    first = result_of(kind, updates)
    spread = [np.repeat(update, 2)[::2] for update in updates]  # other strides, as views of a message have
    assert result_of(kind, spread).tobytes() == first.tobytes()
    assert result_of(kind, [update.copy() for update in updates]).tobytes() == first.tobytes()
    if kind in ("trimmed-mean", "median", "sign"):  # these sort: not even the order of peers matters
        assert np.allclose(result_of(kind, updates[::-1]), first, rtol=1e-15, atol=0.0)
        assert np.array_equal(result_of(kind, updates, [1.0, 9.0, 1.0, 1.0, 4.0]), first)


def test_each_kind_by_hand() -> None:
    columns = np.array([[1.0, 1.0, -1.0], [2.0, -2.0, -2.0], [4.0, 3.0, -4.0], [90.0, -90.0, 0.0]])
    rows = list(columns)
    assert result_of("trimmed-mean", rows).tolist() == [3.0, -0.5, -1.5]
    assert result_of("median", rows).tolist() == [3.0, -0.5, -1.5]
    assert result_of("sign", rows).tolist() == [2.0, 0.0, -2.0]  # half of four is no majority
    assert result_of("median", rows[:3]).tolist() == [2.0, 1.0, -2.0]
    assert result_of("trimmed-mean", [np.array([float(value)]) for value in (1, 2, 3, 4, 6, 99)]).tolist() == [3.5]


def test_the_clipped_mean_cuts_norms_and_weights_to_the_median() -> None:
    factors = mean_factors("clipped-mean", {"a": 2.0, "b": 4.0, "c": 90.0}, {"a": 1.0, "b": 2.0, "c": 8.0})
    assert [factor.share for factor in factors.values()] == [0.2, 0.4, 0.4]
    assert [factor.clip for factor in factors.values()] == [1.0, 1.0, 0.25]
    still = mean_factors("clipped-mean", {"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 0.0, "b": 0.0, "c": 5.0})
    assert still["c"].clip == 0.0


def test_what_has_no_majority_falls_back_with_a_reason() -> None:
    for kind in ("trimmed-mean", "median", "sign"):
        assert choose_aggregation(kind, codec="int8", counted=3) == (kind, "")
        assert choose_aggregation(kind, codec="int8", counted=1) == (kind, "")
        assert choose_aggregation(kind, codec="int8", counted=2)[0] == "clipped-mean"
        assert "peers send different values in topk-2bit" in choose_aggregation(kind, codec="topk-2bit", counted=9)[1]
    for kind in ("mean", "clipped-mean"):
        assert all(choose_aggregation(kind, codec=codec, counted=2) == (kind, "") for codec in CODECS)


def test_a_job_names_the_kinds_there_are() -> None:
    assert NAMED_BY_JOBS == AGGREGATIONS


def test_plans_are_held_against_what_members_derive() -> None:
    from test_limits import IDS, plan

    agreed = plan(8192, aggregation="median")
    assert check_derived(agreed, aggregation="median", weight_limits=None) == ""
    assert check_derived(agreed, aggregation="median", weight_limits=dict.fromkeys(IDS, 1.0)) == ""
    assert check_derived(agreed, aggregation="mean", weight_limits=None)
    assert check_derived(agreed, aggregation="median", weight_limits=dict.fromkeys(IDS, 0.99))
    assert check_derived(agreed, aggregation="median", weight_limits={IDS[0]: 1.0}).endswith("and 0 was dealt")
