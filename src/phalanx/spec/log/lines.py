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
from phalanx.spec.log.feed import Piece

_TIMELINE = b'"event":"timeline"'
# A timeline as our writer begins it; the spans, up to 150 kB of them, are left out.
_HEAD = re.compile(
    rb'\{"v":\d{1,9},"event":"timeline","t":[\d.]{1,20},"rank":\d{1,9}(?:,"(?:step|epoch|seconds)":[\d.eE+-]{1,30})*'
    rb',"spans":\['
)
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


class Lines:
    """Parses pieces; knows how many timelines it has seen, since few of them are read whole."""

    def __init__(self) -> None:
        self._loads = _parser()
        self._timelines = 0

    def events(self, piece: Piece) -> tuple[list[Event], Sequence[int], list[int]]:
        """Objects with a text `event`; the number of each one's line; the numbers of lines that are none."""
        data = self._without_spans(piece.data) if _TIMELINE in piece.data else piece.data
        try:
            found = self._loads(b"[" + data[:-1].replace(b"\n", b",") + b"]")
            if len(found) == piece.count and {type(one["event"]) for one in found} == {str}:
                return found, range(piece.line, piece.line + piece.count), []
        except (ValueError, RecursionError, KeyError, TypeError, IndexError):
            pass
        return self._one_by_one(data, piece.line)

    def _without_spans(self, data: bytes) -> bytes:
        """The same lines, most timelines among them shortened."""
        parts, done = [], 0
        while (place := data.find(_TIMELINE, done)) >= 0:
            begin, end = data.rfind(b"\n", done, place) + 1 or done, data.find(b"\n", place)
            parts += [data[done:begin], self._shortened(data[begin:end])]
            done = end
        return b"".join([*parts, data[done:]])

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
        is_even = line.count(b"[") == line.count(b"]") and line.endswith(b"}")
        return head.group() + b"]}" if head and is_even else line


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
