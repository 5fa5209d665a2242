"""Frozen dataclasses as JSON and back, by their declared types; nothing is ever evaluated."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from phalanx.errors import mistake

T = TypeVar("T")


def json_values(value: Any) -> Any:
    """A value as JSON can hold it; infinity becomes null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: json_values(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): json_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def from_json_values(kind: type[T], data: Any, where: str = "plan") -> T:
    """The value of type `kind` that `data` describes; raises UserError naming the entry that is wrong."""
    value: T = _decode(kind, data, where)
    return value


def _decode(kind: Any, data: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _record(kind, data, where)
    if origin in (typing.Union, types.UnionType):
        return _union(arguments, data, where)
    if origin is typing.Literal:
        return data if data in arguments else _refuse(where, data, f"one of {arguments}")
    if origin is tuple:
        return _tuple(arguments, data, where)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(data, dict):
            return _refuse(where, data, "an object")
        return {str(key): _decode(arguments[1], item, f"{where}.{key}") for key, item in data.items()}
    return _scalar(kind, data, where)


def _record(kind: Any, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        return _refuse(where, data, "an object")
    hints = typing.get_type_hints(kind)
    known = {item.name: item for item in dataclasses.fields(kind)}
    for name in data:
        if name not in known:
            raise mistake(f"{where}.{name}", "is not an entry of a plan", fix="write the plan again with this version")
    # A setting that did not exist yet when the plan was written takes its default: old runs can be resumed and read.
    missing = [name for name, item in known.items() if name not in data and not _has_default(item)]
    if missing:
        raise mistake(where, f"lacks {', '.join(missing)}", fix="write the plan again with this version")
    return kind(**{name: _decode(hints[name], data[name], f"{where}.{name}") for name in known if name in data})


def _has_default(item: dataclasses.Field[Any]) -> bool:
    return item.default is not dataclasses.MISSING or item.default_factory is not dataclasses.MISSING


def _union(arguments: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and type(None) in arguments:
        return None
    for one in arguments:
        if isinstance(data, str) == (one is str or typing.get_origin(one) is typing.Literal):
            return _decode(one, data, where)
    return _refuse(where, data, "another type")


def _tuple(arguments: tuple[Any, ...], data: Any, where: str) -> Any:
    if not isinstance(data, list):
        return _refuse(where, data, "a list")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(_decode(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(data))
    if len(data) != len(arguments):
        return _refuse(where, data, f"a list of {len(arguments)}")
    return tuple(_decode(one, item, where) for one, item in zip(arguments, data, strict=True))


def _scalar(kind: Any, data: Any, where: str) -> Any:
    if kind is float:
        if data is None:
            return math.inf
        good = isinstance(data, int | float) and not isinstance(data, bool)
        return float(data) if good else _refuse(where, data, "a number")
    good = isinstance(data, kind) and (kind is bool or not isinstance(data, bool))
    return data if good else _refuse(where, data, f"a value of type {kind.__name__}")


def _refuse(where: str, data: Any, wanted: str) -> typing.NoReturn:
    raise mistake(where, f"{str(data)[:60]} is not {wanted}", fix="write the plan again with phalanx plan --out")
