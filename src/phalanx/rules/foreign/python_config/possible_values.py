"""Values that an expression may have, and the merge of two paths through a program."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field

MISSING = object()
MOST_TEXT = 20_000


@dataclass(frozen=True, slots=True)
class UnknownPython:
    """A value that is not known, and the reason."""

    why: str


@dataclass(frozen=True, slots=True)
class PythonReference:
    """An object defined outside the files that are read, by its dotted name: a class, a function, a constant."""

    name: str

    @property
    def is_class(self) -> bool:
        """True if a part of the name is capitalised, as classes are.

        Calling it, or a method of it, builds an object.
        """
        return any(part.lstrip("_")[:1].isupper() and not part.isupper() for part in self.name.split("."))


@dataclass(eq=False, slots=True)
class Built:
    """An object built by a call; its fields are the keyword arguments and later assignments."""

    kind: str  # dotted name of the called object
    fields: dict[str, object] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)  # of each field, in the file that is read
    args: list[object] = field(default_factory=list)
    line: int = 0
    opened: str = ""  # why fields that are not set here may still be set
    implied: bool = False  # a default of its owner, which is not built here


@dataclass(eq=False, slots=True)
class PythonScope:
    """Names of a function call, and the enclosing scope."""

    names: dict[str, object] = field(default_factory=dict)
    parent: PythonScope | None = None


@dataclass(eq=False, slots=True)
class Function:
    """A function of the program; `module` is the name of its file."""

    node: ast.FunctionDef | ast.Lambda
    module: str
    scope: PythonScope | None = None


@dataclass(frozen=True, slots=True)
class Method:
    """A method of a known value, not yet called."""

    owner: object
    name: str


def is_plain(value: object) -> bool:
    """Return whether a value is a number, a text, a boolean or None."""
    return value is None or isinstance(value, bool | int | float | str)


def reason_of(*values: object) -> str:
    """Return the reason why a value computed from these is not known."""
    return next((value.why for value in values if isinstance(value, UnknownPython)), "is not worked out")


def truth_of(value: object) -> bool | None:
    """Return whether a condition holds; None if it is not known."""
    if is_plain(value) or isinstance(value, list | tuple | dict | set):
        return bool(value)
    if isinstance(value, Function) or (isinstance(value, Built) and not value.implied):
        return True
    return None


def merge_values(first: object, second: object, why: str, *, depth: int = 0) -> object:
    """Merge two values: parts on which they agree are kept, the others are unknown."""
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
            present = b if a is MISSING else a
            fields[name] = (
                present if isinstance(present, Built) and present.implied and not present.fields else UnknownPython(why)
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
    """Record of changes to dictionaries and lists, so that a path through the program can be undone."""

    def __init__(self) -> None:
        self._levels: list[dict[tuple[int, object], tuple[dict[object, object] | list[object], object, object]]] = []

    def write(self, box: dict[object, object], key: object, value: object) -> None:
        """Set a key; `MISSING` removes it."""
        if self._levels:
            self._levels[-1].setdefault((id(box), key), (box, key, box.get(key, MISSING)))
        if value is MISSING:
            box.pop(key, None)
        else:
            box[key] = value

    def replace_list(self, box: list[object], items: list[object]) -> None:
        """Replace the items of a list."""
        if self._levels:
            self._levels[-1].setdefault((id(box), None), (box, None, list(box)))
        box[:] = items

    def try_way(self, way: Callable[[], object]) -> tuple[object, Changes]:
        """Follow a path and undo it; return its result and its changes."""
        self._levels.append({})
        try:
            result = way()
        finally:
            level = self._levels.pop()
        changes: Changes = {}
        for place, (box, key, old_value) in level.items():
            if isinstance(box, list):
                changes[place] = (box, key, list(box), old_value)
                assert isinstance(old_value, list)
                box[:] = old_value
            else:
                changes[place] = (box, key, box.get(key, MISSING), old_value)
                if old_value is MISSING:
                    box.pop(key, None)
                else:
                    box[key] = old_value
        return result, changes

    def apply_changes(self, changes: Changes) -> None:
        """Apply the changes of a path that was undone."""
        for box, key, after, _ in changes.values():
            self._set(box, key, after)

    def apply_both(self, first: Changes, second: Changes, why: str) -> None:
        """Apply the changes on which two paths agree, and mark the others as unknown."""
        for place in dict.fromkeys((*first, *second)):
            box, key, _, old_value = first.get(place) or second[place]
            new_values = [changes[place][2] if place in changes else old_value for changes in (first, second)]
            if any(changes is MISSING for changes in new_values):
                present = next((changes for changes in new_values if changes is not MISSING), MISSING)
                is_default = isinstance(present, Built) and present.implied and not present.fields
                self._set(box, key, present if is_default or present is MISSING else UnknownPython(why))
            elif isinstance(box, list):
                merged = merge_values(new_values[0], new_values[1], why)
                self._set(box, key, merged if isinstance(merged, list) else [UnknownPython(why)])
            else:
                self._set(box, key, merge_values(new_values[0], new_values[1], why))

    def _set(self, box: dict[object, object] | list[object], key: object, value: object) -> None:
        if isinstance(box, list):
            assert isinstance(value, list)
            self.replace_list(box, value)
        else:
            self.write(box, key, value)


Changes = dict[tuple[int, object], tuple[dict[object, object] | list[object], object, object, object]]
