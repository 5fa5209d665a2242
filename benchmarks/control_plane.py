"""A real coordinator process against many fake hosts: `python benchmarks/control_plane.py [--hosts 64 1024 16384]`.

Each fake host (fake_hosts.py) has its own connection, handshake, hello, status, ready and heartbeats, and 8 slots
without processes in them; several processes share the hosts. The times are of this machine with the fakes on it, so
they are upper bounds: on a cluster every host pays for its own side. Beside each time, in brackets, the processor time
of the coordinator itself, which is nearly the same on a busy machine.

    join         first connection to the last host's status
    start        the last status to the last word to go: membership, readiness, go
    rank lost    one process is lost and replaced in its slot: to the last word to go of the next generation
    host gone    one host hangs up for good: the same, less the second for which it may come back
    host silent  one host says nothing any more: the same, less fault.dead_after_s since its last word
    killed       the coordinator's process is killed: until every host is back at the next one
    frozen       it is stopped (SIGSTOP), as if its host were gone without a word: the same
    load         processor time of the coordinator per second while everybody trains and beats
    bytes        sent to one host for the lost rank, frames included
"""

from __future__ import annotations

import argparse
import gc
import math
import multiprocessing
import os
import platform
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fake_hosts import SLOTS, TRAINING, ready_message, serve_hosts

from phalanx.elastic.coordinator_actions import Coordinator
from phalanx.elastic.coordinator_memory import CoordinatorMemory, known_coordinator
from phalanx.elastic.coordinator_plan import CoordinatorPlan
from phalanx.elastic.coordinator_state import SavedState, Send
from phalanx.elastic.decide_silence import RECONNECT_S
from phalanx.elastic.file_election import FileElection, Watched, read_sign
from phalanx.elastic.handshake import make_secret
from phalanx.elastic.heartbeat_board import WATCHER_SIGN_S, sign_every_s
from phalanx.elastic.host_agent import DISK_S, QUIET_S, turn_s
from phalanx.record.events import EventWriter
from phalanx.record.run import Run, create_run
from phalanx.train.prepare import load_job, plan_for_run

JOB = Path(__file__).parents[1] / "examples" / "drill.toml"
SIZES = (64, 256, 512, 1024, 4096, 16384)
DEAD_AFTER_S = 16.0  # more with --dead-after where other work keeps the fakes from beating in time
OVERRIDES = ["fault.recovery='replace'", "comm.init_timeout_s=600"]
STEADY_S = 10.0
LIMIT_S = 300.0
FLOORS: dict[int, dict[str, float]] = {
    1024: {"start_s": 0.5, "rank_s": 0.3, "load": 0.05},
    16384: {
        "start_s": 10.0,
        "rank_s": 3.0,
        "gone_s": 3.0,
        "silent_s": 3.0,
        "killed_s": 8.0,
        "frozen_s": 8.0,
        "load": 0.5,
    },
}


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
    gone_s: float
    gone_cpu_s: float
    silent_s: float
    silent_cpu_s: float
    killed_s: float
    killed_cpu_s: float
    frozen_s: float
    frozen_cpu_s: float
    memory_mb: float
    load_average: float


class Plane:
    """A coordinator and the fake hosts of one size."""

    def __init__(self, folder: Path, hosts: int, *, processes: int, dead_after_s: float) -> None:
        self.run, self.num_hosts = _make_run(folder, hosts, dead_after_s), hosts
        self.coordinator = self._start()
        self.frozen: list[subprocess.Popen[bytes]] = []
        self.lines: list[Connection] = []
        self.children: list[Any] = []
        context = multiprocessing.get_context("fork")
        for number in range(processes):
            ours, theirs = context.Pipe()
            share = range(number, hosts, processes)
            child = context.Process(target=serve_hosts, args=(theirs, self.run, share, SLOTS * hosts), daemon=True)
            child.start()
            self.lines.append(ours)
            self.children.append(child)

    def _start(self, watched: Watched | None = None) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "phalanx.elastic.coordinator", str(self.run.path), "127.0.0.1", "0"]
        return subprocess.Popen([*command, "-1", "file", str(watched or "")])

    def end(self) -> None:
        for process in (self.coordinator, *self.frozen):
            process.kill()
            process.wait()
        for child in self.children:
            child.kill()
            child.join()

    def spent_s(self) -> float:
        return _processor_s(self.coordinator.pid)

    def wait_all(self, kind: str) -> list[Any]:
        return [_await(line, kind) for line in self.lines]

    def went(self, began_s: float, order: str) -> tuple[float, float, float]:
        """Say something to the first process of hosts; seconds and processor time until all went, and bytes a host."""
        spent = self.spent_s()
        self.lines[0].send(order)
        told = self.wait_all("went")
        return (
            max(one[1] for one in told) - began_s,
            self.spent_s() - spent,
            sum(one[2] for one in told) / self.num_hosts,
        )

    def back(self, began_s: float) -> tuple[float, float]:
        """Wait until all hosts are at the coordinator that was started last; that nobody was told to form is seen."""
        joined_s = max(one[1] for one in self.wait_all("joined")) - began_s
        time.sleep(2.0)
        for line in self.lines:
            line.send("forms")
        assert sum(one[1] for one in self.wait_all("forms")) == 0, "training was disturbed"
        return joined_s, self.spent_s()

    def kill(self) -> tuple[float, float]:
        """The agent of its host sees its end at once, and starts the next."""
        began_s = time.monotonic()
        self.coordinator.kill()
        self.coordinator.wait()
        self.coordinator = self._start()
        return self.back(began_s)

    def freeze(self) -> tuple[float, float]:
        """The agent of the second host watches the count, hears nothing, and starts the next when its turn has come."""
        term, count = read_sign(self.run)
        watched = Watched(term=term, count=count, since_s=time.monotonic())
        began_s = time.monotonic()
        os.kill(self.coordinator.pid, signal.SIGSTOP)
        self.frozen.append(self.coordinator)
        until_s = began_s + min(sign_every_s(self.num_hosts), WATCHER_SIGN_S) + QUIET_S + turn_s(1)
        while time.monotonic() < until_s:
            time.sleep(min(DISK_S, max(0.0, until_s - time.monotonic())))
            term, count = read_sign(self.run)
            if (term, count) != (watched.term, watched.count):
                watched = Watched(term=term, count=count, since_s=time.monotonic())
        self.coordinator = self._start(watched)
        return self.back(began_s)


def measure(hosts: int, *, processes: int, dead_after_s: float) -> Row:
    """One size: start a coordinator, join, train for a while, lose a rank, two hosts and two coordinators."""
    with tempfile.TemporaryDirectory() as folder:
        plane = Plane(Path(folder), hosts, processes=processes, dead_after_s=dead_after_s)
        try:
            while known_coordinator(plane.run) is None:
                time.sleep(0.01)
            began_s, spent = time.monotonic(), plane.spent_s()
            for line in plane.lines:
                line.send("join")
            joined_s = max(one[1] for one in plane.wait_all("joined"))
            went_s = max(one[1] for one in plane.wait_all("went"))
            begin_cpu_s = plane.spent_s() - spent
            for spare in (hosts, hosts + 1):
                plane.lines[-1].send(f"spare {spare}")
                _await(plane.lines[-1], "joined")
            for line in plane.lines:
                line.send("forms")
            plane.wait_all("forms")
            time.sleep(5.0)  # first heartbeats, and their rhythm
            before, before_s = plane.spent_s(), time.monotonic()
            time.sleep(STEADY_S)
            load = (plane.spent_s() - before) / (time.monotonic() - before_s)
            rank_s, rank_cpu_s, rank_bytes = plane.went(time.monotonic(), "lose")
            time.sleep(5.0)
            gone_s, gone_cpu_s, _ = plane.went(time.monotonic() + RECONNECT_S, "leave")
            time.sleep(5.0)
            silent_s, silent_cpu_s, _ = plane.went(time.monotonic() + dead_after_s, "mute")
            silent_cpu_s -= load * dead_after_s
            for line in plane.lines:
                line.send("forms")
            plane.wait_all("forms")
            time.sleep(5.0)
            memory = int(Path(f"/proc/{plane.coordinator.pid}/statm").read_text().split()[1])
            killed_s, killed_cpu_s = plane.kill()
            time.sleep(5.0)
            frozen_s, frozen_cpu_s = plane.freeze()
            for line in plane.lines:
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
                gone_s=gone_s,
                gone_cpu_s=gone_cpu_s,
                silent_s=silent_s,
                silent_cpu_s=silent_cpu_s,
                killed_s=killed_s,
                killed_cpu_s=killed_cpu_s,
                frozen_s=frozen_s,
                frozen_cpu_s=frozen_cpu_s,
                memory_mb=memory * resource.getpagesize() / 1e6,
                load_average=os.getloadavg()[0],
            )
        finally:
            plane.end()


def decisions(hosts: int) -> dict[str, float]:
    """Processor time of everything but the connections: decisions, events, and what is written down."""
    gc.set_threshold(1_000_000, 50, 100)  # as the coordinator
    world, clock_s = SLOTS * hosts, 0.0
    names = [f"host-{number:05d}" for number in range(hosts)]
    pids = {name: {slot: 1 + n * SLOTS + slot for slot in range(SLOTS)} for n, name in enumerate(names)}
    ranks: dict[str, dict[int, int]] = {}
    answers: list[tuple[str, dict[str, Any]]] = []
    went: dict[str, int] = {}

    def told(send: Send) -> None:
        for name in send.hosts:
            message = send.message_for(name)
            if message["kind"] == "form":
                if "ranks" in message:
                    ranks[name] = {int(slot): rank for slot, rank in message["ranks"].items()}
                answers.append((name, ready_message(ranks[name], message["epoch"], 10, world)))
            elif message["kind"] == "go":
                went[name] = message["epoch"]

    with tempfile.TemporaryDirectory() as folder:
        run = _make_run(Path(folder), hosts, DEAD_AFTER_S)
        plan = CoordinatorPlan.from_json(run.plan_json.read_text())
        sent: list[Send] = []
        election, memory = FileElection(run), CoordinatorMemory(run, started_s=0.0)
        assert election.take()
        coordinator = Coordinator(
            run,
            plan,
            sent.append,
            EventWriter(run.supervisor, rank=-1),
            saved=SavedState(),
            save=lambda saved: memory.save(saved, ("127.0.0.1", 1), term=election.term),
            clock=lambda: time.monotonic() + clock_s,
        )

        def join(some: Sequence[str]) -> None:
            hear(
                (name, message)
                for name in some
                for message in (
                    {"kind": "joined", "hello": {"host": name, "address": "127.0.0.1", "time": time.time()}},
                    {"kind": "status", "slots": pids[name], "epoch": 0, "digest": "", "went": 0, "wishes": 0},
                )
            )

        def hear(messages: Any) -> None:
            coordinator.hear_all(list(messages))

        def answer() -> None:
            said, answers[:] = list(answers), []
            hear(said)

        def timed(*calls: Callable[[], None]) -> float:
            spent = 0.0
            for call in calls:
                began_s = time.process_time()
                call()
                spent += time.process_time() - began_s
                for send in sent:
                    told(send)
                sent.clear()
            return spent

        found = {"join": timed(partial(join, names)), "start": timed(coordinator.tick, answer, coordinator.tick)}
        answers += [(name, {"kind": "beat", "epoch": 1, "progress": [10, TRAINING, 0.1]}) for name in names]
        found["heartbeat of each"] = timed(answer)
        failure = {"rank": 0, "step": 10, "at_s": time.time(), "kind": "Signal", "message": "killed"}
        lost = {"slot": 0, "pid": pids[names[0]][0], "epoch": 1, "leaving": False, "failure": failure}
        coordinator.hear(names[0], {"kind": "lost", **lost, "out_of_memory": False})
        coordinator.hear(names[0], {"kind": "up", "slots": {0: 10**7}})
        found["rank lost"] = timed(coordinator.tick, answer, coordinator.tick)
        assert set(went.values()) == {2}

        def lose_host() -> None:
            nonlocal clock_s
            hear([(names[1], {"kind": "gone"})])
            for _ in range(3):  # in turns: one pause of a second would be taken for our own, and excuse the host
                clock_s += RECONNECT_S / 3 + 0.1
                coordinator.tick()

        for number in (hosts, hosts + 1):  # whose processes take the place of those of the lost host
            spare = f"host-{number:05d}"
            pids[spare] = {slot: 1 + number * SLOTS + slot for slot in range(SLOTS)}
            names.append(spare)
            timed(partial(join, [spare]))
        found["host lost"] = timed(lose_host, answer, coordinator.tick)
        del went[names[1]]
        assert set(went.values()) == {3}
        return found


def print_decisions(sizes: Sequence[int]) -> None:
    rows = {hosts: decisions(hosts) for hosts in sizes}
    print("| hosts (GPUs) | " + " | ".join(next(iter(rows.values()))) + " |\n|---|---|---|---|---|---|")
    for hosts, row in rows.items():
        print(f"| {hosts:,} ({SLOTS * hosts:,}) | " + " | ".join(f"{value:.3f} s" for value in row.values()) + " |")
    first, last = sizes[0], sizes[-1]
    if last > first:
        grows = math.log(last / first)
        slopes = ", ".join(
            f"{name} {math.log(rows[last][name] / rows[first][name]) / grows:.2f}" for name in rows[last]
        )
        print(f"\nslope from {first:,} to {last:,}: {slopes}")


def _make_run(folder: Path, hosts: int, dead_after_s: float) -> Run:
    """A run of 8 ranks on each host."""
    overrides = [*OVERRIDES, f"fault.dead_after_s={dead_after_s}"]
    job = load_job(str(JOB), overrides=overrides, cluster=None, steps=0)
    plan = plan_for_run(job)
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


def slope(rows: Sequence[Row], name: str) -> float:
    """The power of the number of hosts with which a time grows, between the smallest from 1,024 on and the largest."""
    first, last = next(row for row in rows if row.hosts >= 1024), rows[-1]
    ratio = max(getattr(last, name), 1e-3) / max(getattr(first, name), 1e-3)
    return math.log(ratio) / math.log(last.hosts / first.hosts)


def print_row(row: Row) -> None:
    cells = [
        f"{row.hosts:,} ({SLOTS * row.hosts:,})",
        f"{row.join_s:.2f} s",
        f"{row.start_s:.2f} s ({row.begin_cpu_s:.2f} s with join)",
        f"{row.load:.1%}",
        f"{row.rank_s:.2f} s ({row.rank_cpu_s:.2f} s)",
        f"{row.rank_bytes:,.0f}",
        f"{row.gone_s:.2f} s ({row.gone_cpu_s:.2f} s)",
        f"{row.silent_s:.2f} s ({row.silent_cpu_s:.2f} s)",
        f"{row.killed_s:.2f} s ({row.killed_cpu_s:.2f} s)",
        f"{row.frozen_s:.2f} s ({row.frozen_cpu_s:.2f} s)",
        f"{row.memory_mb:,.0f} MB",
        f"{row.load_average:.1f}",
    ]
    print("| " + " | ".join(cells) + " |", flush=True)


def print_floors(rows: Sequence[Row]) -> None:
    print("\n| floor | seen | |\n|---|---|---|")
    for row in rows:
        for name, most in FLOORS.get(row.hosts, {}).items():
            seen = getattr(row, name)
            what = {"load": "steady load of a core"}.get(name, name.removesuffix("_s").replace("_", " "))
            texts = (f"{most:.0%}", f"{seen:.1%}") if name == "load" else (f"{most:g} s", f"{seen:.2f} s")
            over = f"{seen - most:.1%}" if name == "load" else f"{seen - most:.2f} s"
            verdict = "met" if seen <= most else f"**missed by {over}**"
            print(f"| {row.hosts:,} hosts: {what} ≤ {texts[0]} | {texts[1]} | {verdict} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--processes", type=int, default=4, help="that share the fake hosts")
    parser.add_argument("--dead-after", type=float, default=DEAD_AFTER_S, help="fault.dead_after_s of the run, seconds")
    parser.add_argument("--decisions", action="store_true", help="only the coordinator's own work, without connections")
    called = parser.parse_args()
    if called.decisions:
        print_decisions(sorted(called.hosts))
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, load average {os.getloadavg()[0]:.1f}\n")
    print(
        "| hosts (GPUs) | join | start | load of a core | rank lost | bytes a host | host gone | host silent | "
        "coordinator killed | frozen | memory | load average |"
    )
    print("|" + "---|" * 12, flush=True)
    rows = []
    for hosts in sorted(called.hosts):
        rows.append(measure(hosts, processes=called.processes, dead_after_s=called.dead_after))
        print_row(rows[-1])
    print_floors(rows)
    if rows[-1].hosts > 1024 and any(row.hosts >= 1024 for row in rows[:-1]):
        names = ("begin_cpu_s", "load", "rank_cpu_s", "gone_cpu_s", "killed_cpu_s", "rank_bytes")
        slopes = ", ".join(f"{name} {slope(rows, name):.2f}" for name in names)
        print(f"\nslope from {next(row.hosts for row in rows if row.hosts >= 1024):,} to {rows[-1].hosts:,}: {slopes}")


if __name__ == "__main__":
    main()
