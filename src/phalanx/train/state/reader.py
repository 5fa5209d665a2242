"""Reading of checkpoints: find the newest intact one, verify one, read shards from it.

`CheckpointReader` reads a committed folder, on a disk or in an object store. It and the replicas of replica_reader.py
are both a `StateSource`, the only interface that a restore uses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from phalanx.errors import Problem, SystemFailure
from phalanx.train.state import paths
from phalanx.train.state.checkpoint_index import (
    JSON,
    CheckpointManifest,
    DamagedCheckpoint,
    RankIndex,
    check_coverage,
    check_same_tensor,
    damaged_checkpoint,
    read_manifest,
    read_rank_index,
    safetensors_header,
)
from phalanx.train.state.paths import CHUNK_BYTES, Location, Url, os_error_text
from phalanx.train.state.shards import STORED_DTYPES, Region, StoredShard, whole_region
from phalanx.train.state.storage import CheckpointFolder, open_folder, open_storage

HASH_THREADS = 4  # sha256 runs at 1.1 GB/s per core, slower than a fast disk


class ShardReader(Protocol):
    """The open shards of one rank."""

    def check(self, shards: Iterable[StoredShard]) -> None:
        """Compare the bytes of these shards with their digests; raise DamagedCheckpoint with the tensor's name."""

    def read(self, shard: StoredShard, part: Region) -> torch.Tensor:
        """Return the elements of `part`, which is inside the shard's region, on the CPU; only after `check`."""


class StateSource(Protocol):
    """The state of one step, as ranks of some layout wrote it. Safe to use from several threads."""

    @property
    def where(self) -> str:
        """The source's name in messages."""

    @property
    def step(self) -> int:
        """Number of steps done."""

    @property
    def world(self) -> int:
        """Number of ranks that wrote it."""

    @property
    def meta(self) -> Mapping[str, Any]:
        """The `meta` given by the caller of the save."""

    def count(self, rank: int) -> int:
        """Return the number of shards a rank wrote; the index of a rank without any is read only for its meta."""

    def index(self, rank: int) -> RankIndex:
        """Return the index of a rank; raise DamagedCheckpoint."""

    def open(self, rank: int) -> AbstractContextManager[ShardReader]:
        """Open the shards of a rank; raise DamagedCheckpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint: its shards, which all agree on dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shards: tuple[StoredShard, ...]

    def check_whole(self) -> None:
        """Raise DamagedCheckpoint unless the shards cover every element once."""
        check_coverage(self.name, whole_region(self.shape), [(shard, shard.region) for shard in self.shards])


class CheckpointReader:
    """A committed folder; raises DamagedCheckpoint if its manifest is damaged. Indexes are read on demand."""

    def __init__(self, location: Location) -> None:
        folder = open_folder(location)
        self.location = location
        self.manifest = read_manifest(folder)
        self.folder = folder.rank_files(self.manifest.attempt)
        self._indexes: dict[int, RankIndex] = {}

    @property
    def where(self) -> str:
        """The folder."""
        return str(self.location)

    @property
    def step(self) -> int:
        """The step in the manifest."""
        return self.manifest.step

    @property
    def world(self) -> int:
        """Number of ranks that wrote the folder."""
        return self.manifest.world

    @property
    def meta(self) -> Mapping[str, Any]:
        """The meta of rank 0."""
        return self.manifest.meta

    def count(self, rank: int) -> int:
        """Return the number of shards in the manifest."""
        return self.manifest.ranks[rank].tensors

    def index(self, rank: int) -> RankIndex:
        """Return the index, checked against the manifest; it is read once."""
        if rank not in self._indexes:
            self._indexes[rank] = read_rank_index(self.folder, rank, self.manifest.ranks[rank])
        return self._indexes[rank]

    def open(self, rank: int) -> RankFileReader:
        """Open the safetensors file of a rank."""
        return RankFileReader(self.folder, self.index(rank))

    def tensors(self) -> dict[str, StoredTensor]:
        """Return every tensor in name order with its shards from the indexes of all ranks; raise DamagedCheckpoint."""
        shards: dict[str, list[StoredShard]] = {}
        for rank in range(self.world):
            for shard in self.index(rank).shards:
                tensor_shards = shards.setdefault(shard.name, [])
                tensor_shards.append(shard)
                check_same_tensor(self.location, tensor_shards[0], shard)
        return {
            name: StoredTensor(
                name=name, dtype=tensor_shards[0].dtype, shape=tensor_shards[0].shape, shards=tuple(tensor_shards)
            )
            for name, tensor_shards in sorted(shards.items())
        }


def open_source(where: Location | StateSource) -> StateSource:
    """Return the source itself, or the reader of a folder; raise DamagedCheckpoint."""
    return CheckpointReader(where) if isinstance(where, Path | Url) else where


class RankFileReader:
    """The open file of one rank; compares its bytes with the digests of its index, and reads regions."""

    def __init__(self, folder: CheckpointFolder, index: RankIndex) -> None:
        self._path = folder.location / paths.data_name(index.rank)
        self._index = index
        try:
            self._file = folder.open(self._path.name)
        except OSError as error:
            raise self._unreadable_file(error) from error

    def check(self, shards: Iterable[StoredShard]) -> None:
        """Compare size, header and these shards with their digests; raise DamagedCheckpoint with the tensor's name."""
        end = sum(shard.size_bytes for shard in self._index.shards) + self._index.header_bytes
        if self._file.size_bytes != end:
            problem = f"has {self._file.size_bytes:,} bytes instead of {end:,}"
            raise damaged_checkpoint(self._path, problem, why="it was cut, or is another rank's file")
        self._check_header()
        for shard in shards:
            self._compare_digest(shard, self._range_digest(shard.offset, shard.size_bytes))

    def _compare_digest(self, shard: StoredShard, digest: str) -> None:
        if digest != shard.sha256:
            problem = f"holds another {shard.name} than was written: its digest differs"
            raise damaged_checkpoint(self._path, problem, why="training would go on with wrong numbers")

    def _check_header(self) -> None:
        """Check that the header, which other programs rely on, agrees with the index byte for byte."""
        index = self._index
        header = safetensors_header(index.shards)
        if index.header_bytes != len(header) or hashlib.sha256(header).hexdigest() != index.header_sha256:
            problem = f"has a header of {index.header_bytes:,} bytes that is not the header of its tensors"
            raise damaged_checkpoint(self._path, problem, why="other programs would read something else")
        if self._range_digest(0, index.header_bytes) != index.header_sha256:
            raise damaged_checkpoint(self._path, "has another header than was written: its digest differs")

    def read(self, shard: StoredShard, part: Region) -> torch.Tensor:
        """Return the elements of `part`, which is inside the shard's region; raise DamagedCheckpoint.

        The full shard is read and compared once more: a disk, or the memory that caches it, may have given `check`
        other bytes.
        """
        region, values_of = shard.region, STORED_DTYPES[shard.dtype].torch
        if not region.size:
            return self._sound_bytes(shard, 0, shard.size_bytes).view(values_of).reshape(())
        row_bytes = shard.size_bytes // region.size[0]
        rows = Region((part.start[0], *region.start[1:]), (part.size[0], *region.size[1:]))
        skipped = part.start[0] - region.start[0]
        data = self._sound_bytes(shard, skipped * row_bytes, part.size[0] * row_bytes)
        return data.view(values_of).view(rows.size)[part.within(rows)]

    def _sound_bytes(self, shard: StoredShard, begin: int, size_bytes: int) -> torch.Tensor:
        """Return some bytes of a shard from a read whose digest is right, with memory for the wanted bytes only."""
        result, digest, end = torch.empty(size_bytes, dtype=torch.uint8), hashlib.sha256(), begin + size_bytes
        result_view, scratch = result.numpy().data, memoryview(bytearray(0))
        position = 0
        while position < shard.size_bytes:
            # Up to where the wanted bytes begin or end, and no more than a chunk.
            boundary = begin if position < begin else end if position < end else shard.size_bytes
            count = min(CHUNK_BYTES, boundary - position)
            if begin <= position < end:
                chunk = result_view[position - begin : position - begin + count]
            else:
                scratch = scratch if len(scratch) >= count else memoryview(bytearray(count))
                chunk = scratch[:count]
            try:
                self._file.read_into(chunk, shard.offset + position)
            except OSError as error:
                raise self._unreadable_file(error) from error
            digest.update(chunk)
            position += count
        self._compare_digest(shard, digest.hexdigest())
        return result

    def _range_digest(self, offset: int, size_bytes: int) -> str:
        digest, buffer = hashlib.sha256(), memoryview(bytearray(min(size_bytes, CHUNK_BYTES)))
        try:
            for begin in range(0, size_bytes, CHUNK_BYTES):
                chunk = buffer[: min(CHUNK_BYTES, size_bytes - begin)]
                self._file.read_into(chunk, offset + begin)
                digest.update(chunk)
        except OSError as error:
            raise self._unreadable_file(error) from error
        return digest.hexdigest()

    def _unreadable_file(self, error: OSError) -> DamagedCheckpoint:
        return damaged_checkpoint(self._path, f"cannot be read: {os_error_text(error)}")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> RankFileReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# Finding and verifying.


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CommittedCheckpoint:
    """A committed step. `warnings` describes newer ones that were skipped, with reasons."""

    path: Location
    step: int
    world: int
    meta: Mapping[str, JSON]
    generation: int = 0
    warnings: tuple[str, ...] = ()


def list_commits(root: Location | str) -> list[Location]:
    """Return the committed steps, newest first, without checking that they are intact; raise SystemFailure."""
    try:
        return open_storage(root).commits()
    except OSError as error:
        problem = f"its checkpoints cannot be listed: {os_error_text(error)}"
        raise SystemFailure(Problem(where=str(root), what=problem, why="there may be some to go on from")) from error


def newest_checkpoint(root: Location | str, *, verify: bool = False) -> CommittedCheckpoint | None:
    """Return the newest intact checkpoint; None if there is no checkpoint.

    The manifest is always checked; with `verify` every byte is read. A damaged checkpoint is skipped with a warning.
    If all are damaged, raises DamagedCheckpoint, because starting again from step 0 must be a person's decision.
    """
    problems = []
    for location in list_commits(root):
        try:
            manifest = verify_checkpoint(location) if verify else read_manifest(open_folder(location))
        except DamagedCheckpoint as error:
            problems += list(error.problems)
            continue
        warnings = tuple(problem.render() for problem in problems)
        return replace(_committed_checkpoint(location, manifest), warnings=warnings)
    if problems:
        raise DamagedCheckpoint(problems)
    return None


def sound_checkpoints(root: Location | str, damaged: list[str] | None = None) -> Iterator[CommittedCheckpoint]:
    """Yield checkpoints with an intact manifest, newest first, to try in turn when loading finds damage.

    Messages about skipped ones are appended to `damaged`.
    """
    for location in list_commits(root):
        try:
            manifest = read_manifest(open_folder(location))
        except DamagedCheckpoint as error:
            if damaged is not None:
                damaged.append(str(error))
            continue
        yield _committed_checkpoint(location, manifest)


def own_first(
    found: Sequence[CommittedCheckpoint], run_id: str
) -> tuple[list[CommittedCheckpoint], dict[CommittedCheckpoint, str]]:
    """Sort checkpoints of this run before those of other runs, and return warnings about the latter.

    Other runs' checkpoints may have been copied in. Before 0.7 checkpoints had no run id: those count as this run's.
    """
    foreign = [checkpoint for checkpoint in found if run_id and str(checkpoint.meta.get("run") or run_id) != run_id]
    own_checkpoints = [checkpoint for checkpoint in found if checkpoint not in foreign]
    consequence = "it is used, as this run has none of its own" if not own_checkpoints else "it is passed over"
    fix = "move it away; to start from its weights, export them and set train.weights"
    warnings = {}
    for checkpoint in foreign:
        problem = (
            f"was written by another run ({str(checkpoint.meta['run'])[:8]}…, and this is {run_id[:8]}…): {consequence}"
        )
        warnings[checkpoint] = Problem(where=str(checkpoint.path), what=problem, fix=fix).render()
    return [*own_checkpoints, *foreign], warnings


def _committed_checkpoint(location: Location, found: CheckpointManifest) -> CommittedCheckpoint:
    return CommittedCheckpoint(
        path=location, step=found.step, world=found.world, meta=found.meta, generation=found.generation
    )


def read_checkpoint_meta(location: Location) -> dict[str, Any]:
    """Return the `meta` given by the caller of the save, with `step` and `world`; raise DamagedCheckpoint."""
    manifest = read_manifest(open_folder(location))
    return {**manifest.meta, "step": manifest.step, "world": manifest.world}


def read_rank_meta(location: Location, rank: int) -> dict[str, Any]:
    """Return the `rank_meta` of a rank that wrote the checkpoint; raise DamagedCheckpoint."""
    return dict(CheckpointReader(location).index(rank).meta)


def verify_checkpoint(location: Location) -> CheckpointManifest:
    """Read every byte of a checkpoint, and return its manifest; raise DamagedCheckpoint with all problems.

    All files must be present and unchanged, without additional ones, and every tensor complete.
    """
    reader = CheckpointReader(location)
    tensors = reader.tensors()
    _check_file_names(reader)

    def check(rank: int) -> list[Problem]:
        try:
            with reader.open(rank) as file:
                file.check(reader.index(rank).shards)
        except DamagedCheckpoint as error:
            return list(error.problems)
        return []

    with ThreadPoolExecutor(max_workers=HASH_THREADS) as pool:
        problems = [problem for rank_problems in pool.map(check, range(reader.world)) for problem in rank_problems]
    for tensor in tensors.values():
        try:
            tensor.check_whole()
        except DamagedCheckpoint as error:
            problems += error.problems
    if problems:
        raise DamagedCheckpoint(problems)
    return reader.manifest


def _check_file_names(reader: CheckpointReader) -> None:
    ranks = range(reader.world)
    expected = {*map(paths.data_name, ranks), *map(paths.index_name, ranks)}
    present = reader.folder.names() - {paths.MANIFEST}
    for name in sorted(expected - present):
        raise damaged_checkpoint(reader.folder.location / name, "is missing")
    for name in sorted(present - expected):
        problem = "does not belong to this checkpoint"
        raise damaged_checkpoint(reader.folder.location / name, problem, fix="move it away")
