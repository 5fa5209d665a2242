"""Saving beside the training: the step waits for a copy to host memory, a thread does the rest."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from phalanx.train.checkpoint.jsontext import JSON
from phalanx.train.checkpoint.save import TIMEOUT_S, Saved, save
from phalanx.train.checkpoint.shard import owned
from phalanx.train.parallel.pieces import Piece


class AsyncSaver:
    """One save at a time. Memory: one host copy of what this rank owns, kept and used again.

    All ranks call `save` for the same steps in the same order. It returns when the copy is taken; an error of the
    thread is raised by the next `save`, after that one was started so that the ranks stay together, or by `wait`. Only
    rank 0 knows whether a step was committed: on other ranks a finished save means that their part is on the disk.
    """

    def __init__(
        self,
        root: Path,
        *,
        attempt: str,
        rank: int,
        world: int,
        keep: int = 2,
        timeout_s: float = TIMEOUT_S,
        point: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._save = partial(save, root, rank=rank, world=world, keep=keep, timeout_s=timeout_s, point=point)
        self._attempt = attempt
        self._started = 0
        self._thread: threading.Thread | None = None
        self._step = -1
        self._copies: dict[str, torch.Tensor] = {}
        self._saved: Saved | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether a save is being written."""
        return self._thread is not None and self._thread.is_alive()

    def reserve(self, pieces: Sequence[Piece]) -> None:
        """Take the host memory now, so that the first save blocks no longer than the others."""
        self.wait()
        self._copy(pieces)

    def save(
        self,
        *,
        step: int,
        pieces: Sequence[Piece],
        meta: Mapping[str, JSON],
        rank_meta: Mapping[str, JSON] | None = None,
    ) -> float:
        """Copy and go on; returns the seconds the caller was held up. Waits for the save before, if it still writes.

        The step of the save before is not written again, so that a final save may come at any step.
        """
        began = time.monotonic()
        error = self._join()
        if step != self._step:
            copies = self._copy(pieces)
            self._start(partial(self._save, step=step, pieces=copies, meta=dict(meta), rank_meta=dict(rank_meta or {})))
            self._step = step
        if error is not None:
            raise error
        return time.monotonic() - began

    def _start(self, job: Callable[..., Saved]) -> None:
        # Numbered, as on every rank: what a failed save left behind is never taken for a part of the next.
        self._started += 1
        job = partial(job, attempt=f"{self._attempt}.{self._started}")
        # Daemon: a process that dies of something else must not stay for minutes to wait for the other ranks' files.
        self._thread = threading.Thread(target=self._run, args=(job,), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> Saved | None:
        """Wait until nothing is being written and raise what went wrong; the last finished save of this rank."""
        error = self._join()
        if error is not None:
            raise error
        return self._saved

    def _join(self) -> BaseException | None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        return error

    def _run(self, job: Callable[[], Saved]) -> None:
        try:
            self._saved = job()
        except BaseException as error:  # handed to the caller's thread
            self._error = error

    def _copy(self, pieces: Sequence[Piece]) -> list[Piece]:
        mine = owned(pieces)
        old, self._copies = self._copies, {}
        for piece in mine:
            copy = _fitting(old.pop(piece.name, None), piece.tensor)
            copy.copy_(piece.tensor.detach(), non_blocking=copy.is_pinned())
            self._copies[piece.name] = copy
        for device in {piece.tensor.device for piece in mine if piece.tensor.is_cuda}:
            torch.cuda.synchronize(device)
        return [replace(piece, tensor=self._copies[piece.name]) for piece in mine]


def _fitting(old: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """The buffer of the save before where it fits: touching fresh memory costs more than the copy into it."""
    if old is not None and old.shape == like.shape and old.dtype == like.dtype:
        return old
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)
