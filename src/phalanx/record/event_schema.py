"""The schema of events as it is shipped: JSON Schema 2020-12, one definition per kind of event."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.io.files import shipped_text
from phalanx.io.values import printable
from phalanx.record.events import Event


def load_schema() -> dict[str, Any]:
    """The schema as JSON values; any JSON Schema library can check a line of a run against it."""
    text = shipped_text(__file__, "data/events.schema.json")
    return dict(json.loads(text))


def event_fields() -> dict[str, tuple[str, ...]]:
    """The fields of each kind of event beside those that all have.

    >>> event_fields()["run_end"]
    ('step', 'state')
    """
    return {kind: tuple(known["properties"]) for kind, known in load_schema()["$defs"].items()}


# Whether events are as the schema has them: columns of many at once by their types, single ones by the whole schema.
#
# The schema is record/data/events.schema.json. Of it only the words that it uses are known here; a test compares the
# answers with those of a JSON Schema library.


_TYPES: dict[str, frozenset[type]] = {
    "integer": frozenset((int,)),
    "number": frozenset((int, float)),
    "string": frozenset((str,)),
    "boolean": frozenset((bool,)),
    "array": frozenset((list,)),
    "object": frozenset((dict,)),
    "null": frozenset((type(None),)),
}
_NUMBERS = frozenset((int, float))
_NUMBERS_OR_NONE = _NUMBERS | {type(None)}
_UNHASHABLE = frozenset((list, dict))
COMMON = ("v", "event", "t", "rank")
Column = tuple[Any, ...]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class FieldShape:
    """What a column may hold."""

    types: frozenset[type] | None  # None: anything
    least: float | None
    most: float | None
    among: frozenset[Any] | None

    @property
    def is_free(self) -> bool:
        """Whether any text may stand there."""
        return self.among is None and (self.types is None or str in self.types)


@functools.cache
def _loaded_schema() -> dict[str, Any]:
    return load_schema()


@functools.cache
def known_kinds() -> frozenset[str]:
    """Kinds of events that the schema has."""
    return frozenset(_loaded_schema()["$defs"])


@functools.cache
def fields_of(kind: str) -> dict[str, FieldShape]:
    """What the schema has of a kind that it knows, but for `event` itself."""
    schema = _loaded_schema()
    found = {**schema["properties"], **schema["$defs"][kind]["properties"]}
    return {name: _field_shape(known) for name, known in found.items() if name != "event"}


def _field_shape(known: Mapping[str, Any]) -> FieldShape:
    names = known.get("type")
    listed = [names] if isinstance(names, str) else names
    among = known.get("enum", [known["const"]] if "const" in known else None)
    types = [_TYPES[name] for name in listed] if listed else [frozenset({type(one)}) for one in among or ()]
    return FieldShape(
        types=frozenset().union(*types) if types else None,
        least=known.get("minimum"),
        most=known.get("maximum"),
        among=frozenset(among) if among is not None else None,
    )


@functools.cache
def _required_fields(kind: str) -> frozenset[str]:
    schema = _loaded_schema()
    return frozenset(schema["required"]) | frozenset(schema["$defs"][kind].get("required", ()))


class EventColumns:
    """The fields of events of one kind, each as a column; a field that an event lacks is None there."""

    def __init__(self, kind: str, events: Sequence[Any], *, names: tuple[str, ...] = ()) -> None:
        """With `names`, events are rows of these (typed.py), which the schema has nothing against."""
        self.kind, self.names, self._reported, self._is_typed = kind, names or tuple(events[0]), events, bool(names)
        try:
            rows = events if names else list(map(_fields_getter(self.names), events))
            self.is_even = self._is_typed or sum(map(len, events)) == len(events) * len(self.names)
        except KeyError:
            self.is_even = False
        if not self.is_even:  # events of several versions, or with fields of somebody's own
            self.names = tuple(dict.fromkeys(name for event in events for name in event))[:MOST_FIELDS]
            rows = [tuple([event.get(name) for name in self.names]) for event in events]
        self._columns: dict[str, Column] = dict(zip(self.names, zip(*rows, strict=True), strict=True))
        self._nothing: Column = (None,) * len(events)
        self._floats: dict[str, Floats] = {}
        self.is_doubted = False

    def __len__(self) -> int:
        return len(self._reported)

    @property
    def events(self) -> Sequence[Event]:
        """As tables."""
        return [self.event(place) for place in range(len(self))] if self._is_typed else self._reported

    def event(self, place: int) -> Event:
        """One of them."""
        reported = self._reported[place]
        return {"event": self.kind, **dict(zip(self.names, reported, strict=True))} if self._is_typed else reported

    def get(self, name: str) -> Column:
        """A column."""
        return self._columns.get(name, self._nothing)

    def floats(self, name: str) -> Floats:
        """A column as numbers; NaN where there is none."""
        found = self._floats.get(name)
        if found is None:
            column = self.get(name)
            if column[0] is None and column.count(None) == len(column):
                found = np.full(len(column), np.nan)
            else:
                found = _as_floats(column if self._is_typed else _numbers_or_none(column))
            self._floats[name] = found
        return found

    def has(self, name: str) -> bool:
        """Whether any event has the field."""
        return name in self._columns

    def pick(self, places: Sequence[int]) -> EventColumns:
        """Those of some of the events."""
        return EventColumns(
            self.kind, [self._reported[place] for place in places], names=self.names if self._is_typed else ()
        )

    def tells(self, place: int, name: str) -> bool:
        """Whether an event has a field that any of them has."""
        return self.is_even or name in self._reported[place]

    def doubts(self) -> list[int]:
        """Places of events that the whole schema must be asked about."""
        if self._is_typed:
            return []
        found: set[int] = set()
        required = _required_fields(self.kind)
        if not self.is_even or not required <= set(self.names):
            found.update(place for place, event in enumerate(self.events) if not required <= event.keys())
        for name, field in fields_of(self.kind).items():
            column = self._columns.get(name)
            if column is not None:
                found.update(_misfit_places(column, field))
        self.is_doubted = bool(found)
        return sorted(found)

    def free(self) -> Sequence[str]:
        """Fields that may hold any text: those that the schema does not know, and its own texts."""
        return _free_fields(self.kind, self.names)

    def whole(self) -> EventColumns:
        """With 5 for 5.0 where the schema wants an integer: to JSON they are the same."""
        integers = [name for name, field in fields_of(self.kind).items() if field.types and not field.types & {float}]
        return EventColumns(self.kind, [event | _whole_numbers(event, integers) for event in self.events])


@functools.lru_cache(maxsize=256)
def _free_fields(kind: str, names: tuple[str, ...]) -> Sequence[str]:
    fields = fields_of(kind)
    return [name for name in names if name != "event" and (name not in fields or fields[name].is_free)]


MOST_FIELDS = 1000  # of events of one kind in a piece; somebody else's beyond that


def _numbers_or_none(column: Column) -> Column:
    if {*map(type, column)} <= _NUMBERS_OR_NONE:
        return column
    return tuple(value if type(value) in _NUMBERS else None for value in column)


def _as_floats(column: Column) -> Floats:
    try:
        return np.array(column, dtype=np.float64)
    except OverflowError:  # an integer of 400 digits
        return np.array([value if type(value) is float else np.nan for value in column])


def _whole_numbers(event: Event, names: Sequence[str]) -> Event:
    return {name: int(event[name]) for name in names if isinstance(event.get(name), float) and event[name].is_integer()}


def _misfit_places(column: Column, field: FieldShape) -> Sequence[int]:
    """Places of what does not belong into a column; of numbers in the middle of others, all that are too small."""
    is_empty = column[0] is None and column.count(None) == len(column)  # a third of the columns of a step
    types = {type(None)} if is_empty else set(map(type, column))
    if field.types is not None and not types <= field.types:
        return [place for place, value in enumerate(column) if type(value) not in field.types]
    if (field.least is not None or field.most is not None) and types & _NUMBERS:
        return _places_beyond(column, field, types)
    if field.among is not None:
        allowed = field.among
        if not types & _UNHASHABLE and allowed.issuperset(column):
            return ()
        return [place for place, value in enumerate(column) if isinstance(value, list | dict) or value not in allowed]
    return ()


def _places_beyond(column: Column, field: FieldShape, types: set[type]) -> Sequence[int]:
    """Places of numbers that are too small or too large."""
    least = -math.inf if field.least is None else field.least
    if field.most is None and types <= _NUMBERS and min(column) >= least:
        return ()
    most = math.inf if field.most is None else field.most
    return [place for place, value in enumerate(column) if type(value) in _NUMBERS and not least <= value <= most]


@functools.lru_cache(maxsize=256)
def _fields_getter(names: tuple[str, ...]) -> Callable[[Event], tuple[Any, ...]]:
    if len(names) > 1:
        return itemgetter(*names)
    return lambda event: (event[names[0]],)


# ---- one event, by the whole schema ----------------------------------------------------------------------------------


def schema_breaks(event: Event) -> str:
    """What the schema has against an event, in one line; empty when nothing."""
    schema = _loaded_schema()
    wrong = _check_schema(event, schema, "")
    kind = event.get("event")
    if not wrong and isinstance(kind, str) and kind in schema["$defs"]:
        wrong = _check_schema(event, schema["$defs"][kind], "")
    return printable(wrong, most=200)


def _check_schema(value: Any, schema: Mapping[str, Any], at: str) -> str:
    for check in (_check_type, _check_value, _check_table, _check_list):
        if wrong := check(value, schema, at):
            return wrong
    return ""


def _check_type(value: Any, schema: Mapping[str, Any], at: str) -> str:
    names = schema.get("type")
    if names is None:
        return ""
    listed = [names] if isinstance(names, str) else names
    if any(type(value) in _TYPES[name] for name in listed):
        return ""
    if "integer" in listed and isinstance(value, float) and value.is_integer():
        return ""
    return f"{at or 'the event'} = {_shown_value(value)} is not {' or '.join(listed)}"


def _check_value(value: Any, schema: Mapping[str, Any], at: str) -> str:
    among = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if among is not None and not any(_is_same(value, one) for one in among):
        return f"{at} = {_shown_value(value)} is none of {', '.join(map(str, among))}"
    if type(value) in _NUMBERS and value < schema.get("minimum", -math.inf):
        return f"{at} = {_shown_value(value)} is below {schema['minimum']}"
    if type(value) in _NUMBERS and value > schema.get("maximum", math.inf):
        return f"{at} = {_shown_value(value)} is above {schema['maximum']}"
    if isinstance(value, str) and len(value) < schema.get("minLength", 0):
        return f"{at} is empty"
    return ""


def _is_same(value: Any, other: Any) -> bool:
    """Equal as JSON: 1 and 1.0 are, 1 and true are not."""
    return (type(value) is type(other) or {type(value), type(other)} <= _NUMBERS) and bool(value == other)


def _check_table(value: Any, schema: Mapping[str, Any], at: str) -> str:
    if not isinstance(value, dict):
        return ""
    if missing := [name for name in schema.get("required", ()) if name not in value]:
        return f"{at + '.' if at else ''}{missing[0]} is missing"
    for name, known in schema.get("properties", {}).items():
        if name in value and (wrong := _check_schema(value[name], known, f"{at}.{name}" if at else name)):
            return wrong
    return ""


def _check_list(value: Any, schema: Mapping[str, Any], at: str) -> str:
    if not isinstance(value, list):
        return ""
    if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
        return f"{at} has {len(value):,} entries"
    for place, known in enumerate(schema.get("prefixItems", ())[: len(value)]):
        if wrong := _check_schema(value[place], known, f"{at}[{place}]"):
            return wrong
    items = schema.get("items")
    if items is not None:
        for place, one in enumerate(value):
            if wrong := _check_schema(one, items, f"{at}[{place}]"):
                return wrong
    return ""


def _shown_value(value: Any) -> str:
    return printable(repr(value), most=40)
