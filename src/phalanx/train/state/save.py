"""Save: every rank writes its own files and a note; rank 0 waits for all notes, writes the manifest and commits.

No rank needs another rank's plan and there is no collective: a save may run in a thread during training
(async_saver.py). The save points, in order, are passed to `point`, so that drills can stop a process at each of them:

    rank    begin · data · index · done
    rank 0  all · manifest · set-aside · commit · prune
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from threading import Event

import torch

from phalanx.errors import PhalanxError, Problem, SystemFailure, mistake
from phalanx.train.parallel.tensor_shard import TensorShard
from phalanx.train.state import paths
from phalanx.train.state.checkpoint_index import (
    JSON,
    CheckpointManifest,
    RankFiles,
    RankIndex,
    decode_json,
    encode_json,
    encode_manifest,
    encode_rank_index,
    safetensors_header,
)
from phalanx.train.state.paths import CHUNK_BYTES, Location, os_error_text
from phalanx.train.state.retention import delete_replaced, make_room, prune_commits
from phalanx.train.state.shards import lay_out_shards, owned_shards, tensor_bytes
from phalanx.train.state.storage import CheckpointDraft, CheckpointStorage, open_storage
from phalanx.units import first_few

# Longest wait of rank 0 for the slowest rank. BLOOM's 2.3 TB took 40 s on 384 GPUs; storage under load can be slow.
SAVE_TIMEOUT_S = 600.0
# Rank 0 checks again after a fiftieth of the time it has waited, so that it sees the last rank at most 2 % late.
FIRST_LOOK_S, LAST_LOOK_S, LOOKS = 0.002, 0.2, 50
NOTE_BYTES = 2**16  # the longest note of a rank
MOST_UNHASHED = 4  # tensors written but not yet hashed

CommitFence = Callable[[], AbstractContextManager[None]]


class SaveAbandoned(Exception):
    """The process that began the save has given it up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedCheckpoint:
    """A finished save of one rank.

    `path` is the commit (on other ranks than 0, where it will be); `bytes` were written by this rank, `total_bytes`
    by all ranks (on rank 0). `seconds` is the time from the call to the commit, or to the safety of this rank's
    files; the deletion of old checkpoints follows.
    """

    path: Location
    step: int
    bytes: int
    seconds: float
    total_bytes: int | None = None
    # Steps deleted for space on a full disk, although `keep` wanted them
    deleted_for_room: tuple[int, ...] = ()
    # Steps that a roll-back set aside, and that checkpoints have now replaced
    deleted_untrusted: tuple[int, ...] = ()


def save_checkpoint(
    root: Location | str | CheckpointStorage,
    *,
    step: int,
    attempt: str,
    shards: Sequence[TensorShard],
    meta: Mapping[str, JSON],
    rank: int,
    world: int,
    keep: int = 2,
    generation: int = 0,
    rank_meta: Mapping[str, JSON] | None = None,
    timeout_s: float = SAVE_TIMEOUT_S,
    fence: CommitFence = nullcontext,
    abandoned: Event | None = None,
    point: Callable[[str], None] = lambda name: None,
    trusted_step: Callable[[], int | None] = lambda: None,
) -> SavedCheckpoint:
    """Write this rank's shards of a checkpoint; on rank 0 also commit it and delete all but the newest `keep`.

    `attempt` is the same on all ranks and new for every start of the job, so that files of a dead job are never
    mistaken for this job's. `meta` of rank 0 goes into the manifest, `rank_meta` into the index of each rank. Rank 0
    commits inside `fence()`; if that raises, nothing was committed. Raises SystemFailure if the disk fails or a rank
    is missing after `timeout_s`, SaveAbandoned if `abandoned` is set; earlier checkpoints are then unchanged. State
    of steps after `trusted_step()` may be damaged: the newest checkpoint up to there is never deleted.
    """
    began = time.monotonic()
    if step < 0 or keep < 1 or generation < 0 or not 0 <= rank < world:
        problem = f"step {step}, keep {keep}, rank {rank} of {world} cannot be saved"
        raise mistake(
            "checkpoint", problem, fix="use a step and generation from 0, keep from 1, and a rank below world"
        )
    _check_meta(meta)
    _check_meta(rank_meta or {})
    storage, abandoned = open_storage(root), abandoned or Event()
    draft, deleted, total_bytes = storage.draft(step, attempt), list[int](), None
    untrusted: list[int] = []
    try:
        point("begin")
        if rank == 0:
            # Ranks that write meanwhile may still find the disk full: then this save fails, and the next finds
            # room.
            with suppress(SystemFailure):
                deleted += make_room(storage, fence, trusted_step=trusted_step())
        size_bytes = _write_rank(draft, rank, shards, rank_meta or {}, abandoned, point)
        if rank == 0:
            ranks = wait_for_ranks(draft, step=step, world=world, timeout_s=timeout_s, abandoned=abandoned)
            total_bytes = sum(rank_files.data_bytes + rank_files.index_bytes for rank_files in ranks)
            point("all")
            manifest = CheckpointManifest(
                step=step,
                world=world,
                attempt=attempt,
                generation=generation,
                code=_code_version(),
                meta=meta,
                ranks=ranks,
            )
            _commit_draft(draft, manifest, fence, abandoned, point)
    except BaseException as error:
        _clean_up(draft, rank, error)
        if isinstance(error, OSError):
            raise _save_failure(draft, step, error) from error
        raise
    path = storage.root / paths.commit_name(step)
    seconds = time.monotonic() - began
    if rank == 0:
        point("commit")
        # A process that is fenced by now deletes nothing: other processes save here
        with suppress(SystemFailure), fence():
            draft.tidy()
            trusted = trusted_step()
            # If memberships have numbers, processes of another start are fenced, and their drafts are unused.
            prune_commits(
                storage,
                keep=keep,
                stale_s=0.0 if generation else timeout_s,
                spare=paths.attempt_family(attempt),
                trusted_step=trusted,
            )
            if trusted is not None:
                untrusted = delete_replaced(storage, trusted_step=trusted)
            # For the next save, while no rank writes
            deleted += make_room(storage, trusted_step=trusted)
        point("prune")
    return SavedCheckpoint(
        path=path,
        step=step,
        bytes=size_bytes,
        seconds=seconds,
        total_bytes=total_bytes,
        deleted_for_room=tuple(deleted),
        deleted_untrusted=tuple(untrusted),
    )


def _check_meta(meta: Mapping[str, JSON]) -> None:
    try:
        encode_json(dict(meta))
    except (TypeError, ValueError) as error:
        problem = f"meta cannot be written as JSON: {error}"
        raise mistake("checkpoint", problem, fix="numbers, texts and lists") from error


def _code_version() -> str:
    try:
        phalanx_version = version("phalanx")
    # Run from a source tree that was never installed
    except PackageNotFoundError:
        phalanx_version = "from source"
    return f"phalanx {phalanx_version}, torch {torch.__version__}"


def _write_rank(
    draft: CheckpointDraft,
    rank: int,
    shards: Sequence[TensorShard],
    meta: Mapping[str, JSON],
    abandoned: Event,
    point: Callable[[str], None],
) -> int:
    """Write file and index of a rank, then its note; return the bytes."""
    draft.begin()
    index = _write_rank_file(draft, rank, shards, meta, abandoned)
    point("data")
    text = encode_rank_index(index)
    draft.put(paths.index_name(rank), text)
    point("index")
    files = RankFiles(
        data_bytes=index.header_bytes + sum(shard.size_bytes for shard in index.shards),
        index_bytes=len(text),
        index_sha256=hashlib.sha256(text).hexdigest(),
        tensors=len(index.shards),
    )
    draft.note(paths.done_name(rank), encode_json(asdict(files)))
    point("done")
    return files.data_bytes + files.index_bytes


def _write_rank_file(
    draft: CheckpointDraft, rank: int, shards: Sequence[TensorShard], meta: Mapping[str, JSON], abandoned: Event
) -> RankIndex:
    """Write and flush the tensors of a rank, hashed meanwhile; return the index."""
    owned = owned_shards(shards)
    laid_out = lay_out_shards(owned, rank)
    header = safetensors_header(laid_out)
    size_bytes = len(header) + sum(shard.size_bytes for shard in laid_out)
    # The file is flushed while the last digests are still computed, because the inner block ends first.
    with ThreadPoolExecutor(max_workers=1) as hasher:
        digests: list[Future[str]] = []
        with draft.create(paths.data_name(rank), size_bytes) as writer:
            writer.write(memoryview(header))
            for shard_to_write in owned:
                data = tensor_bytes(shard_to_write.tensor)
                digests.append(hasher.submit(_hex_sha256, data))
                for begin in range(0, len(data), CHUNK_BYTES):
                    _raise_if_abandoned(abandoned)
                    writer.write(data[begin : begin + CHUNK_BYTES])
                # Hashing may lag behind, but not by the full state, which may be a copy of what is on a GPU.
                if len(digests) > MOST_UNHASHED:
                    digests[-1 - MOST_UNHASHED].result()
    stored = tuple(
        replace(shard, offset=len(header) + shard.offset, sha256=digest.result())
        for shard, digest in zip(laid_out, digests, strict=True)
    )
    return RankIndex(
        rank=rank, header_bytes=len(header), header_sha256=_hex_sha256(memoryview(header)), shards=stored, meta=meta
    )


def _hex_sha256(data: memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def _raise_if_abandoned(abandoned: Event) -> None:
    if abandoned.is_set():
        raise SaveAbandoned


def wait_for_ranks(
    draft: CheckpointDraft, *, step: int, world: int, timeout_s: float, abandoned: Event
) -> tuple[RankFiles, ...]:
    """Return the files that all ranks wrote, by rank.

    A rank whose files are safe writes a note (rank-00000.done); one that gives up writes another (rank-00000.failed),
    so that rank 0 need not wait for it. Raises SystemFailure if a rank is missing or gave up, SaveAbandoned if
    `abandoned` is set.
    """
    began = time.monotonic()
    expected = [paths.done_name(rank) for rank in range(world)]
    while True:
        notes = draft.notes()
        failed = sorted(name for name in notes if name.endswith(".failed"))
        if failed:
            text = draft.read_notes(failed[:1], most_bytes=NOTE_BYTES)[0].decode("utf-8", "replace")
            reason = text or "no space to say why"
            problem = f"step {step} is not saved: {failed[0].removesuffix('.failed')} gave up: {reason}"
            raise SystemFailure(
                Problem(where=str(draft.location), what=problem, why="the checkpoint before it is intact")
            )
        missing_ranks = [rank for rank, name in enumerate(expected) if name not in notes]
        if not missing_ranks:
            return tuple(RankFiles(**decode_json(text)) for text in draft.read_notes(expected, most_bytes=NOTE_BYTES))
        waited_s = time.monotonic() - began
        if waited_s > timeout_s:
            raise _ranks_late(draft, step, missing_ranks, timeout_s)
        if abandoned.wait(min(max(waited_s / LOOKS, FIRST_LOOK_S), LAST_LOOK_S)):
            raise SaveAbandoned


def _ranks_late(draft: CheckpointDraft, step: int, missing: Sequence[int], timeout_s: float) -> SystemFailure:
    rank_list = first_few(missing, 4)
    return SystemFailure(
        Problem(
            where=str(draft.location),
            what=f"step {step} is not saved: rank {rank_list} did not write its shards in {timeout_s:g} s",
            why="a checkpoint counts only when every rank's shards are stored; the one before is intact",
            fix="look at the log of that rank, and that all ranks see the same file system",
        )
    )


def _commit_draft(
    draft: CheckpointDraft,
    manifest: CheckpointManifest,
    fence: CommitFence,
    abandoned: Event,
    point: Callable[[str], None],
) -> None:
    text = encode_manifest(manifest)
    draft.seal(text, map(paths.done_name, range(manifest.world)))
    point("manifest")
    with fence():
        # The last moment at which the previous checkpoint still counts
        point("set-aside")
        _raise_if_abandoned(abandoned)
        draft.commit(text)


def _clean_up(draft: CheckpointDraft, rank: int, error: BaseException) -> None:
    """Remove partial work: rank 0 deletes the folder, another rank its own files, and it leaves a note for rank 0."""
    if rank == 0:
        draft.discard()
        return
    draft.withdraw([paths.data_name(rank), paths.index_name(rank), paths.done_name(rank)])
    if isinstance(error, OSError):
        text = os_error_text(error)
    elif isinstance(error, PhalanxError):
        text = error.problems[0].render().splitlines()[0]
    else:
        text = f"{type(error).__name__}: {error}"
    # An empty note fits on a full disk: without a note, rank 0 would wait for this rank, and training for rank 0.
    for note in (text.encode()[:NOTE_BYTES], b""):
        with suppress(OSError):
            draft.note(paths.failed_name(rank), note)
            return


def _save_failure(draft: CheckpointDraft, step: int, error: OSError) -> SystemFailure:
    is_gone = isinstance(error, FileNotFoundError) and draft.is_gone()
    reason = "rank 0 gave up and took the folder away" if is_gone else os_error_text(error)
    return SystemFailure(
        Problem(
            where=str(draft.location),
            what=f"step {step} is not saved: {reason}",
            why="the checkpoint before it is intact",
            fix="free space on this disk, or name another folder",
        )
    )
