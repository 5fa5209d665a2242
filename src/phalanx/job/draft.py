"""A job while it is loaded: its table, `--set` overrides, the origin of each value, and the mistakes found."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from phalanx.errors import MOST_UNKNOWN, Problem, nearest
from phalanx.io.toml import MOST_DEPTH, KeyPath, TooDeep, key_lines, split_key
from phalanx.job.key_rules import KeyRule, WrongValue, shown_value


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The origin of a value; `where` is shown to users, such as "job.toml:12" or "preset llama-3-8b"."""

    kind: Literal["file", "set", "preset", "hf_config", "derived", "default"]
    where: str

    @property
    def by_hand(self) -> bool:
        """True if a user wrote this value, in the file or with --set."""
        return self.kind in ("file", "set")


DEFAULT = Origin(kind="default", where="default")


@dataclass(kw_only=True, slots=True)
class Draft:
    """The values, origins and problems of a job while it is loaded; discarded once the Job is built."""

    path: Path
    table: dict[str, object]
    lines: Mapping[KeyPath, int]
    settings: dict[str, str] = field(default_factory=dict)  # dotted key -> the --set that set it
    given: Mapping[str, Origin] = field(default_factory=dict)  # dotted key -> origin, of a table that is no TOML file
    origins: dict[str, Origin] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)
    bad: set[str] = field(default_factory=set)  # keys whose value was refused

    def section(self, name: str) -> dict[str, object]:
        """Return the table of one section; empty when it is absent."""
        value = self.table.get(name, {})
        return value if isinstance(value, dict) else {}

    def written(self, key: str) -> Origin:
        """Return the origin of a key in the file or of --set; keys of list elements are like `batch.ramp.0.until`."""
        for set_key, origin_text in self.settings.items():
            if key == set_key or key.startswith(set_key + "."):
                return Origin(kind="set", where=origin_text)
        if key in self.given:
            return self.given[key]
        path: KeyPath = tuple(int(word) if word.isdigit() else word for word in key.split("."))
        return Origin(kind="file", where=self.place(path))

    def place(self, path: KeyPath) -> str:
        """Return file:line of a key path, or of the nearest table around it."""
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.path}:{self.lines[path]}" if path else str(self.path)

    def _set_by(self, path: KeyPath) -> str:
        """Return the --set that set a key, or the only key below it; empty if the file set it."""
        key = dotted_key(path)
        prefix = "" if path in self.lines else f"{key}."
        return next(
            (
                text
                for set_key, text in self.settings.items()
                if set_key == key or (prefix and set_key.startswith(prefix))
            ),
            "",
        )

    def complain(self, key: str, what: str, *, why: str = "", fix: str = "") -> None:
        """Record a mistake at a key, which counts as refused from then on."""
        self.bad.add(key)
        origin = self.origins.get(key)
        where = origin.where if origin and origin.kind != "default" else self.written(key).where
        self.problems.append(Problem(where=where, what=what, why=why, fix=fix))

    def warn(self, key: str, what: str, *, fix: str = "") -> None:
        """Record a warning about a legal setting without effect."""
        self.warnings.append(Problem(where=self.origins[key].where, what=what, fix=fix))

    def read(self, key: str, value: object, rule: KeyRule, *, origin: Origin | None = None) -> object | None:
        """Return the value as read by its rule, or None after recording a mistake."""
        self.origins[key] = origin or self.written(key)
        try:
            return rule.read(value)
        except WrongValue as error:
            fix = error.fix or f"use {rule.expects}"
            self.complain(key, f"{key} = {shown_value(value)} {error}", why=rule.note, fix=fix)
            return None

    def refuse_unknown(self, prefix: KeyPath, given: Iterable[str], known: Iterable[str]) -> None:
        """Record a mistake for each unknown key, with the nearest known one."""
        names = sorted(known)
        unknown = [name for name in given if name not in names]
        if len(unknown) > MOST_UNKNOWN:
            summary = f"{len(unknown) - MOST_UNKNOWN:,} more keys that nobody reads"
            self.problems.append(Problem(where=self.place((*prefix, unknown[MOST_UNKNOWN])), what=summary))
        for name in unknown[:MOST_UNKNOWN]:
            suggestion = nearest(name, names)
            fix = f'did you mean "{suggestion}"?' if suggestion else f"the keys are {', '.join(names)}"
            place = f"section [{dotted_key(prefix)}]" if prefix else "a job file"
            where = self._set_by((*prefix, name)) or self.place((*prefix, name))
            self.problems.append(Problem(where=where, what=f"{place} has no key {shown_value(name)}", fix=fix))


def dotted_key(path: KeyPath) -> str:
    """Return a key path as users write it.

    >>> dotted_key(("batch", "ramp", 0))
    'batch.ramp.0'
    """
    return ".".join(str(part) for part in path)


# `--set section.key=value`: the only way the command line changes a job.


# Pairs of which a job sets only one: setting the first on the command line drops the second from the file.
EXCLUSIVE = (
    ("batch.global_tokens", "batch.global_sequences"),
    ("cluster.spec", "cluster.file"),
    ("model.preset", "model.hf_config"),
)


def apply_overrides(draft: Draft, overrides: Sequence[str]) -> None:
    """Write each override into the draft's table; the last one for a key wins."""
    for override in overrides:
        path_and_value = _parse_override(draft, override)
        if path_and_value is None:
            continue
        for path, value in _leaf_values(*path_and_value):
            _write_value(draft, path, value, override)


def _parse_override(draft: Draft, override: str) -> tuple[tuple[str, ...], object] | None:
    key_text, equals, right = override.partition("=")
    path = split_key(key_text)
    if not equals or path is None or len(path) > 2:
        fix = "write --set section.key=value, as --set parallel.tensor=8"
        draft.problems.append(Problem(where=f"--set {shown_value(override)}", what="is not an override", fix=fix))
        return None
    return path, _override_value(right.strip())


def _override_value(text: str) -> object:
    """Return the value of the text as TOML, else the text itself: 8, true, "a b", [1, 2] and also bf16 or 15T."""
    try:
        key_lines(f"v = {text}")  # raises on deep nesting before tomllib recurses into it
        table = tomllib.loads(f"v = {text}")
    except (ValueError, TooDeep, RecursionError):
        return text
    return table["v"] if table.keys() == {"v"} else text


def _leaf_values(path: tuple[str, ...], value: object) -> list[tuple[tuple[str, ...], object]]:
    """Return the (path, value) pairs of a table's leaves; setting them leaves the table's other keys unchanged."""
    if not isinstance(value, dict) or len(path) > MOST_DEPTH:
        return [(path, value)]
    return [leaf for key, item in value.items() for leaf in _leaf_values((*path, key), item)]


def _write_value(draft: Draft, path: tuple[str, ...], value: object, override: str) -> None:
    table = draft.table
    for name in path[:-1]:
        inner = table.get(name)
        if not isinstance(inner, dict):
            inner = table[name] = {}
        table = inner
    table[path[-1]] = value
    key = dotted_key(path)
    draft.settings[key] = f"--set {override if len(override) <= 80 else override[:79] + '…'}"
    _drop_partner(draft, key)


def _drop_partner(draft: Draft, key: str) -> None:
    for pair in EXCLUSIVE:
        if key in pair:
            partner = pair[1 - pair.index(key)]
            section, _, name = partner.partition(".")
            inner = draft.table.get(section)
            if partner not in draft.settings and isinstance(inner, dict):
                inner.pop(name, None)
