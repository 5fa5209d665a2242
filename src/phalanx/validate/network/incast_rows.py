"""Rows about a flow beside an incast: several hosts under one T0 send to one host under another.

The victim goes from a further host of the first T0 to a neighbour of the crowded one. With hashed paths it suffers only
where its path shares a link with the crowd: of 24 hashes, all that do so are run and counted, none is picked. The
paper's cluster, wiring and hash are not published (arXiv:2605.04333 section 5.2.8 and appendix); it shows one that did.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from statistics import median

import numpy as np

from phalanx.network.fabric.parse import parse_fabric
from phalanx.sim.links import Floats
from phalanx.sim.matrices import flows
from phalanx.sim.packets.roce import ROCE, ROCE_PFC, Roce
from phalanx.sim.packets.run import run
from phalanx.sim.packets.transport import MRC, Transport
from phalanx.validate.network.outcome import Context, Outcome, Reader, Simulation, Wanted, ranged, reproduced, skipped
from phalanx.validate.network.table import Row
from phalanx.validate.network.words import NotSaid, count, number, said

SEEDS = range(24)
SAMPLE_S = 1e-3
# Pauses settle at once; rates of DCQCN rise by 1/1000 of the line every 55 µs; shares of MRC walk, so average long.
PFC_S, DCQCN_S, MRC_S = 2e-3, 40e-3, 25e-3
CPU_S = {"PFC": 4.0, "DCQCN": 34.0, "MRC": 3.0}  # measured on 2026-11-15
HARMED = 0.98  # of what the victim gets alone; pauses leave it a fifth or everything, so any share between does
WHOLE = 1.0  # per cent of the victim's rate: the design's limit for MRC
MOST_SENDERS = 63


def loss_mrc(row: Row, context: Context) -> Outcome:
    """What the victim loses where packets are sprayed."""
    senders, gbps = _crowd(row)
    if reason := context.refuses(_simulation("MRC", senders, gbps)):
        return skipped(row, reason)
    rates = _rates(MRC, senders, gbps, 0, MRC_S)
    shares = rates[:-1].mean(axis=1) * MRC.packet_bytes / MRC.payload_bytes
    note = f"sim/packets; senders {shares.min():.1f} to {shares.max():.1f} Gb/s on the wire"
    return reproduced(row, 100 * (1 - rates[-1].mean() / _alone(MRC, gbps)), note, tolerance=WHOLE)


def share_mrc(row: Row, context: Context) -> Outcome:
    """What each of the crowd gets, on the wire."""
    senders, gbps = _crowd(row)
    if reason := context.refuses(_simulation("MRC", senders, gbps)):
        return skipped(row, reason)
    shares = _rates(MRC, senders, gbps, 0, MRC_S)[:-1].mean(axis=1) * MRC.packet_bytes / MRC.payload_bytes
    return reproduced(row, float(shares.mean()), f"sim/packets; {shares.min():.1f} to {shares.max():.1f}")


def loss_dcqcn(row: Row, context: Context) -> Outcome:
    """What the victim loses in the second half: the middle of all hashes that put it beside the crowd."""
    senders, gbps = _crowd(row)
    qps = count(row.quantity, "QPs?") or 1
    if qps > 1 or "1-s" in row.quantity:
        return skipped(row, "a second is beyond what is simulated by packets; over 40 ms: docs/simulation/packets.md")
    if reason := context.refuses(_simulation("DCQCN", senders, gbps)):
        return skipped(row, reason)
    left = [_late(_rates(ROCE, senders, gbps, seed, DCQCN_S)) / _alone(ROCE, gbps) for seed in _harmed(row)]
    lost = [100 * (1 - share) for share in left]
    note = f"sim/packets, median of {_drawn(lost)}"
    return ranged(row, median(lost), note, between=(min(lost), max(lost)))


def _pfc(pick: Callable[[list[float]], float], name: str) -> Reader:
    def read(row: Row, context: Context) -> Outcome:
        """The victim's rate under pauses, over hashes that put it beside the crowd."""
        senders, gbps = _crowd(row)
        if reason := context.refuses(_simulation("PFC", senders, gbps)):
            return skipped(row, reason)
        rates = [_late(_rates(ROCE_PFC, senders, gbps, seed, PFC_S)) for seed in _harmed(row)]
        note = f"sim/packets, {name} of {_drawn(rates)}, median {median(rates):.0f}"
        return ranged(row, pick(rates), note, between=(min(rates), max(rates)))

    return read


def _drawn(values: list[float]) -> str:
    return (
        f"the {len(values)} of {len(SEEDS)} hashes that put it beside the crowd: {min(values):.0f} to {max(values):.0f}"
    )


def _late(rates: Floats) -> float:
    """The victim's mean over the second half."""
    return float(rates[-1, rates.shape[1] // 2 :].mean())


def _harmed(row: Row) -> list[int]:
    """Hashes with which pauses reach the victim."""
    senders, gbps = _crowd(row)
    alone = _alone(ROCE_PFC, gbps)
    found = [seed for seed in SEEDS if _late(_rates(ROCE_PFC, senders, gbps, seed, PFC_S)) < HARMED * alone]
    if not found:
        raise NotSaid(f"a hash that matters: none of {len(SEEDS)} put the victim beside the crowd")
    return found


def _crowd(row: Row) -> tuple[int, float]:
    senders = said(number(row.conditions, r"(\d+) ?(?::|to) ?1 incast"), "how many to one (7:1 incast)")
    gbps = number(row.conditions, r"(\d+)G\b") or 400.0
    if not 2 <= senders <= MOST_SENDERS:
        raise NotSaid(f"an incast that is run here: {senders:g}:1 is not 2:1 to {MOST_SENDERS}:1")
    return int(senders), gbps


def _alone(transport: Transport | Roce, gbps: float) -> float:
    return gbps * transport.payload_bytes / transport.packet_bytes


@functools.lru_cache(maxsize=64)
def _rates(transport: Transport | Roce, senders: int, gbps: float, seed: int, limit_s: float) -> Floats:
    """Gb/s of every flow over time, the victim last."""
    side = senders + 1
    fabric = parse_fabric(f"clos2:{2 * side}x{gbps:g}G/1p/{2 * side}/wide")
    source, target = np.arange(side), np.full(side, side)
    target[-1] += 1
    endless = np.full(side, math.ceil(2 * limit_s * gbps * 1e9 / 8))
    found = run(
        fabric,
        flows(source, target, endless),
        transport=transport,
        seed=seed,
        limit_s=limit_s,
        sample_s=SAMPLE_S if limit_s > 10 * SAMPLE_S else limit_s / 10,
        watch=tuple(range(side)),
    )
    if found.stopped == "interrupted":
        raise KeyboardInterrupt
    return found.watched_gbps


def _simulation(kind: str, senders: int, gbps: float) -> Simulation:
    return Simulation(key=("incast", kind, senders, gbps), cpu_s=CPU_S[kind] * senders / 7)


def _wanted(kind: str) -> Wanted:
    def wanted(row: Row) -> Simulation | None:
        return None if "1-s" in row.quantity else _simulation(kind, *_crowd(row))

    return wanted


MRC_LOSS, DCQCN_LOSS = r"^victim flow loss MRC", r"^victim flow (worst 1-s )?loss RoCE\+DCQCN"
PFC_LOW, PFC_HIGH = r"^victim flow PFC only, low", r"^victim flow PFC only, high"
MRC_SHARE = r"^(fair )?share (per|of each) sender|^sender share"
READERS: tuple[tuple[str, Reader], ...] = (
    (MRC_LOSS, loss_mrc),
    (MRC_SHARE, share_mrc),
    (DCQCN_LOSS, loss_dcqcn),
    (PFC_LOW, _pfc(min, "least")),
    (PFC_HIGH, _pfc(max, "most")),
)
WANTED: tuple[tuple[str, Wanted], ...] = (
    (MRC_LOSS, _wanted("MRC")),
    (MRC_SHARE, _wanted("MRC")),
    (DCQCN_LOSS, _wanted("DCQCN")),
    (PFC_LOW, _wanted("PFC")),
    (PFC_HIGH, _wanted("PFC")),
)
