"""Which generation of a place the next snapshot may overwrite.

A snapshot is needed while the newest step that every rank has may be it, or lie before it. A rank learns that step, the
held one, only with the numbers of the next step; until then it must keep what it has.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from phalanx.elastic.vault_header import Header
from phalanx.elastic.vault_segment import Segment


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What must stay: snapshots of this epoch, and the one it was restored from (epoch, step), from `held` on.

    `held` is the newest step of this epoch that all ranks hold, -1 while there is none.
    """

    epoch: int
    restored: tuple[int, int] | None
    held: int

    def keeps(self, header: Header) -> bool:
        """Whether the snapshot with this header must stay."""
        ours = header.epoch == self.epoch or (header.epoch, header.step) == self.restored
        return ours and header.step >= self.held


def next_free(segments: Sequence[Segment], needs: Needs, *, busy: Collection[int] = ()) -> int | None:
    """The generation to overwrite; None when all of them are needed. Those in `busy` are being written."""
    headers = [segment.header() for segment in segments]
    free = [
        place
        for place, header in enumerate(headers)
        if place not in busy and (header is None or not needs.keeps(header))
    ]

    def order(place: int) -> tuple[int, int, int]:
        """The largest first, so that a third generation takes memory only when two are not enough; then the oldest."""
        header = headers[place]
        return segments[place].size_bytes, -(header.sequence if header is not None else 0), -place

    return max(free, key=order, default=None)


def next_sequence(segments: Sequence[Segment]) -> int:
    """A number above those of all snapshots in a place."""
    return max((header.sequence for one in segments if (header := one.header()) is not None), default=0) + 1
