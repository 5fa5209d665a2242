"""Change values in a job file and nothing else: comments, order, spaces and line ends stay as they are."""

from __future__ import annotations

import difflib
import os
import re
import secrets
import tomllib
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from phalanx.errors import Problem, SystemFailure, UserError, mistake
from phalanx.io.files import read_text
from phalanx.io.toml import key_lines
from phalanx.job.draft import EXCLUSIVE
from phalanx.rules.outcome import Edit

BOM = "\ufeff"


def edited_text(text: str, edits: Sequence[Edit], *, where: str) -> str:
    """The text with every edit in it; raises UserError when anything else would change with it."""
    mark, body = (BOM, text[1:]) if text.startswith(BOM) else ("", text)
    result = body
    for edit in edits:
        result = _put(result, edit, where)
    _prove(body, result, edits, where)
    return mark + result


def _put(text: str, edit: Edit, where: str) -> str:
    """One value: replaced where it stands, else written after the last key of its section."""
    section, _, name = edit.key.rpartition(".")
    document = _parse(_without_partner(text, edit.key, where), where)
    table: Any = document
    if section:
        if section not in document:
            return _append_section(tomlkit.dumps(document), section, f"{name} = {_value(edit, where)}")
        table = document[section]
    if not isinstance(table, MutableMapping):
        raise _refusal(where, f"{section} is no section in it")
    if name not in table:
        inserted = _insert(tomlkit.dumps(document), section, f"{name} = {_value(edit, where)}")
        if inserted:
            return inserted
    table[name] = edit.value
    return tomlkit.dumps(document)


def _parse(text: str, where: str) -> tomlkit.TOMLDocument:
    try:
        document = tomlkit.parse(text)
    except (TOMLKitError, ValueError, RecursionError) as error:
        raise _refusal(where, f"the editor cannot read it: {str(error)[:200]}") from error
    if tomlkit.dumps(document) != text:
        raise _refusal(where, "the editor would change its layout")
    return document


def _without_partner(text: str, key: str, where: str) -> str:
    """Of two keys that say the same, as global_tokens and global_sequences, the file gives one."""
    document: Any = _parse(text, where)
    for pair in EXCLUSIVE:
        if key in pair:
            section, _, name = pair[1 - pair.index(key)].partition(".")
            table = document.get(section)
            if isinstance(table, MutableMapping) and name in table:
                del table[name]
    return tomlkit.dumps(document)


def _value(edit: Edit, where: str) -> str:
    try:
        return tomlkit.item(edit.value).as_string()
    except (TOMLKitError, ValueError) as error:
        raise _refusal(where, f"{edit.key} = {edit.value!r} cannot be written") from error


def _append_section(text: str, section: str, line: str) -> str:
    end = _line_end(text)
    lead = "" if not text else end if text.endswith("\n") else end * 2
    return f"{text}{lead}[{section}]{end}{line}{end}"


def _insert(text: str, section: str, line: str) -> str:
    """A new line after the last key of a section; empty where it has no lines of its own, as an inline table."""
    numbers = key_lines(text)
    rows = text.splitlines(keepends=True)
    first = numbers.get((section,), 0) if section else 0
    if section and not re.match(rf"\s*\[\s*{re.escape(section)}\s*\]", rows[first - 1] if first else ""):
        return ""
    depth = 2 if section else 1
    own = [number for path, number in numbers.items() if len(path) == depth and path[: depth - 1] == _prefix(section)]
    # a line that is TOML by itself holds a whole key and value, and no header
    whole = [number for number in own if _is_pair(rows[number - 1])]
    after = max(whole, default=first)
    if not after:
        return ""
    end = _line_end(text)
    if not rows[after - 1].endswith("\n"):
        rows[after - 1] += end
    return "".join([*rows[:after], line + end, *rows[after:]])


def _prefix(section: str) -> tuple[str, ...]:
    return (section,) if section else ()


def _is_pair(row: str) -> bool:
    try:
        return bool(tomllib.loads(row)) and not row.lstrip().startswith("[")
    except (ValueError, RecursionError):
        return False


def _line_end(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _prove(before: str, after: str, edits: Sequence[Edit], where: str) -> None:
    """The edited text says what it said, except for the edited keys."""
    old, new = (_leaves(tomllib.loads(text)) for text in (before, after))
    allowed = {edit.key for edit in edits}
    partners = {pair[1 - pair.index(key)] for key in allowed for pair in EXCLUSIVE if key in pair}
    changed = {key for key in {**old, **new} if old.get(key) != new.get(key) or (key in old) != (key in new)}
    wrong = sorted(changed - allowed - partners)
    missing = [edit.key for edit in edits if new.get(edit.key) != edit.value]
    if wrong or missing:
        raise _refusal(where, f"{', '.join(wrong or missing)} would not come out as meant")


def _leaves(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key; a list is one value."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            found |= _leaves(value, f"{name}.")
        else:
            found[name] = value
    return found


def _refusal(where: str, what: str) -> UserError:
    return mistake(where, f"is not edited: {what}", fix="change it by hand: phalanx check names the values")


def unified_difference(before: str, after: str, *, name: str) -> str:
    """A unified diff, as `patch` reads it; empty when nothing differs."""
    rows = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{name}", f"b/{name}"
    )
    return "".join(row if row.endswith("\n") else f"{row}\n\\ No newline at end of file\n" for row in rows)


def read_exactly(path: Path) -> str:
    """The text with its own line ends and mark of byte order; raises UserError for what is no job file."""
    read_text(path, noun="job file")  # small, regular, UTF-8
    return path.read_bytes().decode("utf-8")


def write_exactly(path: Path, before: str, after: str) -> None:
    """Replace the file whole or not at all. A link stays a link, rights stay as they are."""
    real = path.resolve()
    temporary = real.parent / f".phalanx-{secrets.token_hex(8)}.tmp"
    try:
        status = real.stat()
        if real.read_bytes() != before.encode("utf-8"):
            raise mistake(str(path), "was changed by somebody else meanwhile", fix="check it again")
        with temporary.open("xb") as stream:
            os.fchmod(stream.fileno(), status.st_mode & 0o7777)
            stream.write(after.encode("utf-8"))
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(real)
    except OSError as error:
        what = f"cannot be written: {error.strerror or error}"
        raise SystemFailure(Problem(where=str(path), what=what, fix="--diff shows the change")) from error
    finally:
        temporary.unlink(missing_ok=True)
