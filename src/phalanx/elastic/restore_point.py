"""Where replicas lie, and which of them make a whole: the newest step of which every rank's state is somewhere.

Only the words in which agents, coordinator and ranks speak of replicas; no tensors. `generation` is that of the
membership that wrote a replica, `buffer` the one of its slot that holds it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, Literal

from phalanx.elastic.rank_ranges import RankRanges

Kind = Literal["own", "guest"]
KINDS: tuple[Kind, ...] = ("own", "guest")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaInfo:
    """A complete snapshot in this host's memory. `slot` of a guest is its place among the host's guests."""

    rank: int
    world: int
    generation: int
    step: int
    slot: int
    kind: Kind
    buffer: int
    tensors: int
    size_bytes: int

    def to_json(self) -> dict[str, Any]:
        """For a message."""
        return asdict(self)

    @classmethod
    def from_json(cls, message: Mapping[str, Any]) -> ReplicaInfo:
        """From a message; raises KeyError, ValueError or TypeError for anything else."""
        numbers = {name: int(message[name]) for name in cls.__dataclass_fields__ if name != "kind"}
        return cls(kind=kind_of(message), **numbers)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaPlace:
    """Where a copy of one rank's snapshot lies."""

    host: str
    slot: int
    kind: Kind
    buffer: int
    tensors: int

    def to_json(self) -> dict[str, Any]:
        """For a message."""
        return asdict(self)

    @classmethod
    def from_json(cls, message: Mapping[str, Any]) -> ReplicaPlace:
        """From a message; raises KeyError, ValueError or TypeError for anything else."""
        numbers = {name: int(message[name]) for name in ("slot", "buffer", "tensors")}
        return cls(host=str(message["host"]), kind=kind_of(message), **numbers)


def kind_of(message: Mapping[str, Any]) -> Kind:
    """The kind a message names."""
    for kind in KINDS:
        if message["kind"] == kind:
            return kind
    raise ValueError(f"{message['kind']!r} is neither of {', '.join(KINDS)}")


Sightings = dict[int, list[ReplicaPlace]]  # by rank


@dataclass(frozen=True, kw_only=True, slots=True)
class RestorePoint:
    """A step that memory holds in full: for each rank that wrote it, where its copies are, the best first."""

    generation: int
    step: int
    world: int
    places: Mapping[int, tuple[ReplicaPlace, ...]]

    def to_json(self) -> dict[str, Any]:
        """For a message."""
        places = {str(rank): [place.to_json() for place in copies] for rank, copies in self.places.items()}
        return {"generation": self.generation, "step": self.step, "world": self.world, "places": places}

    @classmethod
    def from_json(cls, message: Mapping[str, Any]) -> RestorePoint:
        """From a message; raises KeyError, ValueError or TypeError for anything else."""
        places = {
            int(rank): tuple(ReplicaPlace.from_json(place) for place in copies)
            for rank, copies in message["places"].items()
        }
        numbers = {name: int(message[name]) for name in ("generation", "step", "world")}
        return cls(places=places, **numbers)


@dataclass(frozen=True, slots=True)
class Lineage:
    """Up to which step the snapshots of each generation belong to the run as it is now.

    When generation 5 went on from step 8 of generation 4, then steps 9 and 10 that generation 4 had done never
    happened, although they may still lie in memory: perhaps it fell back because they were wrong.
    """

    ceilings: tuple[tuple[int, int | None], ...] = ()

    def begin(self, generation: int, *, source: tuple[int, int] | None) -> Lineage:
        """`generation` goes on from (generation, step) in memory, or from disk or the start, which no memory precedes.

        >>> line = Lineage().begin(4, source=None).begin(5, source=(4, 8))
        >>> [line.allows(4, 8), line.allows(4, 9), line.allows(5, 9), line.allows(3, 7)]
        [True, False, True, False]
        """
        if source is None:
            return Lineage(((generation, None),))
        before, step = source
        kept = [
            (old, step if ceiling is None else min(ceiling, step)) for old, ceiling in self.ceilings if old <= before
        ]
        return Lineage((*kept, (generation, None)))

    def allows(self, generation: int, step: int) -> bool:
        """Whether the run as it is now has been through this step of this generation."""
        ceilings = dict(self.ceilings)
        ceiling = ceilings.get(generation)
        return generation in ceilings and (ceiling is None or step <= ceiling)

    def to_json(self) -> list[list[int | None]]:
        """For the coordinator's file."""
        return [[generation, ceiling] for generation, ceiling in self.ceilings]

    @classmethod
    def from_json(cls, rows: Iterable[Iterable[Any]]) -> Lineage:
        """From the coordinator's file."""
        return cls(tuple((int(generation), None if ceiling is None else int(ceiling)) for generation, ceiling in rows))


def find_restore_points(
    held: Mapping[str, Iterable[ReplicaInfo]], *, lineage: Lineage | None = None, at_most: int | None = None
) -> list[RestorePoint]:
    """The steps that can be restored from what each host holds, the newest generation's first, and in it the newest.

    `lineage` leaves out what was undone, `at_most` what came after a step that is known to be sound.
    """
    sets: dict[tuple[int, int, int], Sightings] = {}
    for host, snapshots in held.items():
        for one in snapshots:
            if (lineage is None or lineage.allows(one.generation, one.step)) and (
                at_most is None or one.step <= at_most
            ):
                places = sets.setdefault((one.generation, one.step, one.world), {})
                place = ReplicaPlace(host=host, slot=one.slot, kind=one.kind, buffer=one.buffer, tensors=one.tensors)
                places.setdefault(one.rank, []).append(place)
    whole = [key for key in sorted(sets, reverse=True) if len(sets[key]) == key[2]]
    return [_choice(key, sets[key]) for key in whole]


def _choice(key: tuple[int, int, int], found: Sightings) -> RestorePoint:
    generation, step, world = key
    places = {rank: tuple(sorted(found[rank], key=_order)) for rank in sorted(found)}
    return RestorePoint(generation=generation, step=step, world=world, places=places)


def _order(place: ReplicaPlace) -> tuple[int, str, int, int]:
    return KINDS.index(place.kind), place.host, place.slot, place.buffer


# ---- in messages: which ranks' state of a step a host holds, not where each lies; readers look that up ---------------


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldStep:
    """A step, and the ranks whose state of it is held: by one host, or, where it is whole, by all of them."""

    generation: int
    step: int
    world: int
    ranks: RankRanges
    writers: RankRanges  # of the ranks, those that wrote any tensor: of equal copies only one does

    def to_json(self) -> list[Any]:
        """For a message of an agent, short: each tells it for every membership. No writers: they are the ranks."""
        ranks, writers = self.ranks.to_json(), self.writers.to_json()
        return [self.generation, self.step, self.world, ranks, writers if writers != ranks else None]


def fold_held(held: Iterable[ReplicaInfo]) -> list[HeldStep]:
    """What a host holds, by step."""
    steps: dict[tuple[int, int, int], list[ReplicaInfo]] = {}
    for one in held:
        steps.setdefault((one.generation, one.step, one.world), []).append(one)
    return [
        HeldStep(
            generation=generation,
            step=step,
            world=world,
            ranks=RankRanges.of(one.rank for one in infos),
            writers=RankRanges.of(one.rank for one in infos if one.tensors),
        )
        for (generation, step, world), infos in steps.items()
    ]


def find_whole_step(
    held_steps: Iterable[Iterable[Any]], *, lineage: Lineage | None = None, at_most: int | None = None
) -> HeldStep | None:
    """The newest step of the newest generation that all hosts together hold in full; `held_steps` are theirs.

    `lineage` leaves out what was undone, `at_most` what came after a step that is known to be sound.
    """
    found: dict[tuple[int, int, int], list[tuple[Any, Any]]] = defaultdict(list)
    for generation, step, world, ranks, writers in held_steps:
        found[int(generation), int(step), int(world)].append((ranks, writers))
    for generation, step, world in sorted(found, reverse=True):  # nearly always the first is whole: the others wait
        if (lineage is not None and not lineage.allows(generation, step)) or (at_most is not None and step > at_most):
            continue
        told = found[generation, step, world]
        held = RankRanges.from_json(chain.from_iterable(ranks for ranks, _ in told))
        if held.covers(world):
            wrote = held
            if any(writers is not None for _, writers in told):  # else every rank has written something
                ours = (ranks if writers is None else writers for ranks, writers in told)
                wrote = RankRanges.from_json(chain.from_iterable(ours))
            return HeldStep(generation=generation, step=step, world=world, ranks=held, writers=wrote)
    return None
