"""Single steps of the conventional transport, as the Python they are compiled from: rates, and what receivers say."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from phalanx.sim.packets import engine_state, roce_senders, roce_state
from phalanx.sim.packets import roce_kernel as kernel
from phalanx.sim.packets.roce_state import (
    ACK,
    ALPHA,
    CNP,
    CNP_AT,
    DELIVERED,
    EXPECTED,
    FAST_BYTES,
    FAST_TIME,
    NAK,
    NUMBER_BIT,
    QP_BITS,
    RATE,
    TARGET,
    TOTAL,
)

RULES = SimpleNamespace(
    dcqcn=1, ack_every=4, gain=1 / 256, cnp=150.0, alpha=165.0, timer=165.0, fast_rounds=5, add=0.001, hyper=0.01,
    least=0.001, mark_low=100.0, mark_high=200.0, mark_most=0.2,
)  # fmt: skip


def plain(name: str) -> Callable[..., Any]:
    """A step of the loop before it was compiled."""
    made = getattr(kernel, name, None) or getattr(roce_senders, name)
    python: Callable[..., Any] = getattr(made, "py_func", made)
    return python


@pytest.fixture
def pair() -> SimpleNamespace:
    """One queue pair of ten packets at line rate."""
    made = SimpleNamespace(
        counts=np.zeros((1, 9), dtype=np.int32),
        rate=np.zeros((1, 8)),
        hops=[4],
        owner=np.zeros(1, dtype=np.int32),
        arrived=np.zeros(1, dtype=np.int64),
    )
    made.counts[0, TOTAL] = 10
    made.rate[0, RATE] = made.rate[0, TARGET] = made.rate[0, ALPHA] = 1.0
    made.rate[0, CNP_AT] = -np.inf
    return made


def test_a_complaint_cuts_by_half_of_alpha_and_starts_the_rounds_again(pair: SimpleNamespace) -> None:
    pair.counts[0, FAST_TIME] = pair.counts[0, FAST_BYTES] = 3
    plain("cut")(RULES, pair.rate, pair.counts, 0, 1000)
    assert (pair.rate[0, RATE], pair.rate[0, TARGET], pair.rate[0, ALPHA]) == (0.5, 1, 1)
    assert pair.counts[0, [FAST_TIME, FAST_BYTES]].tolist() == [0, 0]
    pair.rate[0, ALPHA] = 0.5
    plain("cut")(RULES, pair.rate, pair.counts, 0, 1000)
    assert (pair.rate[0, RATE], pair.rate[0, TARGET]) == (0.375, 0.5)
    assert pair.rate[0, ALPHA] == pytest.approx(0.5 * 255 / 256 + 1 / 256)


@pytest.mark.parametrize(
    ("timed", "sent", "target"), [(4, 0, 0.5), (5, 0, 0.501), (9, 5, 0.501), (6, 6, 0.51), (9, 8, 0.53)]
)
def test_a_rate_returns_half_way_then_adds_then_adds_more(
    pair: SimpleNamespace, timed: int, sent: int, target: float
) -> None:
    pair.counts[0, [FAST_TIME, FAST_BYTES]] = timed, sent
    pair.rate[0, [RATE, TARGET]] = 0.25, 0.5
    plain("rise")(RULES, pair.rate, pair.counts, 0)
    assert pair.rate[0, TARGET] == pytest.approx(target)
    assert pair.rate[0, RATE] == pytest.approx((target + 0.25) / 2)


def test_nothing_is_faster_than_the_line(pair: SimpleNamespace) -> None:
    pair.counts[0, [FAST_TIME, FAST_BYTES]] = 50
    plain("rise")(RULES, pair.rate, pair.counts, 0)
    assert (pair.rate[0, RATE], pair.rate[0, TARGET]) == (1, 1)


def test_a_receiver_takes_packets_in_order_and_complains_once(
    pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int, int]] = []

    def tell(_calendar: object, _totals: object, at: int, word: int) -> None:
        told.append((at, (int(word) >> QP_BITS) & 3, int(word) >> NUMBER_BIT))

    monkeypatch.setattr(kernel, "tell", tell)
    form, totals = SimpleNamespace(back=3, host_slots=11, ring=10_000), np.zeros(13, dtype=np.int64)

    def receive(slot: int, number: int, marked: int = 0) -> list[tuple[int, int, int]]:
        told.clear()
        packets = SimpleNamespace(pair=[0], number=[number], marked=[marked])
        plain("receive")(form, RULES, packets, pair, None, totals, slot, 0)
        return list(told)

    assert [receive(slot, slot) for slot in range(3)] == [[], [], []]
    assert receive(3, 3) == [(3 + 4 * 3 + 11, ACK, 4)]
    assert [kind for _, kind, _ in receive(4, 5) + receive(5, 6)] == [NAK]  # 4 is missing; once
    assert receive(6, 4) == []
    assert [kind for _, kind, _ in receive(7, 7)] == [NAK]  # another gap
    assert receive(8, 3) == [(8 + 23, ACK, 5)]  # again what it has: how far it is
    assert (pair.counts[0, EXPECTED], totals[DELIVERED], pair.arrived[0]) == (5, 5, 5)
    # Marks are passed on at most every 150 slots.
    assert [receive(slot, 5 + i, 1) != [] for i, slot in enumerate((100, 249))] == [True, False]
    assert [kind for _, kind, _ in receive(250, 7, 1)] == [ACK, CNP]


def test_marks_begin_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "draw", lambda _totals: 0.15)
    found = [plain("marks")(RULES, None, waiting) for waiting in (100, 150, 180, 199, 200)]
    assert found == [False, False, True, True, True]  # 0.2 · 0.5 is below the draw, 0.2 · 0.8 above


def test_a_switch_pauses_a_port_by_what_is_free_not_by_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(kernel, "enqueue", lambda *_: None)
    monkeypatch.setattr(kernel, "signal", lambda *args: asked.append((args[4], args[5])))
    for name in ("nth", "power_of_two_for", "shuffled"):
        monkeypatch.setattr(kernel, name, plain(name))

    def arrive(used: int, held: int) -> list[tuple[int, int]]:
        """One packet reaches a switch of 800 that has `used` of them, `held` over this link."""
        asked.clear()
        ports = SimpleNamespace(
            wire=np.ones((1, 1), dtype=np.int32), first=None, last=None, waiting=np.zeros(1, dtype=np.int32), node=[0],
            used=[used], held=[held], asked=[0],
        )  # fmt: skip
        packets = SimpleNamespace(next=None, came=[0], pair=[0], hop=[0])
        pairs = SimpleNamespace(hops=[4], route=np.zeros((1, 6), dtype=np.int32))
        rules = SimpleNamespace(pfc=1, buffer=800, pause_share=1 / 8)
        plain("arrive")(SimpleNamespace(wire=1), rules, ports, packets, pairs, None, None, 1000)
        return list(asked)

    assert arrive(used=0, held=98) == []  # an eighth of 800 is 100
    assert arrive(used=0, held=99) == [(0, 1)]
    assert arrive(used=400, held=48) == []
    assert arrive(used=400, held=49) == [(0, 1)]  # an eighth of the 400 that are free


def test_both_loops_draw_from_the_same_column() -> None:
    assert roce_state.RANDOM == engine_state.RANDOM
