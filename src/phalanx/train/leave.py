"""Leaves the process groups of a membership that is over, and keeps the process and its CUDA context.

NCCL's kernels wait for a lost rank for ever, and the training waits for them: in a collective, in a synchronise, or
in the launch of the next kernel. `ncclCommAbort` from another thread ends them (benchmarks/nccl_recovery.py). Their
results are worthless by then: code that returns from a wait calls `RankControl.check` before it uses a number.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

# Between two passes: the second aborts communicators that were being created during the first.
AGAIN_S = 1.0
# For the aborts of a rank that leaves; slower ones continue in their threads.
WAIT_S = 2.0


class CommunicatorAbort:
    """Aborts the NCCL communicators of all groups of this process, without blocking the caller."""

    def __init__(self) -> None:
        # Called by the thread of the agent's link, and by the training thread when it leaves.
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._ended_s: float | None = None

    def __call__(self) -> bool:
        """Start the aborts, unless they are running; return True once all have ended."""
        with self._lock:
            if any(thread.is_alive() for thread in self._threads):
                return False
            now = time.monotonic()
            if self._threads:
                self._threads, self._ended_s = [], now
            if self._ended_s is not None and now - self._ended_s < AGAIN_S:
                return True
            # All at once: freeing the memory of one communicator waits for every kernel on the device, also for those
            # that hang in another communicator (pytorch#119797).
            self._threads = [
                threading.Thread(target=_abort_backend, args=(backend,), name="nccl-abort", daemon=True)
                for backend in nccl_backends()
            ]
            for thread in self._threads:
                thread.start()
            return not self._threads

    def wait(self, seconds: float = WAIT_S) -> None:
        """Abort, and wait until that is done, at most `seconds`."""
        until_s = time.monotonic() + seconds
        while not self() and time.monotonic() < until_s:
            for thread in list(self._threads):
                thread.join(max(0.0, until_s - time.monotonic()))


def nccl_backends() -> list[Any]:
    """Return the NCCL backend of every group of this process; groups that are still being created are missing."""
    backends = []
    for group in list(dist.distributed_c10d._world.pg_map):
        with suppress(RuntimeError):  # a group without a backend for GPUs
            backend = group._get_backend(torch.device("cuda"))
            # A backend named "gloo" serves both kinds of devices.
            backends += [backend] if backend.name() == "nccl" else []
    return backends


def _abort_backend(backend: Any) -> None:
    # A communicator may never have been connected, or abort with an error of NCCL: the rank leaves either way.
    with suppress(Exception):
        backend.abort()


def forget_groups() -> None:
    """Remove all state of the process groups, also of half-created ones; NCCL's were aborted before.

    destroy_process_group is not used while NCCL is left: it waits for the kernels of a communicator that could not be
    aborted. torch names the keys of a group by a counter, which is reset too: a rank that continued the count of a
    failed group would wait for keys that no other rank writes.
    """
    c10d = dist.distributed_c10d
    if not nccl_backends():
        for end_group in (c10d._abort_process_group, dist.destroy_process_group):
            with suppress(Exception):
                end_group()
    with suppress(Exception):
        c10d._update_default_pg(None)
        c10d._unregister_all_process_groups()  # type: ignore[attr-defined]
    state = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg")
    for name in (*state, "pg_coalesce_state"):
        getattr(c10d._world, name, {}).clear()
    c10d._world.group_count = 0


def number_ranks(world: int) -> None:
    """Set the global ranks of the group of all ranks.

    torch sets them only for the first group that a process makes (`groupRanks` of its backends); a split of a later
    group, which is how a mesh makes its groups on GPUs, reads beyond an empty list: signal 11, torch 2.11 to 2.13.
    """
    group = dist.group.WORLD
    if group is None:
        return
    for device in ("cpu", "cuda"):
        with suppress(RuntimeError):  # no backend for such devices
            group._get_backend(torch.device(device)).options.global_ranks_in_group = list(range(world))


def check_device() -> None:
    """Raise if the CUDA context of this process is broken: the error is permanent, only another process helps.

    Waits for what still runs on the device. A lost peer never breaks the context; an illegal access or a failed
    assertion in one of this rank's kernels does, and may first appear as an error of NCCL.
    """
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").add_(1).cpu()
        torch.cuda.empty_cache()  # the next membership needs blocks of other sizes
