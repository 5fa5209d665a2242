"""Checkpoints: a folder per step, a file per rank, digests over everything, no code inside. See docs/checkpoints.md."""

from __future__ import annotations

from phalanx.train.state.damage import Damaged
from phalanx.train.state.find import Checkpoint, candidates, newest, read_meta, read_rank_meta
from phalanx.train.state.load import Ready, load, prepare
from phalanx.train.state.prune import sweep
from phalanx.train.state.save import Saved, save
from phalanx.train.state.source import FolderSource, Source
from phalanx.train.state.verify import verify

__all__ = [
    "Checkpoint",
    "Damaged",
    "FolderSource",
    "Ready",
    "Saved",
    "Source",
    "candidates",
    "load",
    "newest",
    "prepare",
    "read_meta",
    "read_rank_meta",
    "save",
    "sweep",
    "verify",
]
