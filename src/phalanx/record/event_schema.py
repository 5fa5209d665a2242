"""The JSON Schema (2020-12) of events: a definition per kind, checks of single events and of whole columns."""

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
    """Return the schema as JSON values; any JSON Schema library can check a line of an event file with it."""
    text = shipped_text(__file__, "data/events.schema.json")
    return dict(json.loads(text))


def event_fields() -> dict[str, tuple[str, ...]]:
    """Return the fields of each kind of event, without the common ones.

    >>> event_fields()["run_end"]
    ('step', 'state')
    """
    return {kind: tuple(kind_schema["properties"]) for kind, kind_schema in load_schema()["$defs"].items()}


# Checks of events against record/data/events.schema.json: many events at once by the types of their columns, single
# events against the full schema. Only the JSON Schema keywords that this schema uses are implemented; a test compares
# the results with a JSON Schema library.


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
    """The values that a column may contain."""

    types: frozenset[type] | None  # None: any type
    least: float | None
    most: float | None
    among: frozenset[Any] | None

    @property
    def is_free(self) -> bool:
        """True if the field may contain any text."""
        return self.among is None and (self.types is None or str in self.types)


@functools.cache
def _loaded_schema() -> dict[str, Any]:
    return load_schema()


@functools.cache
def known_kinds() -> frozenset[str]:
    """Return the kinds of events that the schema defines."""
    return frozenset(_loaded_schema()["$defs"])


@functools.cache
def fields_of(kind: str) -> dict[str, FieldShape]:
    """Return the fields that the schema defines for a kind, except `event`."""
    schema = _loaded_schema()
    properties = {**schema["properties"], **schema["$defs"][kind]["properties"]}
    return {name: _field_shape(field_schema) for name, field_schema in properties.items() if name != "event"}


def _field_shape(known: Mapping[str, Any]) -> FieldShape:
    names = known.get("type")
    listed = [names] if isinstance(names, str) else names
    among = known.get("enum", [known["const"]] if "const" in known else None)
    types = [_TYPES[name] for name in listed] if listed else [frozenset({type(value)}) for value in among or ()]
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
    """The fields of events of one kind as columns; an event that lacks a field has None there."""

    def __init__(self, kind: str, events: Sequence[Any], *, names: tuple[str, ...] = ()) -> None:
        """Build the columns. With `names`, the events are already valid rows of these fields (event_batches.py)."""
        self.kind, self.names, self._reported, self._is_typed = kind, names or tuple(events[0]), events, bool(names)
        try:
            rows = events if names else list(map(_fields_getter(self.names), events))
            self.is_even = self._is_typed or sum(map(len, events)) == len(events) * len(self.names)
        except KeyError:
            self.is_even = False
        # Events of several versions, or with fields that the user added.
        if not self.is_even:
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
        """The events as dicts."""
        return [self.event(place) for place in range(len(self))] if self._is_typed else self._reported

    def event(self, place: int) -> Event:
        """Return one event as a dict."""
        reported = self._reported[place]
        return {"event": self.kind, **dict(zip(self.names, reported, strict=True))} if self._is_typed else reported

    def get(self, name: str) -> Column:
        """Return a column; all None if no event has the field."""
        return self._columns.get(name, self._nothing)

    def floats(self, name: str) -> Floats:
        """Return a column as floats; NaN where it has anything else."""
        numbers = self._floats.get(name)
        if numbers is None:
            column = self.get(name)
            if column[0] is None and column.count(None) == len(column):
                numbers = np.full(len(column), np.nan)
            else:
                numbers = _as_floats(column if self._is_typed else _numbers_or_none(column))
            self._floats[name] = numbers
        return numbers

    def has(self, name: str) -> bool:
        """Return True if any event has the field."""
        return name in self._columns

    def pick(self, places: Sequence[int]) -> EventColumns:
        """Return the columns of some of the events."""
        return EventColumns(
            self.kind, [self._reported[place] for place in places], names=self.names if self._is_typed else ()
        )

    def tells(self, place: int, name: str) -> bool:
        """Return True if this event has the field. The field must exist in at least one event."""
        return self.is_even or name in self._reported[place]

    def doubts(self) -> list[int]:
        """Return the places of events that must be checked against the full schema."""
        if self._is_typed:
            return []
        places: set[int] = set()
        required = _required_fields(self.kind)
        if not self.is_even or not required <= set(self.names):
            places.update(place for place, event in enumerate(self.events) if not required <= event.keys())
        for name, field in fields_of(self.kind).items():
            column = self._columns.get(name)
            if column is not None:
                places.update(_misfit_places(column, field))
        self.is_doubted = bool(places)
        return sorted(places)

    def free(self) -> Sequence[str]:
        """Return the fields that may contain any text: fields unknown to the schema, and its free text fields."""
        return _free_fields(self.kind, self.names)

    def whole(self) -> EventColumns:
        """Return the columns with integral floats turned into integers where the schema asks for integers.

        In JSON 5.0 and 5 are the same number.
        """
        integers = [name for name, field in fields_of(self.kind).items() if field.types and not field.types & {float}]
        return EventColumns(self.kind, [event | _whole_numbers(event, integers) for event in self.events])


@functools.lru_cache(maxsize=256)
def _free_fields(kind: str, names: tuple[str, ...]) -> Sequence[str]:
    fields = fields_of(kind)
    return [name for name in names if name != "event" and (name not in fields or fields[name].is_free)]


# Columns per kind in a block; further fields, which only a user can have added, are dropped.
MOST_FIELDS = 1000


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
    """Return the places of values that the schema does not allow.

    If other values lie between numbers, all numbers out of range are listed.
    """
    # True for a third of the columns of a step.
    is_empty = column[0] is None and column.count(None) == len(column)
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
    """Return the places of numbers that are too small or too large."""
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


# ---- one event against the full schema -------------------------------------------------------------------------------


def schema_breaks(event: Event) -> str:
    """Return the first violation of the schema by an event, in one line; empty if the event is valid."""
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
    if among is not None and not any(_is_same(value, allowed) for allowed in among):
        return f"{at} = {_shown_value(value)} is none of {', '.join(map(str, among))}"
    if type(value) in _NUMBERS and value < schema.get("minimum", -math.inf):
        return f"{at} = {_shown_value(value)} is below {schema['minimum']}"
    if type(value) in _NUMBERS and value > schema.get("maximum", math.inf):
        return f"{at} = {_shown_value(value)} is above {schema['maximum']}"
    if isinstance(value, str) and len(value) < schema.get("minLength", 0):
        return f"{at} is empty"
    return ""


def _is_same(value: Any, other: Any) -> bool:
    """Return True if both values are equal in JSON: 1 equals 1.0, but not true."""
    return (type(value) is type(other) or {type(value), type(other)} <= _NUMBERS) and bool(value == other)


def _check_table(value: Any, schema: Mapping[str, Any], at: str) -> str:
    if not isinstance(value, dict):
        return ""
    if missing := [name for name in schema.get("required", ()) if name not in value]:
        return f"{at + '.' if at else ''}{missing[0]} is missing"
    for name, property_schema in schema.get("properties", {}).items():
        if name in value and (wrong := _check_schema(value[name], property_schema, f"{at}.{name}" if at else name)):
            return wrong
    return ""


def _check_list(value: Any, schema: Mapping[str, Any], at: str) -> str:
    if not isinstance(value, list):
        return ""
    if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
        return f"{at} has {len(value):,} entries"
    for place, item_schema in enumerate(schema.get("prefixItems", ())[: len(value)]):
        if wrong := _check_schema(value[place], item_schema, f"{at}[{place}]"):
            return wrong
    items = schema.get("items")
    if items is not None:
        for place, item in enumerate(value):
            if wrong := _check_schema(item, items, f"{at}[{place}]"):
                return wrong
    return ""


def _shown_value(value: Any) -> str:
    return printable(repr(value), most=40)
