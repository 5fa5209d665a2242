"""Which snapshots make a whole: the newest step of which every rank's part is somewhere, and may be gone on from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.elastic.held import KINDS, Held, Place

Sightings = dict[int, list[Place]]  # by rank


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A step that memory holds in full: for each rank that wrote it, where its copies are, the best first."""

    epoch: int
    step: int
    world: int
    places: Mapping[int, tuple[Place, ...]]

    def to_json(self) -> dict[str, Any]:
        """For a message."""
        places = {str(rank): [place.to_json() for place in copies] for rank, copies in self.places.items()}
        return {"epoch": self.epoch, "step": self.step, "world": self.world, "places": places}

    @classmethod
    def from_json(cls, message: Mapping[str, Any]) -> Choice:
        """From a message; raises KeyError, ValueError or TypeError for anything else."""
        places = {
            int(rank): tuple(Place.from_json(place) for place in copies) for rank, copies in message["places"].items()
        }
        numbers = {name: int(message[name]) for name in ("epoch", "step", "world")}
        return cls(places=places, **numbers)


@dataclass(frozen=True, slots=True)
class Lineage:
    """Up to which step the snapshots of each epoch belong to the run as it is now.

    When epoch 5 went on from step 8 of epoch 4, then steps 9 and 10 that epoch 4 had done never happened, although they
    may still lie in memory: perhaps it fell back because they were wrong.
    """

    ceilings: tuple[tuple[int, int | None], ...] = ()

    def begin(self, epoch: int, *, source: tuple[int, int] | None) -> Lineage:
        """Epoch `epoch` goes on from (epoch, step) in memory, or from disk or the start, which no memory precedes.

        >>> line = Lineage().begin(4, source=None).begin(5, source=(4, 8))
        >>> [line.allows(4, 8), line.allows(4, 9), line.allows(5, 9), line.allows(3, 7)]
        [True, False, True, False]
        """
        if source is None:
            return Lineage(((epoch, None),))
        kept = [(old, _lower(ceiling, source[1])) for old, ceiling in self.ceilings if old <= source[0]]
        return Lineage((*kept, (epoch, None)))

    def allows(self, epoch: int, step: int) -> bool:
        """Whether the run as it is now has been through this step of this epoch."""
        ceilings = dict(self.ceilings)
        ceiling = ceilings.get(epoch)
        return epoch in ceilings and (ceiling is None or step <= ceiling)

    def to_json(self) -> list[list[int | None]]:
        """For the coordinator's file."""
        return [[epoch, ceiling] for epoch, ceiling in self.ceilings]

    @classmethod
    def from_json(cls, rows: Iterable[Iterable[Any]]) -> Lineage:
        """From the coordinator's file."""
        return cls(tuple((int(epoch), None if ceiling is None else int(ceiling)) for epoch, ceiling in rows))


def _lower(ceiling: int | None, step: int) -> int:
    return step if ceiling is None else min(ceiling, step)


def choices(
    held: Mapping[str, Iterable[Held]], *, lineage: Lineage | None = None, at_most: int | None = None
) -> list[Choice]:
    """The steps that can be restored from what each host holds, the newest epoch's first, and in it the newest.

    `lineage` leaves out what was undone, `at_most` what came after a step that is known to be sound.
    """
    sets: dict[tuple[int, int, int], Sightings] = {}
    for host, snapshots in held.items():
        for one in snapshots:
            if (lineage is None or lineage.allows(one.epoch, one.step)) and (at_most is None or one.step <= at_most):
                places = sets.setdefault((one.epoch, one.step, one.world), {})
                places.setdefault(one.rank, []).append(_place(host, one))
    whole = [key for key in sorted(sets, reverse=True) if len(sets[key]) == key[2]]
    return [_choice(key, sets[key]) for key in whole]


def _place(host: str, held: Held) -> Place:
    return Place(host=host, slot=held.slot, kind=held.kind, generation=held.generation, tensors=held.tensors)


def _choice(key: tuple[int, int, int], found: Sightings) -> Choice:
    epoch, step, world = key
    places = {rank: tuple(sorted(found[rank], key=_order)) for rank in sorted(found)}
    return Choice(epoch=epoch, step=step, world=world, places=places)


def _order(place: Place) -> tuple[int, str, int, int]:
    return KINDS.index(place.kind), place.host, place.slot, place.generation
