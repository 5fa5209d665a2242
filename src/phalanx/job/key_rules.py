"""Rules for settings: each rule reads one value of the job file, or raises WrongValue with the reason it cannot."""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from phalanx.errors import nearest
from phalanx.io.limits import MAX_COUNT
from phalanx.units import parse_count

AUTO: Final = "auto"
Auto = Literal["auto"]
COUNT_TEXT = {"type": "string", "pattern": r"^(auto|[0-9][0-9_]*(\.[0-9]+)?([eE][0-9]+)? ?[A-Za-z]{0,2})$"}


class WrongValue(ValueError):
    """Raised for a value that breaks its rule; the text completes the sentence `key = value ...`."""

    def __init__(self, text: str, *, fix: str = "") -> None:
        super().__init__(text)
        self.fix = fix


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyRule:
    """The rule of one key: `expects` completes "use ...", `note` explains the key."""

    expects: str
    read: Callable[[object], object]
    note: str
    key: str = ""  # the name in the file, where it differs from the field's
    schema: Mapping[str, object] = field(default_factory=dict)  # the same rule as JSON Schema, for editors


Metadata = Mapping[str, KeyRule]


def rule_of(metadata: Mapping[str, object]) -> KeyRule:
    """Return the rule of a dataclass field."""
    rule = metadata["rule"]
    assert isinstance(rule, KeyRule)
    return rule


def count(
    note: str, *, least: int = 1, most: int = MAX_COUNT, auto: bool = False, zero_is_auto: bool = False
) -> Metadata:
    """Return the rule of a whole number; text such as "15T" is accepted too."""
    expects = f"a whole number from {least:,} to {_power_text(most)}" + _or_auto(auto)

    def read(value: object) -> object:
        if auto and (value == AUTO or (zero_is_auto and value == 0 and not isinstance(value, bool))):
            return AUTO
        number = _whole_number(value)
        if number < least:
            raise WrongValue(f"is below {least:,}", fix=f"use {least:,} or more{_or_auto(auto)}")
        if number > most:
            raise WrongValue(f"is above {_power_text(most)}", fix=f"use {expects}")
        return number

    schema = {"anyOf": [{"type": "integer", "minimum": 0 if zero_is_auto else least, "maximum": most}, COUNT_TEXT]}
    return {"rule": KeyRule(expects=expects, read=read, note=note, schema=schema)}


def number(note: str, *, least: float = 0.0, most: float = 1e18, auto: bool = False, above: bool = False) -> Metadata:
    """Return the rule of a finite number; `above` excludes the lower end."""
    expects = f"a number {'above' if above else 'from'} {least:g} {'and up to' if above else 'to'} {most:g}"
    expects += _or_auto(auto)

    def read(value: object) -> object:
        if auto and value == AUTO:
            return AUTO
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise WrongValue(f"is {value_kind(value)}, not a number")
        # float() overflows beyond 1,024 bits.
        if isinstance(value, int) and value.bit_length() > 1000:
            raise WrongValue(f"is above {most:g}")
        result = float(value)
        if not math.isfinite(result):
            raise WrongValue("is not a finite number")
        if result < least or (above and result == least):
            raise WrongValue(f"is {'not above' if above else 'below'} {least:g}")
        if result > most:
            raise WrongValue(f"is above {most:g}")
        return result

    bounds = {"exclusiveMinimum" if above else "minimum": least, "maximum": most}
    schema = _schema_or_auto({"type": "number", **bounds}, auto)
    return {"rule": KeyRule(expects=expects, read=read, note=note, schema=schema)}


def choice(note: str, *names: str) -> Metadata:
    """Return the rule of a choice among a few words."""
    choices = ", ".join(f'"{name}"' for name in names)

    def read(value: object) -> object:
        if not isinstance(value, str):
            raise WrongValue(f"is {value_kind(value)}, not text", fix=f"use one of {choices}")
        if value not in names:
            suggestion = nearest(value, names)
            fix = f'did you mean "{suggestion}"? the choices are {choices}' if suggestion else f"use one of {choices}"
            raise WrongValue("is not a choice", fix=fix)
        return value

    return {"rule": KeyRule(expects=f"one of {choices}", read=read, note=note, schema={"enum": list(names)})}


def flag(note: str, *, auto: bool = False, key: str = "") -> Metadata:
    """Return the rule of true or false."""

    def read(value: object) -> object:
        if isinstance(value, bool) or (auto and value == AUTO):
            return value
        raise WrongValue(f"is {value_kind(value)}, not true or false")

    schema = _schema_or_auto({"type": "boolean"}, auto)
    return {"rule": KeyRule(expects="true or false" + _or_auto(auto), read=read, note=note, key=key, schema=schema)}


def text(note: str, *, pattern: str = "", expects: str = "a text of at most 4,096 characters") -> Metadata:
    """Return the rule of a printable string, which must match `pattern` if one is given."""

    def read(value: object) -> object:
        if not isinstance(value, str):
            raise WrongValue(f"is {value_kind(value)}, not text")
        if len(value) > 4096 or not value.isprintable():
            raise WrongValue("is too long or holds unprintable characters")
        if pattern and re.fullmatch(pattern, value) is None:
            raise WrongValue("has the wrong form")
        return value

    schema: dict[str, object] = {"type": "string", "maxLength": 4096}
    if pattern:
        schema["pattern"] = f"^(?:{pattern})$"
    return {"rule": KeyRule(expects=expects, read=read, note=note, schema=schema)}


def texts(note: str, *, key: str, pattern: str = "", expects: str = "a text or a list of texts") -> Metadata:
    """Return the rule of a string or a list of strings, read as a tuple; each must match `pattern` if one is given."""

    def read(value: object) -> object:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) and item.isprintable() for item in items):
            raise WrongValue(f"is {value_kind(value)}, not a text or a list of texts")
        if pattern and (not items or not all(len(item) <= 4096 and re.fullmatch(pattern, item) for item in items)):
            raise WrongValue("has the wrong form")
        return tuple(items)

    item_schema: dict[str, object] = {"type": "string", **({"pattern": f"^(?:{pattern})$"} if pattern else {})}
    schema = {"anyOf": [item_schema, {"type": "array", "items": item_schema}]}
    return {"rule": KeyRule(expects=expects, read=read, note=note, key=key, schema=schema)}


def pair(note: str, *, least: float, most: float) -> Metadata:
    """Return the rule of two numbers in a half-open range, such as Adam's betas."""

    def read(value: object) -> object:
        if not isinstance(value, list) or len(value) != 2:
            raise WrongValue(f"is {value_kind(value)}, not two numbers")
        low, high = (item if isinstance(item, int | float) and not isinstance(item, bool) else -1 for item in value)
        if not (least <= low < most and least <= high < most):
            raise WrongValue(f"leaves the range from {least:g} to below {most:g}")
        return float(low), float(high)

    expects = f"two numbers from {least:g} to below {most:g}, as [0.9, 0.95]"
    item_schema = {"type": "number", "minimum": least, "exclusiveMaximum": most}
    schema = {"type": "array", "items": item_schema, "minItems": 2, "maxItems": 2}
    return {"rule": KeyRule(expects=expects, read=read, note=note, schema=schema)}


def day(note: str) -> Metadata:
    """Return the rule of a date, in TOML's form or as text; stored as "2026-12-31"."""
    expects = "a date, as 2026-12-31"

    def read(value: object) -> object:
        if isinstance(value, datetime.datetime):
            raise WrongValue("has a time of day")
        if isinstance(value, datetime.date):
            return value.isoformat()
        try:
            return datetime.date.fromisoformat(str(value)).isoformat()
        except ValueError as error:
            raise WrongValue("is not a date") from error

    return {"rule": KeyRule(expects=expects, read=read, note=note, schema={"type": "string", "format": "date"})}


def nested(note: str) -> Metadata:
    """Return the rule of a list of tables, which the loader itself reads."""
    return {"rule": KeyRule(expects="a list of tables", read=lambda value: value, note=note)}


def _schema_or_auto(schema: dict[str, object], auto: bool) -> dict[str, object]:
    return {"anyOf": [schema, {"const": AUTO}]} if auto else schema


def value_kind(value: object) -> str:
    """Describe the kind of a TOML value in plain words.

    >>> value_kind(True), value_kind(3), value_kind("a"), value_kind([1, 2])
    ('true/false', 'a whole number', 'text', 'a list of 2')
    """
    match value:
        case bool():
            return "true/false"
        case int():
            return "a whole number"
        case float():
            return "a decimal number"
        case str():
            return "text"
        case list():
            return f"a list of {len(value)}"
        case dict():
            return "a table"
        case _:
            return "a date or time"


def shown_value(value: object, *, limit: int = 60) -> str:
    """Return a value as the job file would write it, shortened to `limit` characters.

    >>> shown_value(True), shown_value("a"), shown_value([1, "b"])
    ('true', '"a"', '[1, "b"]')
    """
    match value:
        case bool():
            result = "true" if value else "false"
        # Python refuses to print integers of more than 4,300 digits.
        case int() if value.bit_length() > 200:
            result = f"a number of about {int(value.bit_length() * math.log10(2)):,} digits"
        case str():
            result = json.dumps(value[: limit + 1], ensure_ascii=False)
        case list() | tuple():
            result = "[" + ", ".join(shown_value(item) for item in value[:limit]) + "]"
        case dict():
            result = (
                "{ " + ", ".join(f"{key} = {shown_value(item)}" for key, item in list(value.items())[:limit]) + " }"
            )
        case _:
            result = str(value)
    return result if len(result) <= limit else result[: limit - 1] + "…"


def _whole_number(value: object) -> int:
    if isinstance(value, str):
        try:
            value = _tidy_float(parse_count(value))
        except (ValueError, OverflowError) as error:
            raise WrongValue("is text that is not a number such as 512, 8B or 15T") from error
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise WrongValue(f"is {value_kind(value)}, not a whole number")
    if isinstance(value, float) and (not math.isfinite(value) or not value.is_integer()):
        raise WrongValue("is not a whole number")
    return int(value)


def _tidy_float(value: float) -> float:
    """Round a number that is whole but for the error of binary arithmetic.

    66.9 × 1e9 is 66,900,000,000.00001 in binary; users who write "66.9B" mean the whole number.
    """
    rounded = round(value) if math.isfinite(value) else value
    return rounded if abs(value - rounded) <= 1e-9 * abs(value) else value


def _power_text(value: int) -> str:
    power = round(math.log10(value)) if value > 0 else 0
    return f"1e{power}" if power >= 7 and value == 10**power else f"{value:,}"


def _or_auto(auto: bool) -> str:
    return ', or "auto"' if auto else ""
