"""Assignments of texts, lists and tables: complete, to an element, or appended."""

from __future__ import annotations

import re
from typing import Protocol

from phalanx.rules.foreign.shell.arithmetic import UnknownNumberError
from phalanx.rules.foreign.shell.expansion import Scope, evaluate_in, expand_fields, expand_text
from phalanx.rules.foreign.shell.partial_text import MOST_TEXT, Text
from phalanx.rules.foreign.shell.script_state import ShellState
from phalanx.rules.foreign.shell.syntax import Assignment


class AssignScope(Scope, Protocol):
    """The parts of the interpreter that an assignment needs in addition to those of an expansion."""

    state: ShellState
    open_sources: list[str]
    given: dict[str, str]


# A default of one host, as in NNODES=${1:-1}, is meant for a test: a launch on several hosts passes their number.
HOSTS = re.compile(r"NNODES|NUM_NODES|N_NODES|NODES|NODE_COUNT|NODE_NUM|NUM_MACHINES|HOST_NUM", re.IGNORECASE)
DEFAULT = re.compile(r"[\"']?\$\{(\w+):?[-=][\"']?1[\"']?\}[\"']?")


def assign_variable(scope: AssignScope, one: Assignment) -> None:
    """Carry out `NAME=value` in all its forms."""
    if one.items is not None:
        return _assign_list(scope, one)
    assert one.value is not None
    value = expand_text(one.value.text, scope)
    if value == "1" and HOSTS.fullmatch(one.name) and _is_default(one.value.text, scope):
        value = scope.open_mark(f"{one.name}, which who starts it gives; {value} without", one.name)
    old_value = scope.get_variable(one.name)
    if one.index is not None:
        return _assign_element(scope, one, value, old_value)
    if one.append and isinstance(old_value, tuple):
        scope.set_variable(one.name, (old_value[0] + value, *old_value[1:]) if old_value else (value,))
    else:
        old_text = old_value if one.append and isinstance(old_value, str) else ""
        new_text = (
            scope.unset_mark(one.name) if one.append and old_value is None and scope.open_sources else old_text
        ) + value
        scope.set_variable(
            one.name, new_text if len(new_text) <= MOST_TEXT else scope.open_mark("a long text", one.name)
        )
    return None


def _is_default(raw: str, scope: AssignScope) -> bool:
    """Return whether a value is the default of a variable that was not given."""
    match = DEFAULT.fullmatch(raw)
    return match is not None and match.group(1) not in scope.given and scope.get_variable(match.group(1)) is None


def _assign_list(scope: AssignScope, one: Assignment) -> None:
    old_value = scope.get_variable(one.name)
    pairs = [word.text for word in one.items or ()]
    if one.name in scope.state.tables or (pairs and all(text.startswith("[") and "]=" in text for text in pairs)):
        table = dict(old_value) if one.append and isinstance(old_value, dict) else {}
        for text in pairs:
            key, _, value = text[1:].partition("]=")
            table[expand_text(key, scope)] = expand_text(value, scope)
        scope.set_variable(one.name, table)
        return
    items = tuple(field for text in pairs for field in expand_fields(text, scope))
    old_items = (
        old_value if isinstance(old_value, tuple) else (old_value,) if isinstance(old_value, str) and old_value else ()
    )
    all_items = (*old_items, *items) if one.append else items
    scope.set_variable(one.name, all_items[:5_000])


def _assign_element(scope: AssignScope, one: Assignment, value: str, before: Text | None) -> None:
    assert one.index is not None
    if one.name in scope.state.tables or isinstance(before, dict):
        table = dict(before) if isinstance(before, dict) else {}
        key = expand_text(one.index, scope)
        table[key] = (table.get(key, "") if one.append else "") + value
        scope.set_variable(one.name, table)
        return
    items = list(before) if isinstance(before, tuple) else [before] if isinstance(before, str) else []
    try:
        place = evaluate_in(expand_text(one.index, scope), scope)
    except UnknownNumberError:
        place = -1
    if not 0 <= place <= len(items) + 1_000:
        scope.set_variable(one.name, (scope.open_mark(f"an element of {one.name}", one.name),))
        return
    items += [""] * (place + 1 - len(items))
    items[place] = (items[place] if one.append else "") + value
    scope.set_variable(one.name, tuple(items))
