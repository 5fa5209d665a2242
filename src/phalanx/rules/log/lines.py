"""From lines to events, a piece at a time: one compiled decoder for events as our own writer writes them.

What it refuses may be right all the same, and is parsed line by line by `Lines`. From these the decoder learns what the
events of a log look like: which fields its steps have, which kinds there are.
"""

from __future__ import annotations

import gc
import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Annotated, Any, Literal

from phalanx.record.events import Event
from phalanx.rules.log.files import Piece, count_of
from phalanx.rules.log.schema import Columns, Field, fields_of, known_kinds

try:
    import msgspec
except ImportError:  # half as fast, and right all the same
    msgspec = None  # type: ignore[assignment]


STEP = "step"
ROWS = frozenset((STEP, "monitor"))  # kinds of many events and flat ones: they become rows, the others tables
LEAST, MOST = -(2**63), 2**63 - 1  # integers that are integers to every parser
MOST_MADE = 64  # decoders: a log whose events look different again and again is read as ever
MOST_KINDS, MOST_NAMES = 64, 64
_SCALARS: frozenset[type] = frozenset((int, float, str, bool, type(None)))

Row = tuple[Any, ...]
Others = list[tuple[int, str]]  # places of events that are no steps, and their kinds
Shapes = dict[str, tuple[str, ...]]  # by kind, the names of its fields

row: Callable[[Any], Row] = msgspec.structs.astuple if msgspec is not None else tuple  # of a struct, without `event`


class Typed:
    """Decodes pieces of which it has seen the like."""

    def __init__(self, loads: Callable[[bytes], Any]) -> None:
        self._loads = loads
        self._shapes: Shapes = {}
        self._names: Shapes = {}  # the same as a row has them
        self.rows: Shapes = {}  # those of ROWS
        self._made = 0
        self._kinds: dict[type, str] = {}
        self._steps: type | None = None
        self._decode: Callable[[bytes], list[Any]] | None = None

    def read(self, data: bytes) -> tuple[list[Any], Others] | None:
        """The events of a JSON list; None where one of them is not as it should be.

        An event of one of ROWS is a struct, to be made a row by `row`; the others are tables.
        """
        if self._decode is None:
            return None
        try:
            found = self._decode(data)
            kinds, steps = self._kinds, self._steps
            others = [(place, kinds[type(one)]) for place, one in enumerate(found) if type(one) is not steps]
            for place, kind in others:
                if kind not in ROWS:
                    found[place] = self._table(kind, found[place])
        except (ValueError, RecursionError):  # what msgspec and orjson raise are ValueErrors
            return None
        return found, others

    def _table(self, kind: str, one: Any) -> Event:
        values = zip(self._names[kind], row(one), strict=True)
        return {"event": kind, **{name: self._value(value) for name, value in values if value is not msgspec.UNSET}}

    def _value(self, value: Any) -> Any:
        """Lists and tables are left to the other parser: so its answers are the same everywhere."""
        return self._loads(bytes(value)) if type(value) is msgspec.Raw else value

    def learn(self, events: Iterable[Event]) -> None:
        """What these look like, for the next piece. Rows all have the fields of the first one; tables have some."""
        if msgspec is None or self._made >= MOST_MADE:
            return
        shapes = dict(self._shapes)
        seen: set[str] = set()
        for event in events:
            kind = event["event"]
            known = shapes.get(kind, ())
            if len(event) > MOST_NAMES or (not known and len(shapes) >= MOST_KINDS):
                continue
            if kind in ROWS and kind not in seen:
                shapes[kind] = tuple(event)
            elif kind not in ROWS and not event.keys() <= set(known):
                shapes[kind] = tuple(dict.fromkeys((*known, *event)))
            seen.add(kind)
        if shapes != self._shapes:
            self._shapes = shapes
            self._make()

    def _make(self) -> None:
        self._made += 1
        self._names = {kind: tuple(name for name in names if name != "event") for kind, names in self._shapes.items()}
        self.rows = {kind: names for kind, names in self._names.items() if kind in ROWS}
        structs = [(kind, _struct(kind, names)) for kind, names in self._names.items()]
        self._kinds = {struct: kind for kind, struct in structs if struct is not None}
        self._steps = next((struct for kind, struct in structs if kind == STEP), None)
        self._decode = msgspec.json.Decoder(list[_any_of(self._kinds)]).decode if self._kinds else None  # type: ignore[misc]


def _struct(kind: str, names: Sequence[str]) -> type | None:
    """A type that takes events of a kind with these fields and no others; None where that cannot be said."""
    known: Mapping[str, Field] = fields_of(kind) if kind in known_kinds() else {}
    if "t" not in names or len(names) > MOST_NAMES:
        return None
    fields: list[Any] = []
    for place, name in enumerate(names):
        hint = _hint(known.get(name))
        if name == "t":
            fields.append((name, hint, msgspec.field()))
        elif kind not in ROWS:
            hint = (msgspec.Raw if hint is None else hint) | msgspec.UnsetType
            fields.append((f"f{place}", hint, msgspec.field(name=name, default=msgspec.UNSET)))
        elif hint is None:
            return None
        else:
            fields.append((f"f{place}", hint, msgspec.field(name=name)))
    options: dict[str, Any] = {"tag_field": "event", "tag": kind, "forbid_unknown_fields": True, "gc": False}
    return msgspec.defstruct(f"Row{len(names)}", fields, kw_only=True, **options)


def _hint(field: Field | None) -> Any:
    """What a decoder takes for a field; None for lists and tables."""
    if field is None:  # somebody's own
        return Annotated[int, msgspec.Meta(ge=LEAST, le=MOST)] | float | str | bool | None
    if field.among is not None:
        return Literal[tuple(field.among)] if {type(one) for one in field.among} <= {int, str} else None
    if field.types is None or not field.types <= _SCALARS:
        return None
    return _any_of(_bounded(one, field) for one in field.types)


def _bounded(one: type, field: Field) -> Any:
    if one is int:
        least = LEAST if field.least is None else max(LEAST, field.least)
        most = MOST if field.most is None else min(MOST, field.most)
        return Annotated[int, msgspec.Meta(ge=least, le=most)]
    if one is float and (field.least is not None or field.most is not None):
        return Annotated[float, msgspec.Meta(ge=field.least, le=field.most)]
    return one


def _any_of(hints: Iterable[Any]) -> Any:
    return reduce(operator.or_, hints)


# From lines to events, a piece at a time: one call of the parser for all of them, one by one only where that fails.


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
