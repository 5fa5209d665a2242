"""Getting out of a membership that is over: aborts that wait for each other, and groups that leave nothing behind."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from phalanx.train import leave
from phalanx.train.leave import CommunicatorAbort, check_device, forget_groups, nccl_backends


class Backend:
    """Stands in for NCCL: freeing a communicator waits for the kernels of the others, as the driver does."""

    def __init__(self, begun: threading.Barrier) -> None:
        self.begun, self.aborts = begun, 0

    def abort(self) -> None:
        self.aborts += 1
        self.begun.wait(60)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    forget_groups()


def test_all_communicators_are_aborted_at_once_and_nobody_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Barrier(4)  # three communicators, and us
    backends = [Backend(begun) for _ in range(3)]
    monkeypatch.setattr(leave, "nccl_backends", lambda: backends)
    abort = CommunicatorAbort()
    assert not abort(), "it is under way"
    assert not abort()
    begun.wait(60)
    abort.wait(60)
    assert abort()
    assert [one.aborts for one in backends] == [1, 1, 1]


def test_an_error_of_one_abort_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def abort(self) -> None:
            raise RuntimeError("NCCL error: internal error")

    good = Backend(threading.Barrier(1))
    monkeypatch.setattr(leave, "nccl_backends", lambda: [Broken(), good])
    abort = CommunicatorAbort()
    abort.wait(60)
    assert (abort(), good.aborts) == (True, 1)


AGAIN = """
import torch, torch.distributed as dist
from phalanx.train.leave import forget_groups, number_ranks
for epoch in (1, 2):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    number_ranks(1)
    group = dist.group.WORLD.split_group([0], None, None, f"split {epoch}", "")  # as a mesh does on GPUs
    ones = torch.ones(2)
    group.allreduce([ones]).wait()
    forget_groups()
print("split again")
"""


def test_a_process_that_forms_again_can_split_its_groups() -> None:
    """In a process of its own: without the numbers torch ends it with signal 11."""
    done = subprocess.run([sys.executable, "-c", AGAIN], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "split again\n"), done.stderr


def test_groups_without_nccl_need_no_abort_and_leave_nothing(group: None) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
    assert mesh["data"].get_group() is not None
    assert nccl_backends() == []
    assert CommunicatorAbort()()
    check_device()
    forget_groups()
    assert not dist.is_initialized()
    world = dist.distributed_c10d._world
    assert (world.pg_map, world.pg_names, world.group_count) == ({}, {}, 0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # as the next membership does
    dist.barrier()
