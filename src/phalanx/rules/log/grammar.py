"""Format errors of a run log: lines that are not events, events that break the schema, and events out of order."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.io.files import Spot
from phalanx.io.values import printable
from phalanx.record.event_batches import LineBlock
from phalanx.record.event_schema import EventColumns, schema_breaks
from phalanx.record.events import Event

# Unknown kinds that are counted by name; the rest are counted together.
MOST_KINDS = 64
# Events of a kind that are checked against the whole schema, in addition to those in doubt.
SAMPLES = 16
# Fewer samples of kinds whose events are long: checking a timeline of 2,000 spans takes 30 ms.
FEWER = {"timeline": 2}
BACK_S = 1.0  # seconds; a clock that goes back by less was corrected, not set


class Grammar:
    """Counts of format errors, each with the place of the first one."""

    def __init__(self) -> None:
        self.unreadable = self.invalid = self.out_of_order = 0
        self.unreadable_spot: Spot | None = None
        self.invalid_spot: Spot | None = None
        self.out_of_order_spot: Spot | None = None
        self.invalid_text = ""
        self.unknown: dict[str, int] = {}
        self._asked: dict[str, int] = {}

    def unread(self, piece: LineBlock, numbers: Sequence[int]) -> None:
        """Count lines that are not events."""
        if numbers:
            self.unreadable += len(numbers)
            self.unreadable_spot = self.unreadable_spot or Spot(file=piece.file, line=numbers[0])

    def disorder(self, file: str, line: int, count: int = 1) -> None:
        """Count events whose step or time went back."""
        self.out_of_order += count
        self.out_of_order_spot = self.out_of_order_spot or Spot(file=file, line=line)

    def strange(self, kind: str, count: int) -> None:
        """Count events of a kind that the schema does not know."""
        name = printable(kind, most=60)
        name = name if name in self.unknown or len(self.unknown) < MOST_KINDS else "others"
        self.unknown[name] = self.unknown.get(name, 0) + count

    def breaks(self, event: Event, file: str, line: int) -> bool:
        """Return whether an event breaks the schema, and count it if it does."""
        breaks = schema_breaks(event)
        if breaks:
            self.invalid += 1
            if self.invalid_spot is None:
                kind = printable(event.get("event"), most=40)
                self.invalid_spot, self.invalid_text = Spot(file=file, line=line), f"{kind}: {breaks}"
        return bool(breaks)

    def valid(self, columns: EventColumns, file: str, lines: Sequence[int]) -> set[int] | None:
        """Return the positions of events that break the schema, or None if there are none.

        Only doubtful events and the first samples of a kind are checked against the whole schema.
        """
        checked = self._asked.get(columns.kind, 0)
        doubts = columns.doubts()
        if (samples := FEWER.get(columns.kind, SAMPLES) - checked) > 0:
            self._asked[columns.kind] = checked + len(columns)
            doubts = sorted({*doubts, *range(min(samples, len(columns)))})
        if not doubts:
            return None
        return {place for place in doubts if self.breaks(columns.events[place], file, lines[place])} or None
