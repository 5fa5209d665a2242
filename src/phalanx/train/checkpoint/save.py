"""Save: every rank writes its own files and says so; rank 0 sees all of them, writes the manifest and renames.

No rank needs the plan of another and there is no collective: a save may run in a thread beside the training. The save
points, in order, are handed to `point`, so that drills can stop a process at each of them:

rank    begin · data · index · done
rank 0  all · manifest · set-aside · commit · prune
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from phalanx.errors import PhalanxError, Problem, WorldError, mistake
from phalanx.train.checkpoint import index as index_file
from phalanx.train.checkpoint import manifest as manifest_file
from phalanx.train.checkpoint import names
from phalanx.train.checkpoint.disk import publish, read_file, reason, sync_folder, write_file
from phalanx.train.checkpoint.jsontext import JSON, from_text, to_text
from phalanx.train.checkpoint.manifest import Manifest, RankFiles
from phalanx.train.checkpoint.prune import prune
from phalanx.train.checkpoint.shard import write_shard
from phalanx.train.parallel.pieces import Piece

# Longest wait of rank 0 for the slowest rank. BLOOM's 2.3 TB took 40 s on 384 GPUs; storage under load has bad days.
TIMEOUT_S = 600.0
FIRST_LOOK_S, LAST_LOOK_S = 0.002, 0.2  # rank 0 looks often at first: small checkpoints are done in milliseconds
NOTE_BYTES = 2**16  # the longest note of a rank


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A finished save of one rank: where the commit is (on other ranks than 0: will be), bytes this rank wrote."""

    path: Path
    step: int
    bytes: int
    seconds: float


def save(
    root: Path,
    *,
    step: int,
    attempt: str,
    pieces: Sequence[Piece],
    meta: Mapping[str, JSON],
    rank: int,
    world: int,
    keep: int = 2,
    rank_meta: Mapping[str, JSON] | None = None,
    timeout_s: float = TIMEOUT_S,
    point: Callable[[str], None] = lambda name: None,
) -> Saved:
    """Write this rank's part of a checkpoint; on rank 0 also commit it and delete all but the newest `keep`.

    `attempt` is the same on all ranks and new for every start of the job: files a dead job left behind cannot be taken
    for ours. `meta` of rank 0 goes into the manifest, `rank_meta` into the index of each rank. Raises WorldError when
    the disk refuses or a rank is missing after `timeout_s`; earlier checkpoints are then as they were.
    """
    began = time.monotonic()
    _check(step=step, rank=rank, world=world, keep=keep)
    _check_meta(meta)
    _check_meta(rank_meta or {})
    draft, final = root / names.draft_name(step, attempt), root / names.commit_name(step)
    try:
        point("begin")
        size_bytes = _write_rank(draft, rank, pieces, rank_meta or {}, point)
        if rank == 0:
            ranks = _wait_for_ranks(draft, step=step, world=world, timeout_s=timeout_s)
            point("all")
            _commit(
                draft,
                final,
                Manifest(step=step, world=world, attempt=attempt, code=_code(), meta=meta, ranks=ranks),
                point,
            )
    except BaseException as error:
        _clean_up(draft, rank, error)
        if isinstance(error, OSError):
            raise _refused(draft, step, error) from error
        raise
    if rank == 0:
        prune(root, keep=keep, stale_s=timeout_s)
        point("prune")
    return Saved(path=final, step=step, bytes=size_bytes, seconds=time.monotonic() - began)


def _check(*, step: int, rank: int, world: int, keep: int) -> None:
    if step < 0 or keep < 1 or not 0 <= rank < world:
        what = f"step {step}, keep {keep}, rank {rank} of {world} cannot be saved"
        raise mistake("checkpoint", what, fix="step from 0 on, keep from 1 on, rank below world")


def _code() -> str:
    try:
        ours = version("phalanx")
    except PackageNotFoundError:  # run from a source tree that was never installed
        ours = "from source"
    return f"phalanx {ours}, torch {torch.__version__}"


def _check_meta(meta: Mapping[str, JSON]) -> None:
    try:
        to_text(dict(meta))
    except (TypeError, ValueError) as error:
        raise mistake(
            "checkpoint", f"meta cannot be written as JSON: {error}", fix="numbers, texts and lists"
        ) from error


def _write_rank(
    draft: Path, rank: int, pieces: Sequence[Piece], meta: Mapping[str, JSON], point: Callable[[str], None]
) -> int:
    draft.mkdir(parents=True, exist_ok=True)
    index = write_shard(draft, rank, pieces, meta)
    point("data")
    text = index_file.encode(index)
    write_file(draft / names.index_name(rank), text)
    point("index")
    data_bytes = index.header_bytes + sum(entry.size_bytes for entry in index.entries)
    digest = hashlib.sha256(text).hexdigest()
    tensors = len(index.entries)
    note = RankFiles(data_bytes=data_bytes, index_bytes=len(text), index_sha256=digest, tensors=tensors)
    publish(draft / names.done_name(rank), to_text(asdict(note)))
    point("done")
    return data_bytes + len(text)


def _wait_for_ranks(draft: Path, *, step: int, world: int, timeout_s: float) -> tuple[RankFiles, ...]:
    """The notes of all ranks, in order. A few bytes from each, so that 4,096 ranks are read in well under a second."""
    deadline, pause_s = time.monotonic() + timeout_s, FIRST_LOOK_S
    while True:
        here = {path.name for path in draft.iterdir()}
        _stop_at_failure(draft, here, step)
        missing = [rank for rank in range(world) if names.done_name(rank) not in here]
        if not missing:
            return tuple(_note(draft / names.done_name(rank)) for rank in range(world))
        if time.monotonic() > deadline:
            raise WorldError(_late(draft, step, missing, timeout_s))
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LAST_LOOK_S)


def _late(draft: Path, step: int, missing: Sequence[int], timeout_s: float) -> Problem:
    some = ", ".join(map(str, missing[:4])) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
    return Problem(
        where=str(draft),
        what=f"step {step} is not saved: rank {some} did not write its part in {timeout_s:g} s",
        why="a checkpoint counts only when every rank's part is on the disk; the one before is intact",
        fix="look at the log of that rank, and that all ranks see the same file system",
    )


def _stop_at_failure(draft: Path, here: set[str], step: int) -> None:
    failed = sorted(name for name in here if name.endswith(".failed") and not name.startswith("."))
    if failed:
        text = read_file(draft / failed[0], most_bytes=NOTE_BYTES).decode("utf-8", "replace")
        what = f"step {step} is not saved: {failed[0].removesuffix('.failed')} gave up: {text}"
        raise WorldError(Problem(where=str(draft), what=what, why="the checkpoint before it is intact"))


def _note(path: Path) -> RankFiles:
    return RankFiles(**from_text(read_file(path, most_bytes=NOTE_BYTES)))


def _commit(draft: Path, final: Path, manifest: Manifest, point: Callable[[str], None]) -> None:
    for rank in range(manifest.world):
        (draft / names.done_name(rank)).unlink()
    write_file(draft / names.MANIFEST, manifest_file.encode(manifest))
    sync_folder(draft)
    point("manifest")
    going = final.with_name(names.going_name(manifest.step, manifest.attempt))
    if final.exists():  # the job fell back behind this step and came here again: the new one replaces the old one
        final.rename(going)
    try:
        point("set-aside")
        draft.rename(final)
    except BaseException:
        if going.exists():
            going.rename(final)
        raise
    sync_folder(final.parent)
    point("commit")
    shutil.rmtree(going, ignore_errors=True)


def _clean_up(draft: Path, rank: int, error: BaseException) -> None:
    """Leave nothing half: rank 0 takes the folder away, another rank its own files, with a note for rank 0."""
    if rank == 0:
        shutil.rmtree(draft, ignore_errors=True)
        return
    with suppress(OSError):
        for name in (names.data_name(rank), names.index_name(rank), names.done_name(rank)):
            (draft / name).unlink(missing_ok=True)
        publish(draft / names.failed_name(rank), _first_line(error).encode()[:NOTE_BYTES])


def _first_line(error: BaseException) -> str:
    if isinstance(error, OSError):
        return reason(error)
    if isinstance(error, PhalanxError):
        return error.problems[0].render().splitlines()[0]
    return f"{type(error).__name__}: {error}"


def _refused(draft: Path, step: int, error: OSError) -> WorldError:
    gone = isinstance(error, FileNotFoundError) and not draft.exists()
    return WorldError(
        Problem(
            where=str(draft),
            what=f"step {step} is not saved: {'rank 0 gave up and took the folder away' if gone else reason(error)}",
            why="the checkpoint before it is intact",
            fix="free space on this disk, or name another folder",
        )
    )
