"""What is wrong with a log as a text: lines that are no events, events that break the schema, and their order."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.io.files import Spot
from phalanx.io.values import printable
from phalanx.record.event_batches import LineBlock
from phalanx.record.event_schema import EventColumns, schema_breaks
from phalanx.record.events import Event

MOST_KINDS = 64  # unknown ones, by name; the rest are counted together
SAMPLES = 16  # events of a kind that the whole schema is asked about, besides those in doubt
FEWER = {"timeline": 2}  # of kinds whose events are long: a timeline of 2,000 spans takes 30 ms
BACK_S = 1.0  # a clock that goes back by less was corrected, not set


class Grammar:
    """Counts, each with the first place."""

    def __init__(self) -> None:
        self.unreadable = self.invalid = self.out_of_order = 0
        self.unreadable_spot: Spot | None = None
        self.invalid_spot: Spot | None = None
        self.out_of_order_spot: Spot | None = None
        self.invalid_text = ""
        self.unknown: dict[str, int] = {}
        self._asked: dict[str, int] = {}

    def unread(self, piece: LineBlock, numbers: Sequence[int]) -> None:
        """Lines that are no events."""
        if numbers:
            self.unreadable += len(numbers)
            self.unreadable_spot = self.unreadable_spot or Spot(file=piece.file, line=numbers[0])

    def disorder(self, file: str, line: int, count: int = 1) -> None:
        """Events whose step or time went back."""
        self.out_of_order += count
        self.out_of_order_spot = self.out_of_order_spot or Spot(file=file, line=line)

    def strange(self, kind: str, count: int) -> None:
        """Events of a kind that the schema has not."""
        name = printable(kind, most=60)
        name = name if name in self.unknown or len(self.unknown) < MOST_KINDS else "others"
        self.unknown[name] = self.unknown.get(name, 0) + count

    def breaks(self, event: Event, file: str, line: int) -> bool:
        """Whether an event breaks the schema; counted when it does."""
        wrong = schema_breaks(event)
        if wrong:
            self.invalid += 1
            if self.invalid_spot is None:
                kind = printable(event.get("event"), most=40)
                self.invalid_spot, self.invalid_text = Spot(file=file, line=line), f"{kind}: {wrong}"
        return bool(wrong)

    def valid(self, columns: EventColumns, file: str, lines: Sequence[int]) -> set[int] | None:
        """Places of events that break the schema; None when none does."""
        asked = self._asked.get(columns.kind, 0)
        doubts = columns.doubts()
        if (wanted := FEWER.get(columns.kind, SAMPLES) - asked) > 0:
            self._asked[columns.kind] = asked + len(columns)
            doubts = sorted({*doubts, *range(min(wanted, len(columns)))})
        if not doubts:
            return None
        return {place for place in doubts if self.breaks(columns.events[place], file, lines[place])} or None
