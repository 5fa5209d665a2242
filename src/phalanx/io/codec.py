"""Values as JSON and back, by their declared types: plans, measurements, `--json`, answers of the dashboard.

Everything is written with `json_values` and `json_text`. A file that a person may edit or receive from elsewhere is
read by `from_json_values`: it reports every mistake with its path, uses defaults for entries that an older version did
not write, and reads null as infinity, which JSON cannot represent and msgspec does not convert. Messages between
Phalanx processes are read by msgspec (`from_message`), as are event lines (record/event_batches.py). No content is
ever evaluated as code.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from phalanx.errors import MOST_UNKNOWN, Problem, UserError, nearest

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Bounds of a number or a text for `Annotated`: msgspec.Meta's parameters used here, without its import."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    max_length: int = 0  # of a text


def json_values(value: Any) -> Any:
    """Convert a value to JSON types: dataclasses become objects, infinities and NaN null, sets sorted lists.

    A dataclass may list properties to write in addition to its fields, in a class variable `JSON_PROPERTIES`, and
    fields to omit while they have their default, in `JSON_UNLESS_DEFAULT`, so that older documents stay unchanged.
    """
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): json_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(item) for item in value]
    return json_values(_simpler_value(value))


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Return one JSON document of a value as `json_values` would convert it; compact without `indent`."""
    separators = None if indent is not None else (",", ":")
    # Most values are finite, and checking that costs more than the rest.
    try:
        return json.dumps(
            value, ensure_ascii=False, allow_nan=False, indent=indent, separators=separators, default=_simpler_value
        )
    except (ValueError, TypeError):
        return json.dumps(json_values(value), ensure_ascii=False, indent=indent, separators=separators)


def _simpler_value(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        omitted = getattr(value, "JSON_UNLESS_DEFAULT", ())
        names = [
            item.name
            for item in dataclasses.fields(value)
            if item.name not in omitted or getattr(value, item.name) != _field_default(item)
        ]
        return {name: getattr(value, name) for name in (*names, *getattr(value, "JSON_PROPERTIES", ()))}
    if isinstance(value, set | frozenset):
        return sorted(value)
    # numpy scalars and arrays, without importing numpy
    to_list = getattr(value, "tolist", None)
    return to_list() if callable(to_list) else str(value)


def _field_default(item: dataclasses.Field[Any]) -> Any:
    return item.default if item.default_factory is dataclasses.MISSING else item.default_factory()


def from_message(kind: type[T], data: Any) -> T:
    """Return the value of type `kind` from data of `json_values`; raise ValueError for anything else."""
    # Imported here: it takes 25 ms, and no plan needs it.
    import msgspec

    return msgspec.convert(data, kind, str_keys=True)


def from_json_values(kind: type[T], data: Any, where: str = "plan", *, noun: str = "plan", fix: str = "") -> T:
    """Return the value of type `kind` that `data` describes; raise UserError with each wrong entry.

    Bounds are declared in the type: `Annotated[float, Bounds(ge=0)]` is a finite number of at least 0.
    """
    reader = _Reader(noun=noun, fix=fix or f"write the {noun} again with this version")
    value: T = reader.read(kind, data, where)
    if reader.problems:
        raise UserError(reader.problems)
    return value


@functools.cache
def _entries(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Return, for each field, its type and True if a file may omit it."""
    hints = typing.get_type_hints(kind, include_extras=True)
    missing = dataclasses.MISSING
    return {
        item.name: (hints[item.name], item.default is not missing or item.default_factory is not missing)
        for item in dataclasses.fields(kind)
        if item.init
    }


class _Reader:
    """Reads values and collects all problems, so that a user sees them at once."""

    def __init__(self, *, noun: str, fix: str) -> None:
        self._noun, self._fix = noun, fix
        self.problems: list[Problem] = []

    def read(self, kind: Any, data: Any, where: str) -> Any:
        """Return a value of a type; an arbitrary value if a problem was noted."""
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if len(self.problems) >= MOST_UNKNOWN or kind is Any:
            return data
        if dataclasses.is_dataclass(kind):
            return self._record(kind, data, where)
        if origin in (typing.Union, types.UnionType):
            return self._union(arguments, data, where)
        if origin is typing.Literal:
            return data if data in arguments else self._refuse(where, data, f"one of {arguments}")
        if origin is tuple:
            return self._tuple(arguments, data, where)
        if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
            if not isinstance(data, dict):
                return self._refuse(where, data, "an object")
            return {str(key): self.read(arguments[1], item, f"{where}.{key}") for key, item in data.items()}
        if origin is typing.Annotated:
            return self._bounded(arguments[0], arguments[1], data, where)
        return self._scalar(kind, data, where)

    def _record(self, kind: Any, data: Any, where: str) -> Any:
        if not isinstance(data, dict):
            return self._refuse(where, data, "an object")
        entries, before = _entries(kind), len(self.problems)
        for name in [name for name in data if name not in entries][:MOST_UNKNOWN]:
            close = nearest(str(name), entries)
            fix = f"did you mean {close}?" if close else self._fix
            self._note(f"{where}.{str(name)[:80]}", f"is not an entry of a {self._noun}", fix)
        # A setting that did not exist when the file was written takes its default: old runs are resumed and read.
        if missing := [name for name, (_, optional) in entries.items() if name not in data and not optional]:
            self._note(where, f"lacks {', '.join(missing)}", self._fix)
        values = {
            name: self.read(hint, data[name], f"{where}.{name}") for name, (hint, _) in entries.items() if name in data
        }
        return kind(**values) if len(self.problems) == before else None

    def _union(self, arguments: tuple[Any, ...], data: Any, where: str) -> Any:
        if data is None and type(None) in arguments:
            return None
        for alternative in arguments:
            if isinstance(data, str) == (alternative is str or typing.get_origin(alternative) is typing.Literal):
                return self.read(alternative, data, where)
        return self._refuse(where, data, "another type")

    def _tuple(self, arguments: tuple[Any, ...], data: Any, where: str) -> Any:
        if not isinstance(data, list):
            return self._refuse(where, data, "a list")
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(self.read(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(data))
        if len(data) != len(arguments):
            return self._refuse(where, data, f"a list of {len(arguments)}")
        return tuple(self.read(item_type, item, where) for item_type, item in zip(arguments, data, strict=True))

    def _bounded(self, kind: Any, meta: Bounds, data: Any, where: str) -> Any:
        """Read a finite number within its bounds, or a text that is not too long."""
        if kind is str:
            good = isinstance(data, str) and len(data) <= meta.max_length
            return data if good else self._refuse(where, data, f"a text of at most {meta.max_length} characters")
        good = isinstance(data, int if kind is int else int | float) and not isinstance(data, bool)
        above = meta.ge is None or (good and data >= meta.ge)
        if good and above and (meta.gt is None or data > meta.gt) and data <= (meta.le or sys.float_info.max):
            return kind(data)
        low = f"above {meta.gt:g}" if meta.gt is not None else f"from {meta.ge:g}"
        high = f" to {meta.le:g}" if meta.le is not None else ""
        return self._refuse(where, data, f"a {'whole ' if kind is int else ''}number {low}{high}")

    def _scalar(self, kind: Any, data: Any, where: str) -> Any:
        if kind is float:
            if data is None:
                return math.inf
            # An integer of 400 digits is JSON too.
            good = isinstance(data, float) or (type(data) is int and abs(data) <= sys.float_info.max)
            return float(data) if good else self._refuse(where, data, "a number")
        good = isinstance(data, kind) and (kind is bool or not isinstance(data, bool))
        return data if good else self._refuse(where, data, f"a value of type {kind.__name__}")

    def _refuse(self, where: str, data: Any, wanted: str) -> None:
        self._note(where, f"{str(data)[:60]} is not {wanted}", self._fix)

    def _note(self, where: str, what: str, fix: str) -> None:
        self.problems.append(Problem(where=where, what=what, fix=fix))
