"""A network that breaks and heals: two halves never both commit the same round, and nobody is lost for good."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
from crew import Crew, together
from relay import Switch


@contextmanager
def two_sites(near: list[int], far: list[int]) -> Iterator[tuple[Crew, Switch]]:
    """Peers of two sites, with a cable between them; the lowest id founds, and each dials the lower ones."""
    count, switch = len(near) + len(far), Switch()
    crew = Crew(4, dead_after_s=2.0)
    try:
        for place in range(count):
            routes = {
                crew.people[other].id: switch.relay_to(crew.groups[other].address)
                for other in range(place)
                if (other in near) != (place in near)
            }
            group = crew.start(place, routes=routes)
            first = routes.get(crew.people[0].id, crew.groups[0].address)
            group.join([first] if place else (), timeout_s=20.0)
        crew.wait_for(lambda: all(len(group.view().members) == count for group in crew.groups))
        yield crew, switch
    finally:
        switch.heal()
        crew.close()
        switch.close()


def committed(crew: Crew, place: int, number: int) -> bool:
    return any(event.kind == "committed" and event.round_number == number for event in list(crew.events[place]))


@pytest.mark.parametrize(
    ("majority", "minority"),
    [([0, 1], [2, 3]), ([1, 2, 3], [0]), ([0, 1], [2])],
    ids=["exact halves", "the leader alone", "two of three"],
)
def test_partition_and_heal(majority: list[int], minority: list[int]) -> None:
    count = len(majority) + len(minority)
    vectors = [np.random.default_rng(place).standard_normal(20_000) for place in range(count)]
    with two_sites(majority, minority) as (crew, switch), ThreadPoolExecutor(count) as pool:

        def begin(place: int, number: int) -> object:
            return pool.submit(crew.groups[place].average, number, vectors[place], 1.0, "fp64", timeout_s=50.0)

        first = [begin(place, 0) for place in range(count)]
        assert all(one.result(30.0).committed for one in first)  # type: ignore[attr-defined]
        switch.cut()
        calls = [begin(place, 1) for place in range(count)]
        results = [calls[place].result(40.0) for place in majority]  # type: ignore[attr-defined]
        ids = tuple(crew.people[place].id for place in sorted(majority))
        for result in results:
            assert result.committed, result.reason
            assert result.members_counted == ids
        crew.wait_for(lambda: all("no-majority" in [event.kind for event in crew.events[place]] for place in minority))
        # The majority has committed round 1; the other side has not, and does not.
        assert not any(calls[place].done() for place in minority)  # type: ignore[attr-defined]
        assert not any(committed(crew, place, 1) for place in minority)
        switch.heal()
        for place in minority:
            result = calls[place].result(50.0)  # type: ignore[attr-defined]
            assert result.committed, result
            assert result.members_counted == ids
            assert np.array_equal(result.vector, results[0].vector)
        crew.wait_for(lambda: all(len(group.view().members) == count for group in crew.groups))
        again = together(
            [
                lambda p=place: crew.groups[p].average(2, vectors[p], 1.0, "fp64", timeout_s=30.0)
                for place in range(count)
            ]
        )
        assert all(result.committed and len(result.members_counted) == count for result in again), again
        assert len({result.vector.tobytes() for result in again}) == 1  # type: ignore[union-attr]
