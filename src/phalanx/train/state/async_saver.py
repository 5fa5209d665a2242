"""Asynchronous saving of checkpoints: a step waits for a copy to host memory, and a thread does the rest."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch

from phalanx.elastic.replica_store import MemorySegment
from phalanx.train.parallel.tensor_shard import TensorShard
from phalanx.train.state.checkpoint_index import JSON
from phalanx.train.state.memory_reservation import MemoryReservation
from phalanx.train.state.paths import Location
from phalanx.train.state.save import SAVE_TIMEOUT_S, CommitFence, SavedCheckpoint, save_checkpoint
from phalanx.train.state.shards import StoredShard, lay_out_shards, owned_shards
from phalanx.train.state.snapshot import ALIGN_BYTES, copy_shards, device_of, reserve_segment
from phalanx.train.state.storage import open_storage

ABANDON_S = 0.1  # a survivor that recovers waits no longer for its own disk


class AsyncSaver:
    """Writes checkpoints in a thread, one at a time, from a reused host copy of the tensors this rank owns.

    All ranks call `save` for the same steps in the same order. It returns when the copy is made; an error of the
    thread is raised by the next `save`, after that one was started so that the ranks stay together, or by `wait`.
    Only rank 0 knows whether a step was committed: on other ranks a finished save means that their shards are stored.
    The host memory is `copies`, which may serve one saver after another, but not two at a time.
    """

    def __init__(
        self,
        root: Location | str,
        *,
        attempt: str,
        rank: int,
        world: int,
        keep: int = 2,
        generation: int = 0,
        timeout_s: float = SAVE_TIMEOUT_S,
        fence: CommitFence = nullcontext,
        copies: HostCopies | None = None,
        point: Callable[[str], None] = lambda name: None,
        trusted_step: Callable[[], int | None] = lambda: None,
    ) -> None:
        # Once, because connecting to an object store takes longer than a small save
        storage = open_storage(root)
        self._save = partial(
            save_checkpoint,
            storage,
            rank=rank,
            world=world,
            keep=keep,
            generation=generation,
            timeout_s=timeout_s,
            fence=fence,
            point=point,
            trusted_step=trusted_step,
        )
        self._attempt = attempt
        self._started = 0
        self._current: _SaveThread | None = None
        self._step = -1
        self._saved: SavedCheckpoint | None = None
        self._copies = HostCopies() if copies is None else copies

    @property
    def busy(self) -> bool:
        """True while a save is being written."""
        return self._current is not None and self._current.is_alive()

    def reserve(self, shards: Sequence[TensorShard]) -> None:
        """Allocate the host memory in the background, so that the first save does not block longer than the others."""
        self.wait()
        self._copies.reserve(shards)

    def save(
        self,
        *,
        step: int,
        shards: Sequence[TensorShard],
        meta: Mapping[str, JSON],
        rank_meta: Mapping[str, JSON] | None = None,
    ) -> float:
        """Copy the state and start a save; return the seconds that the caller was blocked.

        Waits for the previous save if it is still being written, and raises its error. A step that the previous save
        wrote is not written again, so that a final save may come at any step.
        """
        began = time.monotonic()
        error = self._join_save()
        if step != self._step:
            copies = self._copies.take(shards)
            self._start_save(
                partial(self._save, step=step, shards=copies, meta=dict(meta), rank_meta=dict(rank_meta or {}))
            )
            self._step = step
        if error is not None:
            raise error
        return time.monotonic() - began

    def _start_save(self, job: Callable[..., SavedCheckpoint]) -> None:
        # Numbered, as on every rank: files of a failed save are never mistaken for files of the next.
        self._started += 1
        self._current = _SaveThread(partial(job, attempt=f"{self._attempt}.{self._started}"))
        self._current.start()

    def finish(self) -> None:
        """Wait until no save is being written; `wait` returns or raises its outcome."""
        if self._current is not None:
            self._current.join()

    def wait(self) -> SavedCheckpoint | None:
        """Wait until no save is being written; return this rank's last finished save, or raise the error."""
        error = self._join_save()
        if error is not None:
            raise error
        return self._saved

    def _join_save(self) -> BaseException | None:
        job, self._current = self._current, None
        if job is None:
            return None
        job.join()
        self._saved = job.saved or self._saved
        return job.error

    def abandon(self) -> None:
        """Give up the running save and its error, because the ranks it waits for may be gone.

        Returns within about 0.1 s. A thread that a slow disk blocks continues alone to clean up: it starts no commit,
        and keeps the host copy it reads from.
        """
        job, self._current = self._current, None
        if job is None:
            return
        job.abandoned.set()
        job.join(ABANDON_S)
        if job.is_alive():
            self._copies.leave_to(job)
        self._saved = job.saved or self._saved


class _SaveThread(threading.Thread):
    """A thread that runs one save, with its result or error."""

    def __init__(self, run: Callable[..., SavedCheckpoint]) -> None:
        # Daemon: a process that fails otherwise must not wait for minutes for the other ranks' files.
        super().__init__(name="checkpoint", daemon=True)
        self.abandoned = threading.Event()
        self.saved: SavedCheckpoint | None = None
        self.error: BaseException | None = None
        self._job = partial(run, abandoned=self.abandoned)

    def run(self) -> None:
        """Save; the caller's thread raises a stored error."""
        try:
            self.saved = self._job()
        except BaseException as error:
            self.error = error


# Host copies of the tensors that a rank owns, taken between two steps and reused.


class HostCopies:
    """One host copy of each tensor a rank owns; pinned memory if a GPU copies into it."""

    def __init__(self) -> None:
        self._segment: MemorySegment | None = None
        self._left: list[tuple[MemorySegment, threading.Thread]] = []
        self._reservation = MemoryReservation()

    def reserve(self, shards: Sequence[TensorShard]) -> None:
        """Allocate the memory for copies of these shards, in a thread."""
        self._reservation.wait()
        segment, device = self._present_segment(), device_of(shards)
        _, end = _lay_out(owned_shards(shards))

        def take() -> None:
            reserve_segment(segment, end, device)

        self._reservation.begin(take, device)

    @torch.no_grad()
    def take(self, shards: Sequence[TensorShard]) -> list[TensorShard]:
        """Return the owned shards with copies of their present values; copies returned before are overwritten."""
        self._reservation.wait()
        owned = owned_shards(shards)
        device, (laid_out, end) = device_of(owned), _lay_out(owned)
        view = reserve_segment(self._present_segment(), end, device)
        copies = copy_shards(view, owned, laid_out, device)
        return [replace(shard, tensor=copy) for shard, copy in zip(owned, copies, strict=True)]

    def leave_to(self, reader: threading.Thread) -> None:
        """Leave the present copies to a thread that still reads them; the next use other memory until it has ended."""
        if self._segment is not None:
            self._left.append((self._segment, reader))
            self._segment = None

    def _present_segment(self) -> MemorySegment:
        """Return a segment that no thread reads, if possible one used before: touching new memory costs more."""
        if self._segment is None:
            free = next(
                (segment_and_reader for segment_and_reader in self._left if not segment_and_reader[1].is_alive()), None
            )
            if free is not None:
                self._left.remove(free)
            self._segment = MemorySegment("saver") if free is None else free[0]
        return self._segment


def _lay_out(shards: Sequence[TensorShard]) -> tuple[tuple[StoredShard, ...], int]:
    """Return the place of each shard in a segment, and the end of the last."""
    laid_out = lay_out_shards(shards, rank=0, offset=0, align_bytes=ALIGN_BYTES)
    return laid_out, max((stored.offset + stored.size_bytes for stored in laid_out), default=1)
