"""Single steps of the loop, as the Python they are compiled from: path states, the window, queues."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from phalanx.sim.packets import kernel, parts, roce_kernel, senders, switches
from phalanx.sim.packets.engine_state import (
    ACHIEVED,
    ACKED,
    ARRIVED,
    ASSUMED_BAD,
    AVERAGE,
    BAD_PATHS,
    BASE,
    CREDIT,
    DENIED,
    FAST,
    FRESH,
    GOOD,
    IGNORED,
    IN_FLIGHT,
    JUDGE_AT,
    KEPT,
    LAST_ADD,
    LAST_CUT,
    LAST_LOSS,
    LOSSES,
    LOST,
    MOST,
    MOST_SKIP,
    RANDOM,
    RETIRED,
    STAMP_BIT,
    TOUCHED,
    TRIMMED,
    TRIMMED_LAST_HOP,
    UNACKED,
    UNSENT,
    WINDOW,
)
from phalanx.sim.packets.parts import stamp_of

KNOBS: dict[str, Any] = {
    "paths": 4, "skip": 1, "kept": 0, "edge": 1, "controlled": 0, "target": 40.0, "rtt": 60.0, "idle": 3.0,
    "scale": 1.0, "gain": 4.0, "smoothing": 0.0125, "fresh": 8.0, "least_paths": 1,
}  # fmt: skip


def plain(name: str) -> Callable[..., Any]:
    """A step of the loop before it was compiled."""
    made = next(getattr(module, name) for module in (switches, senders, parts) if hasattr(module, name))
    python: Callable[..., Any] = getattr(made, "py_func", made)
    return python


def knobs(**changed: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**KNOBS, **changed})


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """One connection of four paths with 3 packets under way, in the middle of slot 1000."""
    for name in ("draw", "judge", "quadrant", "grow"):
        monkeypatch.setattr(senders, name, plain(name))
    made = SimpleNamespace(
        tally=np.zeros((1, 16), dtype=np.int32),
        window=np.zeros((1, 16)),
        path=np.zeros((1, 4), dtype=np.uint8),
        kept=np.zeros((1, 8), dtype=np.int16),
        turn=np.zeros((1, 1), dtype=np.int32),
        totals=np.zeros(9, dtype=np.int64),
    )
    made.totals[RANDOM] = 12345
    made.tally[0, IN_FLIGHT] = 3
    made.window[0, WINDOW], made.window[0, MOST], made.window[0, BASE] = 10, 100, 60
    made.window[0, LAST_ADD] = made.window[0, LAST_CUT] = 900
    return made


def heard(state: SimpleNamespace, kind: int, path: int = 1, **changed: Any) -> None:
    args = (state.tally, state.window, state.path, state.totals)
    plain("missing")(knobs(**changed), *args, 0, path, 1000, kind)


def acknowledged(state: SimpleNamespace, marks: int, number: int = 2, waited: int = 0, **changed: Any) -> None:
    word = (marks << senders.SEEN_BIT) | (number << senders.NUMBER_BIT) | (waited << senders.DELAY_BIT)
    args = (state.tally, state.window, state.path, state.kept)
    plain("acknowledged")(knobs(**changed), *args, 0, 1, 1000, word)


def test_what_is_missing_is_sent_again(state: SimpleNamespace) -> None:
    for kind in (LOST, TRIMMED, TRIMMED_LAST_HOP):
        heard(state, kind)
    assert (state.tally[0, IN_FLIGHT], state.tally[0, UNSENT]) == (0, 3)


def test_a_silent_loss_retires_its_path_once(state: SimpleNamespace) -> None:
    heard(state, LOST)
    heard(state, LOST)
    assert state.path[0].tolist() == [GOOD, ASSUMED_BAD, GOOD, GOOD]
    assert (state.tally[0, RETIRED], state.totals[BAD_PATHS]) == (1, 1)
    heard(state, LOST, path=2, edge=0)
    assert state.path[0, 2] == GOOD
    state.path[0, 2] = DENIED
    heard(state, LOST, path=2)
    assert state.path[0, 2] == DENIED


def test_the_last_path_stays(state: SimpleNamespace) -> None:
    for path in range(4):
        heard(state, LOST, path=path)
    assert state.path[0].tolist() == [ASSUMED_BAD, ASSUMED_BAD, ASSUMED_BAD, GOOD]


def test_a_trim_skips_its_path_four_times_but_not_on_the_last_hop(state: SimpleNamespace) -> None:
    heard(state, TRIMMED)
    assert state.path[0, 1] == 4
    for _ in range(5):
        heard(state, TRIMMED)
    assert state.path[0, 1] == MOST_SKIP
    heard(state, TRIMMED_LAST_HOP, path=2)
    heard(state, TRIMMED, path=3, skip=0)
    assert state.path[0, 2:].tolist() == [GOOD, GOOD]
    heard(state, LOST)
    heard(state, TRIMMED)
    assert state.path[0, 1] == ASSUMED_BAD


def test_a_trim_takes_a_packet_of_the_window_and_an_edge_loss_none(state: SimpleNamespace) -> None:
    heard(state, TRIMMED, controlled=1)
    assert state.window[0, WINDOW] == 9
    heard(state, LOST, controlled=1)
    assert state.window[0, WINDOW] == 9
    heard(state, LOST, controlled=1, edge=0)
    assert state.window[0, WINDOW] == 8


def test_a_mark_skips_its_path_once_and_the_last_hop_says_nothing_of_it(state: SimpleNamespace) -> None:
    acknowledged(state, 1)
    assert state.path[0, 1] == 1
    acknowledged(state, 2)
    assert state.path[0, 1] == 1
    state.path[0, 1] = MOST_SKIP
    acknowledged(state, 1)
    assert state.path[0, 1] == MOST_SKIP
    state.path[0, 1] = ASSUMED_BAD
    acknowledged(state, 1)
    assert state.path[0, 1] == ASSUMED_BAD


def test_an_answer_counts_what_had_arrived(state: SimpleNamespace) -> None:
    acknowledged(state, 0, number=2)
    assert (state.tally[0, IN_FLIGHT], state.tally[0, ACKED]) == (1, 2)
    state.tally[0, UNACKED] = 1
    acknowledged(state, 0, number=0)
    assert (state.tally[0, IN_FLIGHT], state.tally[0, ACKED], state.tally[0, UNACKED]) == (0, 3, 0)
    assert state.tally[0, ARRIVED] == 0


def test_only_unmarked_paths_are_kept_and_no_more_than_fit(state: SimpleNamespace) -> None:
    for marks in (0, 1, 2, 0, 0):
        acknowledged(state, marks, kept=2)
    assert state.tally[0, KEPT] == 2


def choose(state: SimpleNamespace) -> int:
    path: int = plain("choose")(state.path, state.turn, state.totals, 0, 0, 1, 4)
    return path


def test_paths_take_turns_without_those_to_skip(state: SimpleNamespace) -> None:
    assert [choose(state) for _ in range(4)] == [0, 1, 2, 3]
    state.turn[:] = 0
    state.path[0] = [GOOD, ASSUMED_BAD, DENIED, GOOD]
    assert [choose(state) for _ in range(2)] == [0, 3]
    state.turn[:] = 0
    state.path[0] = [2, GOOD, GOOD, GOOD]
    assert choose(state) == 1
    assert state.path[0, 0] == 1  # one rotation has passed
    state.path[0] = [ASSUMED_BAD, DENIED, 3, ASSUMED_BAD]
    assert choose(state) == 2  # better a busy path than none
    state.path[0] = [ASSUMED_BAD, DENIED, ASSUMED_BAD, ASSUMED_BAD]
    assert choose(state) == -1


def quadrant(state: SimpleNamespace, marked: int, waited: float) -> None:
    plain("quadrant")(knobs(), state.window, 0, 1000, marked, 2, waited)


def test_the_four_quadrants(state: SimpleNamespace) -> None:
    quadrant(state, 0, 20.0)  # no mark, short wait: grow by the distance to the target
    assert state.window[0, CREDIT] == pytest.approx(4 * 2 * 0.5)
    quadrant(state, 0, 40.0)  # no mark, long wait: grow fairly
    assert state.window[0, CREDIT] == pytest.approx(4 + 5 * 2)
    quadrant(state, 1, 39.0)  # mark, short wait: hold
    assert (state.window[0, WINDOW], state.window[0, CREDIT]) == (10, pytest.approx(14))
    state.window[0, AVERAGE] = 50
    quadrant(state, 1, 40.0)  # mark, long wait: cut by the average's distance to the target
    assert state.window[0, WINDOW] == pytest.approx(10 * (1 - 0.8 * 10 / 50))
    quadrant(state, 1, 80.0)  # once in a round trip
    assert state.window[0, WINDOW] == pytest.approx(8.4)
    state.window[0, LAST_CUT], state.window[0, AVERAGE] = 900, 1e6
    quadrant(state, 1, 80.0)  # at most by half
    assert state.window[0, WINDOW] == pytest.approx(4.2)


def test_an_idle_path_grows_fast_after_a_calm_window(state: SimpleNamespace) -> None:
    for _ in range(5):
        quadrant(state, 0, 1.0)
    assert (state.window[0, WINDOW], state.window[0, FAST]) == (10, 0)
    quadrant(state, 0, 1.0)
    assert (state.window[0, WINDOW], state.window[0, FAST]) == (10.5, 1)
    quadrant(state, 0, 3.0)
    assert state.window[0, FAST] == 0


def judged(state: SimpleNamespace, *, bad: bool = False, marked: int = 0, waited: float = 0.0) -> bool:
    settled: bool = plain("judge")(knobs(), state.window, 0, 3, 1000, bad, marked, waited)
    return settled


def test_a_round_trip_that_delivered_next_to_nothing_sets_the_window(state: SimpleNamespace) -> None:
    state.window[0, JUDGE_AT], state.window[0, ACHIEVED] = 999, 12  # an eighth of the most is 12.5
    assert not judged(state)  # nothing was trimmed, and nobody waited long
    state.window[0, JUDGE_AT], state.window[0, ACHIEVED] = 999, 13
    assert not judged(state, bad=True)
    state.window[0, JUDGE_AT], state.window[0, ACHIEVED] = 999, 12
    assert judged(state, bad=True)
    assert (state.window[0, WINDOW], state.window[0, JUDGE_AT]) == (12, 1000 + 60 + 40)
    # What was under way then is not judged again, if it comes back marked.
    assert judged(state, marked=1)
    assert not judged(state, marked=0)
    state.window[0, IGNORED] = 3
    assert not judged(state, marked=1)


def test_a_long_wait_alarms_as_a_trim_does(state: SimpleNamespace) -> None:
    state.window[0, JUDGE_AT] = 999
    assert not judged(state, waited=160)
    state.window[0, JUDGE_AT] = 999
    assert judged(state, waited=161)
    assert not judged(state, waited=161)  # the next round trip has just begun
    assert state.window[0, WINDOW] == 1


def test_credit_becomes_window_after_eight_packets_or_a_round_trip(state: SimpleNamespace) -> None:
    state.window[0, JUDGE_AT], state.window[0, LAST_ADD], state.window[0, CREDIT] = 2000, 950, 20
    state.window[0, FRESH] = 8
    plain("grow")(knobs(), state.window, 0, 3, 1000, 0, 2, 20.0)
    assert (state.window[0, WINDOW], state.window[0, CREDIT]) == (10, 24)
    state.window[0, FRESH] = 9
    plain("grow")(knobs(), state.window, 0, 3, 1000, 0, 2, 20.0)
    assert (state.window[0, WINDOW], state.window[0, CREDIT]) == (pytest.approx(12.8), 0)
    plain("grow")(knobs(), state.window, 0, 3, 1011, 1, 2, 20.0)  # a round trip since the last: a little in any case
    assert state.window[0, WINDOW] == pytest.approx(12.8 + 0.15)
    # A long wait without a mark is a path that drains: a quarter of a round trip in the average.
    state.window[0, AVERAGE] = 0
    plain("grow")(knobs(), state.window, 0, 3, 1012, 0, 2, 60.0)
    assert state.window[0, AVERAGE] == pytest.approx(0.0125 * 15)


def test_losses_in_a_row_are_counted_once_per_round_trip_until_something_arrives(state: SimpleNamespace) -> None:
    heard(state, LOST)
    heard(state, LOST)
    assert state.tally[0, LOSSES] == 1
    state.window[0, LAST_LOSS] = 939
    heard(state, LOST)
    assert state.tally[0, LOSSES] == 2
    acknowledged(state, 0)
    assert state.tally[0, LOSSES] == 0


def test_a_kept_path_is_used_unless_it_went_bad(state: SimpleNamespace) -> None:
    shape, more = SimpleNamespace(planes=1), knobs(kept=8)
    state.kept[0, :2], state.tally[0, KEPT] = [3, 2], 2
    state.path[0, 2] = ASSUMED_BAD
    taken = [plain("again")(more, shape, state.tally, state.path, state.kept, 0, 0) for _ in range(3)]
    assert taken == [3, -1, -1]
    assert state.tally[0, KEPT] == 0


@pytest.mark.parametrize(("edge", "losses", "wait"), [(1, 3, 200), (0, 0, 200), (0, 3, 1600), (0, 9, 3200)])
def test_a_timeout_doubles_where_there_is_no_other_path(
    state: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, edge: int, losses: int, wait: int
) -> None:
    told: list[int] = []
    monkeypatch.setattr(switches, "tell", lambda *args: told.append(args[6]))
    state.tally[0, LOSSES] = losses
    shape = SimpleNamespace(timeout=200, ring=5000)
    calendar = SimpleNamespace(first=None, word=None, next=None, free=None)
    plain("lose")(shape, knobs(edge=edge), state, calendar, state.totals, 1000, 990 << STAMP_BIT)
    assert told == [990 + wait]
    assert state.tally[0, TOUCHED] == 1


def test_a_queue_takes_what_fits_and_goes_round() -> None:
    ring, head, count = np.zeros((1, 3), dtype=np.int64), np.array([2], dtype=np.int16), np.zeros(1, dtype=np.int16)
    push = plain("push")
    assert [push(ring, head, count, 3, 0, packet) for packet in (7, 8, 9, 10)] == [True, True, True, False]
    assert ring[0].tolist() == [8, 9, 7]


def test_a_slow_port_lets_slots_pass() -> None:
    share, trouble = np.array([0.25]), np.ones(1, dtype=np.uint8)
    held = [plain("held")(share, trouble, 0, slot) for slot in range(100)]
    assert held.count(False) == 25
    trouble[0] = 3
    assert plain("held")(np.ones(1), trouble, 0, 0)
    assert trouble[0] == 1
    assert not plain("held")(np.ones(1), trouble, 0, 0)


@pytest.mark.parametrize("number", [2, 3, 24, 32])
def test_who_comes_first_in_a_slot_is_everybody_equally(number: int) -> None:
    room = plain("power_of_two_for")(number)
    orders = []
    for slot in range(4000):
        word = plain("shuffled")(slot)
        order = [plain("nth")(place, word, room) for place in range(room)]
        assert sorted(order) == list(range(room))
        orders.append([one for one in order if one < number])
    place = np.argsort(np.array(orders), axis=1)
    before = np.array([(place[:, [one]] < place).mean(axis=0) for one in range(number)])
    np.fill_diagonal(before, 0.5)
    assert np.abs(before - 0.5).max() < 0.05  # of any two, six standard deviations
    # In every period too: a connection may send in every eighth slot only.
    assert np.abs((place[::8, 0] < place[::8, 1]).mean() - 0.5) < 0.1


def test_ports_of_both_tiers_are_even_and_independent() -> None:
    # Were the choice at a T1 that of its T0, three tiers would use 8 of 64 ways.
    for seed in (12345, 987654321):
        found = np.zeros((8, 8))
        for flow in range(100):
            for path in range(64):
                found[tuple(plain("spread")(seed, flow, path, salt, 8) for salt in (1, 2))] += 1
        assert found.sum() == 6400
        assert 60 < found.min() <= found.max() < 140  # 100 each, four standard deviations


def test_what_loops_are_compiled_from_is_in_the_key_of_their_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("kernel.py", "parts.py", "senders.py", "engine_state.py", "switches.py")
    folder = Path(kernel.__file__).parent
    stamp = stamp_of(*(str(folder / name) for name in names))
    for loop in (kernel.advance, kernel.probe, kernel.deny):
        assert [cell.cell_contents for cell in loop.py_func.__closure__] == [stamp]
    held = [cell.cell_contents for cell in roce_kernel.advance.py_func.__closure__]
    assert held == [
        stamp_of(
            *(
                str(folder / f"{name}.py")
                for name in ("roce_kernel", "parts", "roce_senders", "roce_state", "engine_state")
            )
        )
    ]
    # A constant from elsewhere, as numba sees it: compiled again only because the stamp differs.
    (tmp_path / "constant.py").write_text("SIZE = 1\n")
    (tmp_path / "loop.py").write_text(LOOP)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    constant, loop = importlib.import_module("constant"), importlib.import_module("loop")
    assert loop.made().size() == 1
    (tmp_path / "constant.py").write_text("SIZE = 2\n")
    constant.SIZE = loop.SIZE = 2
    assert loop.made().size() == 2


LOOP = """
import types
from constant import SIZE
import constant
from phalanx.sim.fair_rates import compile_loop
from phalanx.sim.packets.parts import stamp_of

def made():
    stamp = stamp_of(constant.__file__)

    @compile_loop
    def size():
        _ = stamp
        return SIZE

    return types.SimpleNamespace(size=size)
"""
