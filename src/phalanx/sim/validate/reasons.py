"""Rows that we read and do not attempt, with the reason."""

from __future__ import annotations

from phalanx.sim.validate.outcome import Context, Outcome, Reader, skipped
from phalanx.sim.validate.table import Row

REASONS = (
    (r"packets per CPU-second|solve time|^ns-3 time|^software simulation of", "a speed of a machine: see benchmarks/"),
    (r"^largest cluster validated|^mean alignment to real", "a result of another simulator on data we do not have"),
    (r"DCQCN|PFC only", "DCQCN and PFC are not modelled"),
    (r"^SRv6 locator|^SACK bitmap", "a field of a header: routes and acknowledgements are modelled, not their bits"),
    (r"^entropy values per QP, low", "the other end of a range; ours is the upper one"),
    (r"^NIC port failure QP remap", "the remapping of queue pairs by a NIC is not modelled"),
    (r"^RoCE 1 QP fraction|^RoCE QPs beyond", "where the 64 hosts of that cluster were plugged in is not published"),
    (r"^victim flow loss MRC", "phalanx sim runs it (incast with a victim); not part of this table's runs"),
    (r"^EV injected loss", "an input of an experiment"),
    (r"^packets lost when T1|^T1 forwarding restored|^QPs affected by T1 stop", "the job's fabric is not published"),
    (r"^job throughput drop", "which NICs flapped, and for how much of the minute, is not published"),
    (r"^loss rate after start|^lost packets per QP|^T1 switches rebooted", "an observation of one cluster"),
    (r"^slowest flow, slotted spray", "a prototype's result: one seed, no window; ours has one"),
    (r"^all-reduce gain of", "a gain over a baseline that is not described"),
)


def _because(reason: str) -> Reader:
    def read(row: Row, _: Context) -> Outcome:
        return skipped(row, reason)

    return read


READERS: tuple[tuple[str, Reader], ...] = tuple((pattern, _because(reason)) for pattern, reason in REASONS)
