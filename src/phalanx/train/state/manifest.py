"""The manifest: written last, it makes a folder a checkpoint and vouches for the index of every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.train.state import names
from phalanx.train.state.damage import damaged
from phalanx.train.state.jsontext import JSON, from_text, to_text
from phalanx.train.state.storage import Folder
from phalanx.train.state.streams import read_whole, reason
from phalanx.units import plural

FORMAT = "phalanx-checkpoint"
VERSION = 1
# 131,072 ranks at 190 bytes each are 24 MiB.
MOST_BYTES = 2**27


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFiles:
    """What a rank wrote: the size of its tensors, and size and digest of its index, which holds their digests."""

    data_bytes: int
    index_bytes: int
    index_sha256: str
    tensors: int  # how many boxes it holds; the index of a rank without any need not be opened


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A committed step: who wrote it, and what the caller wanted to remember of it."""

    step: int
    world: int
    attempt: str
    code: str
    meta: Mapping[str, JSON]
    ranks: tuple[RankFiles, ...]
    epoch: int = 0  # the membership that wrote it

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors and indexes."""
        return sum(rank.data_bytes + rank.index_bytes for rank in self.ranks)


def encode(manifest: Manifest) -> bytes:
    """The text of a manifest, with the digest of the rest of it inside; raises ValueError for meta that is not JSON."""
    body = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "world": manifest.world,
        "attempt": manifest.attempt,
        "epoch": manifest.epoch,
        "code": manifest.code,
        "meta": manifest.meta,
        "ranks": [asdict(rank) for rank in manifest.ranks],
    }
    return to_text({**body, "sha256": hashlib.sha256(to_text(body)).hexdigest()})


def read_manifest(folder: Folder) -> Manifest:
    """The manifest of a committed folder; raises Damaged when a single bit of it is not what was written."""
    path = folder.place / names.MANIFEST
    try:
        data = read_whole(folder.open(names.MANIFEST), most_bytes=MOST_BYTES)
    except OSError as error:
        raise damaged(
            path, f"cannot be read: {reason(error)}", why="without it nothing vouches for the rest"
        ) from error
    try:
        manifest = _decode(data)
    except (ValueError, TypeError, KeyError) as error:
        raise damaged(path, f"is not a sound manifest: {_words(error)}") from error
    if manifest.step != names.step_of(folder.place.name):
        what = f"is the manifest of step {manifest.step}, in the folder {folder.place.name}"
        raise damaged(path, what, why="it vouches for other files")
    return manifest


def _words(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def _decode(data: bytes) -> Manifest:
    body = from_text(data)
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise ValueError(f"it does not say format {FORMAT}")
    if body.get("version") != VERSION:
        raise ValueError(f"it has version {body.get('version')!r}, and this Phalanx reads version {VERSION}")
    digest = body.pop("sha256")
    if digest != hashlib.sha256(to_text(body)).hexdigest() or data != to_text({**body, "sha256": digest}):
        raise ValueError("its digest does not fit its text")
    ranks = tuple(RankFiles(**_rank(row)) for row in body["ranks"])
    known = {key: body[key] for key in ("step", "world", "attempt", "code", "meta")}
    manifest = Manifest(ranks=ranks, epoch=body.get("epoch", 0), **known)
    if not is_count(manifest.step) or manifest.world != len(ranks) or not ranks or not isinstance(manifest.meta, dict):
        raise ValueError(
            f"it lists {plural(len(ranks), 'rank')} for step {manifest.step!r} of a world of {manifest.world!r}"
        )
    if not names.is_attempt(manifest.attempt) or not is_count(manifest.epoch):
        raise ValueError(f"it is of attempt {manifest.attempt!r}, epoch {manifest.epoch!r}")
    return manifest


def _rank(row: Any) -> Any:
    counts = all(is_count(row[key]) for key in ("data_bytes", "index_bytes", "tensors"))
    if not counts or not isinstance(row["index_sha256"], str):
        raise ValueError("an entry of ranks is not of two sizes, a digest and a number of tensors")
    return row


def is_count(value: Any) -> bool:
    """Whether a value from a file is a whole number from 0 on that fits 63 bits; True is none."""
    return type(value) is int and 0 <= value < 2**63
