"""A real coordinator process against many fake hosts: `python benchmarks/control_plane.py [--hosts 64 1024 16384]`.

Each fake host has its own connection, handshake, hello, status, ready and heartbeats, and 8 slots without processes in
them; several processes share the hosts. A spare host joins once all train. The times are of this machine with the fakes
on it, so they are upper bounds: on a cluster every host pays for its own side.

Beside each time, in brackets, the processor time of the coordinator itself: the same on a busy machine.

    join     first connection to the last host's status
    start    the last status to the last word to go: membership, readiness, go
    rank     one process is lost and replaced in its slot: to the last word to go of the next generation
    host     one host hangs up for good: the same, less the second for which it may come back
    load     processor time of the coordinator per second while everybody trains and beats
    bytes    sent to one host for the lost rank, frames included
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import multiprocessing
import os
import resource
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from phalanx.elastic.channel import Channel, connect
from phalanx.elastic.coordinator_actions import Coordinator
from phalanx.elastic.coordinator_state import SavedState
from phalanx.elastic.election import FileElection, coordinator_address
from phalanx.elastic.handshake import make_secret
from phalanx.elastic.heartbeat_board import Phase, fold_progress
from phalanx.plan.plan import Plan
from phalanx.record.events import EventWriter
from phalanx.record.run import Run, create_run
from phalanx.train.prepare import load_job, make

JOB = Path(__file__).parents[1] / "examples" / "drill.toml"
SIZES = (64, 256, 512, 1024, 4096, 16384)
SLOTS = 8
OVERRIDES = [
    "fault.dead_after_s=60",
    "fault.recovery='replace'",
    "comm.init_timeout_s=600",
]  # a busy machine is no fault
STEADY_S = 10.0
RECONNECT_S = 1.0  # decide.py: for which a host that hung up may come back
LIMIT_S = 600.0


@dataclass(kw_only=True)
class FakeHost:
    """What an agent would say; it has no processes, only their numbers."""

    number: int
    channel: Channel
    ranks: dict[int, int] = field(default_factory=dict)
    pids: dict[int, int] = field(default_factory=dict)
    digest: str = ""
    generation: int = 0
    went: int = 0
    held_bytes: int = 0
    beat_s: float = 0.0
    every_s: float = 0.25

    @property
    def name(self) -> str:
        return f"host-{self.number:05d}"

    def hear(self, message: dict[str, Any], step: int) -> None:
        kind = message["kind"]
        if kind == "form":
            self.ranks = (
                {int(slot): rank for slot, rank in message["ranks"].items()} if "ranks" in message else self.ranks
            )
            self.generation, self.digest = message["epoch"], message["digest"]
            self.channel.send(self._ready(step))
        elif kind == "go":
            self.went = message["epoch"]
        elif kind == "beat":
            self.every_s = message["every_s"]

    def _ready(self, step: int) -> dict[str, Any]:
        """As an agent whose host holds its own copies and those of the host before it, of two steps."""
        first, world = min(self.ranks.values(), default=0), 0
        held = []
        if self.generation > 1 and self.ranks:
            world = FakeHost.world
            before = (first - SLOTS) % world
            spans = [[first, first + SLOTS - 1], [before, before + SLOTS - 1]]
            held = [[1, step - back, world, spans, spans] for back in (0, 1)]
        return {
            "kind": "ready",
            "epoch": self.generation,
            "ports": {str(slot): [7000, 8000 + slot] for slot in self.ranks},
            "held": held,
            "collectives": {"all_gather of 1048576 float32": sorted(self.ranks)} if self.generation > 1 else {},
            "time": time.time(),
        }

    def beat(self, now_s: float, step: int) -> None:
        progress = {slot: (step, int(Phase.TRAINING), 0.1) for slot in self.ranks} if self.went else {}
        self.channel.send({"kind": "beat", "epoch": self.generation, **fold_progress(progress)})
        self.beat_s = now_s

    world = 0  # of the membership, all hosts alike


def serve_hosts(line: Connection, run: Run, numbers: Sequence[int], world: int) -> None:
    """One process with many hosts. It is told `join`, `lose`, `leave` and `end`, and tells how far its hosts are."""
    FakeHost.world = world
    _allow_descriptors()
    secret = bytes.fromhex((run.path / "secret").read_text().strip())
    where = None
    while where is None:
        where = coordinator_address(run)
        time.sleep(0.01)
    line.recv()
    selector, hosts = selectors.DefaultSelector(), []

    def join(number: int) -> None:
        hello = {"role": "agent", "host": f"host-{number:05d}", "id": str(number), "address": "127.0.0.1"}
        channel = connect(where, secret, {**hello, "epoch": 0, "time": time.time()}, timeout_s=60.0)
        host = FakeHost(number=number, channel=channel, pids={slot: 1 + number * SLOTS + slot for slot in range(SLOTS)})
        channel.send({"kind": "status", "slots": host.pids, "epoch": 0, "digest": "", "went": 0, "wishes": 0})
        selector.register(channel, selectors.EVENT_READ, host)
        hosts.append(host)

    for number in numbers:
        join(number)
    line.send(("joined", time.monotonic()))
    step, told, began_s = 10, 0, time.monotonic()
    received = 0
    waiting = {host.number for host in hosts}
    while True:
        for key, _ in selector.select(0.005):
            host = key.data
            for message in host.channel.receive():
                if message["kind"] != "beat":
                    received += len(json.dumps(message, separators=(",", ":"))) + 48  # prefix and HMAC
                was = host.went
                host.hear(message, step)
                if host.went > was:
                    waiting.discard(host.number)
        now = time.monotonic()
        step = 10 + int(now - began_s)
        if hosts and not waiting:
            told += 1
            line.send(("went", now, received))
            received, waiting = 0, {host.number for host in hosts}
        for host in hosts:
            if now - host.beat_s >= host.every_s:
                if host.beat_s == 0.0:  # hosts of a cluster do not beat all at once
                    host.beat_s = now - host.every_s * ((host.number * 0.618) % 1.0)
                    continue
                host.beat(now, step)
        if line.poll():
            order = line.recv()
            if order == "end":
                return
            if order == "spare":  # one more host, so that a lost one is replaced
                join(world // SLOTS)
                waiting.add(world // SLOTS)
                continue
            victim = hosts[0]
            if order == "lose":
                pid, victim.pids[0] = victim.pids[0], victim.pids[0] + 10**7
                failure = {"rank": 0, "step": step, "at_s": time.time(), "kind": "Signal", "message": "killed"}
                lost = {"slot": 0, "pid": pid, "epoch": victim.generation, "leaving": False, "failure": failure}
                victim.channel.send({"kind": "lost", **lost, "out_of_memory": False})
                victim.channel.send({"kind": "up", "slots": {0: victim.pids[0]}})
            elif order == "leave":
                selector.unregister(victim.channel)
                victim.channel.close()
                hosts.remove(victim)
                waiting.discard(victim.number)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    hosts: int
    join_s: float
    start_s: float
    begin_cpu_s: float  # of both together
    load: float
    rank_s: float
    rank_cpu_s: float
    rank_bytes: float
    host_s: float
    host_cpu_s: float
    memory_mb: float


def measure(hosts: int, *, processes: int) -> Row:
    """One size: start a coordinator, join, train for a while, lose a rank, lose a host."""
    with tempfile.TemporaryDirectory() as folder:
        run = _make_run(Path(folder), hosts)
        command = [sys.executable, "-P", "-m", "phalanx.elastic.coordinator", str(run.path), "127.0.0.1", "0"]
        coordinator = subprocess.Popen(command)
        lines, children = [], []
        context = multiprocessing.get_context("fork")
        try:
            for number in range(processes):
                ours, theirs = context.Pipe()
                share = range(number, hosts, processes)
                child = context.Process(target=serve_hosts, args=(theirs, run, share, SLOTS * hosts), daemon=True)
                child.start()
                lines.append(ours)
                children.append(child)
            while coordinator_address(run) is None:
                time.sleep(0.01)
            began_s, spent = time.monotonic(), _processor_s(coordinator.pid)
            for line in lines:
                line.send("join")
            joined_s = max(_await(line, "joined")[1] for line in lines)
            went_s = max(_await(line, "went")[1] for line in lines)
            begin_cpu_s = _processor_s(coordinator.pid) - spent
            lines[-1].send("spare")
            time.sleep(2.0)  # first heartbeats, and their rhythm
            before, before_s = _processor_s(coordinator.pid), time.monotonic()
            time.sleep(STEADY_S)
            load = (_processor_s(coordinator.pid) - before) / (time.monotonic() - before_s)
            lost_s, spent = time.monotonic(), _processor_s(coordinator.pid)
            lines[0].send("lose")
            told = [_await(line, "went") for line in lines]
            rank_cpu_s = _processor_s(coordinator.pid) - spent
            rank_s, rank_bytes = max(one[1] for one in told) - lost_s, sum(one[2] for one in told) / hosts
            time.sleep(1.0)
            gone_s, spent = time.monotonic(), _processor_s(coordinator.pid)
            lines[0].send("leave")
            host_s = max(_await(line, "went")[1] for line in lines) - gone_s - RECONNECT_S
            host_cpu_s = _processor_s(coordinator.pid) - spent
            memory = int(Path(f"/proc/{coordinator.pid}/statm").read_text().split()[1]) * resource.getpagesize() / 1e6
            for line in lines:
                line.send("end")
            return Row(
                hosts=hosts,
                join_s=joined_s - began_s,
                start_s=went_s - joined_s,
                begin_cpu_s=begin_cpu_s,
                load=load,
                rank_s=rank_s,
                rank_cpu_s=rank_cpu_s,
                rank_bytes=rank_bytes,
                host_s=host_s,
                host_cpu_s=host_cpu_s,
                memory_mb=memory,
            )
        finally:
            coordinator.kill()
            coordinator.wait()
            for child in children:
                child.kill()
                child.join()


class SilentChannel:
    """Keeps what a fake host says, for `decisions`."""

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> None:
        self.said.append(message)


def decisions(hosts: int) -> dict[str, float]:
    """Processor time of everything but the connections: decisions, events, and what is written down."""
    gc.set_threshold(100_000, 50, 100)  # as the coordinator
    FakeHost.world = SLOTS * hosts
    with tempfile.TemporaryDirectory() as folder:
        run = _make_run(Path(folder), hosts)
        plan = Plan.from_json(run.plan_json.read_text(), where="plan")
        sent: list[tuple[Sequence[str], dict[str, Any]]] = []
        election = FileElection(run, started_s=float(run.launch()["launched"]))
        assert election.take()
        coordinator = Coordinator(
            run,
            plan,
            lambda names, message: sent.append((names, message)),
            EventWriter(run.supervisor, rank=-1),
            saved=SavedState(),
            save=lambda saved: election.save(saved, ("127.0.0.1", 1)),
        )
        fakes = {
            f"host-{number:05d}": FakeHost(
                number=number,
                channel=SilentChannel(),  # type: ignore[arg-type]
                pids={slot: 1 + number * SLOTS + slot for slot in range(SLOTS)},
            )
            for number in range(hosts)
        }

        def join() -> None:
            for name, host in fakes.items():
                hello = {"host": name, "address": "127.0.0.1", "time": time.time()}
                coordinator.hear(name, {"kind": "joined", "hello": hello})
                told = {"epoch": 0, "digest": "", "went": 0, "wishes": 0}
                coordinator.hear(name, {"kind": "status", "slots": host.pids, **told})

        def answer() -> None:
            for name, host in fakes.items():
                said, host.channel.said = host.channel.said, []  # type: ignore[attr-defined]
                for message in said:
                    coordinator.hear(name, message)

        def timed(*calls: Callable[[], None]) -> float:
            spent = 0.0
            for call in calls:
                began_s = time.process_time()
                call()
                spent += time.process_time() - began_s
                told, sent[:] = list(sent), []
                for names, message in told:
                    for name in names:
                        fakes[name].hear(message, 10)
            return spent

        found = {"join": timed(join), "start": timed(coordinator.tick, answer, coordinator.tick)}
        for host in fakes.values():
            host.beat(1.0, 10)
        found["heartbeat of each"] = timed(answer)
        victim = fakes["host-00000"]
        failure = {"rank": 0, "step": 10, "at_s": time.time(), "kind": "Signal", "message": "killed"}
        lost = {"slot": 0, "pid": victim.pids[0], "epoch": 1, "leaving": False, "failure": failure}
        coordinator.hear(victim.name, {"kind": "lost", **lost, "out_of_memory": False})
        coordinator.hear(victim.name, {"kind": "up", "slots": {0: 10**7}})
        found["rank lost"] = timed(coordinator.tick, answer, coordinator.tick)
        assert {host.went for host in fakes.values()} == {2}
        return found


def print_decisions(sizes: Sequence[int]) -> None:
    rows = {hosts: decisions(hosts) for hosts in sizes}
    print("| hosts (GPUs) | " + " | ".join(next(iter(rows.values()))) + " |\n|---|---|---|---|---|")
    for hosts, row in rows.items():
        print(f"| {hosts:,} ({SLOTS * hosts:,}) | " + " | ".join(f"{value:.3f} s" for value in row.values()) + " |")
    first, last = sizes[0], sizes[-1]
    if last > first:
        grows = math.log(last / first)
        slopes = ", ".join(
            f"{name} {math.log(rows[last][name] / rows[first][name]) / grows:.2f}" for name in rows[last]
        )
        print(f"\nslope from {first:,} to {last:,}: {slopes}")


def _make_run(folder: Path, hosts: int) -> Run:
    """A run of 8 ranks on each host."""
    job = load_job(str(JOB), overrides=OVERRIDES, cluster=None, steps=0)
    plan = make(job)
    world = SLOTS * hosts
    layout = replace(plan.layout, data=world, shard=world, accumulation=1)
    run = create_run(folder, "plane", job_toml="", job={}, plan_json=replace(plan, layout=layout).to_json())
    names = [f"host-{number:05d}" for number in range(hosts)]
    make_secret(run.path / "secret")
    run.set_launch(hosts=names, slots=[SLOTS] * hosts, launched=time.time())
    run.set_status("launching")
    return run


def _await(line: Connection, kind: str) -> Any:
    if not line.poll(LIMIT_S):
        raise TimeoutError(f"not {kind} within {LIMIT_S:g} s")
    told = line.recv()
    assert told[0] == kind, told
    return told


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _allow_descriptors() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _slope(rows: Sequence[Row], name: str) -> float:
    """The power of the number of hosts with which a time grows, between the smallest from 1,024 on and the largest."""
    first, last = next(row for row in rows if row.hosts >= 1024), rows[-1]
    ratio = max(getattr(last, name), 1e-3) / max(getattr(first, name), 1e-3)
    return math.log(ratio) / math.log(last.hosts / first.hosts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--processes", type=int, default=4, help="that share the fake hosts")
    parser.add_argument("--decisions", action="store_true", help="only the coordinator's own work, without connections")
    called = parser.parse_args()
    if called.decisions:
        print_decisions(sorted(called.hosts))
        return
    _allow_descriptors()
    print("| hosts (GPUs) | join | start | load of a core | rank lost | bytes a host | host lost | memory |")
    print("|---|---|---|---|---|---|---|---|")
    rows = []
    for hosts in sorted(called.hosts):
        row = measure(hosts, processes=called.processes)
        rows.append(row)
        print(
            f"| {row.hosts:,} ({SLOTS * row.hosts:,}) | {row.join_s:.2f} s | {row.start_s:.2f} s "
            f"({row.begin_cpu_s:.2f} s with join) | {row.load:.1%} | {row.rank_s:.2f} s ({row.rank_cpu_s:.2f} s) | "
            f"{row.rank_bytes:,.0f} | {row.host_s:.2f} s ({row.host_cpu_s:.2f} s) | {row.memory_mb:,.0f} MB |",
            flush=True,
        )
    if rows[-1].hosts > 1024 and any(row.hosts >= 1024 for row in rows[:-1]):
        slopes = ", ".join(
            f"{name} {_slope(rows, name):.2f}"
            for name in ("begin_cpu_s", "load", "rank_cpu_s", "host_cpu_s", "rank_bytes")
        )
        print(f"\nslope from {next(row.hosts for row in rows if row.hosts >= 1024):,} to {rows[-1].hosts:,}: {slopes}")


if __name__ == "__main__":
    main()
