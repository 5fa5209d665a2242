"""Two peers send their values before the leader's plan: what each has in the round counts, not what went out."""

from __future__ import annotations

import numpy as np
import pytest
from crew import Crew, together

from phalanx.peers.facts import RoundResult
from phalanx.peers.group import PeerGroup


def draw(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(20_000)


def average(groups: list[PeerGroup], vectors: list[np.ndarray], number: int) -> list[RoundResult]:
    return together(
        [
            lambda group=group, vector=vector: group.average(number, vector, 1.0, "fp64", timeout_s=30.0)
            for group, vector in zip(groups, vectors, strict=True)
        ]
    )


@pytest.mark.parametrize("late", [0, 1])
def test_values_of_a_call_that_has_ended_are_sent_again(late: int) -> None:
    with Crew(2) as crew:
        groups = crew.join_all(2)
        for number in range(3):
            vectors = [draw(10 * number), draw(10 * number + 1)]
            for result in average(groups, vectors, number):
                assert result.committed, result.reason
                assert np.allclose(result.vector, sum(vectors) / 2, atol=1e-12)
        for group in groups:  # values go out once, whoever begins first
            sent = sum(link.sent_bytes for link in group._node.links.data.values())
            assert 3 * 160_000 <= sent < 3.1 * 160_000
        # One is ready alone, sends its values, gives up, and comes back with others.
        assert not groups[late].average(3, draw(77), 1.0, "fp64", timeout_s=0.5).committed
        vectors = [draw(78), draw(79)]
        for result in average(groups, vectors, 3):
            assert result.committed, result.reason
            assert np.allclose(result.vector, sum(vectors) / 2, atol=1e-12)
