"""The vault of one host: three generations for each slot, and three for each guest of another host."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.elastic.held import KINDS, Held, Kind
from phalanx.elastic.vault_segment import Segment

# The newest that every rank has, one that some have, one being written: docs/vault.md, "Why three".
GENERATIONS = 3


class Vault:
    """Made by the agent before it forks; its ranks inherit it. Empty segments cost a descriptor and no memory.

    `guests` is how many ranks of another host may keep a copy here: the most slots that any host of the job has.
    """

    def __init__(self, slots: int, guests: int | None = None) -> None:
        self.slots = slots
        self.guests = slots if guests is None else guests
        places = {"own": range(slots), "guest": range(self.guests)}
        self._segments = {
            (kind, slot, generation): Segment(f"{kind}-{slot}-{generation}")
            for kind in KINDS
            for slot in places[kind]
            for generation in range(GENERATIONS)
        }

    def segment(self, kind: Kind, slot: int, generation: int) -> Segment:
        """One segment; raises KeyError when the vault has no such place."""
        return self._segments[kind, slot, generation]

    def generations(self, kind: Kind, slot: int) -> tuple[Segment, ...]:
        """All generations of a place; raises KeyError when the vault has no such place."""
        return tuple(self.segment(kind, slot, generation) for generation in range(GENERATIONS))

    def held(self) -> list[Held]:
        """Every complete snapshot, from headers alone: 10 µs each, however large they are."""
        return list(self._held())

    def _held(self) -> Iterator[Held]:
        for (kind, slot, generation), segment in self._segments.items():
            header = segment.header()
            if header is not None:
                yield Held(
                    rank=header.rank,
                    world=header.world,
                    epoch=header.epoch,
                    step=header.step,
                    slot=slot,
                    kind=kind,
                    generation=generation,
                    tensors=header.tensors,
                    size_bytes=header.data_bytes,
                )

    def close(self) -> None:
        """Give all memory back, once no process has it mapped."""
        for segment in self._segments.values():
            segment.close()
