"""Metadata files of a checkpoint: the index of each rank, and the manifest with the digests of all indexes.

The index of a rank lists the shards in its file, each with offset and digest. The manifest is written last; it makes
a folder a checkpoint and holds the digest of every index. Both are JSON in which each value has exactly one encoding,
so that any change is detected. Any deviation from what was written raises DamagedCheckpoint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from phalanx.errors import Problem, SystemFailure
from phalanx.train.state import paths
from phalanx.train.state.paths import os_error_text, read_small_file
from phalanx.train.state.shards import (
    RESERVED,
    STORED_DTYPES,
    Region,
    StoredShard,
    first_coverage_gap,
    shared_region,
)
from phalanx.train.state.storage import CheckpointFolder
from phalanx.units import plural

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"

FORMAT = "phalanx-checkpoint"
VERSION = 1
MOST_MANIFEST_BYTES = 2**27  # 131,072 ranks at 190 bytes each are 24 MiB
MOST_INDEX_BYTES = 2**28  # a million shards on one rank, at 250 bytes a row
MOST_DIMS = 16


class DamagedCheckpoint(SystemFailure):
    """A file of a checkpoint is missing, truncated, changed or forged; an earlier checkpoint may be intact."""


def damaged_checkpoint(
    where: object, what: str, *, why: str = "", fix: str = "restore the checkpoint before it"
) -> DamagedCheckpoint:
    """Build a DamagedCheckpoint with one problem."""
    return DamagedCheckpoint(Problem(where=str(where), what=what, why=why, fix=fix))


def encode_json(value: Any) -> bytes:
    """Return the one encoding of a value: sorted keys, a line per entry, ASCII.

    Raises ValueError for NaN and infinity.
    """
    try:
        return (json.dumps(value, sort_keys=True, indent=1, allow_nan=False) + "\n").encode("ascii")
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _json_line(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def decode_json(data: bytes) -> Any:
    """Decode JSON; raise ValueError for duplicate keys, NaN, infinity and invalid text."""

    def to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("it has the same key twice")
        return result

    def refuse(text: str) -> None:
        raise ValueError(f"it holds {text}")

    try:
        return json.loads(data, parse_constant=refuse, object_pairs_hook=to_dict)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def is_count(value: Any) -> bool:
    """Return whether a value from a file is a non-negative integer below 2**63; False for True."""
    return type(value) is int and 0 <= value < 2**63


# The manifest.


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFiles:
    """Sizes of the files of a rank, and the digest of its index, which holds the digests of its tensors."""

    data_bytes: int
    index_bytes: int
    index_sha256: str
    tensors: int  # number of shards; the index of a rank without any need not be opened


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointManifest:
    """A committed step: the ranks and program that wrote it, and the caller's `meta`."""

    step: int
    world: int
    attempt: str
    code: str
    meta: Mapping[str, JSON]
    ranks: tuple[RankFiles, ...]
    generation: int = 0  # the generation of the membership that wrote it

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors and indexes."""
        return sum(rank.data_bytes + rank.index_bytes for rank in self.ranks)


def encode_manifest(manifest: CheckpointManifest) -> bytes:
    """Return the text of a manifest, which includes a digest of its other fields.

    Raises ValueError for meta that is not JSON.
    """
    body = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "world": manifest.world,
        "attempt": manifest.attempt,
        "epoch": manifest.generation,
        "code": manifest.code,
        "meta": manifest.meta,
        "ranks": [asdict(rank) for rank in manifest.ranks],
    }
    return encode_json({**body, "sha256": hashlib.sha256(encode_json(body)).hexdigest()})


def read_manifest(folder: CheckpointFolder) -> CheckpointManifest:
    """Read the manifest of a committed folder; raise DamagedCheckpoint if any bit of it was changed."""
    path = folder.location / paths.MANIFEST
    try:
        data = read_small_file(folder.open(paths.MANIFEST), most_bytes=MOST_MANIFEST_BYTES)
    except OSError as error:
        reason_text = "without it nothing vouches for the other files"
        raise damaged_checkpoint(path, f"cannot be read: {os_error_text(error)}", why=reason_text) from error
    try:
        manifest = _decode_manifest(data)
    except (ValueError, TypeError, KeyError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise damaged_checkpoint(path, f"is not a valid manifest: {reason}") from error
    if manifest.step != paths.commit_step(folder.location.name):
        problem = f"is the manifest of step {manifest.step}, in the folder {folder.location.name}"
        raise damaged_checkpoint(path, problem, why="it vouches for other files")
    return manifest


def _decode_manifest(data: bytes) -> CheckpointManifest:
    body = decode_json(data)
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise ValueError(f"it does not say format {FORMAT}")
    if body.get("version") != VERSION:
        raise ValueError(f"it has version {body.get('version')!r}, and this Phalanx reads version {VERSION}")
    digest = body.pop("sha256")
    # The text is compared too: every value has one encoding, so that any changed byte is found.
    if digest != hashlib.sha256(encode_json(body)).hexdigest() or data != encode_json({**body, "sha256": digest}):
        raise ValueError("its digest does not match its text")
    for row in body["ranks"]:
        counts = all(is_count(row[key]) for key in ("data_bytes", "index_bytes", "tensors"))
        if not counts or not isinstance(row["index_sha256"], str):
            raise ValueError("an entry of ranks is not two sizes, a digest and a number of tensors")
    ranks = tuple(RankFiles(**row) for row in body["ranks"])
    fields = {key: body[key] for key in ("step", "world", "attempt", "code", "meta")}
    manifest = CheckpointManifest(ranks=ranks, generation=body.get("epoch", 0), **fields)
    if not is_count(manifest.step) or manifest.world != len(ranks) or not ranks or not isinstance(manifest.meta, dict):
        raise ValueError(
            f"it lists {plural(len(ranks), 'rank')} for step {manifest.step!r} of a world size of {manifest.world!r}"
        )
    if not paths.is_attempt(manifest.attempt) or not is_count(manifest.generation):
        raise ValueError(f"it belongs to attempt {manifest.attempt!r}, generation {manifest.generation!r}")
    return manifest


# The index of a rank, and the safetensors header that must agree with it.


@dataclass(frozen=True, kw_only=True, slots=True)
class RankIndex:
    """Everything one rank wrote: its header, its shards, and metadata of this rank only, such as its random state."""

    rank: int
    header_bytes: int
    header_sha256: str
    shards: tuple[StoredShard, ...]
    meta: Mapping[str, JSON]


def safetensors_header(shards: Iterable[StoredShard]) -> bytes:
    """Return the safetensors header of these shards: eight bytes of length and a table in file order."""
    table: dict[str, object] = {RESERVED: {"format": "pt"}}
    end = 0
    for shard in shards:
        begin, end = end, end + shard.size_bytes
        tag = STORED_DTYPES[shard.dtype].tag
        table[shard.name] = {"dtype": tag, "shape": list(shard.region.size), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def encode_rank_index(index: RankIndex) -> bytes:
    """Return the text of an index, with a line per tensor."""
    rows = [
        {
            "name": shard.name,
            "dtype": shard.dtype,
            "shape": shard.shape,
            "start": shard.region.start,
            "local": shard.region.size,
            "offset": shard.offset,
            "bytes": shard.size_bytes,
            "sha256": shard.sha256,
        }
        for shard in index.shards
    ]
    header = {"bytes": index.header_bytes, "sha256": index.header_sha256}
    head = f'{{"rank":{index.rank},\n"header":{_json_line(header)},\n"meta":{_json_line(index.meta)},\n"tensors":[\n'
    return (head + ",\n".join(map(_json_line, rows)) + "\n]}\n").encode("ascii")


def read_rank_index(folder: CheckpointFolder, rank: int, files: RankFiles) -> RankIndex:
    """Read the index of a rank and compare it with the manifest's digest; raise DamagedCheckpoint."""
    path = folder.location / paths.index_name(rank)
    try:
        data = read_small_file(folder.open(path.name), most_bytes=min(files.index_bytes, MOST_INDEX_BYTES))
    except OSError as error:
        raise damaged_checkpoint(path, f"cannot be read: {os_error_text(error)}") from error
    if len(data) != files.index_bytes or hashlib.sha256(data).hexdigest() != files.index_sha256:
        raise damaged_checkpoint(path, "is not what the manifest says was written: its digest differs")
    try:
        return _decode_rank_index(decode_json(data), rank, files)
    except (ValueError, TypeError, KeyError) as error:
        raise damaged_checkpoint(path, f"is not a valid index: {error}") from error


def _decode_rank_index(body: Any, rank: int, files: RankFiles) -> RankIndex:
    header = body["header"]
    if body["rank"] != rank or not is_count(header["bytes"]) or not isinstance(body["meta"], dict):
        raise ValueError(f"it is not the index of rank {rank}")
    shards = tuple(_decode_shard(row, rank) for row in body["tensors"])
    if len(shards) != files.tensors:
        raise ValueError(f"it lists {len(shards)} tensors, and the manifest counts {files.tensors}")
    if len({shard.name for shard in shards}) != len(shards):
        raise ValueError("it names a tensor twice")
    # Shards must follow each other without a gap from the header to the end, so that every byte has a digest.
    end = header["bytes"]
    for shard in shards:
        if shard.offset != end:
            raise ValueError(f"{shard.name} lies at byte {shard.offset:,}, not at {end:,}")
        end += shard.size_bytes
    if end != files.data_bytes:
        raise ValueError(f"its tensors end at byte {end:,} of {files.data_bytes:,}")
    return RankIndex(
        rank=rank,
        header_bytes=header["bytes"],
        header_sha256=header["sha256"],
        shards=shards,
        meta=body["meta"],
    )


def _decode_shard(row: Any, rank: int) -> StoredShard:
    shape, region = _decode_ints(row["shape"]), Region(_decode_ints(row["start"]), _decode_ints(row["local"]))
    shard = StoredShard(
        name=row["name"],
        dtype=row["dtype"],
        shape=shape,
        region=region,
        rank=rank,
        offset=row["offset"],
        size_bytes=row["bytes"],
        sha256=row["sha256"],
    )
    if not isinstance(shard.name, str) or shard.dtype not in STORED_DTYPES or not is_count(shard.offset):
        raise ValueError(f"{shard.name!r} has dtype {shard.dtype!r} and offset {shard.offset!r}")
    if not len(shape) == len(region.start) == len(region.size) <= MOST_DIMS or any(map(int.__gt__, region.end, shape)):
        raise ValueError(f"{shard.name}: {region} is not inside the shape {list(shape)}")
    if not region.volume or shard.size_bytes != region.volume * STORED_DTYPES[shard.dtype].size_bytes:
        raise ValueError(f"{shard.name}: {shard.size_bytes!r} bytes do not hold {list(region.size)} of {shard.dtype}")
    return shard


def _decode_ints(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(map(is_count, values)):
        raise ValueError(f"{values!r} is not a list of whole numbers")
    return tuple(values)


# Consistency checks between shards of several ranks.


def check_same_tensor(where: object, first: StoredShard, shard: StoredShard) -> None:
    """Raise DamagedCheckpoint unless two shards belong to the same tensor."""
    if (shard.dtype, shard.shape) != (first.dtype, first.shape):
        mismatch = (
            f"{shard.name} is {first.dtype} {list(first.shape)} for rank {first.rank} "
            f"and {shard.dtype} {list(shard.shape)} for rank {shard.rank}"
        )
        raise damaged_checkpoint(where, mismatch, why="the ranks that wrote it did not run the same model")


def check_coverage(name: str, region: Region, parts: Sequence[tuple[StoredShard, Region]]) -> None:
    """Raise DamagedCheckpoint unless `parts`, the parts of `region` that shards hold, tile it exactly."""
    try:
        gap = first_coverage_gap(region, [part for _, part in parts])
    except OverflowError as error:
        raise damaged_checkpoint(name, f"is split beyond measure: {error}") from error
    if gap is None:
        return
    elements = f"elements {list(gap.region.start)} to {list(gap.region.end)} (end excluded)"
    if not gap.times:
        raise damaged_checkpoint(name, f"has a hole: no rank wrote {elements}")
    ranks = [str(shard.rank) for shard, part in parts if shared_region(part, gap.region)]
    raise damaged_checkpoint(name, f"is there twice: ranks {', '.join(ranks)} all wrote {elements}")
