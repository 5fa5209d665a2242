"""Leave the process groups of a membership that is over, and keep the process and its CUDA context.

NCCL's kernels wait for a lost rank for ever, and the training waits for them: in a collective, in a synchronise, or in
the launch of the next kernel. `ncclCommAbort` from another thread ends them (benchmarks/nccl_recovery.py). What they
have computed by then is worth nothing: whoever comes out of a wait asks `RankControl.check` before it keeps a number.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

AGAIN_S = 1.0  # between two rounds: a communicator that was being made during the first is caught by the next
WAIT_S = 2.0  # for the aborts of a rank that leaves; those that take longer go on beside it


class CommunicatorAbort:
    """Aborts the NCCL communicators of all groups of this process, without blocking who asks for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # the rank's line asks, and the training when it leaves
        self._threads: list[threading.Thread] = []
        self._ended_s: float | None = None

    def __call__(self) -> bool:
        """Begin, unless it is being done; whether all that was begun has ended."""
        with self._lock:
            if any(thread.is_alive() for thread in self._threads):
                return False
            now = time.monotonic()
            if self._threads:
                self._threads, self._ended_s = [], now
            if self._ended_s is not None and now - self._ended_s < AGAIN_S:
                return True
            # All at once: freeing the memory of one waits for every kernel of the device, also for those that hang in
            # another communicator (pytorch#119797).
            self._threads = [
                threading.Thread(target=_abort_backend, args=(backend,), name="nccl-abort", daemon=True)
                for backend in nccl_backends()
            ]
            for thread in self._threads:
                thread.start()
            return not self._threads

    def wait(self, seconds: float = WAIT_S) -> None:
        """Abort and wait until that is done, but not for ever."""
        until_s = time.monotonic() + seconds
        while not self() and time.monotonic() < until_s:
            for thread in list(self._threads):
                thread.join(max(0.0, until_s - time.monotonic()))


def nccl_backends() -> list[Any]:
    """The NCCL side of every group of this process. One that is only being made is not among them."""
    found = []
    for group in list(dist.distributed_c10d._world.pg_map):
        with suppress(RuntimeError):  # a group without a GPU's side
            backend = group._get_backend(torch.device("cuda"))
            found += [backend] if backend.name() == "nccl" else []  # plain "gloo" serves both kinds of devices
    return found


def _abort_backend(backend: Any) -> None:
    with suppress(Exception):  # one that was never connected, or an error of NCCL: the rank leaves either way
        backend.abort()


def forget_groups() -> None:
    """Leave nothing of the process groups, also where they were only half made; NCCL's were aborted before.

    Not through destroy_process_group, which waits for the kernels of a communicator that could not be aborted. torch
    names the keys of a group by a count; a rank that counts on from a group that failed looks for keys that nobody
    else writes.
    """
    c10d = dist.distributed_c10d
    if not nccl_backends():
        for leave in (c10d._abort_process_group, dist.destroy_process_group):
            with suppress(Exception):
                leave()
    with suppress(Exception):
        c10d._update_default_pg(None)
        c10d._unregister_all_process_groups()  # type: ignore[attr-defined]
    state = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg")
    for name in (*state, "pg_coalesce_state"):
        getattr(c10d._world, name, {}).clear()
    c10d._world.group_count = 0


def number_ranks(world: int) -> None:
    """Tell the group of all which ranks it has.

    torch knows that by itself only of the first group that a process makes (`groupRanks` of its backends); a split of a
    later one, which is how a mesh makes its groups on GPUs, reads beyond an empty list: signal 11, torch 2.11 to 2.13.
    """
    group = dist.group.WORLD
    if group is None:
        return
    for device in ("cpu", "cuda"):
        with suppress(RuntimeError):  # no backend for such devices
            group._get_backend(torch.device(device)).options.global_ranks_in_group = list(range(world))


def check_device() -> None:
    """Raise when the CUDA context of this process is broken: such an error stays, and only another process helps.

    Waits for what still runs on the device. A lost peer never breaks it; an illegal access or an assertion of a kernel
    of our own does, and may first show as an error of NCCL.
    """
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").add_(1).cpu()
        torch.cuda.empty_cache()  # what the next membership needs is of other sizes
