"""Events as our own writer writes them: one compiled decoder parses the lines of a piece and checks them by the schema.

What it refuses may be right all the same, and is read as ever by those who can tell what is wrong with it (lines.py,
shape.py). From these it learns what the events of a log look like: which fields its steps have, which kinds there are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Annotated, Any, Literal

try:
    import msgspec
except ImportError:  # half as fast, and right all the same
    msgspec = None  # type: ignore[assignment]

from phalanx.record.events import Event
from phalanx.rules.log.shape import Field, fields_of, known_kinds

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
