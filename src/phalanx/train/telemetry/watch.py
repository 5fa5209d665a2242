"""What runs beside the training of a rank, started and ended together: the monitor and the pings between peers."""

from __future__ import annotations

import hashlib
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from phalanx.job.schema import Telemetry
from phalanx.plan.layout import Layout
from phalanx.record.events import EventWriter
from phalanx.train.parallel.dims import ParallelDims
from phalanx.train.telemetry.monitor import Monitor
from phalanx.train.telemetry.peers import Peers
from phalanx.train.telemetry.sensors import Sensors, sensors_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """How the ranks of a formation ping each other: where they tell their addresses, and what they prove."""

    store: Store
    secret: bytes
    address: str  # this rank's own


class KeptSensors:
    """The sensors of a process, made when first asked for: in the monitor's thread, where a driver may be slow."""

    def __init__(self) -> None:
        self._made: Sensors | None = None
        self._lock = threading.Lock()

    def of(self, device: torch.device, power_w: float) -> Sensors:
        """The same ones in every formation: counters go on."""
        with self._lock:
            if self._made is None:
                self._made = sensors_of(device, power_w=power_w)
            return self._made


@contextmanager
def watched(
    events: EventWriter,
    sensors: Callable[[], Sensors],
    meeting: Meeting | None,
    *,
    telemetry: Telemetry,
    layout: Layout,
    rank: int,
    epoch: int,
    ranks_on_host: int,
) -> Iterator[None]:
    """Watch this rank for the length of the block; what cannot be started is told and left out."""
    with ExitStack() as stack:
        monitor = Monitor(events, sensors, ranks=ranks_on_host, interval_s=telemetry.interval_s, epoch=epoch)
        stack.callback(monitor.close)
        monitor.start()
        if meeting is not None and telemetry.peers_every_s and layout.devices > 1:
            try:
                peers = Peers(
                    events,
                    meeting.store,
                    rank=rank,
                    dims=ParallelDims.of(layout),
                    epoch=epoch,
                    secret=meeting.secret,
                    address=meeting.address,
                    every_s=telemetry.peers_every_s,
                )
                stack.callback(peers.close)
                peers.start()
            except OSError as error:
                print(f"peers: latency is not measured ({error}); training goes on", file=sys.stderr)
        yield


def meet(store: Store, environ: Mapping[str, str]) -> Meeting:
    """Without an agent: rank 0 draws a secret and tells it to the others, as unprotected as every collective.

    Every rank calls this, and listens on the address that leads to MASTER_ADDR.
    """
    drawn = torch.frombuffer(bytearray(secrets.token_bytes(32)), dtype=torch.uint8)
    dist.broadcast(drawn, src=0)
    secret = bytes(drawn.tolist())
    # A launcher that starts its ranks again may keep the store, and in it the addresses of the ranks before.
    attempt = hashlib.sha256(secret).hexdigest()[:16]
    address = _address_towards(environ.get("MASTER_ADDR", "127.0.0.1"))
    return Meeting(store=PrefixStore(attempt, store), secret=secret, address=address)


def _address_towards(host: str) -> str:
    with suppress(OSError):
        family, _, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect(place)  # sends nothing: only the route is looked up
            return str(asking.getsockname()[0])
    return "127.0.0.1"
