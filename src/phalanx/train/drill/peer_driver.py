"""Drive the peers of a drill: start their processes, inject faults from outside, and restart peers that return."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from phalanx.record.events import EventReader
from phalanx.record.run import Run
from phalanx.train.drill import firings
from phalanx.train.drill.faults import Fault
from phalanx.train.drill.machine_faults import BusyCore
from phalanx.train.drill.peer_cables import Address, PeerCables
from phalanx.train.slow_links.peer_launch import set_addresses, start_process
from phalanx.train.slow_links.peer_session import STATUS, peers_folder, read_session, read_status
from phalanx.units import MINUTE_S, plural

TICK_S = 0.05
# Time for peers to leave after they are asked to.
LEAVE_S = 60.0


@dataclass
class DrilledPeer:
    """One peer of a drill: its number from 1 on, its run, and its process while it has one."""

    number: int
    run: Run
    id: str
    process: subprocess.Popen[bytes] | None = None
    events: EventReader = field(init=False)
    step: int = -1
    rounds: int = 0
    members: int = 0  # in its last round
    back_s: float | None = None  # time.monotonic() at which it is started again
    is_held: bool = False  # stopped by a signal, or cut off
    is_gone: bool = False  # for good: killed or removed without return
    since_s: float = 0.0  # Unix time of its last start

    def __post_init__(self) -> None:
        self.events = EventReader(self.run.events(0))

    @property
    def is_running(self) -> bool:
        """True while its process lives."""
        return self.process is not None and self.process.poll() is None

    @property
    def address(self) -> Address | None:
        """The address where the peer listens; None while it does not."""
        status = read_status(self.run)
        # The file's modification time, because the clock of the peer may be wrong on purpose.
        try:
            written_s = (peers_folder(self.run) / STATUS).stat().st_mtime
        except OSError:
            return None
        if not self.is_running or written_s < self.since_s or "address" not in status:
            return None
        host, port = status["address"]
        return str(host), int(port)


class PeerDriver:
    """Follow the peers until all have ended; `minutes` after the first step they are asked to leave."""

    def __init__(
        self,
        peers: Sequence[DrilledPeer],
        faults: Sequence[Fault],
        *,
        cables: PeerCables | None,
        minutes: float,
        settle_s: float,
        patience_s: float,
        allow_code: bool,
        tell: Callable[[str], None],
    ) -> None:
        self.peers = {peer.number: peer for peer in peers}
        self._owner = peers[0].run
        self._outside = [fault for fault in faults if not fault.of.inside]
        self._skewed = {number for fault in faults if fault.kind == "clock-skew" for number in fault.peer}
        self._cables, self._minutes, self._settle_s = cables, minutes, settle_s
        self._patience_s, self._allow_code, self._tell = patience_s, allow_code, tell
        self._later: list[tuple[float, Callable[[], object]]] = []
        self._first_s: float | None = None
        self._undone_s = self._moved_s = time.monotonic()
        self._undone_round = 0
        self.met_s: float | None = None  # seconds from the last fault's end until all peers were in one round
        self.stuck = ""
        self._asked_s: float | None = None

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Run the drill to its end; no process is left running, even after an exception."""
        first, *later_peers = self.peers.values()
        try:
            self._start(first)
            while first.address is None and first.is_running and not should_stop():
                time.sleep(TICK_S)
            for peer in later_peers:
                self._start(peer)
            while not should_stop() and not self.stuck and self._is_going_on():
                self._tick()
                time.sleep(TICK_S)
        finally:
            for _, undo in self._later:
                undo()
            for peer in self.peers.values():
                if peer.process is not None and peer.is_running:
                    with suppress(ProcessLookupError):
                        peer.process.send_signal(signal.SIGCONT)
                        peer.process.kill()
                if peer.process is not None:
                    peer.process.wait()

    # ---- following -------------------------------------------------------------------------------------------------

    def _is_going_on(self) -> bool:
        return any(peer.is_running and not peer.is_held for peer in self.peers.values()) or (
            self._asked_s is None
            and any(peer.back_s is not None for peer in self.peers.values())
            and any(peer.is_running for peer in self.peers.values())
        )

    def _start(self, peer: DrilledPeer) -> None:
        """Start a peer's process with the current addresses of the others, which change with every process."""
        remote_peers = [remote for remote in self.peers.values() if remote is not peer]
        known = [remote for remote in remote_peers if remote.address is not None]
        routes = (
            {remote.id: self._cables.address(peer.number, remote.number) for remote in remote_peers}
            if self._cables
            else {}
        )
        addresses = [routes.get(remote.id) or remote.address for remote in known]
        if peer.number > 1 or addresses:
            set_addresses(peer.run, [address for address in addresses if address is not None], routes)
        else:
            set_addresses(peer.run, (), routes)
        peer.since_s, peer.back_s = time.time(), None
        peer.process = start_process(peer.run, allow_code=self._allow_code, sharers=len(self.peers))

    def _tick(self) -> None:
        now = time.monotonic()
        for peer in self.peers.values():
            self._follow(peer)
        for entry in [entry for entry in self._later if entry[0] <= now]:
            self._later.remove(entry)
            entry[1]()
            self._mark_undone()
        for fault in [fault for fault in self._outside if self._is_due(fault)]:
            if self._fire_fault(fault):
                self._outside.remove(fault)
                self._mark_undone()
        if now - self._moved_s > self._patience_s:
            self.stuck = f"no round and no step for {self._patience_s:g} s"
        self._stop_in_time(now)

    def _mark_undone(self) -> None:
        self._undone_s, self.met_s = time.monotonic(), None
        self._undone_round = max(peer.rounds for peer in self.peers.values())

    def _follow(self, peer: DrilledPeer) -> None:
        for event in peer.events.read():
            if event["event"] == "step":
                peer.step, self._moved_s = int(event["step"]), time.monotonic()
                if self._first_s is None:
                    self._first_s = time.monotonic()
                    for drilled in self.peers.values():
                        firings.start_clock(drilled.run)
            elif event["event"] == "exchange":
                self._moved_s = time.monotonic()
                peer.rounds, peer.members = int(event["round"]), len(event["members"])
                present = sum(not drilled.is_gone for drilled in self.peers.values())
                if self.met_s is None and peer.members >= present and peer.rounds > self._undone_round:
                    self.met_s = time.monotonic() - self._undone_s

    def _is_due(self, fault: Fault) -> bool:
        if self._first_s is None:
            return False
        if fault.at_s is not None:
            return time.monotonic() >= self._first_s + fault.at_s
        return max(peer.step for peer in self.peers.values()) >= (fault.step or 0)

    def _stop_in_time(self, now: float) -> None:
        """Ask all peers to leave when the time is over, once they have met in a round after the last fault."""
        if self._asked_s is not None:
            if now > self._asked_s + LEAVE_S:
                self.stuck = f"peers are still there {LEAVE_S:g} s after they were asked to leave"
            return
        if not self._minutes or self._first_s is None or now < self._first_s + self._minutes * MINUTE_S:
            return
        is_waiting = bool(self._later) or any(peer.back_s is not None for peer in self.peers.values())
        is_settled = not is_waiting and self.met_s is not None
        if is_settled or (now > self._undone_s + self._settle_s and not is_waiting):
            self._asked_s = now
            self._outside.clear()
            for peer in self.peers.values():
                if peer.process is not None and peer.is_running:
                    peer.process.send_signal(signal.SIGINT)

    # ---- firing ----------------------------------------------------------------------------------------------------

    def _fire_fault(self, fault: Fault) -> bool:
        """Inject a fault; False when its targets are not up, so that the next tick tries again."""
        if fault.kind in ("partition", "slow-link"):
            return self._hit_cables(fault)
        targets = [self.peers[number] for number in fault.peer]
        if not all(peer.is_running and not peer.is_held and peer.address is not None for peer in targets):
            # Already down, or not up yet.
            return False
        if not self._claim(fault):
            return True
        for peer in targets:
            self._hit_peer(fault, peer)
        return True

    def _hit_peer(self, fault: Fault, peer: DrilledPeer) -> None:
        process = peer.process
        assert process is not None
        match fault.kind:
            case "hang":
                peer.is_held = True
                process.send_signal(signal.SIGSTOP)
                self._undo_later(fault, lambda: self._wake(peer))
            case "busy-core":
                self._undo_later(fault, BusyCore(process.pid, fault.share).close)
            case _:
                process.send_signal(signal.SIGKILL if fault.kind == "kill" else signal.SIGINT)
                if fault.for_s:
                    peer.back_s = time.monotonic() + fault.for_s
                    self._later.append((peer.back_s, lambda: self._start_again(peer)))
                else:
                    peer.is_gone = True

    def _start_again(self, peer: DrilledPeer) -> None:
        """Start a peer again; while its old process is still leaving, try again after a second."""
        if peer.is_running:
            self._later.append((time.monotonic() + 1.0, lambda: self._start_again(peer)))
        elif self._asked_s is None:
            self._tell(f"  peer {peer.number} is started again")
            self._start(peer)

    def _wake(self, peer: DrilledPeer) -> None:
        peer.is_held = False
        if peer.process is not None and peer.is_running:
            peer.process.send_signal(signal.SIGCONT)

    def _hit_cables(self, fault: Fault) -> bool:
        assert self._cables is not None
        cables = self._cables
        if self._claim(fault):
            if fault.kind == "partition":
                cables.cut(fault.peer)
            else:
                cables.slow(fault.peer, fault.sleep_s)
            self._undo_later(fault, lambda: cables.heal(fault.peer))
        return True

    def _claim(self, fault: Fault) -> bool:
        step = max(peer.step for peer in self.peers.values())
        count_text = plural(len(fault.peer), "peer")
        self._tell(f"  step {step}: {fault.text}")
        return firings.claim_firing(self._owner, fault, rank=fault.peer[0], step=step, note=count_text)

    def _undo_later(self, fault: Fault, undo: Callable[[], object]) -> None:
        if fault.for_s:
            self._later.append((time.monotonic() + fault.for_s, undo))
        elif fault.kind == "hang":
            for number in fault.peer:
                self.peers[number].is_gone = True


def drilled_peers(runs: Sequence[Run]) -> list[DrilledPeer]:
    """Return the peers of runs that have their sessions, in order of their numbers."""
    from phalanx.peers.identity import PeerIdentity

    peers = []
    for number, run in enumerate(runs, 1):
        read_session(run)
        peers.append(DrilledPeer(number=number, run=run, id=PeerIdentity.load(peers_folder(run)).id))
    return peers
