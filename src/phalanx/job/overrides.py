"""`--set section.key=value`: the single way the command line changes a job."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence

from phalanx.errors import Problem
from phalanx.io.toml import MOST_DEPTH, TooDeep, key_lines, split_key
from phalanx.job.draft import Draft, dotted
from phalanx.job.key_rules import shown_value

# Pairs of which a job gives one: setting the first on the command line drops the second from the file.
EXCLUSIVE = (
    ("batch.global_tokens", "batch.global_sequences"),
    ("cluster.spec", "cluster.file"),
    ("model.preset", "model.hf_config"),
)


def apply_overrides(draft: Draft, overrides: Sequence[str]) -> None:
    """Write each override into the draft's table, the last one winning."""
    for override in overrides:
        parsed = _parse(draft, override)
        if parsed is None:
            continue
        for path, value in _leaves(*parsed):
            _write(draft, path, value, override)


def _parse(draft: Draft, override: str) -> tuple[tuple[str, ...], object] | None:
    left, equals, right = override.partition("=")
    path = split_key(left)
    if not equals or path is None or len(path) > 2:
        fix = "write --set section.key=value, as --set parallel.tensor=8"
        draft.problems.append(Problem(where=f"--set {shown_value(override)}", what="is not an override", fix=fix))
        return None
    return path, _value(right.strip())


def _value(text: str) -> object:
    """TOML if it is TOML, else the text itself: 8, true, "a b", [1, 2] and also bf16 or 15T."""
    try:
        key_lines(f"v = {text}")  # refuses hostile nesting before tomllib recurses into it
        table = tomllib.loads(f"v = {text}")
    except (ValueError, TooDeep, RecursionError):
        return text
    return table["v"] if table.keys() == {"v"} else text


def _leaves(path: tuple[str, ...], value: object) -> list[tuple[tuple[str, ...], object]]:
    """A table sets each of its keys and leaves the others alone."""
    if not isinstance(value, dict) or len(path) > MOST_DEPTH:
        return [(path, value)]
    return [leaf for key, item in value.items() for leaf in _leaves((*path, key), item)]


def _write(draft: Draft, path: tuple[str, ...], value: object, override: str) -> None:
    table = draft.table
    for part in path[:-1]:
        inner = table.get(part)
        if not isinstance(inner, dict):
            inner = table[part] = {}
        table = inner
    table[path[-1]] = value
    key = dotted(path)
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
