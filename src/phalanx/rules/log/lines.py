"""From lines to events, a piece at a time: one call of the parser for all of them, one by one only where that fails."""

from __future__ import annotations

import gc
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from phalanx.record.events import Event
from phalanx.rules.log.feed import Piece, count_of
from phalanx.rules.log.shape import Columns
from phalanx.rules.log.typed import STEP, Others, Shapes, Typed, row

_TIMELINE = b'"event":"timeline"'
_SOUGHT = _TIMELINE[:14]  # `find` skips by the last letter: one that is rare in the lines makes it three times as fast
# A timeline as our writer begins it; the spans, up to 150 kB of them, are left out.
_HEAD = re.compile(
    rb'\{"v":\d{1,9},"event":"timeline","t":[\d.]{1,20},"rank":\d{1,9}(?:,"(?:step|epoch|seconds)":[\d.eE+-]{1,30})*'
    rb',"spans":\['
)
_NONE: Shapes = {}
WHOLE = 32  # timelines that are parsed whole: the first ones, and later every so manyth


def _refuse(word: str) -> Any:
    raise ValueError(word)


def _float(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def _int(text: str) -> float:
    return int(text) if len(text) < 19 else _float(text)


def _plain(data: bytes) -> Any:
    """As strict as orjson: NaN is no JSON, and no number is infinite."""
    return json.loads(data, parse_constant=_refuse, parse_float=_float, parse_int=_int)


def _parser() -> Callable[[bytes], Any]:
    try:
        import orjson
    except ImportError:  # five times slower, and right all the same
        return _plain
    return orjson.loads


class Batch:
    """The events of a piece, in order: nearly all of them steps, and some others."""

    def __init__(
        self, events: list[Any], lines: Sequence[int], *, others: Others, bad: Sequence[int] = (), rows: Shapes = _NONE
    ) -> None:
        self.events, self.lines = events, lines  # the number of each one's line
        self.others = others
        self.bad = bad  # numbers of lines that are no events
        self._rows = rows  # by kind, names of the fields of those that are structs
        self._columns: dict[str, tuple[Columns, Sequence[int]]] = {}

    def parts(self, places: Sequence[int]) -> Iterator[Batch]:
        """Cut before these."""
        for begin, end in zip([0, *places], [*places, len(self.events)], strict=True):
            if begin == 0 and end == len(self.events):
                yield self
            elif end > begin:
                others = [(place - begin, kind) for place, kind in self.others if begin <= place < end]
                yield Batch(self.events[begin:end], self.lines[begin:end], others=others, rows=self._rows)

    @property
    def times(self) -> list[Any]:
        """Of all; what an event says that says no time is None."""
        if self._rows:
            return [event["t"] if type(event) is dict else event.t for event in self.events]
        return [event.get("t") for event in self.events]

    @property
    def kinds(self) -> list[str]:
        """Those that are there, as they first come."""
        first: dict[str, int] = {}
        for place, kind in self.others:
            first.setdefault(kind, place)
        if len(self.others) < len(self.events):
            places = {place for place, _ in self.others}
            first[STEP] = next(place for place in range(len(self.events)) if place not in places)
        return sorted(first, key=first.__getitem__)

    def columns(self, kind: str) -> tuple[Columns, Sequence[int]]:
        """The fields of a kind that is there, and the lines of its events."""
        if kind not in self._columns:
            events, lines = self._steps() if kind == STEP else self._few(kind)
            names = self._rows.get(kind, ())
            self._columns[kind] = Columns(kind, list(map(row, events)) if names else events, names=names), lines
        return self._columns[kind]

    def _few(self, kind: str) -> tuple[list[Any], Sequence[int]]:
        places = [place for place, one in self.others if one == kind]
        return [self.events[place] for place in places], [self.lines[place] for place in places]

    def _steps(self) -> tuple[list[Any], Sequence[int]]:
        if not self.others:
            return self.events, self.lines
        events, lines = list(self.events), list(self.lines)
        for place, _ in reversed(self.others):
            del events[place], lines[place]
        return events, lines


class Lines:
    """Parses pieces; knows how many timelines it has seen, since few of them are read whole."""

    def __init__(self) -> None:
        self._loads = _parser()
        self._typed = Typed(self._loads)
        self._timelines = 0

    def batch(self, piece: Piece) -> Batch:
        """All of a piece."""
        data = self._without_spans(piece.data)
        listed = _listed(data)
        typed = self._typed.read(listed)
        if typed is not None and len(typed[0]) == piece.count:
            lines: Sequence[int] = range(piece.line, piece.line + piece.count)
            return Batch(typed[0], lines, others=typed[1], rows=self._typed.rows)
        events, lines, bad = self._events(piece, data, listed)
        self._typed.learn(events)
        others = [(place, event["event"]) for place, event in enumerate(events) if event["event"] != STEP]
        return Batch(events, lines, others=others, bad=bad)

    def events(self, piece: Piece) -> tuple[list[Event], Sequence[int], list[int]]:
        """Objects with a text `event`; the number of each one's line; the numbers of lines that are none."""
        data = self._without_spans(piece.data)
        return self._events(piece, data, _listed(data))

    def _events(self, piece: Piece, data: bytes, listed: bytes) -> tuple[list[Event], Sequence[int], list[int]]:
        try:
            found = self._loads(listed)
            if len(found) == piece.count and {type(one["event"]) for one in found} == {str}:
                return found, range(piece.line, piece.line + piece.count), []
        except (ValueError, RecursionError, KeyError, TypeError, IndexError):
            pass
        return self._one_by_one(data, piece.line)

    def _without_spans(self, data: bytes) -> bytes:
        """The same lines, most timelines among them shortened."""
        parts, done, after = [], 0, 0
        while (place := data.find(_SOUGHT, after)) >= 0:
            after = place + 1
            if data.startswith(_TIMELINE, place):
                begin, end = data.rfind(b"\n", done, place) + 1 or done, data.find(b"\n", place)
                parts += [data[done:begin], self._shortened(data[begin:end])]
                done = after = end
        return b"".join([*parts, data[done:]]) if parts else data

    def _one_by_one(self, data: bytes, first: int) -> tuple[list[Event], list[int], list[int]]:
        events, numbers, bad = [], [], []
        for number, line in enumerate(data[:-1].split(b"\n"), first):
            event = self._event(line)
            if event is not None:
                events.append(event)
                numbers.append(number)
            elif line.strip():
                bad.append(number)
        return events, numbers, bad

    def _event(self, line: bytes) -> Event | None:
        try:
            event = self._loads(line)
        except (ValueError, RecursionError):
            return None
        return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None

    def _shortened(self, line: bytes) -> bytes:
        """A timeline without its spans, where its brackets are even; the first and some later ones whole."""
        self._timelines += 1
        if self._timelines <= WHOLE or self._timelines % WHOLE == 0:
            return line
        head = _HEAD.match(line)
        is_even = count_of(b"[", line) == count_of(b"]", line) and line.endswith(b"}")
        return head.group() + b"]}" if head and is_even else line


def _listed(data: bytes) -> bytes:
    """Lines as a JSON list: one call of the parser."""
    return b"[" + data[:-1].replace(b"\n", b",") + b"]"


@contextmanager
def uncollected() -> Iterator[None]:
    """For the milliseconds of a piece: its events are gone before the collector could find them, which is a fifth."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
