"""Measurements of kernels on this machine, in the user's cache: the fastest variants, and the winners of searches.

There are two files, neither with code: choices.json has the selector's choices (train/kernels/selector.py),
winners.json the values that `phalanx evolve kernels` found for one of our templates. A file that is damaged, owned by
another user or of another format counts as not measured; a measurement that cannot be written is dropped.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.io.files import load_json, replace_text

FORMAT = 1
MOST_BYTES = 4 * 2**20
MOST_KEPT = 4096
CHOICES, WINNERS = "choices.json", "winners.json"


def kernel_cache_folder(environ: Mapping[str, str]) -> Path | None:
    """Return the folder of measurements; None without a home, because the current folder may belong to another user."""
    home = environ.get("HOME", "")
    cache = environ.get("XDG_CACHE_HOME") or (os.path.join(home, ".cache") if home else "")
    return Path(cache) / "phalanx" / "kernels" if os.path.isabs(cache) else None


def read_choices(folder: Path | None) -> dict[str, dict[str, Any]]:
    """Return choices by key (operation | sizes | type | device | versions)."""
    return {key: entry for key, entry in _read_file(folder, CHOICES).items() if _is_choice(entry)}


def write_choice(key: str, entry: Mapping[str, Any], folder: Path | None) -> None:
    """Add a choice to the stored ones; the oldest are dropped."""
    _write_file(
        folder,
        CHOICES,
        {**{old_key: old_entry for old_key, old_entry in read_choices(folder).items() if old_key != key}, key: entry},
    )


def read_winners(folder: Path | None) -> dict[str, dict[str, Any]]:
    """Return template values by key; the caller checks that they are among the template's options."""
    return {key: entry for key, entry in _read_file(folder, WINNERS).items() if isinstance(entry, dict)}


def write_winner(key: str, genome: Mapping[str, Any], folder: Path | None) -> None:
    """Add the winner of a search to the stored ones; the oldest are dropped."""
    _write_file(
        folder,
        WINNERS,
        {
            **{old_key: old_genome for old_key, old_genome in read_winners(folder).items() if old_key != key},
            key: genome,
        },
    )


def chosen_variants(choices: Mapping[str, Mapping[str, Any]], *, device: str) -> dict[str, str]:
    """Return the chosen variants by operation, on devices whose name starts with `device`.

    >>> measured = {"rope | a=1 | bf16 | H200 x | v": {"variant": "triton"}, "rope | a=2 | bf16 | H200 x | v":
    ...     {"variant": "builtin"}, "rope | a=3 | bf16 | H200 x | v": {"variant": "triton"}}
    >>> chosen_variants(measured, device="H200"), chosen_variants(measured, device="B200")
    ({'rope': 'triton 2 of 3, builtin 1 of 3'}, {})
    """
    counts: dict[str, Counter[str]] = {}
    for key, entry in choices.items():
        fields = key.split(" | ")
        if len(fields) == 5 and fields[3].startswith(device):
            counts.setdefault(fields[0], Counter())[entry["variant"]] += 1
    return {
        op: ", ".join(
            name if len(variant_counts) == 1 else f"{name} {count} of {variant_counts.total()}"
            for name, count in variant_counts.most_common()
        )
        for op, variant_counts in counts.items()
    }


def _is_choice(entry: object) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("variant"), str):
        return False
    entry.setdefault("spreads_ms", {})  # absent from entries of 0.7 and before
    times_ms, spreads_ms = entry.get("times_ms"), entry["spreads_ms"]
    if not isinstance(times_ms, dict) or not isinstance(spreads_ms, dict) or not all(times_ms.values()):
        return False
    values = [*times_ms.values(), *spreads_ms.values()]
    return all(isinstance(value, int | float) and math.isfinite(value) and value >= 0 for value in values)


def _read_file(folder: Path | None, name: str) -> dict[str, Any]:
    if folder is None:
        return {}
    path = folder / name
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            return {}
        stored = load_json(path, MOST_BYTES)
    except (OSError, ValueError):
        return {}
    if not isinstance(stored, dict) or stored.get("format") != FORMAT or not isinstance(stored.get("choices"), dict):
        return {}
    return dict(stored["choices"])


def _write_file(folder: Path | None, name: str, entries: Mapping[str, Any]) -> None:
    if folder is None:
        return
    newest_entries = dict(list(entries.items())[-MOST_KEPT:])
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_text(folder / name, json.dumps({"format": FORMAT, "choices": newest_entries}, indent=1))
