"""Damage to a checkpoint of a run, as disks and people do it."""

from __future__ import annotations

import random
from pathlib import Path

from phalanx.record.run import Run


def damage(run: Run, step: int, *, how: str, seed: int) -> str:
    """Spoil one file of the commit of a step; says what was done, empty when there is no such commit."""
    try:
        return _damage(run, step, how=how, seed=seed)
    except (OSError, StopIteration):  # it was pruned under our hands
        return ""


def _damage(run: Run, step: int, *, how: str, seed: int) -> str:
    root = run.checkpoints
    if isinstance(root, str):  # an object store is not ours to damage
        return ""
    draw = random.Random(seed)
    folder = next(root.glob(f"step-*{step:08d}"))  # not checkpoint.names: it imports torch
    files = sorted(path for path in folder.iterdir() if path.suffix == ".safetensors")
    if not files:
        return ""
    path = folder / "manifest.json" if how == "manifest" else files[draw.randrange(len(files))]
    match how:
        case "flip" | "manifest":
            what = _flip(path, draw)
        case "truncate":
            what = _truncate(path, draw)
        case "swap":
            what = _swap(path, files[(files.index(path) + 1) % len(files)])
        case _:
            path.unlink()
            what = "deleted"
    return f"{folder.name}/{path.name}: {what}"


def _flip(path: Path, draw: random.Random) -> str:
    data = bytearray(path.read_bytes())
    place, bit = draw.randrange(len(data)), draw.randrange(8)
    data[place] ^= 1 << bit
    path.write_bytes(data)
    return f"bit {bit} of byte {place:,} flipped"


def _truncate(path: Path, draw: random.Random) -> str:
    size = path.stat().st_size
    kept = draw.randrange(size)
    with path.open("r+b") as file:
        file.truncate(kept)
    return f"cut from {size:,} to {kept:,} bytes"


def _swap(first: Path, second: Path) -> str:
    if first == second:
        return "nothing to swap with"
    aside = first.with_suffix(".aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
    return f"swapped with {second.name}"
