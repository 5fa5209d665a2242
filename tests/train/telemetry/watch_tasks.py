"""What test_watch runs on every rank."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.job.run_sections import Telemetry
from phalanx.plan.layout import Layout
from phalanx.record.events import EventWriter, read_events
from phalanx.train.telemetry.monitor import PeerRendezvous, meet_peers, monitored_rank
from phalanx.train.telemetry.sensors import sensors_of
from phalanx.train.telemetry.sharing import Sharers


def watch(
    rank: int, folder: str, layout: Layout, telemetry: Telemetry, *, blocked: bool = False
) -> tuple[PeerRendezvous, Sharers]:
    """Until this rank has told of its peers, or where it cannot, of its device; how it met the others."""
    path = Path(folder) / f"events-{rank:05d}.jsonl"
    events = EventWriter(path, rank=rank)
    store, environ = dist.distributed_c10d._get_default_store(), {**os.environ, "MASTER_ADDR": "127.0.0.1"}
    meeting, sharers = meet_peers(store, environ, torch.device("cpu"), events)
    assert meeting is not None
    shown = PeerRendezvous(store=None, secret=meeting.secret, address=meeting.address)  # type: ignore[arg-type]
    if blocked:
        meeting = PeerRendezvous(store=meeting.store, secret=meeting.secret, address="192.0.2.1")  # nobody's (RFC 5737)
    with monitored_rank(
        events,
        lambda: sensors_of(torch.device("cpu"), power_w=6.25),
        meeting,
        telemetry=telemetry,
        layout=layout,
        rank=rank,
        generation=4,
        sharers=sharers,
    ):
        end_s = time.monotonic() + 300
        while not _all_done(path, "monitor" if blocked else "peers") and time.monotonic() < end_s:
            time.sleep(0.02)
    events.close()
    return shown, sharers


def _all_done(path: Path, wanted: str) -> bool:
    missing = torch.tensor([not any(one["event"] == wanted for one in read_events(path)[0])], dtype=torch.int64)
    dist.all_reduce(missing)
    return not int(missing.item())


def blocked(rank: int, folder: str, layout: Layout, telemetry: Telemetry) -> tuple[PeerRendezvous, Sharers]:
    """The same, on an address that this host does not have."""
    return watch(rank, folder, layout, telemetry, blocked=True)
