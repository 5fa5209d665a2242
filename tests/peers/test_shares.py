"""Water-filling: the formula's own numbers, and that no other shares do better."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.network.slow_codecs import CUT_VALUES, cut_shares, exchange_bytes
from phalanx.network.slow_shares import round_seconds, water_filling
from phalanx.peers.facts import Bandwidth, Member
from phalanx.peers.round_leader import plan_shares

SPEEDS = st.lists(st.floats(0.1, 1e4), min_size=1, max_size=12)


def test_one_fast_and_three_slow_peers_gain_exactly_half() -> None:
    speeds = [80.0, 10.0, 10.0, 10.0]
    shares = water_filling(speeds)
    equal, best = round_seconds(1e6, speeds, [0.25] * 4), round_seconds(1e6, speeds, shares)
    assert equal / best == pytest.approx(1.5, rel=1e-12)
    assert shares == [1.0, 0.0, 0.0, 0.0]


@given(speeds=SPEEDS, data=st.data())
def test_shares_sum_to_one_and_none_are_better(speeds: list[float], data: st.DataObject) -> None:
    clients = data.draw(st.lists(st.booleans(), min_size=len(speeds), max_size=len(speeds)))
    if all(clients):
        with pytest.raises(ValueError) as caught:
            water_filling(speeds, clients)
        assert "client-only" in str(caught.value)
        return
    shares = water_filling(speeds, clients)
    assert sum(shares) == pytest.approx(1.0)
    assert all(share >= 0.0 for share in shares)
    assert all(share == 0.0 for share, client in zip(shares, clients, strict=True) if client)
    raw = [0.0 if client else data.draw(st.floats(0.001, 1.0)) for client in clients]
    other = [one / sum(raw) for one in raw]
    assert round_seconds(1.0, speeds, shares) <= round_seconds(1.0, speeds, other) * (1 + 1e-9)


@given(values=st.integers(0, 10**6), raw=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8).filter(any))
def test_cuts_make_up_the_vector(values: int, raw: list[float]) -> None:
    shares = [one / sum(raw) for one in raw]
    cuts = cut_shares(values, shares)
    assert cuts[0] == 0
    assert cuts[-1] == values
    assert cuts == sorted(cuts)
    assert len(cuts) == len(shares) + 1
    for place, share in enumerate(shares):
        owned = cuts[place + 1] - cuts[place]
        assert abs(owned - share * values) <= 2 * CUT_VALUES
        assert owned == 0 or share > 0.0


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan")])
def test_a_bandwidth_of_zero_is_refused(speed: float) -> None:
    with pytest.raises(ValueError) as caught:
        water_filling([10.0, speed, 10.0])
    assert "above 0" in str(caught.value)


def test_a_peer_that_states_no_bandwidth_counts_as_the_slowest() -> None:
    def member(place: int, mbps: float | None, client_only: bool = False) -> Member:
        link = Bandwidth(up_mbps=mbps, down_mbps=2 * mbps) if mbps else None
        address = ("127.0.0.1", 1)
        return Member(id=str(place), name="p", address=address, instance="i", bandwidth=link, client_only=client_only)

    assert plan_shares([member(0, 80.0), member(1, None), member(2, 10.0)]) == water_filling([80.0, 10.0, 10.0])
    assert plan_shares([member(0, None), member(1, None), member(2, None, True)]) == [0.5, 0.5, 0.0]


def test_bytes_of_a_round_are_those_of_the_formula() -> None:
    assert exchange_bytes("fp32", 1000, 0.5, 1) == 0.0
    assert exchange_bytes("int8", 4096, 1.0, 4) == 3 * 4160
