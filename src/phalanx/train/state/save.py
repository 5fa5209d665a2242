"""Save: every rank writes its own files and says so; rank 0 sees all of them, writes the manifest and commits.

No rank needs the plan of another and there is no collective: a save may run in a thread beside the training. The save
points, in order, are handed to `point`, so that drills can stop a process at each of them:

rank    begin · data · index · done
rank 0  all · manifest · set-aside · commit · prune
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from threading import Event

import torch

from phalanx.errors import Problem, SystemFailure, mistake
from phalanx.train.parallel.tensor_shard import TensorShard
from phalanx.train.state import index as index_file
from phalanx.train.state import index as manifest_file
from phalanx.train.state import paths as names
from phalanx.train.state.index import JSON, Manifest, RankFiles, encode_json
from phalanx.train.state.paths import Location, os_error_text
from phalanx.train.state.retention import prune_commits
from phalanx.train.state.save import SaveAbandoned, note_done, note_failed, wait_for_ranks
from phalanx.train.state.shards import write_rank_file
from phalanx.train.state.storage import CheckpointDraft, CheckpointStorage, open_storage

# Longest wait of rank 0 for the slowest rank. BLOOM's 2.3 TB took 40 s on 384 GPUs; storage under load has bad days.
SAVE_TIMEOUT_S = 600.0

CommitFence = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedCheckpoint:
    """A finished save of one rank: where the commit is (on other ranks than 0: will be), bytes this rank wrote.

    `seconds` lie between the call and the commit, or the safety of this rank's part; old checkpoints go after that.
    """

    path: Location
    step: int
    bytes: int
    seconds: float


def save_checkpoint(
    root: Location | str | CheckpointStorage,
    *,
    step: int,
    attempt: str,
    pieces: Sequence[TensorShard],
    meta: Mapping[str, JSON],
    rank: int,
    world: int,
    keep: int = 2,
    epoch: int = 0,
    rank_meta: Mapping[str, JSON] | None = None,
    timeout_s: float = SAVE_TIMEOUT_S,
    fence: CommitFence = nullcontext,
    abandoned: Event | None = None,
    point: Callable[[str], None] = lambda name: None,
) -> SavedCheckpoint:
    """Write this rank's part of a checkpoint; on rank 0 also commit it and delete all but the newest `keep`.

    `attempt` is the same on all ranks and new for every start of the job: files a dead job left behind cannot be taken
    for ours. `meta` of rank 0 goes into the manifest, `rank_meta` into the index of each rank. Rank 0 commits inside
    `fence()`; what that raises means that nothing was committed. Raises SystemFailure when the disk refuses or a rank
    is missing after `timeout_s`, Abandoned when `abandoned` is set; earlier checkpoints are then as they were.
    """
    began = time.monotonic()
    _check(step=step, rank=rank, world=world, keep=keep, epoch=epoch)
    _check_meta(meta)
    _check_meta(rank_meta or {})
    storage, abandoned = open_storage(root), abandoned or Event()
    draft = storage.draft(step, attempt)
    try:
        point("begin")
        size_bytes = _write_rank(draft, rank, pieces, rank_meta or {}, abandoned, point)
        if rank == 0:
            ranks = wait_for_ranks(draft, step=step, world=world, timeout_s=timeout_s, abandoned=abandoned)
            point("all")
            manifest = Manifest(
                step=step, world=world, attempt=attempt, epoch=epoch, code=_code(), meta=meta, ranks=ranks
            )
            _commit(draft, manifest, fence, abandoned, point)
    except BaseException as error:
        _clean_up(draft, rank, error)
        if isinstance(error, OSError):
            raise _save_failure(draft, step, error) from error
        raise
    path = storage.root / names.commit_name(step)
    saved = SavedCheckpoint(path=path, step=step, bytes=size_bytes, seconds=time.monotonic() - began)
    if rank == 0:
        point("commit")
        with suppress(SystemFailure), fence():  # whoever is fenced by now tidies up nothing: others save here
            draft.tidy()
            # Where memberships have numbers, whoever is not of our start is fenced, and its drafts are nobody's.
            prune_commits(storage, keep=keep, stale_s=0.0 if epoch else timeout_s, spare=names.attempt_family(attempt))
        point("prune")
    return saved


def _check(*, step: int, rank: int, world: int, keep: int, epoch: int) -> None:
    if step < 0 or keep < 1 or epoch < 0 or not 0 <= rank < world:
        what = f"step {step}, keep {keep}, rank {rank} of {world} cannot be saved"
        raise mistake("checkpoint", what, fix="step and epoch from 0 on, keep from 1 on, rank below world")


def _code() -> str:
    try:
        ours = version("phalanx")
    except PackageNotFoundError:  # run from a source tree that was never installed
        ours = "from source"
    return f"phalanx {ours}, torch {torch.__version__}"


def _check_meta(meta: Mapping[str, JSON]) -> None:
    try:
        encode_json(dict(meta))
    except (TypeError, ValueError) as error:
        raise mistake(
            "checkpoint", f"meta cannot be written as JSON: {error}", fix="numbers, texts and lists"
        ) from error


def _write_rank(
    draft: CheckpointDraft,
    rank: int,
    pieces: Sequence[TensorShard],
    meta: Mapping[str, JSON],
    abandoned: Event,
    point: Callable[[str], None],
) -> int:
    draft.begin()
    index = write_rank_file(draft, rank, pieces, meta, partial(_go_on, abandoned))
    point("data")
    text = index_file.encode_rank_index(index)
    draft.put(names.index_name(rank), text)
    point("index")
    data_bytes = index.header_bytes + sum(entry.size_bytes for entry in index.entries)
    digest = hashlib.sha256(text).hexdigest()
    tensors = len(index.entries)
    note_done(
        draft, rank, RankFiles(data_bytes=data_bytes, index_bytes=len(text), index_sha256=digest, tensors=tensors)
    )
    point("done")
    return data_bytes + len(text)


def _go_on(abandoned: Event) -> None:
    if abandoned.is_set():
        raise SaveAbandoned


def _commit(
    draft: CheckpointDraft, manifest: Manifest, fence: CommitFence, abandoned: Event, point: Callable[[str], None]
) -> None:
    text = manifest_file.encode_rank_index(manifest)
    draft.seal(text, map(names.done_name, range(manifest.world)))
    point("manifest")
    with fence():
        point("set-aside")  # the last moment at which the checkpoint before still counts
        _go_on(abandoned)
        draft.commit(text)


def _clean_up(draft: CheckpointDraft, rank: int, error: BaseException) -> None:
    """Leave nothing half: rank 0 takes the folder away, another rank its own files, with a note for rank 0."""
    if rank == 0:
        draft.discard()
        return
    draft.withdraw([names.data_name(rank), names.index_name(rank), names.done_name(rank)])
    with suppress(OSError):
        note_failed(draft, rank, error)


def _save_failure(draft: CheckpointDraft, step: int, error: OSError) -> SystemFailure:
    gone = isinstance(error, FileNotFoundError) and draft.is_gone()
    return SystemFailure(
        Problem(
            where=str(draft.place),
            what=f"step {step} is not saved: {'rank 0 gave up and took the folder away' if gone else os_error_text(error)}",
            why="the checkpoint before it is intact",
            fix="free space on this disk, or name another folder",
        )
    )
