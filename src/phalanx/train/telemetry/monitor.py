"""The monitor: a background thread of a rank that samples its device at intervals and writes events.

It never delays a step: training neither waits for it nor receives its errors.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from phalanx.io.listen import is_loopback_host
from phalanx.job.run_sections import Telemetry
from phalanx.plan.layout import Layout
from phalanx.record.events import EventWriter
from phalanx.record.provenance import redact
from phalanx.train.parallel.dims import ParallelDims
from phalanx.train.telemetry.peer_latency import Peers
from phalanx.train.telemetry.sensors import Sensors, sensors_of
from phalanx.train.telemetry.sharing import (
    SECRET_BYTES,
    DeviceCard,
    Sharers,
    card_of,
    count_sharers,
    exchange_cards,
)

# Seconds that the end of a membership waits for the last sample; a driver that hangs is not waited for
LEAVE_S = 0.5


class Monitor:
    """Monitor of one rank in one membership. `sensors` is called in the thread, because a driver may be slow."""

    def __init__(
        self,
        events: EventWriter,
        sensors: Callable[[], Sensors],
        *,
        sharers: Sharers,
        interval_s: float,
        generation: int = 0,
    ) -> None:
        self._events, self._sensors, self._sharers = events, sensors, sharers
        self._interval_s, self._generation = interval_s, generation
        # Of this membership, including the time before it since the last sample
        self._energy_j: float | None = None
        self._closing, self._abandoned = threading.Event(), False
        # The first error
        self.trouble = ""
        self._thread = threading.Thread(target=self._run_thread, name="monitor", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Take a last sample and end the thread, waiting at most LEAVE_S; may be called twice."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(LEAVE_S)
        self._abandoned = True

    def _run_thread(self) -> None:
        sensors = self._try_once(self._sensors)
        while sensors is not None:
            is_closing = self._closing.wait(min(self._interval_s, threading.TIMEOUT_MAX))
            self._try_once(lambda: self._write_sample(sensors))
            if is_closing:
                return

    def _write_sample(self, sensors: Sensors) -> None:
        reading = sensors.read(self._sharers)
        if reading.energy_j is not None:
            self._energy_j = (self._energy_j or 0.0) + reading.energy_j
        if not self._abandoned:
            self._events.write("monitor", epoch=self._generation, **{**asdict(reading), "energy_j": self._energy_j})

    def _try_once(self, act: Callable[[], Any]) -> Any:
        """Call `act`; print the first error to the rank's log and return None on any error."""
        try:
            return act()
        except Exception as error:
            if not self.trouble:
                self.trouble = f"{type(error).__name__}: {error}"
                print(f"monitor: a sample could not be taken ({self.trouble}); training goes on", file=sys.stderr)
            return None


# Background work of a rank, started and ended together: the monitor and the pings between peers.


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerRendezvous:
    """Rendezvous for the pings of a membership: the store for addresses, and the secret that authenticates packets."""

    store: Store
    secret: bytes
    address: str  # this rank's address


class SensorCache:
    """The sensors of a process, created at first use: in the monitor's thread, where a driver may be slow."""

    def __init__(self) -> None:
        self._made: Sensors | None = None
        self._lock = threading.Lock()

    def of(self, device: torch.device, power_w: float) -> Sensors:
        """Return the same sensors in every membership, so that counters continue."""
        with self._lock:
            if self._made is None:
                self._made = sensors_of(device, power_w=power_w)
            return self._made


@contextmanager
def monitored_rank(
    events: EventWriter,
    sensors: Callable[[], Sensors],
    meeting: PeerRendezvous | None,
    *,
    telemetry: Telemetry,
    layout: Layout,
    rank: int,
    generation: int,
    sharers: Sharers,
) -> Iterator[None]:
    """Monitor this rank during the block; write a remark event for anything that cannot be started."""
    with ExitStack() as stack:
        try:
            monitor = Monitor(events, sensors, sharers=sharers, interval_s=telemetry.interval_s, generation=generation)
            stack.callback(monitor.close)
            monitor.start()
        except Exception as error:
            write_remark(events, "the device is not watched", error)
        if meeting is not None and telemetry.peers_every_s and layout.devices > 1:
            try:
                peers = Peers(
                    events,
                    meeting.store,
                    rank=rank,
                    dims=ParallelDims.of(layout),
                    generation=generation,
                    secret=meeting.secret,
                    address=meeting.address,
                    every_s=telemetry.peers_every_s,
                )
                stack.callback(peers.close)
                peers.start()
            except Exception as error:
                write_remark(events, "the latency to other ranks is not measured", error)
        yield


def write_remark(events: EventWriter, what: str, error: Exception) -> None:
    """Write an event about a function this membership lacks, with the error that caused it."""
    message = (redact(str(error), os.environ).splitlines() or ["no message"])[0]
    events.write("remark", step=None, text=f"{what} ({type(error).__name__}: {message}); training goes on")


def meet_peers(
    store: Store, environ: Mapping[str, str], device: torch.device, events: EventWriter
) -> tuple[PeerRendezvous | None, Sharers]:
    """Exchange addresses and a secret among ranks started without an agent.

    Returns the rendezvous and the host's sharers. Every rank calls this, and listens on its address on the route to
    MASTER_ADDR. Rank 0's secret is sent unprotected, as every collective is. If the exchange fails, returns no
    rendezvous.
    """
    master = environ.get("MASTER_ADDR", "127.0.0.1")
    card = card_of(device, address=_address_towards(master), secret=secrets.token_bytes(SECRET_BYTES))
    try:
        cards = exchange_cards(card)
    # The group is broken: training will report it
    except Exception as error:
        write_remark(events, "who shares this host is not known", error)
        return None, Sharers()
    secret = cards[0].secret
    # A launcher that restarts its ranks may keep the store, with the addresses of the previous ranks.
    attempt = hashlib.sha256(secret).hexdigest()[:16]
    address = _reachable_address(card, cards)
    if is_loopback_host(address) and any(other_card.host != card.host for other_card in cards):
        text = f"{master} leads to {address} here, which no other host reaches: pings from there will be lost"
        events.write("remark", step=None, text=text)
    return PeerRendezvous(store=PrefixStore(attempt, store), secret=secret, address=address), count_sharers(card, cards)


def _reachable_address(card: DeviceCard, cards: Sequence[DeviceCard]) -> str:
    """Return the address at which the other ranks reach this rank.

    The first host often resolves its own name to 127.0.1.1 (Debian's /etc/hosts); then the address on the route to a
    rank on another host is used.
    """
    if not is_loopback_host(card.address):
        return card.address
    remote_addresses = (
        other_card.address
        for other_card in cards
        if other_card.host != card.host and not is_loopback_host(other_card.address)
    )
    return next((address for address in map(_address_towards, filter(None, remote_addresses))), card.address)


def _address_towards(host: str) -> str:
    with suppress(OSError, UnicodeError):
        family, _, _, _, destination = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Sends nothing: only the route is looked up
            probe.connect(destination)
            return str(probe.getsockname()[0])
    return "127.0.0.1"
