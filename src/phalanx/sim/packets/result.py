"""The result of a packet simulation."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from phalanx.sim.fabric_links import Floats, Ints
from phalanx.sim.packets.engine_state import Ints32


@dataclass(frozen=True, kw_only=True, slots=True)
class PacketResult:
    """Completion times, losses and throughput; of all planes even when only one was simulated."""

    transport: str
    # Of each connection from its start to its last acknowledgement; NaN where it did not finish.
    fct_s: Floats
    start_s: Floats  # of each connection; NaN where it did not start
    nbytes: float  # of all connections, to be sent
    packets: int  # to deliver
    sent: int
    delivered: int
    lost: int  # packets that disappeared
    trimmed: int
    marked: int
    touched: int  # connections with a lost or trimmed packet
    touched_by_loss: int
    retired_paths: int
    time_s: Floats  # end of each sample of the throughput
    throughput_gbps: Floats  # payload
    watched_gbps: Floats  # [watched connection, sample]
    planes_simulated: int
    simulated_s: float
    cpu_s: float
    stopped: str  # reason of an early end: "", "interrupted" or "time limit"
    # Of the lost packets, those that met a full buffer (conventional transport without PFC).
    dropped: int = 0
    denied_paths: int = 0
    sent_by_plane: tuple[int, ...] = ()  # of the sent; not counted for the conventional transport
    paused_share: float = 0.0  # of the time, ports with something to send were paused (PFC)

    @property
    def finished(self) -> int:
        """The number of connections that finished."""
        return int(np.isfinite(self.fct_s).sum())

    @property
    def mean_s(self) -> float:
        """The mean completion time of the finished connections; NaN when none finished."""
        return float(np.nanmean(self.fct_s)) if self.finished else float("nan")

    @property
    def tail_s(self) -> float:
        """The slowest completion; infinite while a connection has not finished."""
        return float(np.max(self.fct_s)) if self.finished == len(self.fct_s) else float("inf")

    @property
    def best_s(self) -> float:
        """The fastest completion; NaN when none finished."""
        return float(np.nanmin(self.fct_s)) if self.finished else float("nan")

    def summary(self) -> dict[str, object]:
        """Return the result as plain values, for JSON."""
        return {
            "transport": self.transport,
            "connections": len(self.fct_s),
            "finished": self.finished,
            "fct_us": {
                "min": self.best_s * 1e6,
                "mean": self.mean_s * 1e6,
                **{f"p{q}": float(np.nanpercentile(self.fct_s, q)) * 1e6 for q in (50, 99) if self.finished},
                "max": self.tail_s * 1e6,
            },
            "packets": self.packets,
            "sent": self.sent,
            "sent_by_plane": list(self.sent_by_plane),
            "delivered": self.delivered,
            "lost": self.lost,
            "dropped": self.dropped,
            "paused_share": self.paused_share,
            "trimmed": self.trimmed,
            "marked": self.marked,
            "connections_touched": self.touched,
            "connections_touched_by_loss": self.touched_by_loss,
            "paths_retired": self.retired_paths,
            "paths_denied": self.denied_paths,
            "throughput_over_time": [
                {"until_us": float(t) * 1e6, "gbps": float(g)}
                for t, g in zip(self.time_s, self.throughput_gbps, strict=True)
            ],
            "planes_simulated": self.planes_simulated,
            "simulated_us": self.simulated_s * 1e6,
            "cpu_s": self.cpu_s,
            "stopped": self.stopped,
        }


# Throughput of a run over time.


@dataclass(kw_only=True, slots=True)
class PacketCourse:
    """Samples of a run: the slot, packets delivered until then, and those of each watched connection."""

    watched: int  # number of watched connections
    samples: list[tuple[int, int, Ints]] = field(default_factory=list)

    def keep(self, slot: int, delivered: int, watched: Ints | Ints32) -> None:
        """Take a sample; in one step, because Ctrl-C may come between two."""
        self.samples.append((slot, delivered, np.array(watched, dtype=np.int64)))

    def gbps(self, slot_s: float, packet_gbit: float) -> tuple[Floats, Floats, Floats]:
        """Return the ends of the samples in seconds, throughput in each, and that of each watched connection."""
        ends = np.array([slot for slot, _, _ in self.samples], dtype=np.float64)
        lengths_s = np.maximum(np.diff(ends, prepend=1.0), 1.0) * slot_s
        total = np.array([delivered for _, delivered, _ in self.samples], dtype=np.float64)
        each = np.array([watched for _, _, watched in self.samples], dtype=np.float64)
        each = each.reshape(len(ends), self.watched).T
        rate, rates = (np.diff(counted, prepend=0.0) * packet_gbit / lengths_s for counted in (total, each))
        return (ends - 1) * slot_s, rate, rates
