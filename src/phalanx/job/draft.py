"""What the file and `--set` say while a job is loaded: where each value is from, and every mistake found so far."""

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
    """Where a value came from: `where` is what a person reads, such as "job.toml:12" or "preset llama-3-8b"."""

    kind: Literal["file", "set", "preset", "hf_config", "derived", "default"]
    where: str

    @property
    def by_hand(self) -> bool:
        """Whether a person wrote this very value."""
        return self.kind in ("file", "set")


DEFAULT = Origin(kind="default", where="default")


@dataclass(kw_only=True, slots=True)
class Draft:
    """Collects while the loader reads; thrown away once the Job is built."""

    path: Path
    table: dict[str, object]
    lines: Mapping[KeyPath, int]
    settings: dict[str, str] = field(default_factory=dict)  # dotted key -> the --set that gave it
    given: Mapping[str, Origin] = field(default_factory=dict)  # dotted key -> origin, of a table that is no file
    origins: dict[str, Origin] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)
    bad: set[str] = field(default_factory=set)  # keys whose value was refused

    def section(self, name: str) -> dict[str, object]:
        """The table of one section; empty when it is absent."""
        value = self.table.get(name, {})
        return value if isinstance(value, dict) else {}

    def written(self, key: str) -> Origin:
        """The origin of a key that the file or --set gives; keys of list elements are written `batch.ramp.0.until`."""
        for given, origin_text in self.settings.items():
            if key == given or key.startswith(given + "."):
                return Origin(kind="set", where=origin_text)
        if key in self.given:
            return self.given[key]
        path: KeyPath = tuple(int(part) if part.isdigit() else part for part in key.split("."))
        return Origin(kind="file", where=self.place(path))

    def place(self, path: KeyPath) -> str:
        """file:line of a key path, or of the nearest table around it."""
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.path}:{self.lines[path]}" if path else str(self.path)

    def _set_by(self, path: KeyPath) -> str:
        """The --set that gave a key, or the only thing below it; empty where the file did."""
        key = dotted_key(path)
        below = "" if path in self.lines else f"{key}."
        return next(
            (text for given, text in self.settings.items() if given == key or (below and given.startswith(below))), ""
        )

    def complain(self, key: str, what: str, *, why: str = "", fix: str = "") -> None:
        """Note a mistake at a key; the key counts as refused from here on."""
        self.bad.add(key)
        origin = self.origins.get(key)
        where = origin.where if origin and origin.kind != "default" else self.written(key).where
        self.problems.append(Problem(where=where, what=what, why=why, fix=fix))

    def warn(self, key: str, what: str, *, fix: str = "") -> None:
        """Note a setting that is legal but does nothing."""
        self.warnings.append(Problem(where=self.origins[key].where, what=what, fix=fix))

    def read(self, key: str, value: object, rule: KeyRule, *, origin: Origin | None = None) -> object | None:
        """The value as its rule reads it, or None after a complaint."""
        self.origins[key] = origin or self.written(key)
        try:
            return rule.read(value)
        except WrongValue as wrong:
            fix = wrong.fix or f"use {rule.expects}"
            self.complain(key, f"{key} = {shown_value(value)} {wrong}", why=rule.note, fix=fix)
            return None

    def refuse_unknown(self, prefix: KeyPath, given: Iterable[str], known: Iterable[str]) -> None:
        """Complain about each key that nobody reads, with the nearest one that somebody does."""
        names = sorted(known)
        unknown = [name for name in given if name not in names]
        if len(unknown) > MOST_UNKNOWN:
            more = f"{len(unknown) - MOST_UNKNOWN:,} more keys that nobody reads"
            self.problems.append(Problem(where=self.place((*prefix, unknown[MOST_UNKNOWN])), what=more))
        for name in unknown[:MOST_UNKNOWN]:
            close = nearest(name, names)
            fix = f'did you mean "{close}"?' if close else f"the keys are {', '.join(names)}"
            place = f"section [{dotted_key(prefix)}]" if prefix else "a job file"
            where = self._set_by((*prefix, name)) or self.place((*prefix, name))
            self.problems.append(Problem(where=where, what=f"{place} has no key {shown_value(name)}", fix=fix))


def dotted_key(path: KeyPath) -> str:
    """A key path as a person writes it.

    >>> dotted_key(("batch", "ramp", 0))
    'batch.ramp.0'
    """
    return ".".join(str(part) for part in path)


# `--set section.key=value`: the single way the command line changes a job.


# Pairs of which a job gives one: setting the first on the command line drops the second from the file.
EXCLUSIVE = (
    ("batch.global_tokens", "batch.global_sequences"),
    ("cluster.spec", "cluster.file"),
    ("model.preset", "model.hf_config"),
)


def apply_overrides(draft: Draft, overrides: Sequence[str]) -> None:
    """Write each override into the draft's table, the last one winning."""
    for override in overrides:
        parsed = _parse_override(draft, override)
        if parsed is None:
            continue
        for path, value in _leaf_values(*parsed):
            _write_value(draft, path, value, override)


def _parse_override(draft: Draft, override: str) -> tuple[tuple[str, ...], object] | None:
    left, equals, right = override.partition("=")
    path = split_key(left)
    if not equals or path is None or len(path) > 2:
        fix = "write --set section.key=value, as --set parallel.tensor=8"
        draft.problems.append(Problem(where=f"--set {shown_value(override)}", what="is not an override", fix=fix))
        return None
    return path, _override_value(right.strip())


def _override_value(text: str) -> object:
    """TOML if it is TOML, else the text itself: 8, true, "a b", [1, 2] and also bf16 or 15T."""
    try:
        key_lines(f"v = {text}")  # refuses hostile nesting before tomllib recurses into it
        table = tomllib.loads(f"v = {text}")
    except (ValueError, TooDeep, RecursionError):
        return text
    return table["v"] if table.keys() == {"v"} else text


def _leaf_values(path: tuple[str, ...], value: object) -> list[tuple[tuple[str, ...], object]]:
    """A table sets each of its keys and leaves the others alone."""
    if not isinstance(value, dict) or len(path) > MOST_DEPTH:
        return [(path, value)]
    return [leaf for key, item in value.items() for leaf in _leaf_values((*path, key), item)]


def _write_value(draft: Draft, path: tuple[str, ...], value: object, override: str) -> None:
    table = draft.table
    for part in path[:-1]:
        inner = table.get(part)
        if not isinstance(inner, dict):
            inner = table[part] = {}
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
