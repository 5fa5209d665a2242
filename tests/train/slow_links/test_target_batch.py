"""target-batch: equal to one process with large batches, whoever comes and goes."""

from __future__ import annotations

import numpy as np
import pytest
from local_group import LocalGroup, LocalHub


def distance(one, other) -> float:
    """Largest difference of any weight, against the largest weight."""
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max() / np.abs(other[name]).max()) for name in one)


def test_three_peers_equal_one_process_in_float64(trials, wide) -> None:
    alone = trials.start(trials.plan(), None)
    peers = trials.train(trials.plan('mode = "target-batch"\npeers = 3'), 3)
    for peer in peers:
        assert peer.state == "done"
        assert distance(peer.weights, alone.weights) < 1e-10
    assert all((peers[0].weights[name] == peers[1].weights[name]).all() for name in alone.weights)


def test_three_peers_equal_one_process_in_float32(trials) -> None:
    alone = trials.start(trials.plan(), None)
    for peer in trials.train(trials.plan('mode = "target-batch"\npeers = 3'), 3):
        assert distance(peer.weights, alone.weights) < 1e-5
        assert peer.loss == pytest.approx(alone.loss, abs=1e-5)
