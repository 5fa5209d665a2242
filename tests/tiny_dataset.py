"""A dataset of a few thousand tokens for runs of real processes: `from tiny_dataset import write_dataset`."""

from __future__ import annotations

import sys
from pathlib import Path

from phalanx.train.data.build_dataset import Recipe, TextOrigin, build_dataset
from phalanx.train.data.documents import Reading
from phalanx.train.data.progress import BuildProgress


def write_dataset(folder: Path, *, documents: int = 900, heldout: float = 0.1) -> Path:
    """Write FOLDER/text.txt and, of its documents, the dataset FOLDER/data; returns the latter."""
    text = "\n\n".join(f"{n} and {n * 7} are not {n * 3} but {n % 11}" for n in range(documents))
    (folder / "text.txt").write_text(text)
    origin = TextOrigin(path=folder / "text.txt")
    recipe = Recipe(origins=(origin,), vocab=300, heldout=heldout, reading=Reading(split_on="blank"))
    build_dataset(recipe, folder / "data", lambda size: BuildProgress(sys.stderr, size))
    return folder / "data"
