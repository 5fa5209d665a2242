"""The checks of a host before ranks are started on it: devices, memory, disk, network and clock.

Every check compares one number with one threshold and is a plain function of measured values; `preflight` measures and
runs them all. A host with a problem takes no part: one that is slow or full costs every other host more than its
absence.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

from phalanx.elastic.clock_skew import check_skew
from phalanx.elastic.gpus import check_free
from phalanx.elastic.listener import LOOPBACK
from phalanx.elastic.replica_store import BUFFERS
from phalanx.errors import Problem
from phalanx.hardware.cluster_defaults import LOOPBACK_BYTES_PER_S
from phalanx.hardware.discover import discover
from phalanx.hardware.this_machine import allowed_ranks
from phalanx.hardware.types import Gpu, Machine
from phalanx.io.path_probes import is_folder, path_exists
from phalanx.plan.plan import Plan
from phalanx.units import MB, format_bytes, plural

# With more, the ranks only wait for each other.
MOST_RANKS_PER_CORE = 64
# Of the plan's assumption: a busy machine halves it, a broken link loses far more.
LEAST_LINK_SHARE = 0.1
# For one machine's own loopback, which cannot break: other programs alone took it to 7 % at a load of 20 on two
# cores.
LEAST_LOOPBACK_SHARE = 0.01
LINK_BYTES = 16 * MB
# The best of some tries counts: other work on the machine can only make the link look slower. With ten programs on
# two cores, single tries moved 20 to 870 MB/s, where the idle machine moves 3,300.
LINK_TRIES = 10
# For one try; at a tenth of 2 GB/s it takes 0.08 s.
LINK_PATIENCE_S = 1.0
# The slowest network that hosts are joined by.
GIGABIT_BYTES_PER_S = 125 * MB
# Below it, links came up at half their number or speed.
LEAST_NVLINK_SHARE = 0.5
# 2026-01-01: a host whose clock is before this has lost its time.
OLDEST_CLOCK_S = 1_767_225_600.0


def preflight(*, plan: Plan, run: Path, slots: int, address: str, quick: bool) -> list[Problem]:
    """Return all problems of starting `slots` ranks here; `quick` leaves out the measurement of the link."""
    machine = discover()
    if not is_folder(run):
        return [_missing(run, machine.hostname)]
    problems = [
        *check_devices(plan, machine, slots, fresh=True),
        *check_memory(plan, slots, available_bytes(machine), host=machine.hostname),
        *check_disk(plan, run, host=machine.hostname),
        *check_port(address, host=machine.hostname),
        *check_clock(run, time.time(), host=machine.hostname),
    ]
    if not quick and not problems:
        problems += check_link(plan, address, host=machine.hostname)
    return problems


def recheck(*, plan: Plan, run: Path, slots: int, new_ranks: int, new_places: int, address: str) -> list[Problem]:
    """Run the quick checks, before ranks of this host join another membership.

    Memory is required for `new_ranks` processes, which hold nothing yet, and for the replicas of `new_places` slots;
    the memory of living ranks and their replicas is no longer free, and is not counted twice. The disk is not checked:
    a full or read-only one must not end a living run, whose state is in memory, and each save that fails is reported.
    """
    machine = discover()
    host = machine.hostname
    if not is_folder(run):
        return [_missing(run, host)]
    return [
        *check_devices(plan, machine, slots),
        *check_free_memory(plan, ranks=new_ranks, places=new_places, free_bytes=available_bytes(machine), host=host),
        *check_port(address, host=host),
        *check_clock(run, time.time(), host=host),
    ]


def _missing(run: Path, host: str) -> Problem:
    return Problem(
        where=host,
        what=f"there is no folder {run}",
        why="all hosts of a run record events and find each other in one shared folder",
        fix="put runs on a file system that every host mounts: phalanx train --runs FOLDER",
    )


def check_devices(plan: Plan, machine: Machine, slots: int, *, fresh: bool = False) -> Iterator[Problem]:
    """Every slot has a device as large and as well connected as the plan assumes.

    `fresh`: no rank of this run is on the GPUs yet, so memory in use belongs to other programs.
    """
    if plan.cluster.accelerator.family == "cpu":
        most = MOST_RANKS_PER_CORE * machine.usable_cores
        if slots > most:
            yield Problem(
                where=machine.hostname,
                what=f"{slots:,} ranks on {plural(machine.usable_cores, 'core')}; at most {most:,} can make progress",
                fix=f"give this host at most {most:,} slots",
            )
        return
    count, allowed = len(machine.gpus), allowed_ranks(plan.job.train.ranks_per_gpu, os.environ)
    share = 1
    if count * allowed < slots:
        sharing = f"; {allowed} ranks may share a GPU" if allowed > 1 else ""
        yield Problem(
            where=machine.hostname,
            what=f"{count} of the {slots} × {plan.cluster.accelerator.name} needed by its ranks respond{sharing}",
            why="; ".join(machine.notes) or "every rank needs its own device",
            fix="check nvidia-smi and dmesg (Xid errors); restart the host, or remove it from the job",
        )
    elif count:
        # Spare ranks use no memory until they replace another one.
        share = -(-min(slots, plan.layout.devices) // count)
    for gpu in machine.gpus[:slots]:
        where = f"{machine.hostname}, GPU {gpu.index}"
        need = share * plan.memory.total_bytes
        yield from _check_gpu(plan, gpu, need=need, alone=min(slots, count) == 1, where=where)
        problem = check_free(gpu, needed_bytes=need, where=where) if fresh and gpu.memory_bytes >= need else None
        if problem is not None:
            yield problem


def _check_gpu(plan: Plan, gpu: Gpu, *, need: float, alone: bool, where: str) -> Iterator[Problem]:
    has = gpu.memory_bytes
    if has < need:
        shared = "; ranks share it" if need > plan.memory.total_bytes else ""
        yield Problem(
            where=where,
            what=f"{format_bytes(has)} of memory; the plan needs {format_bytes(need)}{shared}",
            fix=f"use hosts with {plan.cluster.accelerator.name}, or plan for these: phalanx plan JOB --cluster local",
        )
    rate, expected = gpu.nvlink_bytes_per_s, plan.cluster.link_bytes_per_s
    counted_on = plan.cluster.accelerator.link.startswith("NVLink") and gpu.nvlinks >= 0 and not alone
    if counted_on and rate < LEAST_NVLINK_SHARE * expected:
        yield Problem(
            where=where,
            what=f"{gpu.nvlinks} NVLinks give {format_bytes(rate)}/s, less than {LEAST_NVLINK_SHARE:.0%} of the "
            f"{format_bytes(expected)}/s the plan assumed",
            why="every tensor-parallel rank would wait for this one",
            fix="check nvidia-smi nvlink --status; restart the host, or remove it from the job",
        )


def check_memory(plan: Plan, slots: int, free_bytes: float, *, host: str) -> Iterator[Problem]:
    """Host memory is enough for the ranks where they compute on the CPU, and for in-memory checkpoints everywhere."""
    # Spare ranks use no memory until they replace another one.
    active = min(slots, plan.layout.devices)
    yield from check_free_memory(plan, ranks=active, places=active, free_bytes=free_bytes, host=host)


def check_free_memory(plan: Plan, *, ranks: int, places: int, free_bytes: float, host: str) -> Iterator[Problem]:
    """Host memory is enough for so many new ranks, and for the in-memory checkpoints of so many new places."""
    on_cpu = plan.cluster.accelerator.family == "cpu"
    ranks_bytes = ranks * plan.memory.total_bytes if on_cpu else 0.0
    copies_bytes = places * copies_per_rank(plan) * plan.reliability.checkpoint_bytes / plan.layout.devices
    if ranks_bytes + copies_bytes > free_bytes:
        need = f"{format_bytes(ranks_bytes)} for {plural(ranks, 'rank')} and " if on_cpu else ""
        yield Problem(
            where=host,
            what=f"{format_bytes(free_bytes)} of memory is free; the plan needs {need}{format_bytes(copies_bytes)} "
            "for in-memory checkpoints",
            why="the kernel would kill a rank in the middle of a step",
            fix="stop other programs, start fewer ranks here, or set checkpoint.memory_every = 0",
        )


def copies_per_rank(plan: Plan) -> int:
    """Return how many times a host's memory holds a rank's state: its own, and as a replica another host's."""
    if not plan.reliability.memory_every:
        return 0
    return BUFFERS * (2 if plan.reliability.hosts > 1 else 1)


def available_bytes(machine: Machine, *, root: Path = Path("/")) -> float:
    """Return the bytes of memory available without swapping; inside a container, within its limit."""
    match = re.search(r"^MemAvailable:\s*(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    free = int(match.group(1)) * 1024 if match else machine.memory_bytes
    for used_file, stat_file in (
        ("memory.current", "memory.stat"),
        ("memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        used = _text(root / "sys/fs/cgroup" / used_file).strip()
        if used.isdigit():
            # The kernel releases cached files before it kills a process.
            cached = re.search(r"^(?:total_)?inactive_file (\d+)", _text(root / "sys/fs/cgroup" / stat_file), re.M)
            free = min(free, machine.memory_bytes - int(used) + (int(cached.group(1)) if cached else 0))
    return float(max(0, free))


def check_disk(plan: Plan, run: Path, *, host: str) -> Iterator[Problem]:
    """The disk has room for this host's share of the checkpoints: `keep` of them, and the one being written.

    Existing checkpoints need no further room. A run continues with less (a save deletes old ones first where the disk
    is full, train/state/retention.py), but it would then keep fewer than the job asks for.
    """
    path = plan.job.checkpoint.path
    # Object storage has no free space that could be queried.
    if "://" in path:
        return
    folder = next(folder for folder in (run / path, *(run / path).parents) if path_exists(folder))
    num_existing = sum(1 for _ in (run / path).glob("step-*/manifest.json"))
    # Where one exists, only the next needs room: others are deleted for it.
    copies = 1 if num_existing else min(plan.job.checkpoint.keep + 1, expected_saves(plan))
    needed = copies * plan.reliability.checkpoint_bytes / plan.reliability.hosts
    try:
        state = os.statvfs(folder)
    except OSError as error:
        yield Problem(where=host, what=f"{folder} does not answer: {error.strerror}", fix="mount it again")
        return
    free = state.f_bavail * state.f_frsize
    if state.f_flag & os.ST_RDONLY or not os.access(folder, os.W_OK):
        yield Problem(
            where=host,
            what=f"{folder} cannot be written",
            why="the run could save neither checkpoints nor events",
            fix="mount it for writing, or set checkpoint.path",
        )
    elif free < needed:
        noun = "another checkpoint" if num_existing else "a checkpoint"
        yield Problem(
            where=host,
            what=f"{format_bytes(free)} is free in {folder}; "
            f"{f'{copies} checkpoints of this host need' if copies > 1 else f'{noun} of this host needs'} "
            f"{format_bytes(needed)}",
            why="the disk would fill up while saving"
            if copies == 1
            else f"checkpoint.keep = {plan.job.checkpoint.keep}, and the next is written before the oldest is deleted",
            fix="delete old runs, lower checkpoint.keep, or set checkpoint.path to a larger disk",
        )


def expected_saves(plan: Plan) -> int:
    """Return the number of checkpoints of a run without failures: one per interval, and the last; at most one per step.

    Computed with the longest predicted step time, as a slower run saves more often.
    """
    prediction = plan.prediction
    longest_s = plan.duration.training_s * max(1.0, prediction.step_s_high / prediction.step_s)
    return max(1, min(plan.duration.steps, 1 + int(longest_s / plan.reliability.interval_s)))


def check_port(address: str, *, host: str) -> Iterator[Problem]:
    """A port can be bound on the address where other hosts look for this one."""
    try:
        _listen(address).close()
    except OSError as error:
        yield Problem(
            where=host,
            what=f"no port can be bound on {address}: {error.strerror or error}",
            why="no other host could reach its ranks",
            fix="set fault.interface to an address of this host; ip address lists them",
        )


def check_clock(run: Path, now_s: float, *, host: str) -> Iterator[Problem]:
    """The clock advances, and is not behind the last write to the run folder."""
    before = time.monotonic()
    if time.monotonic() < before or now_s < OLDEST_CLOCK_S:
        yield Problem(
            where=host,
            what=f"the clock reads {time.strftime('%Y-%m-%d %H:%M', time.gmtime(max(0.0, now_s)))}",
            why="events of different hosts could not be ordered",
            fix="start chrony or systemd-timesyncd",
        )
        return
    written_s = run.stat().st_mtime
    yield from check_skew(now_s - written_s if now_s < written_s else 0.0, host=host)


def check_link(plan: Plan, address: str, *, host: str) -> Iterator[Problem]:
    """The host's own network stack carries at least a tenth of the plan's assumption; a hundredth on loopback."""
    share = LEAST_LOOPBACK_SHARE if (address or LOOPBACK) == LOOPBACK else LEAST_LINK_SHARE
    least = share * expected_link(plan)
    rate = measure_link(address, enough=least)
    if rate < least:
        yield Problem(
            where=host,
            what=f"its network transfers {format_bytes(rate)}/s on {address or LOOPBACK}, less than "
            f"{share:.0%} of the {format_bytes(expected_link(plan))}/s that the plan assumed",
            why="every other rank would wait for this host",
            fix="stop other programs on it, or measure it again with phalanx probe",
        )


def check_between(plan: Plan, rate: float, *, host: str) -> Iterator[Problem]:
    """The bandwidth between this host and the coordinator's is at least a tenth of the expected one."""
    expected = expected_between(plan)
    if rate < LEAST_LINK_SHARE * expected:
        yield Problem(
            where=host,
            what=f"{format_bytes(rate)}/s between it and the coordinator, less than {LEAST_LINK_SHARE:.0%} of the "
            f"{format_bytes(expected)}/s expected",
            why="every other rank would wait for this host",
            fix="check its cable, MTU and switch; --address selects another network",
        )


def expected_between(plan: Plan) -> float:
    """Return the bytes per second that one TCP connection between two hosts should move.

    CPU ranks communicate over TCP: there it is the plan's network, up to what one connection can carry. The plan's
    figure for GPUs is of RDMA, which this connection does not use: it carries control messages and in-memory
    checkpoints, often over a separate plain network. Those, and a plan for one machine only, are compared with Gigabit
    Ethernet.
    """
    cluster = plan.cluster
    if cluster.accelerator.family != "cpu" or cluster.domains < 2:
        return GIGABIT_BYTES_PER_S
    return min(cluster.nic_bytes_per_s * cluster.domain_devices, LOOPBACK_BYTES_PER_S)


def expected_link(plan: Plan) -> float:
    """Return the bytes per second that a host's network stack should move to itself.

    Only CPU ranks communicate this way. Under GPUs it carries control messages, stores and in-memory checkpoints, and
    is compared with an ordinary machine's loopback instead of NVLink.
    """
    return plan.cluster.link_bytes_per_s if plan.cluster.accelerator.family == "cpu" else LOOPBACK_BYTES_PER_S


def measure_link(address: str, *, enough: float) -> float:
    """Measure bytes per second from this host to itself through `address`: the best of some tries, until it is enough.

    Returns 0 when nothing moves. Starts no thread, because the agent forks.
    """
    best = 0.0
    for _ in range(LINK_TRIES):
        with suppress(OSError):
            best = max(best, _measure_once(address))
        if best >= enough:
            break
    return best


def _measure_once(address: str) -> float:
    # A new listener each time: an unrelated connection spoils only one try.
    with closing(_listen(address)) as listener:
        listener.settimeout(LINK_PATIENCE_S)
        with closing(socket.create_connection(listener.getsockname()[:2], timeout=LINK_PATIENCE_S)) as source:
            target, _ = listener.accept()
            with closing(target):
                return _move(source, target)


def _move(source: socket.socket, target: socket.socket) -> float:
    """Measure bytes per second between two sockets, alternating between sending and receiving a piece."""
    source.setblocking(False)
    target.settimeout(LINK_PATIENCE_S)
    data, buffer = memoryview(bytes(LINK_BYTES)), bytearray(1 << 20)
    sent = received = 0
    start_s = time.perf_counter()
    while received < LINK_BYTES and time.perf_counter() < start_s + LINK_PATIENCE_S:
        with suppress(BlockingIOError):
            sent += source.send(data[sent : sent + len(buffer)]) if sent < LINK_BYTES else 0
        if received < sent:
            received += target.recv_into(buffer)
    return received / (time.perf_counter() - start_s)


def _listen(address: str) -> socket.socket:
    family, _, _, _, place = socket.getaddrinfo(address or LOOPBACK, 0, type=socket.SOCK_STREAM)[0]
    return socket.create_server(place, family=family)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
