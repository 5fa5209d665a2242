"""Screening of stated norms and weights at the edges of each limit, paces that are dealt by, and claims of progress."""

from __future__ import annotations

import msgspec
import pytest
from test_round_leader import IDS, ready

from phalanx.peers.facts import PeerProgress
from phalanx.peers.messages import Ready
from phalanx.peers.screening import ProgressCheck, Screening, UsualUpdate, limit_paces, screen_ready

USUAL = UsualUpdate(norm=1.0, weight=1.0)


def stated(norm: float | None = 1.0, weight: float = 1.0, **changes: object) -> Ready:
    return msgspec.structs.replace(ready(), norm=norm, weight=weight, **changes)


def screen(*updates: Ready, last: UsualUpdate | None = None, limits: list[float] | None = None) -> Screening:
    known = dict(zip(IDS, limits, strict=False)) if limits is not None else None
    return screen_ready(dict(zip(IDS, updates, strict=False)), 10.0, known, last)


@pytest.mark.parametrize(("norm", "is_dropped"), [(10.0, False), (10.1, True), (19.9, True)])
def test_a_norm_above_ten_times_the_median_is_dropped(norm: float, is_dropped: bool) -> None:
    screened = screen(stated(), stated(), stated(norm))
    assert (IDS[2] in screened.dropped) == is_dropped
    assert (IDS[2] in screened.weights) != is_dropped
    if is_dropped:
        assert screened.dropped[IDS[2]] == f"the norm of its update, {norm:g}, is {norm:g} times the round's median"


@pytest.mark.parametrize(("weight", "counts"), [(9.9, 9.9), (10.0, 10.0), (10.1, 10.0), (90.0, 10.0)])
def test_a_weight_counts_at_most_ten_times_the_median(weight: float, counts: float) -> None:
    screened = screen(stated(), stated(), stated(0.5, weight))
    assert screened.weights == {IDS[0]: 1.0, IDS[1]: 1.0, IDS[2]: counts}
    assert list(screened.capped) == ([IDS[2]] if counts < weight else [])


@pytest.mark.parametrize("usual", [1.0, 0.1])
@pytest.mark.parametrize(("weight", "norm", "counts"), [(2.0, 5.0, 2.0), (2.5, 5.0, 2.0), (9.0, 9.0, 10 / 9)])
def test_weight_and_norm_together_are_limited_as_each_is(
    weight: float, norm: float, counts: float, usual: float
) -> None:
    norm *= usual
    screened = screen(stated(usual), stated(usual), stated(norm, weight))
    assert screened.weights[IDS[2]] == pytest.approx(counts)
    assert not screened.dropped
    if counts < weight:
        assert screened.capped[IDS[2]].startswith(f"a weight of {weight:g} with a norm of {norm:g} is too much")
    else:
        assert not screened.capped


def test_a_claim_counts_what_was_dealt_before_it_is_held_against_the_others() -> None:
    claims = [stated(weight=weight) for weight in (2.5, 90.0, 1.5, 1.5, 2.0)]
    screened = screen(claims[0], claims[1], claims[2], limits=[2.0, 2.0])
    assert screened.weights == {IDS[0]: 2.0, IDS[1]: 2.0, IDS[2]: 0.0}
    assert screened.capped[IDS[0]] == "it claims a weight of 2.5, and was dealt 2"
    assert screened.capped[IDS[1]] == "it claims a weight of 90, and was dealt 2"
    assert screened.capped[IDS[2]] == "it claims a weight of 1.5, and was dealt 0"
    screened = screen(claims[2], claims[3], claims[4], limits=[2.0, 2.0, 2.0])
    assert (screened.weights[IDS[0]], screened.weights[IDS[2]], screened.capped) == (1.5, 2.0, {})
    poisoned = screen(stated(), stated(), stated(1000.0, 90.0), limits=[2.0, 2.0, 2.0])
    assert (list(poisoned.dropped), poisoned.capped) == ([IDS[2]], {}), "a peer is named for one reason"


def test_updates_of_zeros_are_counted_and_drop_no_others() -> None:
    # A peer whose fragment did not move, among peers whose updates are small.
    screened = screen(stated(0.0), stated(0.01), stated(0.02))
    assert screened == Screening(dropped={}, weights=dict.fromkeys(IDS[:3], 1.0), capped={})
    # Nearly all did not move: the median says nothing of the one that did.
    screened = screen(stated(0.0), stated(0.0), stated(5.0, 9.0))
    assert screened == Screening(dropped={}, weights={IDS[0]: 1.0, IDS[1]: 1.0, IDS[2]: 9.0}, capped={})


def test_peers_without_a_weight_are_neither_held_against_others_nor_looked_at() -> None:
    screened = screen(stated(), stated(None, 0.0), stated(1e6, 0.0), stated(2.0), stated(1.0))
    assert not screened.dropped
    assert screened.weights == {IDS[0]: 1.0, IDS[1]: 0.0, IDS[2]: 0.0, IDS[3]: 1.0, IDS[4]: 1.0}


def test_updates_that_are_not_finite_or_of_another_form_are_dropped() -> None:
    screened = screen(stated(), stated(None), stated(values=7), stated(codec="int8"), stated())
    assert screened.dropped == {
        IDS[1]: "its update is not finite (NaN or infinity)",
        IDS[2]: "its update has 7 values in fp32, the round's has 50,000 in fp32",
        IDS[3]: "its update has 50,000 values in int8, the round's has 50,000 in fp32",
    }
    assert set(screened.weights) == {IDS[0], IDS[4]}
    assert screen() == Screening(dropped={}, weights={}, capped={})
    assert screen(stated(None, 0.0)) == Screening(dropped={}, weights={IDS[0]: 0.0}, capped={})


def test_of_two_updates_the_one_far_from_the_last_round_is_left_out() -> None:
    plain, poisoned, lying = stated(), stated(1000.0), stated(weight=1000.0)
    assert screen(plain, poisoned, last=USUAL).dropped == {
        IDS[1]: "the norm of its update, 1e+03, is 1e+03 times the last round's"
    }
    assert screen(lying, plain, last=USUAL).weights == {IDS[0]: 10.0, IDS[1]: 1.0}
    assert not screen(poisoned, poisoned, last=USUAL).dropped  # another kind of update: both are
    assert not screen(plain, poisoned).dropped  # no one knows which of them is wrong
    assert screen(lying, plain).weights == {IDS[0]: 1000.0, IDS[1]: 1.0}
    larger = UsualUpdate(norm=2.0, weight=1.0)
    assert screen(stated(4.0), stated(100.0), last=larger).dropped == {
        IDS[1]: "the norm of its update, 100, is 50 times the last round's"
    }
    assert screen(plain, plain, poisoned, last=larger).dropped == {
        IDS[2]: "the norm of its update, 1e+03, is 1e+03 times the round's median"
    }
    # The round before had no update.
    assert not screen(plain, poisoned, last=UsualUpdate(norm=0.0, weight=1.0)).dropped


@pytest.mark.parametrize(("norm", "is_dropped"), [(9.9, False), (10.1, True)])
def test_of_two_updates_the_limit_is_the_same(norm: float, is_dropped: bool) -> None:
    assert (IDS[0] in screen(stated(norm), stated(0.5), last=USUAL).dropped) == is_dropped
    assert not screen(stated(norm), stated(2.0), last=USUAL).dropped


def test_one_update_alone_is_not_held_against_itself() -> None:
    assert screen(stated(1e6, 1e6), last=USUAL) == Screening(dropped={}, weights={IDS[0]: 1e6}, capped={})


@pytest.mark.parametrize(("pace", "dealt_by"), [(39.0, 39.0), (41.0, 40.0), (4000.0, 40.0)])
def test_a_pace_is_dealt_by_only_as_far_as_its_peer_was_seen_to_keep_it(pace: float, dealt_by: float) -> None:
    paces, tokens, seconds = {"a": 10.0, "b": 10.0, "c": pace}, dict.fromkeys("abc", 8.0), dict.fromkeys("abc", 1.0)
    assert limit_paces(paces, tokens, seconds)["c"] == pytest.approx(dealt_by)
    truly_fast = {"a": 80.0, "b": 80.0, "c": 80.0 * pace / 10}  # learnt from as many times more in the same time
    assert limit_paces(paces, truly_fast, seconds)["c"] == pytest.approx(pace)
    assert limit_paces(paces, tokens, {}) == paces  # the leader is new, and has not seen the round begin
    two = {"a": 10.0, "c": pace}
    assert limit_paces(two, tokens, seconds) == two


def test_claims_of_progress_are_held_against_time() -> None:
    check = ProgressCheck(samples_per_s=100.0)
    assert check.doubt(PeerProgress(), 9.0) == ""
    assert check.doubt(PeerProgress(step=3, samples=50), 10.0) == ""
    assert check.doubt(PeerProgress(step=3, samples=250), 11.0) == ""  # one second of slack
    assert check.doubt(PeerProgress(step=4, samples=451), 12.0).startswith("it claims 201 samples in a time that")
    assert check.doubt(PeerProgress(step=5, samples=900), 13.0) == ""  # the same kind of claim is named once
    assert check.doubt(PeerProgress(step=4, samples=0), 14.0) == "it went back from step 5 to 4"
    assert check.doubt(PeerProgress(step=-1, samples=0), 15.0) == "it claims step -1 and 0 samples"
    unknown = ProgressCheck(samples_per_s=None)
    assert unknown.doubt(PeerProgress(step=0, samples=-1), 0.0)
    assert unknown.doubt(PeerProgress(step=0, samples=0), 1.0) == ""
    assert unknown.doubt(PeerProgress(step=1, samples=10**9), 2.0) == ""  # any speed may be true
