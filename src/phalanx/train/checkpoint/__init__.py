"""Checkpoints: a folder per step, a file per rank, digests over everything, no code inside. See docs/checkpoints.md."""

from __future__ import annotations

from phalanx.train.checkpoint.damage import Damaged
from phalanx.train.checkpoint.find import Checkpoint, candidates, newest, read_meta, read_rank_meta
from phalanx.train.checkpoint.load import Ready, load, prepare
from phalanx.train.checkpoint.prune import sweep
from phalanx.train.checkpoint.save import Saved, save
from phalanx.train.checkpoint.source import FolderSource, Source
from phalanx.train.checkpoint.verify import verify

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
