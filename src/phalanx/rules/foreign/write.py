"""The equivalent job file: every value with where it came from, and at the end what could not be said."""

from __future__ import annotations

import json
import os
from pathlib import Path

from phalanx.job.schema import EDITIONS, SECTIONS
from phalanx.rules.evidence import Unmapped
from phalanx.rules.foreign.book import Book, Said
from phalanx.units import plural

ORDER = ("model", *SECTIONS)
UNKNOWN_CLUSTER = "unknown"


def render(book: Book, *, name: str, unmapped: tuple[Unmapped, ...], folder: Path | None = None) -> str:
    """The text of the job file; `folder` is where it will be written, for paths relative to it."""
    parts = [
        f"# Made by phalanx import from {_comment(Path(book.file).name)}, a configuration of {book.title}.",
        f'spec = "{EDITIONS[-1]}"',
        f"name = {_toml(name)}",
    ]
    for section in ORDER:
        said = {key: one for key, one in book.values.items() if key.partition(".")[0] == section and "." in key}
        if said:
            parts += ["", f"[{section}]", *(_line(book, key, one, folder) for key, one in said.items())]
    parts += ["", *_habits(book), *_rest(book, unmapped)]
    return "\n".join(parts) + "\n"


def _line(book: Book, key: str, said: Said, folder: Path | None) -> str:
    value = said.value
    if key in ("model.hf_config", "cluster.file") and folder is not None and isinstance(value, str):
        value = os.path.relpath(Path(book.file).parent / value, folder)
    where = f"{Path(book.file).name}:{said.line} {said.key}" if said.key else ""
    note = _comment("; ".join(part for part in (where, said.note) if part))
    return f"{key.partition('.')[2]} = {_toml(value)}" + (f"  # {note}" if note else "")


def _habits(book: Book) -> list[str]:
    """Settings that change how the trainer behaves, which no key of a job says."""
    head = [
        "# Habits of the trainer that its configuration changes; phalanx check on that file itself counts with them."
    ]
    said = [f"#   {name} = {_comment(str(value))}" for name, value in book.practice.items()]
    return [*head, *said, ""] if said else []


def _rest(book: Book, unmapped: tuple[Unmapped, ...]) -> list[str]:
    if not unmapped:
        return [f"# Every setting of {book.title} that the job schema has a word for is above; none was left over."]
    head = f"# Not mapped: {plural(len(unmapped), 'setting')} that the job schema cannot say."
    return [head, *(f"#   {_comment(one.key)} = {_comment(one.value)}: {_comment(one.why)}" for one in unmapped)]


def _comment(text: str) -> str:
    """One line, printable, short."""
    clean = "".join(one if one.isprintable() else "?" for one in text)
    return clean if len(clean) <= 160 else clean[:159] + "…"


def _toml(value: object) -> str:
    """A value as TOML writes it.

    >>> _toml(True), _toml(1e-8), _toml([0.9, 0.95]), _toml({"a": 1})
    ('true', '1e-08', '[0.9, 0.95]', '{ a = 1 }')
    """
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case list() if value and isinstance(value[0], dict):
            return "[\n" + "".join(f"  {_toml(one)},\n" for one in value) + "]"
        case list() | tuple():
            return "[" + ", ".join(_toml(one) for one in value) + "]"
        case dict():
            return "{ " + ", ".join(f"{key} = {_toml(one)}" for key, one in value.items()) + " }"
        case _:
            return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
