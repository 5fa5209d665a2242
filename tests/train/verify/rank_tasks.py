"""What test_ranks runs on every rank."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist

from phalanx.errors import mistake


def add(rank: int) -> int:
    """The sum of all ranks' numbers."""
    total = torch.tensor([rank])
    dist.all_reduce(total)
    return int(total.item())


def fail(rank: int, how: str) -> int:
    """Rank 1 fails; the others wait for it in a collective."""
    if how == "mistake":
        raise mistake("parallel.tensor", "too many", fix="use fewer")
    if rank == 1 and how == "raise":
        try:
            print(1 / 0)
        except ZeroDivisionError as error:
            raise RuntimeError("failed to run a stage") from error
    if rank == 1 and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and how == "hang":
        time.sleep(600)
    return add(rank)
