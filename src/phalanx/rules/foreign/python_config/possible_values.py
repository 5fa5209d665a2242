"""What an expression of a configuration may stand for, and how two ways through a program are made one."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field

MISSING = object()
MOST_TEXT = 20_000


@dataclass(frozen=True, slots=True)
class UnknownPython:
    """A value that what was read does not settle, and why."""

    why: str


@dataclass(frozen=True, slots=True)
class PythonReference:
    """Something defined outside of what is read, by its dotted name: a class, a function, a constant."""

    name: str

    @property
    def is_class(self) -> bool:
        """Classes are written in capitals; calling one, or a method of one, builds an object."""
        return any(part.lstrip("_")[:1].isupper() and not part.isupper() for part in self.name.split("."))


@dataclass(eq=False, slots=True)
class Built:
    """An object that a call builds: its keyword arguments and what was assigned to it later are its fields."""

    kind: str  # dotted name of what was called
    fields: dict[str, object] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)  # of each field, in the file that is read
    args: list[object] = field(default_factory=list)
    line: int = 0
    opened: str = ""  # why fields that nobody is seen to set may still be set
    implied: bool = False  # a default of its owner, which nothing here builds


@dataclass(eq=False, slots=True)
class PythonScope:
    """Names of a function call, and the scope around it."""

    names: dict[str, object] = field(default_factory=dict)
    parent: PythonScope | None = None


@dataclass(eq=False, slots=True)
class Function:
    """A function of the program; `module` is the name of the file it stands in."""

    node: ast.FunctionDef | ast.Lambda
    module: str
    scope: PythonScope | None = None


@dataclass(frozen=True, slots=True)
class Method:
    """A method of a value that was read, not yet called."""

    owner: object
    name: str


def is_plain(value: object) -> bool:
    """A number, a text, true, false or nothing."""
    return value is None or isinstance(value, bool | int | float | str)


def reason_of(*values: object) -> str:
    """Why something made of these is not known."""
    return next((one.why for one in values if isinstance(one, UnknownPython)), "is not worked out")


def truth_of(value: object) -> bool | None:
    """Whether a condition holds; None where nobody knows."""
    if is_plain(value) or isinstance(value, list | tuple | dict | set):
        return bool(value)
    if isinstance(value, Function) or (isinstance(value, Built) and not value.implied):
        return True
    return None


def merge_values(first: object, second: object, why: str, *, depth: int = 0) -> object:
    """One value for both: what they agree on holds, the rest is unknown."""
    if first is second:
        return first
    if isinstance(first, UnknownPython) or isinstance(second, UnknownPython):
        return first if isinstance(first, UnknownPython) else second
    if is_plain(first) and is_plain(second):
        return first if type(first) is type(second) and first == second else UnknownPython(why)
    if isinstance(first, PythonReference) and first == second:
        return first
    if depth > 40:
        return UnknownPython(why)
    if isinstance(first, Built) and isinstance(second, Built) and (first.kind == second.kind or first.implied):
        return _merge_built(first, second, why, depth)
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return [merge_values(a, b, why, depth=depth + 1) for a, b in zip(first, second, strict=True)]
    if isinstance(first, tuple) and isinstance(second, tuple) and len(first) == len(second):
        return tuple(merge_values(a, b, why, depth=depth + 1) for a, b in zip(first, second, strict=True))
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        return {key: merge_values(first[key], second[key], why, depth=depth + 1) for key in first}
    return UnknownPython(why)


def _merge_built(first: Built, second: Built, why: str, depth: int) -> Built:
    names = list(dict.fromkeys((*first.fields, *second.fields)))
    fields: dict[str, object] = {}
    for name in names:
        a, b = first.fields.get(name, MISSING), second.fields.get(name, MISSING)
        if a is MISSING or b is MISSING:  # one of them has its default
            there = b if a is MISSING else a
            fields[name] = (
                there if isinstance(there, Built) and there.implied and not there.fields else UnknownPython(why)
            )
        else:
            fields[name] = merge_values(a, b, why, depth=depth + 1)
    return Built(
        kind=second.kind or first.kind,
        fields=fields,
        lines={**second.lines, **first.lines},
        args=first.args,
        line=first.line or second.line,
        opened=first.opened or second.opened,
        implied=first.implied and second.implied,
    )


class Journal:
    """Every change of a dictionary or a list, so that a way through the program can be taken back."""

    def __init__(self) -> None:
        self._levels: list[dict[tuple[int, object], tuple[dict[object, object] | list[object], object, object]]] = []

    def write(self, box: dict[object, object], key: object, value: object) -> None:
        """Set a key; `MISSING` takes it away."""
        if self._levels:
            self._levels[-1].setdefault((id(box), key), (box, key, box.get(key, MISSING)))
        if value is MISSING:
            box.pop(key, None)
        else:
            box[key] = value

    def replace_list(self, box: list[object], items: list[object]) -> None:
        """Give a list other items."""
        if self._levels:
            self._levels[-1].setdefault((id(box), None), (box, None, list(box)))
        box[:] = items

    def try_way(self, way: Callable[[], object]) -> tuple[object, Changes]:
        """Follow a way, and take it back: what it answered and what it changed."""
        self._levels.append({})
        try:
            answer = way()
        finally:
            level = self._levels.pop()
        changes: Changes = {}
        for place, (box, key, before) in level.items():
            if isinstance(box, list):
                changes[place] = (box, key, list(box), before)
                assert isinstance(before, list)
                box[:] = before
            else:
                changes[place] = (box, key, box.get(key, MISSING), before)
                if before is MISSING:
                    box.pop(key, None)
                else:
                    box[key] = before
        return answer, changes

    def apply_changes(self, changes: Changes) -> None:
        """Make the changes of a way that was taken back."""
        for box, key, after, _ in changes.values():
            self._set(box, key, after)

    def apply_both(self, first: Changes, second: Changes, why: str) -> None:
        """Of two ways, what they agree on."""
        for place in dict.fromkeys((*first, *second)):
            box, key, _, before = first.get(place) or second[place]
            after = [one[place][2] if place in one else before for one in (first, second)]
            if any(one is MISSING for one in after):
                there = next((one for one in after if one is not MISSING), MISSING)
                kept = isinstance(there, Built) and there.implied and not there.fields
                self._set(box, key, there if kept or there is MISSING else UnknownPython(why))
            elif isinstance(box, list):
                same = merge_values(after[0], after[1], why)
                self._set(box, key, same if isinstance(same, list) else [UnknownPython(why)])
            else:
                self._set(box, key, merge_values(after[0], after[1], why))

    def _set(self, box: dict[object, object] | list[object], key: object, value: object) -> None:
        if isinstance(box, list):
            assert isinstance(value, list)
            self.replace_list(box, value)
        else:
            self.write(box, key, value)


Changes = dict[tuple[int, object], tuple[dict[object, object] | list[object], object, object, object]]
