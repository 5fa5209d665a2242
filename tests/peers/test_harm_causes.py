"""What counts as harm beyond chance, which peers cause it, and which updates are sent again."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pytest

from phalanx.peers.harm_causes import (
    KEPT_UPDATES,
    LEAST_RISE,
    SKETCH_VALUES,
    Losses,
    UpdateHistory,
    find_causes,
    outliers,
    rises,
    same_updates,
    sketch_of,
)

RANDOM = np.random.default_rng(3)
BEFORE: Losses = 3.0 + RANDOM.normal(scale=0.5, size=32)  # sequences differ far more than rounds do


def moved(by: float, scale: float = 0.01) -> Losses:
    return BEFORE + by + RANDOM.normal(scale=scale, size=32)


def test_a_rise_is_beyond_chance_by_its_standard_error_and_not_by_the_spread_of_sequences() -> None:
    assert rises(BEFORE, moved(0.02))
    assert not rises(BEFORE, moved(-0.02))
    assert not rises(BEFORE, BEFORE)
    sign = np.where(np.arange(32) % 2, 1.0, -1.0)
    error = 0.1 / np.sqrt(31)  # of the mean of differences that are +-0.1 around it
    assert not rises(BEFORE, BEFORE + 2.7 * error + 0.1 * sign)
    assert rises(BEFORE, BEFORE + 3.3 * error + 0.1 * sign)
    assert not rises(BEFORE, BEFORE + 0.9 * LEAST_RISE)
    assert rises(BEFORE, BEFORE + 1.1 * LEAST_RISE)
    assert not rises(BEFORE[:1], BEFORE[:1] + 9.0)  # one sequence says nothing about chance
    assert rises(BEFORE, np.full(32, np.nan))
    assert rises(BEFORE, np.full(32, np.inf))
    assert rises(BEFORE, np.where(np.arange(32) == 5, np.nan, BEFORE - 1.0))  # of one sequence
    assert not rises(np.full(32, np.nan), BEFORE)


def quadratic(updates: dict[str, float]) -> tuple[Losses, dict[str, Losses], object]:
    """Losses of a model with one weight at distance 1 from the best, which updates move."""

    def loss_at(move: float) -> Losses:
        return BEFORE + (1.0 - move) ** 2

    def without(removed: Collection[str]) -> Losses:
        return loss_at(float(np.mean([move for peer, move in updates.items() if peer not in removed])))

    return loss_at(0.0), {peer: loss_at(move) for peer, move in updates.items()}, without


HONEST = {"a": 0.30, "b": 0.31, "c": 0.28}


@pytest.mark.parametrize(
    ("liars", "named"),
    [
        ({}, set()),
        ({"x": -0.3}, {"x"}),  # turned round: the mean still moves the right way
        ({"x": -2.0}, {"x"}),
        ({"x": 8.0}, {"x"}),
        ({"x": 0.0}, set()),  # it learnt nothing, and harms nothing
        ({"x": float("nan")}, {"x"}),
        ({"x": 0.27}, set()),
        ({"d": 0.29, "e": 0.32, "x": -0.5, "y": -2.0}, {"x", "y"}),
        ({"x": -2.0, "y": -2.0}, set()),  # two of five are more than a third
    ],
)
def test_those_are_named_whose_removal_lowers_the_loss(liars: dict[str, float], named: set[str]) -> None:
    updates = {**HONEST, **liars}
    before, alone, without = quadratic(updates)
    assert set(find_causes(before, without([]), alone, without)) == named  # type: ignore[operator, arg-type]


def test_an_outlier_is_five_times_as_far_from_the_typical_peer_as_half_of_all_are() -> None:
    alone = {peer: np.full(8, 3.0 + far) for peer, far in {"e": 1.0, "d": -1.0, "c": 0.0, "b": -1.0}.items()}
    assert outliers({**alone, "a": np.full(8, 8.0)}) == []
    assert outliers({**alone, "a": np.full(8, 8.125)}) == ["a"]
    assert outliers({"y": np.full(8, 90.0), **dict.fromkeys("bcd", BEFORE[:8]), "x": np.full(8, 80.0)}) == ["x", "y"]


def table_of(losses: dict[str, float], floor: float) -> tuple[dict[str, Losses], list[Collection[str]], object]:
    """Each peer's loss alone; without peers, the loss falls by 0.1 for each that is above the floor."""
    asked: list[Collection[str]] = []

    def without(removed: Collection[str]) -> Losses:
        asked.append(frozenset(removed))
        return BEFORE + 0.05 - 0.1 * sum(losses[peer] > floor for peer in removed)

    return {peer: BEFORE + far for peer, far in losses.items()}, asked, without


def test_in_a_harmless_round_more_outliers_than_there_may_be_liars_are_no_liars() -> None:
    alone, _, without = table_of({"a": -0.2, "b": -0.2, "c": -0.2, "x": 0.5, "y": 0.6}, 0.0)
    assert find_causes(BEFORE, BEFORE, alone, without) == {}  # type: ignore[arg-type]
    # A round that harms has a cause: the worst is removed, which takes the harm away.
    assert set(find_causes(BEFORE, BEFORE + 0.05, alone, without)) == {"x"}  # type: ignore[arg-type]


def test_the_harm_is_taken_away_first_and_then_the_others_that_harm_are_looked_for() -> None:
    losses = {**dict.fromkeys("abcdef", -0.2), **dict.fromkeys("vwxyz", 0.5)}
    alone, asked, without = table_of(losses, 0.0)
    found = find_causes(BEFORE, BEFORE + 0.05, alone, without)  # type: ignore[arg-type]
    assert list(found) == ["v", "w", "x"]  # as many as may lie of eleven
    assert len(set(asked)) == len(asked) == 5 + 4 + 3, "each evaluation costs a pass over the held-out sequences"


def test_a_loss_that_rises_alike_for_all_has_no_cause() -> None:
    before, alone, without = quadratic({"a": -0.30, "b": -0.31, "c": -0.28, "d": -0.29})
    assert outliers(alone) == []
    assert find_causes(before, without([]), alone, without) == {}  # type: ignore[operator, arg-type]


def test_the_cause_of_a_harmful_round_may_lower_the_loss_when_it_is_alone() -> None:
    """An update of the first rounds did, turned round and four times as large: 5.29 to 5.10 nats, 4.81 for others."""
    alone = {**dict.fromkeys("abc", BEFORE - 0.5), "x": BEFORE - 0.2}

    def without(removed: Collection[str]) -> Losses:
        return BEFORE + (-0.6 if "x" in removed else 0.2)

    assert set(find_causes(BEFORE, without([]), alone, without)) == {"x"}


def test_a_slow_peer_is_left_in_when_a_liar_is_removed() -> None:
    updates = {**HONEST, "d": 0.29, "e": 0.30, "slow": 0.02, "x": -4.0}
    before, alone, without = quadratic(updates)
    assert outliers(alone) == ["slow", "x"]
    assert set(find_causes(before, without([]), alone, without)) == {"x"}  # type: ignore[operator, arg-type]


def test_an_outlier_whose_removal_does_not_help_is_not_named() -> None:
    before, alone, _ = quadratic({**HONEST, "x": -0.5})
    assert find_causes(before, before, alone, lambda removed: before) == {}


def test_a_repeated_update_is_recognised_whatever_its_size() -> None:
    drawn = {peer: RANDOM.normal(size=9000) for peer in "abcd"}
    share, history = (4096, 13096), UpdateHistory()
    sketches = {peer: sketch_of(vector, 4096) for peer, vector in drawn.items()}
    mean = sum(drawn.values()) / 4.0
    assert history.repeated(share, sketches) == {}
    history.remember(7, share, sketches, sketch_of(mean, 4096))
    fresh = {peer: sketch_of(RANDOM.normal(size=9000), 4096) for peer in "abcd"}
    assert history.repeated(share, fresh) == {}
    again = {**fresh, "b": 0.1 * sketches["b"]}
    assert history.repeated(share, again) == {"b": "its update is its own of round 7 again"}
    assert history.repeated((0, 9000), again) == {}
    stolen = {**fresh, "b": sketches["a"]}
    assert history.repeated(share, stolen) == {"b": "its update is another peer's of round 7 again"}
    result = {**fresh, "b": sketch_of(mean, 4096)}
    assert history.repeated(share, result) == {"b": "its update is a copy of the result of round 7"}
    # Like an earlier update, as those of neighbouring rounds are, is not the same.
    like = {**fresh, "b": sketch_of(drawn["b"] + 0.2 * RANDOM.normal(size=9000), 4096)}
    assert history.repeated(share, like) == {}
    assert history.repeated(share, {**fresh, "b": np.zeros(SKETCH_VALUES)}) == {}
    # All at once: the group repeats a round, and no peer lies.
    assert history.repeated(share, sketches) == {}
    for number in range(KEPT_UPDATES):
        assert history.repeated(share, again) == {"b": "its update is its own of round 7 again"}, number
        history.remember(8 + number, share, {"a": fresh["a"]}, np.zeros(SKETCH_VALUES))
        again["a"] = sketch_of(RANDOM.normal(size=9000), 4096)
    assert history.repeated(share, again) == {}


def test_sketches_of_another_share_are_forgotten() -> None:
    sketches, mean = {peer: RANDOM.normal(size=SKETCH_VALUES) for peer in "abcd"}, RANDOM.normal(size=SKETCH_VALUES)
    history = UpdateHistory()
    history.remember(0, (0, 100), sketches, mean)
    history.remember(1, (0, 200), {}, np.zeros(SKETCH_VALUES))
    others = {peer: RANDOM.normal(size=SKETCH_VALUES) for peer in "acd"}
    assert history.repeated((0, 200), {**others, "b": sketches["b"]}) == {}
    assert history.repeated((0, 200), {**others, "b": mean}) == {}


def test_the_same_update_of_two_peers_is_reported_as_a_pair() -> None:
    sketches = {peer: sketch_of(RANDOM.normal(size=500), 0) for peer in "abc"}
    assert same_updates(sketches) == []
    assert same_updates({"d": 2.0 * sketches["b"], **sketches}) == [("b", "d")]
    assert same_updates({**sketches, "d": sketches["c"]}) == [("c", "d")]
