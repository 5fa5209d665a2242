"""Inject faults from inside a rank: the hooks of a drill kill, stop, slow, poison or damage their own process."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist

from phalanx.record.run import Run
from phalanx.train.data.batches import IGNORED
from phalanx.train.drill import firings
from phalanx.train.drill.faults import Fault
from phalanx.train.drill_hooks import DrillHooks
from phalanx.train.parallel.tensor_shard import TensorShard

FIRST_STEP_S = 0.05  # guess of a step's length before one was seen: a kill in a collective comes after half of it
ROOM_BYTES = 64 * 2**20  # above what is in use, when memory is to run out
FILE_BYTES = 4096  # longest file, when the disk is to be full


class DrillFault(RuntimeError):
    """The exception that the fault `raise` raises on purpose."""


class Injector(DrillHooks):
    """The drill hooks of one rank.

    It lives as long as the process, while the process's generation and rank number change.
    """

    records_samples = True

    def __init__(self, run: Run, faults: Iterable[Fault], *, rank: int, slot: int) -> None:
        self._run, self._slot, self._rank = run, slot, rank
        self._faults = [fault for fault in faults if fault.of.inside]
        self._generation = self._step = -1
        self._world = 0
        self._left_out: Mapping[str, Sequence[int]] = run.launch().get("left_out") or {}  # step -> ranks
        self._began_s, self._step_s = 0.0, FIRST_STEP_S
        self._clock: float | None = None
        self._slowed: list[tuple[float, float]] = []  # (until, seconds per step)
        self._muted_until = self._full_until = 0.0
        self._held: dict[str, Sequence[TensorShard]] = {}
        self._over: set[tuple[int, int]] = set()

    @classmethod
    def of(cls, run: Run, *, rank: int, slot: int) -> Injector:
        """Make the injector with the faults of the run's drill.json."""
        return cls(run, firings.read_schedule(run), rank=rank, slot=slot)

    # ---- the hooks -------------------------------------------------------------------------------------------------

    def joining(self, generation: int, rank: int, world: int) -> None:
        """Act before this rank of a new generation joins the process group; `world` counts the ranks of the job."""
        self._generation, self._rank, self._world, self._step = generation, rank, world, -1
        self._held = {}
        self._act_at("init")

    def restoring(self, generation: int, rank: int) -> None:
        """Act before the rank restores its state."""
        self._generation, self._rank = generation, rank
        if generation > 1:
            self._act_at("restore")

    def step_begins(self, step: int) -> None:
        """Act before the batch of a step is fetched."""
        now = time.monotonic()
        if self._began_s:
            self._step_s = now - self._began_s
        self._step = step
        self._act_at("step")
        for fault in self._due_faults("collective"):
            self._in_a_moment(fault)
        # Damage at rest, since the last update: no code has read the state in between.
        for fault in self._due_faults("rest"):
            if fault.how in self._held and self._claim_fault(fault):
                _flip_state(self._held[fault.how], seed=fault.seed)
        self._sleep_slowed()
        self._began_s = time.monotonic()

    def targets(self, step: int, targets: torch.Tensor) -> torch.Tensor:
        """Return the targets.

        In a replay all are ignored where the model replica of this rank was left out of the step.
        """
        return torch.full_like(targets, IGNORED) if self._rank in self._left_out.get(str(step), ()) else targets

    def gradients(self, step: int, grads: Sequence[torch.Tensor]) -> None:
        """Spoil the summed gradients of this rank, before the norm is computed across ranks."""
        for fault in self._due_faults("gradient"):
            filled = [grad for grad in grads if grad.numel()]
            if filled and self._claim_fault(fault):
                if fault.kind == "nan":
                    filled[0].view(-1)[0] = torch.nan
                elif fault.kind == "zero":
                    for grad in filled:
                        grad.zero_()
                else:
                    _flip_bit(filled, seed=fault.seed)

    def updated(self, step: int, weights: Sequence[TensorShard], moments: Sequence[TensorShard]) -> None:
        """Spoil the weights after the optimizer step, before the digest and the in-memory checkpoint are made."""
        self._held = {"weight": weights, "moment": moments}
        for fault in self._due_faults("update"):
            if self._claim_fault(fault):
                _flip_state(weights, seed=fault.seed)

    def save_point(self, name: str) -> None:
        """Act at a named point of a checkpoint save, which may run in a thread; raises OSError for a full disk."""
        self._act_at(f"save-{name}")
        if name == "begin":
            for fault in self._due_faults("disk"):
                if self._claim_fault(fault):
                    if fault.how == "limit":
                        limit_files(for_s=fault.for_s)
                    else:
                        self._full_until = time.monotonic() + fault.for_s
        if name == "data" and time.monotonic() < self._full_until:
            raise OSError(errno.ENOSPC, "No space left on device (drill)")

    def heartbeat_allowed(self) -> bool:
        """False while the fault `mute` suppresses this rank's heartbeats."""
        return time.monotonic() >= self._muted_until

    # ---- which fault is due ----------------------------------------------------------------------------------------

    def _due_faults(self, point: str) -> list[Fault]:
        return [fault for fault in self._faults if _hook_point(fault) == point and self._is_due(fault)]

    def _is_due(self, fault: Fault) -> bool:
        if fault.epoch is not None and fault.epoch != self._generation:
            return False
        if fault.step is not None and self._step < fault.step:
            return False
        if fault.at_s is not None and not self._has_passed(fault.at_s):
            return False
        return self._target_rank(fault) is not None

    def _has_passed(self, at_s: float) -> bool:
        if self._clock is None:
            self._clock = firings.drill_clock(self._run)
        return self._clock is not None and time.time() >= self._clock + at_s

    def _target_rank(self, fault: Fault) -> int | None:
        """Return the number in `fault.rank` that means this rank, or None.

        Numbers count modulo the world size, so that a shrunken job is hit too.
        """
        if fault.slot is not None:
            return fault.slot if fault.slot == self._slot else None
        # Not torch's world size: where lost replicas are left out, each replica is its own process group.
        world = self._world if dist.is_initialized() else 0
        return next((rank for rank in fault.rank if (rank % world if world else rank) == self._rank), None)

    def _claim_fault(self, fault: Fault) -> bool:
        whom = self._target_rank(fault)
        if whom is None or (fault.id, whom) in self._over:
            return False
        # Whichever process fires it, this one need not try again.
        if fault.times == 1:
            self._over.add((fault.id, whom))
        return firings.claim_firing(
            self._run,
            fault,
            whom=whom,
            rank=self._rank,
            slot=self._slot,
            host=socket.gethostname(),
            epoch=self._generation,
            step=self._step,
            pid=os.getpid(),
        )

    # ---- what it does ----------------------------------------------------------------------------------------------

    def _act_at(self, point: str) -> None:
        for fault in self._due_faults(point):
            if self._claim_fault(fault):
                self._inject_fault(fault)

    def _inject_fault(self, fault: Fault) -> None:
        match fault.kind:
            case "kill" | "crash-loop":
                kill_self()
            case "hang":
                # The driver sends SIGCONT where the fault has a length.
                os.kill(os.getpid(), signal.SIGSTOP)
            case "mute":
                self._muted_until = time.monotonic() + (fault.for_s or 1e9)
            case "slow":
                self._slowed.append((time.monotonic() + (fault.for_s or 1e9), fault.sleep_s))
            case "memory":
                exhaust_memory(really=fault.how == "limit")
            case "cuda-error":
                break_device()
            case "raise":
                raise DrillFault(f"drill: fault {fault.id} raised on rank {self._rank}")

    def _in_a_moment(self, fault: Fault) -> None:
        """Inject the fault from a timer thread, while the step is in its collectives."""

        def strike() -> None:
            if self._claim_fault(fault):
                self._inject_fault(fault)

        timer = threading.Timer(random.Random(fault.id).uniform(0.1, 0.9) * self._step_s, strike)
        timer.daemon = True
        timer.start()

    def _sleep_slowed(self) -> None:
        now = time.monotonic()
        self._slowed = [(until, seconds) for until, seconds in self._slowed if now < until]
        time.sleep(sum(seconds for _, seconds in self._slowed))


def _hook_point(fault: Fault) -> str:
    """Return the name of the hook at which a fault acts."""
    match fault.kind:
        case "nan" | "zero":
            return "gradient"
        case "flip":
            return "rest" if fault.how in ("weight", "moment") else fault.how
        case "disk-full":
            return "disk"
    # A crash loop acts at `init`, unless its point is named.
    return fault.point or "step"


def kill_self() -> NoReturn:
    """End this process as a power cut would: nothing is flushed and no peer is notified."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def break_device() -> None:
    """Fail a device-side assertion: this process loses its CUDA context; other processes on the GPU continue."""
    if not torch.cuda.is_initialized():
        raise RuntimeError("CUDA error: device-side assert triggered (drill)")
    torch._assert_async(torch.zeros(1, device="cuda"))
    torch.cuda.synchronize()


def exhaust_memory(*, really: bool) -> None:
    """Raise MemoryError; with `really` the allocator fails under a real limit of the address space."""
    if not really:
        raise MemoryError("drill: out of memory")
    with open("/proc/self/statm", encoding="ascii") as file:
        used_bytes = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + ROOM_BYTES, before[1]))
    try:
        # More than the whole address space allowed: an allocator that has reserved some of it ahead (mimalloc,
        # which torch uses on arm64 since 2.10, reserves gigabytes) has no room for this either.
        torch.empty(used_bytes + 4 * ROOM_BYTES, dtype=torch.uint8).fill_(1)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def limit_files(*, for_s: float) -> None:
    """Limit every file of this process to one page for `for_s` seconds, as a full disk does to a writer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A second fault would otherwise take the first one's limit for the original, and restore that for good.
    soft = before[0] if before[0] != FILE_BYTES else before[1]
    restore: Callable[[], None] = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, before[1]))  # noqa: E731
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, before[1]))
    timer = threading.Timer(for_s, restore)
    timer.daemon = True
    timer.start()


def _flip_state(shards: Sequence[TensorShard], *, seed: int) -> None:
    _flip_bit([shard.tensor for shard in shards if shard.tensor.numel()], seed=seed)


@torch.no_grad()
def _flip_bit(tensors: Sequence[torch.Tensor], *, seed: int) -> None:
    """Flip one bit of one element, all chosen by the seed; the element is written back through the tensor's strides."""
    if not tensors:
        return
    draw = random.Random(seed)
    tensor = tensors[draw.randrange(len(tensors))]
    index, bit = draw.randrange(tensor.numel()), draw.randrange(8 * tensor.element_size())
    place = _unravel_index(index, tensor.shape)
    value = tensor[place].detach().cpu().reshape(1).clone()
    value.view(torch.uint8)[bit // 8] ^= 1 << (bit % 8)
    tensor[place] = value[0].to(tensor.device)


def _unravel_index(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    place = []
    for size in reversed(shape):
        place.append(index % size)
        index //= size
    return tuple(reversed(place))
