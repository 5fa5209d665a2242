"""Bulk reading of a rank's events: blocks of lines across all its files, each block decoded by a single call.

`EventFeed` reads blocks of whole lines and continues where it stopped. `EventParser` turns a block into an
`EventBatch`. It tries three ways in turn: a decoder compiled for the events that this log contains (`TypedDecoder`),
one call of the plain JSON parser, and parsing line by line.
"""

from __future__ import annotations

import gc
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import orjson

from phalanx.io.files import Spot
from phalanx.record.event_schema import EventColumns, FieldShape, fields_of, known_kinds
from phalanx.record.events import MOST_LINE_BYTES, Event, parse_event, part_numbers, part_path
from phalanx.record.host_file import EventBytes, has_events, open_events, opened_size, stat_events

# Bytes per read and parse: the decoded result fits in the cache of a core. Reads of 4 MiB are 3 % slower, reads of 64
# KiB 13 %.
READ_BYTES = 256 * 2**10
# Less than MOST_LINE_BYTES, so only the last line of a piece can be too long.
PIECE_BYTES = 512 * 2**10


@dataclass(frozen=True, kw_only=True, slots=True)
class LineBlock:
    """A block of whole lines that ends with a newline; `line` is the number of its first line, from 1."""

    data: bytes
    file: str
    line: int
    count: int  # number of lines


@dataclass(kw_only=True, slots=True)
class ByteTally:
    """Bytes that several feeds have read together: summing over a thousand feeds after every piece takes longer."""

    read_bytes: int = 0


class EventFeed:
    """Reads new event lines of a rank from where it last stopped.

    Lines beyond 1 MiB are skipped without storing them, and counted.

    `closed` is set by a caller that listed the folder once for many feeds: the numbers of this rank's closed parts.
    """

    def __init__(self, path: Path, shown: str, *, tally: ByteTally | None = None) -> None:
        self.closed: Sequence[int] | None = None
        self._tally = tally or ByteTally()
        self._path = path
        self._shown = shown  # the folder as the user named it
        # Number of the newest closed part that is read to its end.
        self._part = 0
        self._offset = self._line = 0
        self._held = b""
        self._is_overlong = False
        self.read_bytes = 0
        # Lines that are too long or torn in a closed file, and files that cannot be read.
        self.bad = 0
        self.bad_spot: Spot | None = None
        self._is_odd = False

    @property
    def left_bytes(self) -> int:
        """Bytes of the rank's files that have not been read yet."""
        later = [number for number in self._closed_parts() if number > self._part]
        sizes = [_event_bytes(part_path(self._path, number)) for number in later] + [_event_bytes(self._path)]
        return max(0, sum(sizes) - self._offset)

    def _closed_parts(self) -> Sequence[int]:
        return part_numbers(self._path) if self.closed is None else self.closed

    @property
    def is_torn(self) -> bool:
        """Return True if the bytes read so far end in the middle of a line."""
        return bool(self._held) or self._is_overlong

    @property
    def here(self) -> Spot:
        """File and number of the next line."""
        return self._spot_at(self._path, self._line + 1)

    def pieces(self, budget_bytes: int | None = None) -> Iterator[LineBlock]:
        """Yield the new complete lines in blocks, reading at most about `budget_bytes`."""
        until = None if budget_bytes is None else self.read_bytes + budget_bytes
        if not self._part and not self._offset:
            self._part = min(self._closed_parts(), default=1) - 1
        while True:
            after = part_path(self._path, self._part + 1)
            # Before the check for the next part, as in EventReader.
            file = self._open_or_note(self._path)
            closed = has_events(after)
            if closed:
                if file is not None:
                    file.close()
                file = self._open_or_note(after)
            if file is not None:
                with file:
                    yield from self._rest_of_file(file, after if closed else self._path, until)
            if not closed or (until is not None and self.read_bytes >= until):
                return
            if self.is_torn:
                self._note_trouble(self._spot_at(after, self._line + 1))
            self._part, self._offset, self._line = self._part + 1, 0, 0
            self._held, self._is_overlong = b"", False

    def _rest_of_file(self, file: EventBytes, path: Path, until: int | None) -> Iterator[LineBlock]:
        size = opened_size(file)
        # The file was truncated: the bytes read before are gone.
        if size < self._offset:
            self._note_trouble(self._spot_at(path, 0))
            self._offset, self._held, self._is_overlong = size, b"", False
        file.seek(self._offset)
        while until is None or self.read_bytes < until:
            try:
                data = file.read(READ_BYTES)
            except OSError:  # a disk that fails
                self._note_trouble(self._spot_at(path, self._line + 1))
                return
            if not data:
                return
            self._offset += len(data)
            self.read_bytes += len(data)
            self._tally.read_bytes += len(data)
            yield from self._cut_lines(data, path)

    def _cut_lines(self, data: bytes, path: Path) -> Iterator[LineBlock]:
        """Yield the complete lines among the new bytes and the partial line kept from the last read."""
        if self._is_overlong:
            end = data.find(b"\n") + 1
            if not end:
                return
            data, self._is_overlong = data[end:], False
            self._line += 1
        data = self._held + data
        stop = data.rfind(b"\n") + 1
        self._held = data[stop:]
        yield from self._split_blocks(data, stop, path)
        if len(self._held) > MOST_LINE_BYTES:
            self._note_trouble(self._spot_at(path, self._line + 1))
            self._held, self._is_overlong = b"", True

    def _split_blocks(self, data: bytes, stop: int, path: Path) -> Iterator[LineBlock]:
        start = 0
        while start < stop:
            end = data.find(b"\n", min(start + PIECE_BYTES, stop - 1)) + 1
            last = data.rfind(b"\n", start, end - 1) + 1 or start
            # Only the last line of a piece can be too long.
            too_long = end - last > MOST_LINE_BYTES
            if (keep := last if too_long else end) > start:
                yield self._line_block(data[start:keep], path)
            if too_long:
                self._note_trouble(self._spot_at(path, self._line + 1))
                self._line += 1
            start = end

    def _line_block(self, data: bytes, path: Path) -> LineBlock:
        block = LineBlock(data=data, file=self._spot_at(path, 0).file, line=self._line + 1, count=count_of(b"\n", data))
        self._line += block.count
        return block

    def _open_or_note(self, path: Path) -> EventBytes | None:
        try:
            return open_events(path)
        except FileNotFoundError:
            return None
        except OSError:
            if not self._is_odd:
                self._is_odd = True
                self._note_trouble(self._spot_at(path, 0))
            return None

    def _note_trouble(self, spot: Spot) -> None:
        self.bad += 1
        self.bad_spot = self.bad_spot or spot

    def _spot_at(self, path: Path, line: int) -> Spot:
        return Spot(file=f"{self._shown}/{path.name}", line=line)


def count_of(byte: bytes, data: bytes) -> int:
    """Count a byte with numpy: `bytes.count` compares one byte at a time, which took a twentieth of the total time."""
    return int(np.count_nonzero(np.frombuffer(data, np.uint8) == byte[0]))


def _event_bytes(path: Path) -> int:
    stat = stat_events(path, follow_links=False)
    return stat.size if stat is not None and stat.is_file else 0


# ---- decoding --------------------------------------------------------------------------------------------------------


STEP = "step"
# Frequent kinds with scalar fields only: they are decoded into rows, all other kinds into dicts.
ROWS = frozenset((STEP, "monitor"))
# The range of integers that every JSON parser reads exactly.
LEAST, MOST = -(2**63), 2**63 - 1
# Decoders compiled for one log: one whose events change again and again is read by the plain parser afterwards.
MOST_MADE = 64
MOST_KINDS, MOST_NAMES = 64, 64
_SCALARS: frozenset[type] = frozenset((int, float, str, bool, type(None)))

Row = tuple[Any, ...]
# Places and kinds of the events that are not steps.
Others = list[tuple[int, str]]
Shapes = dict[str, tuple[str, ...]]  # by kind, the names of its fields

row_of: Callable[[Any], Row] = msgspec.structs.astuple  # of a struct, without `event`


class TypedDecoder:
    """Decodes blocks of events whose kinds and fields it has learned, and checks them against the schema in one call.

    A block that it refuses may still be valid; the plain parser reads it. `learn` then takes the kinds and fields of
    those events to compile a new decoder.
    """

    def __init__(self, loads: Callable[[bytes], Any]) -> None:
        self._loads = loads
        self._shapes: Shapes = {}
        self._names: Shapes = {}  # the same without `event`: the columns of a row
        self.rows: Shapes = {}  # the entries whose kind is in ROWS
        self._made = 0
        self._kinds: dict[type, str] = {}
        self._steps: type | None = None
        self._decode: Callable[[bytes], list[Any]] | None = None

    def read(self, data: bytes) -> tuple[list[Any], Others] | None:
        """Decode a JSON list of events; return None if an event does not have the expected fields.

        Events of a kind in ROWS are structs, which `row_of` turns into rows; all others are dicts. The second value
        lists the places and kinds of the events that are not steps.
        """
        if self._decode is None:
            return None
        try:
            decoded = self._decode(data)
            kinds, steps = self._kinds, self._steps
            rare = [(place, kinds[type(event)]) for place, event in enumerate(decoded) if type(event) is not steps]
            for place, kind in rare:
                if kind not in ROWS:
                    decoded[place] = self._event_table(kind, decoded[place])
        except (ValueError, RecursionError):
            # Msgspec and orjson raise subclasses of ValueError.
            return None
        return decoded, rare

    def _event_table(self, kind: str, one: Any) -> Event:
        values = zip(self._names[kind], row_of(one), strict=True)
        return {
            "event": kind,
            **{name: self._plain_value(value) for name, value in values if value is not msgspec.UNSET},
        }

    def _plain_value(self, value: Any) -> Any:
        """Parse nested lists and tables with the plain parser, so that both paths return the same values."""
        return self._loads(bytes(value)) if type(value) is msgspec.Raw else value

    def learn(self, events: Iterable[Event]) -> None:
        """Add the kinds and fields of these events to the decoder for the next blocks.

        For kinds in ROWS every event must have the fields of the first one; for others each field is optional.
        """
        if self._made >= MOST_MADE:
            return
        shapes = dict(self._shapes)
        seen_kinds: set[str] = set()
        for event in events:
            kind = event["event"]
            known_names = shapes.get(kind, ())
            if len(event) > MOST_NAMES or (not known_names and len(shapes) >= MOST_KINDS):
                continue
            if kind in ROWS and kind not in seen_kinds:
                shapes[kind] = tuple(event)
            elif kind not in ROWS and not event.keys() <= set(known_names):
                shapes[kind] = tuple(dict.fromkeys((*known_names, *event)))
            seen_kinds.add(kind)
        if shapes != self._shapes:
            self._shapes = shapes
            self._make_decoder()

    def _make_decoder(self) -> None:
        self._made += 1
        self._names = {kind: tuple(name for name in names if name != "event") for kind, names in self._shapes.items()}
        self.rows = {kind: names for kind, names in self._names.items() if kind in ROWS}
        structs = [(kind, _event_struct(kind, names)) for kind, names in self._names.items()]
        self._kinds = {struct: kind for kind, struct in structs if struct is not None}
        self._steps = next((struct for kind, struct in structs if kind == STEP), None)
        self._decode = msgspec.json.Decoder(list[_any_of(self._kinds)]).decode if self._kinds else None  # type: ignore[misc]


def _event_struct(kind: str, names: Sequence[str]) -> type | None:
    """Return a struct type for events of this kind with exactly these fields; None if the fields have no such type."""
    schema_fields: Mapping[str, FieldShape] = fields_of(kind) if kind in known_kinds() else {}
    if "t" not in names or len(names) > MOST_NAMES:
        return None
    fields: list[Any] = []
    for place, name in enumerate(names):
        hint = _field_hint(schema_fields.get(name))
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


def _field_hint(field: FieldShape | None) -> Any:
    """Return the type annotation that decodes a field; None for lists and tables."""
    if field is None:  # not in the schema: a field that the user added
        return Annotated[int, msgspec.Meta(ge=LEAST, le=MOST)] | float | str | bool | None
    if field.among is not None:
        return Literal[tuple(field.among)] if {type(value) for value in field.among} <= {int, str} else None
    if field.types is None or not field.types <= _SCALARS:
        return None
    return _any_of(_bounded_hint(scalar, field) for scalar in field.types)


def _bounded_hint(one: type, field: FieldShape) -> Any:
    if one is int:
        least = LEAST if field.least is None else max(LEAST, field.least)
        most = MOST if field.most is None else min(MOST, field.most)
        return Annotated[int, msgspec.Meta(ge=least, le=most)]
    if one is float and (field.least is not None or field.most is not None):
        return Annotated[float, msgspec.Meta(ge=field.least, le=field.most)]
    return one


def _any_of(hints: Iterable[Any]) -> Any:
    return reduce(operator.or_, hints)


_TIMELINE = b'"event":"timeline"'
# `find` searches for the last character first: a rare one there makes it three times as fast.
_SOUGHT = _TIMELINE[:14]
# Matches a timeline as EventWriter writes it, up to its spans. The spans, up to 150 kB, are dropped.
_HEAD = re.compile(
    rb'\{"v":\d{1,9},"event":"timeline","t":[\d.]{1,20},"rank":\d{1,9}(?:,"(?:step|epoch|seconds)":[\d.eE+-]{1,30})*'
    rb',"spans":\['
)
_NONE: Shapes = {}
# Timelines that are parsed with their spans: the first 32, then every 32nd.
WHOLE = 32


class EventBatch:
    """The events of a block in file order: mostly steps, with a few events of other kinds."""

    def __init__(
        self, events: list[Any], lines: Sequence[int], *, others: Others, bad: Sequence[int] = (), rows: Shapes = _NONE
    ) -> None:
        # `lines` has the line number of each event.
        self.events, self.lines = events, lines
        self.others = others
        self.bad = bad  # numbers of lines that are not events
        # By kind, the field names of events that are structs.
        self._rows = rows
        self._columns: dict[str, tuple[EventColumns, Sequence[int]]] = {}

    def parts(self, places: Sequence[int]) -> Iterator[EventBatch]:
        """Split the batch before each of these places."""
        for begin, end in zip([0, *places], [*places, len(self.events)], strict=True):
            if begin == 0 and end == len(self.events):
                yield self
            elif end > begin:
                rare = [(place - begin, kind) for place, kind in self.others if begin <= place < end]
                yield EventBatch(self.events[begin:end], self.lines[begin:end], others=rare, rows=self._rows)

    @property
    def times(self) -> list[Any]:
        """The time `t` of every event; None where an event has none."""
        if self._rows:
            return [event["t"] if type(event) is dict else event.t for event in self.events]
        return [event.get("t") for event in self.events]

    @property
    def kinds(self) -> list[str]:
        """The kinds of events in the batch, in order of first appearance."""
        first: dict[str, int] = {}
        for place, kind in self.others:
            first.setdefault(kind, place)
        if len(self.others) < len(self.events):
            places = {place for place, _ in self.others}
            first[STEP] = next(place for place in range(len(self.events)) if place not in places)
        return sorted(first, key=first.__getitem__)

    def columns(self, kind: str) -> tuple[EventColumns, Sequence[int]]:
        """Return the columns of a kind that the batch contains, and the line numbers of its events."""
        if kind not in self._columns:
            events, lines = self._steps() if kind == STEP else self._rare_events(kind)
            names = self._rows.get(kind, ())
            self._columns[kind] = EventColumns(kind, list(map(row_of, events)) if names else events, names=names), lines
        return self._columns[kind]

    def _rare_events(self, kind: str) -> tuple[list[Any], Sequence[int]]:
        places = [place for place, event_kind in self.others if event_kind == kind]
        return [self.events[place] for place in places], [self.lines[place] for place in places]

    def _steps(self) -> tuple[list[Any], Sequence[int]]:
        if not self.others:
            return self.events, self.lines
        events, lines = list(self.events), list(self.lines)
        for place, _ in reversed(self.others):
            del events[place], lines[place]
        return events, lines


class EventParser:
    """Parses blocks of lines and counts the timelines, since most of them are parsed without their spans."""

    def __init__(self) -> None:
        self._loads = orjson.loads
        self._typed = TypedDecoder(self._loads)
        self._timelines = 0

    def batch(self, piece: LineBlock) -> EventBatch:
        """Parse a block into a batch; learn from it if the compiled decoder refused it."""
        data = self._without_spans(piece.data)
        listed = _as_json_list(data)
        typed = self._typed.read(listed)
        if typed is not None and len(typed[0]) == piece.count:
            lines: Sequence[int] = range(piece.line, piece.line + piece.count)
            return EventBatch(typed[0], lines, others=typed[1], rows=self._typed.rows)
        events, lines, bad = self._parse_events(piece, data, listed)
        self._typed.learn(events)
        rare = [(place, event["event"]) for place, event in enumerate(events) if event["event"] != STEP]
        return EventBatch(events, lines, others=rare, bad=bad)

    def events(self, piece: LineBlock) -> tuple[list[Event], Sequence[int], list[int]]:
        """Parse a block into dicts.

        Return the events, the line number of each, and the numbers of lines that are not events.
        """
        data = self._without_spans(piece.data)
        return self._parse_events(piece, data, _as_json_list(data))

    def _parse_events(
        self, piece: LineBlock, data: bytes, listed: bytes
    ) -> tuple[list[Event], Sequence[int], list[int]]:
        try:
            events = self._loads(listed)
            if len(events) == piece.count and {type(event["event"]) for event in events} == {str}:
                return events, range(piece.line, piece.line + piece.count), []
        except (ValueError, RecursionError, KeyError, TypeError, IndexError):
            pass
        return self._one_by_one(data, piece.line)

    def _without_spans(self, data: bytes) -> bytes:
        """Return the same lines with most timelines shortened."""
        parts, done, after = [], 0, 0
        while (place := data.find(_SOUGHT, after)) >= 0:
            after = place + 1
            if data.startswith(_TIMELINE, place):
                begin, end = data.rfind(b"\n", done, place) + 1 or done, data.find(b"\n", place)
                parts += [data[done:begin], self._shortened_line(data[begin:end])]
                done = after = end
        return b"".join([*parts, data[done:]]) if parts else data

    def _one_by_one(self, data: bytes, first: int) -> tuple[list[Event], list[int], list[int]]:
        events, numbers, bad = [], [], []
        for number, line in enumerate(data[:-1].split(b"\n"), first):
            event = parse_event(line, strict=True)
            if event is not None:
                events.append(event)
                numbers.append(number)
            elif line.strip():
                bad.append(number)
        return events, numbers, bad

    def _shortened_line(self, line: bytes) -> bytes:
        """Remove the spans of a timeline if its brackets are balanced; keep the first and some later timelines."""
        self._timelines += 1
        if self._timelines <= WHOLE or self._timelines % WHOLE == 0:
            return line
        head = _HEAD.match(line)
        is_even = count_of(b"[", line) == count_of(b"]", line) and line.endswith(b"}")
        return head.group() + b"]}" if head and is_even else line


def _as_json_list(data: bytes) -> bytes:
    """Join lines into a JSON list, so that one parser call decodes them all."""
    return b"[" + data[:-1].replace(b"\n", b",") + b"]"


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable the garbage collector while a block is processed.

    Its events are freed before a collection could find them; this saves a fifth of the time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
