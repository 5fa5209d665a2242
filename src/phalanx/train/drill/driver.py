"""Inject the faults of a drill that act from outside the ranks: signals, disks, ports, network links, damaged files.

The process that launched the run calls `FaultDriver.tick` repeatedly while the run is under way.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from phalanx.record.events import Event, EventReader
from phalanx.record.run import Run
from phalanx.train.drill import firings
from phalanx.train.drill.faults import Fault
from phalanx.train.drill.machine_faults import (
    BusyCore,
    fill_disk,
    free_disk,
    listening_ports,
    send_strangers,
    set_writable,
)
from phalanx.train.drill.network import DrillNetwork
from phalanx.units import MINUTE_S, plural

TAKEN_PORTS = 500  # of the loopback, when ports are to be taken
ENDED = ("done", "stopped", "failed")
# Seconds that the processes of a run get to exit after its end. An agent that was restarted shortly before the end
# imports first: more than 40 s where eight drills shared two cores.
LEAVE_S = 120.0


class DrillStuck(Exception):
    """Raised when a run makes no progress or does not exit; the launcher then ends the processes of the run."""


class FaultDriver:
    """Follow the event files of a run and inject each fault when it is due.

    `hosts` are the host names in the order in which faults number them; `minutes` and `until_step` end the run early.
    """

    def __init__(
        self,
        run: Run,
        faults: Sequence[Fault],
        *,
        hosts: Sequence[str],
        net: DrillNetwork | None = None,
        minutes: float = 0.0,
        until_step: int | None = None,
        patience_s: float = 300.0,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._run, self._hosts, self._net = run, list(hosts), net
        self._outside = [fault for fault in faults if not fault.of.inside]
        self._texts = {fault.id: fault.text for fault in faults}
        self._wakes = {fault.id: fault.for_s for fault in faults if fault.kind == "hang" and fault.for_s}
        self._seen: set[str] = set()
        self._tell = tell
        self._minutes, self._until_step = minutes, until_step
        self._supervisor = EventReader(run.path / "supervisor.jsonl")
        self._ranks = EventReader(run.events(0))
        self._agents: dict[str, int] = {}  # host -> process
        self._pids: dict[int, int] = {}  # rank -> process
        self._later: list[tuple[float, Callable[[], object]]] = []
        self.generation, self.step = 0, -1
        self._first_s: float | None = None
        self._patience_s, self._moved_s = patience_s, time.monotonic()
        self._ended_s: float | None = None

    def tick(self) -> None:
        """Read new events, undo expired faults, inject due ones.

        Raises DrillStuck when the run stopped making progress.
        """
        for event in self._supervisor.read():
            self._note_event(event)
        for event in self._ranks.read():
            if event["event"] == "step":
                if self._first_s is None:
                    self._first_s = time.monotonic()
                    firings.start_clock(self._run)
                self.step, self._moved_s = int(event["step"]), time.monotonic()
        now = time.monotonic()
        for entry in [entry for entry in self._later if entry[0] <= now]:
            self._later.remove(entry)
            entry[1]()
        self._follow_faults()
        for fault in [fault for fault in self._outside if self._is_due(fault)]:
            if self._fire_fault(fault):
                self._outside.remove(fault)
        self._stop_in_time()
        self._give_up()

    def close(self) -> None:
        """Undo all faults that are still active."""
        for _, undo in self._later:
            undo()
        self._later.clear()

    # ---- following -------------------------------------------------------------------------------------------------

    def _note_event(self, event: Event) -> None:
        self._moved_s = time.monotonic()
        if event["event"] != "epoch":
            return
        self.generation = int(event["epoch"])
        self._pids = {int(member["rank"]): int(member.get("pid") or 0) for member in event.get("members") or ()}
        for member in event.get("members") or ():
            agent = parent_of(int(member.get("pid") or 0))
            if agent is not None and agent > 1:
                self._agents[str(member["host"])] = agent

    def _is_due(self, fault: Fault) -> bool:
        if self._first_s is None:
            return False
        if fault.at_s is not None:
            return time.monotonic() >= self._first_s + fault.at_s
        return self.step >= (fault.step or 0)

    def _stop_in_time(self) -> None:
        over = self._until_step is not None and self.step + 1 >= self._until_step
        if self._minutes and self._first_s is not None:
            over = over or time.monotonic() >= self._first_s + self._minutes * MINUTE_S
        if over:
            self._run.stop_file.touch()
            self._minutes, self._until_step = 0.0, None

    def _give_up(self) -> None:
        """Raise DrillStuck when the run made no progress for `patience_s`, or is still alive LEAVE_S after its end."""
        now = time.monotonic()
        if now - self._moved_s > self._patience_s:
            raise DrillStuck(f"no step and no event for {self._patience_s:g} s, after step {self.step}")
        if self._run.status().get("state") in ENDED:
            self._ended_s = self._ended_s or now
            if now - self._ended_s > LEAVE_S:
                raise DrillStuck(f"its processes are still there {LEAVE_S:g} s after its end")

    def _follow_faults(self) -> None:
        """Report the faults that fired, and schedule SIGCONT for a rank that stopped itself by a limited `hang`."""
        for firing in firings.new_firings(self._run, self._seen):
            whom = f"rank {firing.rank}" if firing.rank >= 0 else firing.host
            fault_text = self._texts.get(firing.id, firing.kind)
            self._tell(f"  generation {firing.epoch}, step {firing.step}: {fault_text} {whom}".rstrip())
            for_s = self._wakes.get(firing.id)
            if for_s is not None:
                due_s = time.monotonic() + firing.t_s + for_s - time.time()
                self._later.append((due_s, lambda pid=firing.pid: signal_processes([pid], signal.SIGCONT)))  # type: ignore[misc]

    # ---- firing ----------------------------------------------------------------------------------------------------

    def _fire_fault(self, fault: Fault) -> bool:
        """Inject a fault; False when its target does not exist yet, so that the next tick tries again."""
        host = self._hosts[fault.host % len(self._hosts)]
        match fault.kind:
            case "host" | "freeze":
                return self._hit_host(fault, host)
            case "coordinator":
                pid = coordinator_of(self._run)
                return pid is not None and self._signal_processes(fault, [pid], signal.SIGKILL)
            case "sigterm":
                return self._signal_processes(
                    fault,
                    [os.getpid()],
                    signal.SIGTERM,
                    # The process that launched the run is this one; its signal handler stops the run.
                )
            case "damage":
                return self._damage(fault)
            case "port":
                return self._take_ports(fault)
            case "fill-disk":
                return self._fill_disk(fault)
            case "read-only":
                return self._forbid_writing(fault)
            case "strangers":
                return self._send_strangers(fault)
            case "busy-core":
                return self._take_core(fault)
        return self._hit_link(fault, host)

    def _claim_fault(self, fault: Fault, *, host: str = "", note: str = "") -> bool:
        return firings.claim_firing(self._run, fault, host=host, epoch=self.generation, step=self.step, note=note)

    def _signal_processes(self, fault: Fault, pids: list[int], number: signal.Signals, host: str = "") -> bool:
        if self._claim_fault(fault, host=host, note=f"{number.name} to {plural(len(pids), 'process')}"):
            signal_processes(pids, number)
        return True

    def _hit_host(self, fault: Fault, host: str) -> bool:
        if fault.how == "coordinator":
            pid = coordinator_of(self._run)
            holder = parent_of(pid) if pid is not None else None
            host = next((name for name, agent in self._agents.items() if agent == holder), "")
        agent = self._agents.get(host)
        if agent is None or parent_of(agent) is None:
            # It is down already: wait until it is back.
            return False
        # The agent first: it must not record that its ranks ended.
        pids = [agent, *children_of(agent)]
        if fault.kind == "host":
            return self._signal_processes(fault, pids, signal.SIGKILL, host)
        self._undo_later(fault, lambda: signal_processes(pids, signal.SIGCONT))
        return self._signal_processes(fault, pids, signal.SIGSTOP, host)

    def _damage(self, fault: Fault) -> bool:
        step = max(self._run.saved_steps(), default=None)
        if step is None:
            return False
        if self._claim_fault(fault, note=f"step-{step:08d}: {fault.how}"):
            damage_checkpoint(self._run, step, how=fault.how, seed=fault.seed)
        return True

    def _take_ports(self, fault: Fault) -> bool:
        if self._claim_fault(fault, note=f"{TAKEN_PORTS} ports of the loopback"):
            servers: list[socket.socket] = []
            # Out of descriptors: the ports bound so far are enough.
            with suppress(OSError):
                servers += [socket.create_server(("127.0.0.1", 0)) for _ in range(TAKEN_PORTS)]
            self._later.append((time.monotonic() + 5.0, lambda: _close_sockets(servers)))
        return True

    def _fill_disk(self, fault: Fault) -> bool:
        root = self._run.checkpoints
        if isinstance(root, str) or not os.path.ismount(root):
            # Fill only a file system that the drill mounted itself.
            return False
        if self._claim_fault(fault, note=str(root)):
            fill_disk(root)
            self._undo_later(fault, lambda: free_disk(root))
        return True

    def _forbid_writing(self, fault: Fault) -> bool:
        root = self._run.checkpoints
        if isinstance(root, str) or not set_writable(root, False):
            return False
        self._claim_fault(fault, note=str(root))
        self._undo_later(fault, lambda: set_writable(root, True))
        return True

    def _send_strangers(self, fault: Fault) -> bool:
        agents = [agent for agent in self._agents.values() if parent_of(agent) is not None]
        ports = listening_ports([*agents, *(child for agent in agents for child in children_of(agent))])
        if ports and self._claim_fault(fault, note=f"to {plural(len(ports), 'port')}"):
            threading.Thread(target=send_strangers, args=(ports,), daemon=True).start()
        return bool(ports)

    def _take_core(self, fault: Fault) -> bool:
        pids = {rank % len(self._pids): self._pids[rank % len(self._pids)] for rank in fault.rank if self._pids}
        if any(parent_of(pid) is None for pid in pids.values()):
            # The process was replaced: the next membership names its successor.
            return False
        for rank, pid in pids.items():
            if firings.claim_firing(
                self._run, fault, whom=rank, rank=rank, epoch=self.generation, step=self.step, pid=pid
            ):
                self._undo_later(fault, BusyCore(pid, fault.share).close)
        return bool(pids)

    def _hit_link(self, fault: Fault, host: str) -> bool:
        assert self._net is not None
        net, number = self._net, self._hosts.index(host)
        if self._claim_fault(fault, host=host):
            match fault.kind:
                case "partition":
                    net.cut(number)
                case "slow-link":
                    net.slow(number, fault.sleep_s)
                case _:
                    net.lose(number, fault.share)
            self._undo_later(fault, lambda: net.heal(number))
        return True

    def _undo_later(self, fault: Fault, undo: Callable[[], object]) -> None:
        if fault.for_s:
            self._later.append((time.monotonic() + fault.for_s, undo))


def _close_sockets(taken: Sequence[socket.socket]) -> None:
    for server in taken:
        server.close()


# Damage to a checkpoint, of the kinds that disks and people cause.


def damage_checkpoint(run: Run, step: int, *, how: str, seed: int) -> str:
    """Damage one file of the checkpoint of a step; returns a description, or "" when the checkpoint does not exist."""
    try:
        return _damage(run, step, how=how, seed=seed)
    except (OSError, StopIteration):
        # The checkpoint was pruned at the same time.
        return ""


def _damage(run: Run, step: int, *, how: str, seed: int) -> str:
    root = run.checkpoints
    # Object stores are never damaged.
    if isinstance(root, str):
        return ""
    draw = random.Random(seed)
    # The folder name of a commit, as train.state.paths defines it.
    folder = next(root.glob(f"step-*{step:08d}"))
    files = sorted(path for path in folder.iterdir() if path.suffix == ".safetensors")
    if not files:
        return ""
    path = folder / "manifest.json" if how == "manifest" else files[draw.randrange(len(files))]
    match how:
        case "flip" | "manifest":
            damage = _flip_file(path, draw)
        case "truncate":
            damage = _truncate_file(path, draw)
        case "swap":
            damage = _swap_files(path, files[(files.index(path) + 1) % len(files)])
        case _:
            path.unlink()
            damage = "deleted"
    return f"{folder.name}/{path.name}: {damage}"


def _flip_file(path: Path, draw: random.Random) -> str:
    data = bytearray(path.read_bytes())
    place, bit = draw.randrange(len(data)), draw.randrange(8)
    data[place] ^= 1 << bit
    path.write_bytes(data)
    return f"bit {bit} of byte {place:,} flipped"


def _truncate_file(path: Path, draw: random.Random) -> str:
    size = path.stat().st_size
    kept_bytes = draw.randrange(size)
    with path.open("r+b") as file:
        file.truncate(kept_bytes)
    return f"cut from {size:,} to {kept_bytes:,} bytes"


def _swap_files(first: Path, second: Path) -> str:
    if first == second:
        return "nothing to swap with"
    aside = first.with_suffix(".aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
    return f"swapped with {second.name}"


# The processes of a run, found through the ranks that its record names; a drill touches no other processes.

COORDINATOR = "phalanx.elastic.coordinator"


def parent_of(pid: int) -> int | None:
    """Return the parent's process id, or None when the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # Split after the last bracket: the command name inside the brackets may contain any characters.
    return int(text.rpartition(")")[2].split()[1])


def children_of(pid: int) -> list[int]:
    """Return the direct children of a process, including spare ranks and the coordinator."""
    return [child for child in _all_pids() if parent_of(child) == pid]


def command_of(pid: int) -> list[str]:
    """Return the command line of a process; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return []


def coordinator_of(run: Run) -> int | None:
    """Return the process id of the run's coordinator; None when there is none."""
    return next(
        (pid for pid in _all_pids() if COORDINATOR in (words := command_of(pid)) and str(run.path) in words), None
    )


def signal_processes(pids: list[int], number: signal.Signals) -> int:
    """Send a signal to the processes and return how many of them still existed."""
    reached = 0
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            reached += 1
    return reached


def _all_pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
