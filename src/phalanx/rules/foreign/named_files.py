"""Lookup of a file that a configuration names, restricted to its folder and its repository."""

from __future__ import annotations

from pathlib import Path

from phalanx.io.path_probes import is_file, path_exists, resolve_path


def find_named_file(folder: Path, name: str, *bases: Path) -> Path | None:
    """Return the file, relative to one of the bases, the folder, or a folder above it in the same repository.

    Scripts may be started from a folder above their own; if several files there match, none is returned.
    """
    if not name or "\x00" in name or len(name) > 1_000:
        return None
    try:
        root = resolve_path(folder)
    except (OSError, RuntimeError, ValueError):
        return None
    for base in (*bases, folder):
        if (path := _file_within(base, name, root)) is not None:
            return path
    repository = _repository_of(root)
    above = {path for base in root.parents if (path := _file_within(base, name, repository)) is not None}
    return above.pop() if len(above) == 1 else None


def _file_within(base: Path, name: str, root: Path) -> Path | None:
    try:
        path = resolve_path(base / name)
        return path if path.is_relative_to(root) and is_file(path) else None
    except (OSError, RuntimeError, ValueError):
        return None


def _repository_of(folder: Path) -> Path:
    """Return the root of the checkout that a folder is part of; the folder itself if it is part of none."""
    return next((place for place in (folder, *folder.parents) if path_exists(place / ".git")), folder)
