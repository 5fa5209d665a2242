"""Codecs: bytes equal the formula, values come back, what was lost is carried, hostile bytes are refused."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.network.slow_codecs import CODECS, CUT_VALUES, cut_shares, encoded_bytes
from phalanx.peers.codecs import BadBytes, Sender, _largest_places, decode, encode

ALL = ("fp64", *CODECS)
# Largest error of a value, as a part of the largest value.
BOUNDS = {"fp64": 0.0, "fp32": 0.0, "bf16": 2**-8, "int8": 0.51 / 127, "int4": 0.51 / 7}


def draw(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


@pytest.mark.parametrize("codec", ALL)
@pytest.mark.parametrize("count", [0, 1, 2, 127, 128, 129, 1023, 1025, 4095, 4096, 4097, 20_001])
def test_bytes_equal_the_formula(codec: str, count: int) -> None:
    data = encode(codec, draw(count))
    assert len(data) == encoded_bytes(codec, count)
    assert decode(codec, data, count).shape == (count,)


@pytest.mark.parametrize("codec", ALL)
def test_pieces_take_the_bytes_of_the_whole(codec: str) -> None:
    values = draw(100_003)
    cuts = cut_shares(values.size, [0.5, 0.2, 0.0, 0.3])
    pieces = [values[begin:end] for begin, end in itertools.pairwise(cuts)]
    assert all(cut % CUT_VALUES == 0 for cut in cuts[:-1])
    assert sum(len(encode(codec, piece)) for piece in pieces) == encoded_bytes(codec, values.size)
    whole = decode(codec, encode(codec, values), values.size)
    parts = np.concatenate([decode(codec, encode(codec, piece), piece.size) for piece in pieces])
    assert np.array_equal(whole, parts)


@pytest.mark.parametrize("codec", BOUNDS)
def test_values_come_back(codec: str) -> None:
    values = draw(9_999)
    found = decode(codec, encode(codec, values), values.size)
    assert np.max(np.abs(found - values)) <= BOUNDS[codec] * np.max(np.abs(values))


def test_top_values_are_the_largest_and_keep_their_sign() -> None:
    values = draw(3 * 4096 + 100)
    found = decode("topk-2bit", encode("topk-2bit", values, 0.05), values.size, 0.05)
    for begin in range(0, values.size, 4096):
        chunk, back = values[begin : begin + 4096], found[begin : begin + 4096]
        kept = back != 0
        assert np.abs(chunk[kept]).min() >= np.abs(chunk[~kept]).max()
        assert np.array_equal(np.sign(chunk[kept]), np.sign(back[kept]))
    kept = found != 0
    # Two levels for each sign: a fifth of the norm is what 2 bits lose of a normal tail.
    assert np.linalg.norm((found - values)[kept]) < 0.2 * np.linalg.norm(values[kept])


@pytest.mark.parametrize("codec", ALL)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_no_number_is_still_seen(codec: str, bad: float) -> None:
    values = draw(5000)
    values[4321] = bad
    assert not np.all(np.isfinite(decode(codec, encode(codec, values), values.size)))


@pytest.mark.parametrize("codec", ["int4", "topk-2bit"])
def test_what_is_lost_is_sent_later(codec: str) -> None:
    values, sender = draw(8192, 3), Sender(codec, feedback=1.0)
    sent = np.zeros_like(values)
    for _ in range(60):
        outgoing = sender.outgoing(values)
        decoded = decode(codec, encode(codec, outgoing), values.size)
        sender.settle(outgoing - decoded, np.zeros_like(values))
        sent += decoded
    # With feedback the mean of what was sent is what should have been; without, most values are never sent.
    assert np.linalg.norm(sent / 60 - values) < 0.5 * np.linalg.norm(values)
    plain = decode(codec, encode(codec, values), values.size)
    assert np.linalg.norm(sent / 60 - values) < np.linalg.norm(plain - values)


def test_a_discarded_round_leaves_the_loss_as_it_was() -> None:
    values, sender = draw(4096), Sender("int4")
    first = sender.outgoing(values)
    assert np.array_equal(sender.outgoing(values), first)
    sender.settle(np.ones_like(values), np.zeros_like(values))
    assert np.allclose(sender.outgoing(values), values + 0.95)
    other = Sender("int4")
    other.load_state(sender.state())
    assert np.array_equal(other.outgoing(values), sender.outgoing(values))


@settings(max_examples=200, deadline=None)
@given(
    codec=st.sampled_from(ALL),
    data=st.binary(max_size=700),
    count=st.integers(0, 5000),
    share=st.sampled_from([0.001, 0.03, 1.0]),
)
def test_hostile_bytes_are_refused_or_are_a_vector(codec: str, data: bytes, count: int, share: float) -> None:
    try:
        found = decode(codec, data, count, share)
    except BadBytes:
        return
    assert found.shape == (count,)


@settings(max_examples=200, deadline=None)
@given(codec=st.sampled_from(ALL), count=st.integers(1, 300), data=st.data())
def test_hostile_bytes_of_the_right_size(codec: str, count: int, data: st.DataObject) -> None:
    size = encoded_bytes(codec, count)
    raw = data.draw(st.binary(min_size=size, max_size=size))
    with contextlib.suppress(BadBytes):
        assert decode(codec, raw, count).shape == (count,)


@pytest.mark.parametrize("codec", ALL)
def test_a_wrong_size_is_named(codec: str) -> None:
    with pytest.raises(BadBytes) as caught:
        decode(codec, b"x" * 7, 1000)
    assert "7 bytes for 1000 values" in str(caught.value)


@given(rows=st.lists(st.lists(st.sampled_from([0.0, -0.5, 0.5, 1.0, -1.0, np.nan, np.inf]), min_size=9, max_size=9)))
def test_of_equal_values_the_first_are_sent_as_a_stable_sort_has_them(rows: list[list[float]]) -> None:
    table = np.array(rows, dtype=np.float32).reshape(-1, 9)
    size = np.abs(np.nan_to_num(table, nan=np.inf))
    for count in (1, 4, 9):
        wanted = np.sort(np.argsort(-size, axis=1, kind="stable")[:, :count], axis=1)
        assert np.array_equal(_largest_places(table, count), wanted)
