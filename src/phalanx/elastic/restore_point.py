"""The places of replicas, and the steps they make complete: the newest step for which every rank's state exists.

These are the values that agents, coordinator and ranks exchange about replicas; no tensors. `generation` is that of
the membership that wrote a replica, `buffer` the one of its slot that holds it.
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
        """Return the values for a message."""
        return asdict(self)

    @classmethod
    def from_json(cls, message: Mapping[str, Any]) -> ReplicaInfo:
        """Read a message; raises KeyError, ValueError or TypeError for anything else."""
        numbers = {name: int(message[name]) for name in cls.__dataclass_fields__ if name != "kind"}
        return cls(kind=kind_of(message), **numbers)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaPlace:
    """The place of a copy of one rank's snapshot."""

    host: str
    slot: int
    kind: Kind
    buffer: int
    tensors: int

    def to_json(self) -> dict[str, Any]:
        """Return the values for a message."""
        return asdict(self)

    @classmethod
    def from_json(cls, message: Mapping[str, Any]) -> ReplicaPlace:
        """Read a message; raises KeyError, ValueError or TypeError for anything else."""
        numbers = {name: int(message[name]) for name in ("slot", "buffer", "tensors")}
        return cls(host=str(message["host"]), kind=kind_of(message), **numbers)


def kind_of(message: Mapping[str, Any]) -> Kind:
    """Return the kind that a message names; raises ValueError for any other."""
    for kind in KINDS:
        if message["kind"] == kind:
            return kind
    raise ValueError(f"{message['kind']!r} is neither of {', '.join(KINDS)}")


Sightings = dict[int, list[ReplicaPlace]]  # places by rank


@dataclass(frozen=True, kw_only=True, slots=True)
class RestorePoint:
    """A step that memory holds for every rank: for each rank that wrote it, the places of its copies, best first."""

    generation: int
    step: int
    world: int
    places: Mapping[int, tuple[ReplicaPlace, ...]]

    def to_json(self) -> dict[str, Any]:
        """Return the values for a message."""
        places = {str(rank): [place.to_json() for place in copies] for rank, copies in self.places.items()}
        return {"generation": self.generation, "step": self.step, "world": self.world, "places": places}

    @classmethod
    def from_json(cls, message: Mapping[str, Any]) -> RestorePoint:
        """Read a message; raises KeyError, ValueError or TypeError for anything else."""
        places = {
            int(rank): tuple(ReplicaPlace.from_json(place) for place in copies)
            for rank, copies in message["places"].items()
        }
        numbers = {name: int(message[name]) for name in ("generation", "step", "world")}
        return cls(places=places, **numbers)


@dataclass(frozen=True, slots=True)
class Lineage:
    """The step up to which the snapshots of each generation belong to the present state of the run.

    When generation 5 continued from step 8 of generation 4, steps 9 and 10 of generation 4 were undone, although their
    snapshots may still be in memory: the run may have gone back because they were wrong.
    """

    ceilings: tuple[tuple[int, int | None], ...] = ()

    def begin(self, generation: int, *, source: tuple[int, int] | None) -> Lineage:
        """Return the lineage after `generation` continued from (generation, step) in memory; None: disk or start.

        >>> line = Lineage().begin(4, source=None).begin(5, source=(4, 8))
        >>> [line.allows(4, 8), line.allows(4, 9), line.allows(5, 9), line.allows(3, 7)]
        [True, False, True, False]
        """
        if source is None:
            return Lineage(((generation, None),))
        before, step = source
        older = [
            (old, step if ceiling is None else min(ceiling, step)) for old, ceiling in self.ceilings if old <= before
        ]
        return Lineage((*older, (generation, None)))

    def allows(self, generation: int, step: int) -> bool:
        """True when this step of this generation is part of the run's present state."""
        ceilings = dict(self.ceilings)
        ceiling = ceilings.get(generation)
        return generation in ceilings and (ceiling is None or step <= ceiling)

    def to_json(self) -> list[list[int | None]]:
        """Return the values for the coordinator's file."""
        return [[generation, ceiling] for generation, ceiling in self.ceilings]

    @classmethod
    def from_json(cls, rows: Iterable[Iterable[Any]]) -> Lineage:
        """Read the values of the coordinator's file."""
        return cls(tuple((int(generation), None if ceiling is None else int(ceiling)) for generation, ceiling in rows))


def find_restore_points(
    held: Mapping[str, Iterable[ReplicaInfo]], *, lineage: Lineage | None = None, at_most: int | None = None
) -> list[RestorePoint]:
    """Return the steps that can be restored from what each host holds, by generation and step, newest first.

    `lineage` leaves out steps that were undone, `at_most` steps after the last one that can be trusted.
    """
    sets: dict[tuple[int, int, int], Sightings] = {}
    for host, snapshots in held.items():
        for info in snapshots:
            if (lineage is None or lineage.allows(info.generation, info.step)) and (
                at_most is None or info.step <= at_most
            ):
                places = sets.setdefault((info.generation, info.step, info.world), {})
                place = ReplicaPlace(
                    host=host, slot=info.slot, kind=info.kind, buffer=info.buffer, tensors=info.tensors
                )
                places.setdefault(info.rank, []).append(place)
    complete = [key for key in sorted(sets, reverse=True) if len(sets[key]) == key[2]]
    return [_choice(key, sets[key]) for key in complete]


def _choice(key: tuple[int, int, int], found: Sightings) -> RestorePoint:
    generation, step, world = key
    places = {rank: tuple(sorted(found[rank], key=_order)) for rank in sorted(found)}
    return RestorePoint(generation=generation, step=step, world=world, places=places)


def _order(place: ReplicaPlace) -> tuple[int, str, int, int]:
    return KINDS.index(place.kind), place.host, place.slot, place.buffer


# ---- in messages: the ranks whose state of a step a host holds, not the place of each; readers look that up
# ----------


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldStep:
    """A step, and the ranks whose state of it is held: by one host, or by all hosts together."""

    generation: int
    step: int
    world: int
    ranks: RankRanges
    # Of the ranks, those that wrote any tensor: of equal copies only one is written.
    writers: RankRanges

    def to_json(self) -> list[Any]:
        """Return the values for an agent's message, sent for every membership.

        No writers means that they are the ranks.
        """
        ranks, writers = self.ranks.to_json(), self.writers.to_json()
        return [self.generation, self.step, self.world, ranks, writers if writers != ranks else None]


def fold_held(held: Iterable[ReplicaInfo]) -> list[HeldStep]:
    """Return the steps that a host holds."""
    steps: dict[tuple[int, int, int], list[ReplicaInfo]] = {}
    for info in held:
        steps.setdefault((info.generation, info.step, info.world), []).append(info)
    return [
        HeldStep(
            generation=generation,
            step=step,
            world=world,
            ranks=RankRanges.of(info.rank for info in infos),
            writers=RankRanges.of(info.rank for info in infos if info.tensors),
        )
        for (generation, step, world), infos in steps.items()
    ]


def find_whole_step(
    held_steps: Iterable[Iterable[Any]], *, lineage: Lineage | None = None, at_most: int | None = None
) -> HeldStep | None:
    """Return the newest step of the newest generation that all hosts together hold in full; `held_steps` are theirs.

    `lineage` leaves out steps that were undone, `at_most` steps after the last one that can be trusted.
    """
    entries: dict[tuple[int, int, int], list[tuple[Any, Any]]] = defaultdict(list)
    for generation, step, world, ranks, writers in held_steps:
        entries[int(generation), int(step), int(world)].append((ranks, writers))
    # Nearly always the first one is complete, and the ranges of the others are never decoded.
    for generation, step, world in sorted(entries, reverse=True):
        if (lineage is not None and not lineage.allows(generation, step)) or (at_most is not None and step > at_most):
            continue
        step_entries = entries[generation, step, world]
        held_ranks = RankRanges.from_json(chain.from_iterable(ranks for ranks, _ in step_entries))
        if held_ranks.covers(world):
            wrote = held_ranks
            # Otherwise every rank has written something.
            if any(writers is not None for _, writers in step_entries):
                writer_ranges = (ranks if writers is None else writers for ranks, writers in step_entries)
                wrote = RankRanges.from_json(chain.from_iterable(writer_ranges))
            return HeldStep(generation=generation, step=step, world=world, ranks=held_ranks, writers=wrote)
    return None
