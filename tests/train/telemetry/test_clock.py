"""Compute and wait of a step, by a clock and by marks that a device passes when it gets there."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work
from torch.distributed import HashStore
from torch.distributed._functional_collectives import all_reduce, wait_tensor

from phalanx.train.drill.machine_faults import BusyCore
from phalanx.train.telemetry.clock import CoreWait, DeviceClock, HostClock, time_gathers
from phalanx.train.telemetry.collective_tap import marked_waits


class Time:
    """A clock that is turned by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("compiled", "compute_s", "wait_s"), [(False, 2.5, 1.0), (True, 2.0, 1.5)])
def test_on_a_cpu_what_is_not_waiting_is_own_time(compiled: bool, compute_s: float, wait_s: float):
    """Compiled code waits where nobody hears it: there the processor's time is the work."""
    wall, worked = Time(), Time()
    clock = HostClock(now=wall, worked=worked, compiled=compiled, sees_standstill=False)
    wall.now = worked.now = 100.0
    clock.begin()
    with clock.phase("forward"):
        wall.now += 2.0
        worked.now += 1.5
    with clock.stall(), clock.stall():  # a collective; a wait inside a wait counts once
        wall.now += 1.0
    clock.settle()
    with clock.phase("optimizer"):
        wall.now += 0.5
        worked.now += 0.5
    found = clock.end()
    assert (found.compute_s, found.wait_s, found.cpu_s) == (compute_s, wait_s, 2.0)
    assert [(p.kind, p.start_s, p.duration_s) for p in found.phases] == [("forward", 0, 2), ("optimizer", 3, 0.5)]


WAITS = """
import sys, time
from phalanx.train.telemetry.clock import HostClock
clock = HostClock(compiled=sys.argv[1] == "compiled")
clock.begin()
print("begun", flush=True)
with clock.stall():
    until_s = time.monotonic() + 1.0
    while time.monotonic() < until_s:
        time.sleep(0.005)
found = clock.end()
print(found.compute_s / (found.compute_s + found.wait_s))
"""


@pytest.mark.parametrize("code", ["eager", "compiled"])
def test_who_is_stopped_inside_a_wait_does_not_wait_for_others(code: str):
    with subprocess.Popen([sys.executable, "-c", WAITS, code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        busy = BusyCore(process.pid, 0.75)
        try:
            share = float(process.stdout.readline())
        finally:
            busy.close()
    assert share > 0.3  # 0.75 of the time it stood still; without a standstill seen it is a few thousandths


def test_waits_for_collectives_are_heard_in_the_thread_of_the_step_alone():
    store = HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    heard = []

    class Stall:
        def __enter__(self):
            heard.append("wait")

        def __exit__(self, *error):
            pass

    def reduce():
        dist.all_reduce(torch.ones(2))

    try:
        before = Work.wait
        with marked_waits(Stall()):
            reduce()
            assert heard == ["wait"]
            wait_tensor(all_reduce(torch.ones(2), "sum", dist.group.WORLD))
            assert len(heard) >= 2
            count = len(heard)
            thread = threading.Thread(target=reduce)
            thread.start()
            thread.join()
            assert len(heard) == count
        assert Work.wait is before
        reduce()
        assert len(heard) == count
    finally:
        dist.destroy_process_group()


def test_time_without_a_core_is_counted_by_the_kernel():
    """Two threads of one process on one core: both are ready, one runs."""
    if CoreWait()() is None:
        pytest.skip("the kernel does not count it")
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("cores cannot be chosen here")
    code = (
        "import os, time\n"
        "from phalanx.train.telemetry.clock import CoreWait\n"
        "os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])\n"
        "child = os.fork()\n"
        "while child == 0: pass\n"
        "waited, began = CoreWait(), time.thread_time()\n"
        "before = waited()\n"
        "while time.thread_time() - began < 0.2: pass\n"
        "print(waited() - before)\n"
        "os.kill(child, 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert float(done.stdout) > 0.02


@dataclass
class Device:
    """A stream: work is queued at once and done when the host reads something; marks then know their time."""

    done_ms: float = 0.0
    queue: list[object] = field(default_factory=list)

    def work(self, seconds: float) -> None:
        self.queue.append(seconds * 1e3)

    def read(self) -> None:
        for one in self.queue:
            if isinstance(one, Mark):
                one.at_ms = self.done_ms
            else:
                assert isinstance(one, float)
                self.done_ms += one
        self.queue.clear()


class Mark:
    def __init__(self, device: Device) -> None:
        self._device, self.at_ms = device, None

    def record(self) -> None:
        self._device.queue.append(self)

    def elapsed_time(self, end: Mark) -> float:
        assert self.at_ms is not None, "a mark that the device has not passed: reading it would hold the step up"
        assert end.at_ms is not None
        return end.at_ms - self.at_ms


def _step(clock: DeviceClock, device: Device, *, backward_s: float = 2.0, waits_s: float = 0.0) -> object:
    clock.begin()
    with clock.phase("forward"):
        device.work(1.0)
    with clock.phase("backward"):
        device.work(backward_s)
        with clock.stall():
            device.work(0.25)  # waiting for gathered weights
    device.work(waits_s)  # the agreement
    clock.settle()
    device.read()
    with clock.phase("optimizer"):
        device.work(0.5)
    return clock.end()


def test_on_a_gpu_the_device_is_asked_and_never_waited_for():
    device = Device()
    clock = DeviceClock(lambda: Mark(device))
    first, second = _step(clock, device), _step(clock, device, backward_s=3.0, waits_s=1.5)
    assert first.compute_s == pytest.approx(3.0)  # its update is not over when it ends
    assert first.wait_s == pytest.approx(0.25)
    assert second.compute_s == pytest.approx(1.0 + 3.0 + 0.5)  # the update of the step before stands for its own
    assert second.wait_s == pytest.approx(0.25 + 1.5)
    kinds = [(phase.kind, round(phase.start_s, 6), round(phase.duration_s, 6)) for phase in second.phases]
    assert kinds == [("forward", 0.0, 1.0), ("backward", 1.0, 3.25), ("optimizer", 5.75, 0.5)]


def test_a_single_gpu_does_not_wait_for_itself():
    """What a host clock got wrong: it has long gone on when the device begins to work."""
    device = Device()
    clock = DeviceClock(lambda: Mark(device))
    clock.begin()
    with clock.phase("forward"):
        device.work(5.0)
    clock.settle()
    device.read()
    assert clock.end().wait_s == 0.0


def test_waiting_between_phases_is_not_taken_off_twice():
    device = Device()
    clock = DeviceClock(lambda: Mark(device))
    clock.begin()
    with clock.stall():
        device.work(1.0)
    with clock.phase("forward"):
        device.work(2.0)
    clock.settle()
    device.read()
    found = clock.end()
    assert (found.compute_s, found.wait_s) == (pytest.approx(2.0), pytest.approx(1.0))


def test_what_is_timed_does_not_outlive_its_last_user():
    """A pipeline's stage holds the receive buffers of all its micro-batches."""

    class Group:
        waited = 0

        def wait_for_unshard(self) -> None:
            self.waited += 1

    group = Group()
    time_gathers([group], HostClock())
    group.wait_for_unshard()
    assert group.waited == 1
    gone = weakref.ref(group)
    gc.disable()
    try:
        del group
        assert gone() is None
    finally:
        gc.enable()
