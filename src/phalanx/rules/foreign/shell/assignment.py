"""Assignments: texts, lists and tables, whole, by element, or appended."""

from __future__ import annotations

import re
from typing import Protocol

from phalanx.rules.foreign.shell.arithmetic import UnknownNumberError
from phalanx.rules.foreign.shell.expansion import Scope, evaluate_in, expand_fields, expand_text
from phalanx.rules.foreign.shell.partial_text import MOST_TEXT, Text
from phalanx.rules.foreign.shell.script_state import ShellState
from phalanx.rules.foreign.shell.syntax import Assignment


class AssignScope(Scope, Protocol):
    """What an assignment needs beside an expansion."""

    state: ShellState
    open_sources: list[str]
    given: dict[str, str]


# A number of hosts that is one by default, as NNODES=${1:-1}, is for a try: who starts it on several says how many.
HOSTS = re.compile(r"NNODES|NUM_NODES|N_NODES|NODES|NODE_COUNT|NODE_NUM|NUM_MACHINES|HOST_NUM", re.IGNORECASE)
DEFAULT = re.compile(r"[\"']?\$\{(\w+):?[-=][\"']?1[\"']?\}[\"']?")


def assign_variable(scope: AssignScope, one: Assignment) -> None:
    """`NAME=value` in all its forms."""
    if one.items is not None:
        return _assign_list(scope, one)
    assert one.value is not None
    value = expand_text(one.value.text, scope)
    if value == "1" and HOSTS.fullmatch(one.name) and _is_default(one.value.text, scope):
        value = scope.open_mark(f"{one.name}, which who starts it gives; {value} without", one.name)
    before = scope.get_variable(one.name)
    if one.index is not None:
        return _assign_element(scope, one, value, before)
    if one.append and isinstance(before, tuple):
        scope.set_variable(one.name, (before[0] + value, *before[1:]) if before else (value,))
    else:
        old = before if one.append and isinstance(before, str) else ""
        whole = (scope.unset_mark(one.name) if one.append and before is None and scope.open_sources else old) + value
        scope.set_variable(one.name, whole if len(whole) <= MOST_TEXT else scope.open_mark("a long text", one.name))
    return None


def _is_default(raw: str, scope: AssignScope) -> bool:
    """Whether a value is the default of a variable that nobody gave."""
    found = DEFAULT.fullmatch(raw)
    return found is not None and found.group(1) not in scope.given and scope.get_variable(found.group(1)) is None


def _assign_list(scope: AssignScope, one: Assignment) -> None:
    before = scope.get_variable(one.name)
    pairs = [word.text for word in one.items or ()]
    if one.name in scope.state.tables or (pairs and all(text.startswith("[") and "]=" in text for text in pairs)):
        table = dict(before) if one.append and isinstance(before, dict) else {}
        for text in pairs:
            key, _, value = text[1:].partition("]=")
            table[expand_text(key, scope)] = expand_text(value, scope)
        scope.set_variable(one.name, table)
        return
    items = tuple(field for text in pairs for field in expand_fields(text, scope))
    old = before if isinstance(before, tuple) else (before,) if isinstance(before, str) and before else ()
    whole = (*old, *items) if one.append else items
    scope.set_variable(one.name, whole[:5_000])


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
