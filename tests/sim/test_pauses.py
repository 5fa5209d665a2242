"""Pauses that spread."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.sim.fair_rates import LinkTable, fair_rates_of, paused_rates


def rates(paths: list[list[int]], capacity: list[float]) -> tuple[list[float], list[float]]:
    """Fair rates, and those with pauses."""
    start = np.concatenate([[0], np.cumsum([len(path) for path in paths])])
    table = LinkTable(start=start, link=np.concatenate(paths).astype(np.int32), pull=np.ones(len(paths)))
    room = np.array(capacity)
    fair = fair_rates_of(table, room, engine="numpy")
    return fair.tolist(), paused_rates(table, fair, room).tolist()


def test_who_shares_a_link_before_a_crowded_one_goes_as_slowly() -> None:
    """Links 0 and 1 lead to switches, 2 to the crowded host, 3 to another: the victim shares link 0 with one sender."""
    fair, slow = rates([[0, 2], [1, 2], [0, 3]], [1.0, 1.0, 1.0, 1.0])
    assert fair == pytest.approx([0.5, 0.5, 0.5])
    fair, slow = rates([[0, 2], [1, 2], [4, 2], [0, 3]], [1.0] * 5)
    assert fair == pytest.approx([1 / 3, 1 / 3, 1 / 3, 2 / 3])
    assert slow == pytest.approx([1 / 3] * 4)


def test_a_link_that_is_full_of_one_flow_pauses_nobody() -> None:
    fair, slow = rates([[0, 2], [1, 3]], [1.0] * 4)
    assert slow == fair == pytest.approx([1.0, 1.0])


def test_pauses_go_on_up_the_paths_of_those_they_slow() -> None:
    """The last flow shares nothing with the crowd, only with a flow that does."""
    crowd = [[0, 5, 9], [1, 9], [2, 9], [3, 9]]
    fair, slow = rates([*crowd, [4, 5, 8], [4, 7]], [1.0] * 10)
    assert fair[-2:] == pytest.approx([0.5, 0.5])
    assert slow[-2:] == pytest.approx([0.25, 0.25])


def test_a_dead_link_drops_and_does_not_pause() -> None:
    fair, slow = rates([[0, 1], [0, 2]], [1.0, 0.0, 1.0])
    assert slow == fair == pytest.approx([0.0, 1.0])
