"""Rows that we read and do not attempt, with the reason."""

from __future__ import annotations

from phalanx.validate.network.outcome import Context, Outcome, Reader, skipped
from phalanx.validate.network.table import Row

REASONS = (
    (
        r"packets per CPU-second|solve time|^ns-3 time|^software simulation of|^(speed-?up|speed) (of|over)",
        "a speed of a machine: see benchmarks/",
    ),
    (r"^largest cluster validated|^mean alignment to real", "a result of another simulator on data we do not have"),
    (r"^SRv6 locator|^SACK bitmap", "a field of a header: routes and acknowledgements are modelled, not their bits"),
    (r"^Clustermapper probe interval", "an agent that probes links for operators: no simulation here depends on it"),
    (r"^EV injected loss", "an input of an experiment; what it does is in docs/simulation/packets.md"),
    (r"^packets lost when T1", "it grows with the load and the queue pairs per GPU of that job: neither is published"),
    (r"^lost packets per QP|^T1 switches rebooted", "an observation of one cluster"),
    (r"^all-reduce gain of|^fragmented placement", "a gain over a baseline that is not described"),
)


def _because(reason: str) -> Reader:
    def read(row: Row, _: Context) -> Outcome:
        return skipped(row, reason)

    return read


READERS: tuple[tuple[str, Reader], ...] = tuple((pattern, _because(reason)) for pattern, reason in REASONS)
