"""Rows of uet-htsim: completion times, packet by packet."""

from __future__ import annotations

import functools
from dataclasses import replace
from statistics import median

import numpy as np

from phalanx.sim.packets.build import sketch
from phalanx.sim.packets.faults import Fault
from phalanx.sim.packets.result import PacketResult
from phalanx.sim.packets.run import run
from phalanx.sim.packets.transport import HTSIM, Transport, in_slots
from phalanx.validate.network.htsim_cases import Case, fabric_of, read_case
from phalanx.validate.network.htsim_traffic import CHOSEN, LISTED, flows_of, schedule_of
from phalanx.validate.network.outcome import (
    Context,
    Outcome,
    Reader,
    Simulation,
    Wanted,
    calibrated,
    reproduced,
    skipped,
)
from phalanx.validate.network.table import Row
from phalanx.validate.network.words import NotSaid

# What the design asks for: the mean (and here the fastest) and the tail at 64 paths or more, and all of them at fewer
# and with slow links.
MEAN, TAIL, FEW = 0.05, 0.10, 0.15
MANY_PATHS = 64
# With few paths the slowest flow is an accident of hashes, and ours are not uet-htsim's: a median, with its range.
SEEDS = range(5)
SLOW = 0.25  # of its speed: uet-htsim's topology.cpp, though its test plans call such links "10 %"


def completion(row: Row, context: Context) -> Outcome:
    """Mean, tail or fastest completion."""
    case = read_case(row.conditions)
    if isinstance(case, str):
        return skipped(row, case)
    if reason := context.refuses(_simulation(case)):
        return skipped(row, reason)
    measure = row.quantity.split(" ")[0]
    if case.credits and case.sent.pattern != "permutation" and measure != "tail":
        return skipped(row, "in which order a receiver grants credits to several senders is not modelled")
    results = [_run(case, seed) for seed in _seeds(case)]
    if stopped := [result.stopped for result in results if result.stopped]:
        return skipped(row, f"the simulation ended early: {stopped[0]}")
    ours_us = [1e6 * _measured(result, measure, case.end_s) for result in results]
    loose = case.paths < MANY_PATHS or case.failed
    tolerance = FEW if loose else TAIL if measure == "tail" else MEAN
    if measure == "min" and case.paths >= MANY_PATHS and case.sent.listed == LISTED[CHOSEN][1]:
        note = f"{_note(case, ours_us)}; which of three copies of the file it is was told by this"
        return calibrated(row, median(ours_us), note, tolerance=tolerance)
    return reproduced(row, median(ours_us), _note(case, ours_us), tolerance=tolerance)


def _note(case: Case, ours_us: list[float]) -> str:
    parts = ["sim/packets"]
    if len(ours_us) > 1:
        parts.append(f"median of {len(ours_us)} hashes: {min(ours_us):.0f} to {max(ours_us):.0f}")
    if case.credits:
        parts.append("credits as a window that stays")
    if case.failed:
        parts.append(f"{case.failed} links at {SLOW:.0%}")
    return "; ".join(parts)


def _seeds(case: Case) -> range:
    return SEEDS if case.paths < MANY_PATHS else SEEDS[:1]


def _measured(result: PacketResult, measure: str, end_s: float) -> float:
    """From the beginning of the run, as uet-htsim prints it ("finished at"), and only what finished before its end."""
    ends = result.start_s + result.fct_s
    ends = ends[ends <= end_s]
    if not len(ends):
        raise NotSaid(f"an -end after which anything has finished: ours needs {result.best_s * 1e6:.0f} us")
    return {"mean": float(ends.mean()), "tail": float(ends.max()), "min": float(ends.min())}[measure]


@functools.lru_cache(maxsize=256)
def _run(case: Case, seed: int) -> PacketResult:
    made = run(
        fabric_of(case),
        flows_of(case.sent),
        transport=_transport(case),
        faults=_faults(case),
        seed=seed,
        schedule=schedule_of(case.sent),
    )
    if made.stopped == "interrupted":
        raise KeyboardInterrupt  # a number from half a run would be a wrong one
    return made


def _transport(case: Case) -> Transport:
    made = replace(
        HTSIM,
        paths=case.paths,
        spray=case.spray,
        ack_every=case.ack_every,
        payload_bytes=case.packet_bytes - HTSIM.header_bytes,
        queue_packets=case.queue,
        window_packets=case.window,
    )
    return _credited(case, made) if case.credits else made


def _credited(case: Case, made: Transport) -> Transport:
    """A receiver grants what its link can take in a round trip, to all its senders together, and marks do not matter.

    With one sender each, as in a permutation, that is a window that stays.
    """
    senders = int(np.bincount(flows_of(case.sent).target).max())
    whole = in_slots(fabric_of(case), made, planes=1).window
    return replace(made, controlled=False, mark_last_hop=False, window_packets=max(1.0, whole / senders))


def _faults(case: Case) -> tuple[Fault, ...]:
    """Slow links where uet-htsim has them: three tiers, T2 to T1; two, the first T1s both ways."""
    fabric = fabric_of(case)
    if fabric.tiers == 2:
        return tuple(Fault(part="t1", number=t1, left=SLOW, short=True) for t1 in range(min(case.failed, fabric.t1)))
    ports = fabric.t1_up or fabric.switch.radix // 2
    slow = range(min(case.failed, fabric.t1 * ports))
    return tuple(Fault(part="t1_fall", number=one // ports, port=one % ports, left=SLOW, short=True) for one in slow)


def wanted(row: Row) -> Simulation | None:
    """What a row would have simulated."""
    case = read_case(row.conditions)
    return None if isinstance(case, str) else _simulation(case)


@functools.lru_cache(maxsize=4096)
def _simulation(case: Case) -> Simulation:
    made = sketch(fabric_of(case), flows_of(case.sent), _transport(case), alike=True)
    return Simulation(key=case, cpu_s=made.cost.cpu_s * len(_seeds(case)))


READERS: tuple[tuple[str, Reader], ...] = ((r"^(mean|tail|min) FCT", completion),)
WANTED: tuple[tuple[str, Wanted], ...] = ((r"^(mean|tail|min) FCT", wanted),)
