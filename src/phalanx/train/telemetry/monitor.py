"""The monitor: a thread beside the training of a rank that looks at its device now and then and writes it down.

It never holds up a step: the training neither waits for it nor hears of what goes wrong in it.
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

LEAVE_S = 0.5  # that the end of a membership waits for the last sample; a driver that hangs is left behind


class Monitor:
    """Of one rank in one membership. `sensors` is called in the thread: a driver may be slow to answer."""

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
        self._energy_j: float | None = None  # of this membership, with the time before it in which nobody looked
        self._closing, self._abandoned = threading.Event(), False
        self.trouble = ""  # the first thing that went wrong
        self._thread = threading.Thread(target=self._run_thread, name="monitor", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """Take a last sample and end, soon; calling it twice is fine."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(LEAVE_S)
        self._abandoned = True

    def _run_thread(self) -> None:
        found = self._try_once(self._sensors)
        while found is not None:
            ended = self._closing.wait(min(self._interval_s, threading.TIMEOUT_MAX))
            self._try_once(lambda: self._write_sample(found))
            if ended:
                return

    def _write_sample(self, sensors: Sensors) -> None:
        reading = sensors.read(self._sharers)
        if reading.energy_j is not None:
            self._energy_j = (self._energy_j or 0.0) + reading.energy_j
        if not self._abandoned:
            self._events.write("monitor", epoch=self._generation, **{**asdict(reading), "energy_j": self._energy_j})

    def _try_once(self, act: Callable[[], Any]) -> Any:
        """Do it; whatever goes wrong is told once in the rank's log, and the training goes on."""
        try:
            return act()
        except Exception as error:
            if not self.trouble:
                self.trouble = f"{type(error).__name__}: {error}"
                print(f"monitor: a sample could not be taken ({self.trouble}); training goes on", file=sys.stderr)
            return None


# What runs beside the training of a rank, started and ended together: the monitor and the pings between peers.


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerRendezvous:
    """How the ranks of a membership ping each other: where they tell their addresses, and what they prove."""

    store: Store
    secret: bytes
    address: str  # this rank's own


class SensorCache:
    """The sensors of a process, made when first asked for: in the monitor's thread, where a driver may be slow."""

    def __init__(self) -> None:
        self._made: Sensors | None = None
        self._lock = threading.Lock()

    def of(self, device: torch.device, power_w: float) -> Sensors:
        """The same ones in every membership: counters go on."""
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
    """Watch this rank for the length of the block; what cannot be started is told and left out."""
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
    """Write down what this membership goes without, and why."""
    why = (redact(str(error), os.environ).splitlines() or ["no message"])[0]
    events.write("remark", step=None, text=f"{what} ({type(error).__name__}: {why}); training goes on")


def meet_peers(
    store: Store, environ: Mapping[str, str], device: torch.device, events: EventWriter
) -> tuple[PeerRendezvous | None, Sharers]:
    """Without an agent: ranks tell each other where they are, and rank 0 a secret, as unprotected as every collective.

    Every rank calls this, and listens on the address that leads to MASTER_ADDR.
    """
    master = environ.get("MASTER_ADDR", "127.0.0.1")
    card = card_of(device, address=_address_towards(master), secret=secrets.token_bytes(SECRET_BYTES))
    try:
        cards = exchange_cards(card)
    except Exception as error:  # the group is broken: training will say so itself
        write_remark(events, "who shares this host is not known", error)
        return None, Sharers()
    secret = cards[0].secret
    # A launcher that starts its ranks again may keep the store, and in it the addresses of the ranks before.
    attempt = hashlib.sha256(secret).hexdigest()[:16]
    address = _reachable_address(card, cards)
    if is_loopback_host(address) and any(one.host != card.host for one in cards):
        text = f"{master} leads to {address} here, which no other host reaches: pings from there will be lost"
        events.write("remark", step=None, text=text)
    return PeerRendezvous(store=PrefixStore(attempt, store), secret=secret, address=address), count_sharers(card, cards)


def _reachable_address(card: DeviceCard, cards: Sequence[DeviceCard]) -> str:
    """This rank's address for the others.

    The first host often knows its own name as 127.0.1.1 (Debian's /etc/hosts); its address is then the one that leads
    to a rank elsewhere.
    """
    if not is_loopback_host(card.address):
        return card.address
    far = (one.address for one in cards if one.host != card.host and not is_loopback_host(one.address))
    return next((found for found in map(_address_towards, filter(None, far))), card.address)


def _address_towards(host: str) -> str:
    with suppress(OSError, UnicodeError):
        family, _, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect(place)  # sends nothing: only the route is looked up
            return str(asking.getsockname()[0])
    return "127.0.0.1"
