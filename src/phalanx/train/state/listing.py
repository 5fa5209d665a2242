"""The list of a run's checkpoints: size, layout, and damage of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.plan.layout import Layout
from phalanx.train.state.checkpoint_index import (
    CheckpointManifest,
    DamagedCheckpoint,
    damaged_checkpoint,
    read_manifest,
)
from phalanx.train.state.paths import Location, commit_step, data_name, index_name
from phalanx.train.state.reader import list_commits, verify_checkpoint
from phalanx.train.state.storage import open_folder


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointEntry:
    """One committed step."""

    path: Location
    step: int
    size_bytes: int | None = None  # of the files of all ranks; None if the manifest cannot be read
    world: int | None = None  # number of ranks that wrote it
    layout: str = ""
    tokens: int | None = None  # trained on so far
    run_id: str = ""
    code: str = ""  # versions of Phalanx and torch that wrote it
    damage: tuple[str, ...] = ()  # every problem that was found


def list_checkpoints(
    root: Location | str, *, verify: bool = False, begin: Callable[[Location], None] = lambda place: None
) -> list[CheckpointEntry]:
    """Return every commit, newest first, with the damage found.

    Without `verify` manifests and the sizes of files are checked, with it every byte. `begin` is called before each.
    """
    entries = []
    for place in list_commits(root):
        begin(place)
        entries.append(_look_at(place, verify=verify))
    return entries


def _look_at(place: Location, *, verify: bool) -> CheckpointEntry:
    step = commit_step(place.name) or 0
    try:
        manifest = read_manifest(open_folder(place))
    except DamagedCheckpoint as error:
        return CheckpointEntry(path=place, step=step, damage=_damage_texts(error))
    damage: tuple[str, ...] = ()
    try:
        if verify:
            verify_checkpoint(place)
        elif isinstance(place, Path):
            _check_sizes(place, manifest)
    except DamagedCheckpoint as error:
        damage = _damage_texts(error)
    tokens = manifest.meta.get("tokens")
    return CheckpointEntry(
        path=place,
        step=step,
        size_bytes=manifest.size_bytes,
        world=manifest.world,
        layout=_layout_name(manifest.meta),
        tokens=tokens if isinstance(tokens, int) else None,
        run_id=str(manifest.meta.get("run") or ""),
        code=str(manifest.code),
        damage=damage,
    )


def _damage_texts(error: DamagedCheckpoint) -> tuple[str, ...]:
    return tuple(problem.render().splitlines()[0] for problem in error.problems)


def _layout_name(meta: Mapping[str, Any]) -> str:
    """Return the name of the layout that wrote the checkpoint; empty if this version does not know it."""
    try:
        return Layout(**meta["layout"]).name
    except (KeyError, TypeError, ValueError, AttributeError):
        return ""


def _check_sizes(place: Path, manifest: CheckpointManifest) -> None:
    """Raise DamagedCheckpoint for the first file that is missing or has another size than was written."""
    for rank, files in enumerate(manifest.ranks):
        for name, size in ((data_name(rank), files.data_bytes), (index_name(rank), files.index_bytes)):
            try:
                size_bytes = (place / name).stat().st_size
            except OSError as error:
                raise damaged_checkpoint(place / name, f"cannot be read: {error.strerror or error}") from error
            if size_bytes != size:
                raise damaged_checkpoint(place / name, f"has {size_bytes:,} bytes instead of {size:,}")
