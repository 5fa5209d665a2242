"""Find the checkpoint to go on from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from phalanx.train.state.damage import Damaged
from phalanx.train.state.index import read_index
from phalanx.train.state.jsontext import JSON
from phalanx.train.state.manifest import Manifest, read_manifest
from phalanx.train.state.prune import committed
from phalanx.train.state.storage import folder_of
from phalanx.train.state.url import Place
from phalanx.train.state.verify import verify as verify_folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A committed step. `warnings` says which newer ones were passed over, and why."""

    path: Place
    step: int
    world: int
    meta: Mapping[str, JSON]
    epoch: int = 0
    warnings: tuple[str, ...] = ()


def newest(root: Place | str, *, verify: bool = False) -> Checkpoint | None:
    """The newest whole checkpoint; None when there is none at all.

    The manifest is always checked; with `verify` every byte is read. A damaged one is passed over with a warning. When
    all are damaged, raises Damaged: to start again from step 0 must be somebody's decision.
    """
    problems = []
    for folder in committed(root):
        try:
            found = verify_folder(folder) if verify else read_manifest(folder_of(folder))
        except Damaged as error:
            problems += list(error.problems)
            continue
        warnings = tuple(problem.render() for problem in problems)
        return replace(_checkpoint(folder, found), warnings=warnings)
    if problems:
        raise Damaged(problems)
    return None


def candidates(root: Place | str, damaged: list[str] | None = None) -> Iterator[Checkpoint]:
    """Checkpoints with a sound manifest, newest first: what to try one after the other when loading finds damage.

    What is passed over is told in `damaged`.
    """
    for folder in committed(root):
        try:
            found = read_manifest(folder_of(folder))
        except Damaged as error:
            if damaged is not None:
                damaged.append(str(error))
            continue
        yield _checkpoint(folder, found)


def _checkpoint(place: Place, found: Manifest) -> Checkpoint:
    return Checkpoint(path=place, step=found.step, world=found.world, meta=found.meta, epoch=found.epoch)


def read_meta(folder: Place) -> dict[str, Any]:
    """What the caller of `save` gave as `meta`, with `step` and `world`; raises Damaged."""
    manifest = read_manifest(folder_of(folder))
    return {**manifest.meta, "step": manifest.step, "world": manifest.world}


def read_rank_meta(folder: Place, rank: int) -> dict[str, Any]:
    """What a rank of the world that wrote the checkpoint gave as `rank_meta`; raises Damaged."""
    found = folder_of(folder)
    manifest = read_manifest(found)
    return dict(read_index(found.parts(manifest.attempt), rank, manifest.ranks[rank]).meta)
