"""Throughput of a run over time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from phalanx.sim.links import Floats, Ints
from phalanx.sim.packets.state import Ints32


@dataclass(kw_only=True, slots=True)
class Course:
    """Samples: the slot, packets delivered until then, and those of each watched connection."""

    watched: int  # connections
    samples: list[tuple[int, int, Ints]] = field(default_factory=list)

    def keep(self, slot: int, delivered: int, watched: Ints | Ints32) -> None:
        """Take a sample; in one step, because Ctrl-C may come between two."""
        self.samples.append((slot, delivered, np.array(watched, dtype=np.int64)))

    def gbps(self, slot_s: float, packet_gbit: float) -> tuple[Floats, Floats, Floats]:
        """Ends of the samples in seconds, throughput in each, and that of each watched connection."""
        ends = np.array([slot for slot, _, _ in self.samples], dtype=np.float64)
        taken_s = np.maximum(np.diff(ends, prepend=1.0), 1.0) * slot_s
        total = np.array([delivered for _, delivered, _ in self.samples], dtype=np.float64)
        each = np.array([watched for _, _, watched in self.samples], dtype=np.float64)
        each = each.reshape(len(ends), self.watched).T
        rate, rates = (np.diff(counted, prepend=0.0) * packet_gbit / taken_s for counted in (total, each))
        return (ends - 1) * slot_s, rate, rates
