"""Rows of a slotted spray without windows or latencies: our packet engine with both taken out."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from phalanx.network.fabric.parse import parse_fabric
from phalanx.network.fabric.types import Fabric
from phalanx.sim.matrices import Flows, permutation
from phalanx.sim.packets.build import sketch
from phalanx.sim.packets.result import PacketResult
from phalanx.sim.packets.run import run
from phalanx.sim.packets.transport import MRC, Spray, Transport
from phalanx.validate.network.outcome import Context, Outcome, Reader, Simulation, Wanted, reproduced, skipped
from phalanx.validate.network.table import Row
from phalanx.validate.network.words import NotSaid, count, number, said

PORT_GBPS = 100.0
RADIX = 512
MOST_HOSTS = 131_072
MARK = 8  # packets, where nothing is said
LATE_S = 1e-3  # nothing disappears: no timeout shall fire
TOLERANCE = 0.10  # what the design asks of a tail
TRIMS = 0.25  # of a share of a few per cent, of one seed


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is sprayed where."""

    hosts: int
    down: int  # hosts of a T0
    packets: int  # of a flow
    queue: int
    paths: int
    mark: int
    spray: Spray


def slowest(row: Row, context: Context) -> Outcome:
    """Packets of a flow over the slots that the slowest took."""
    question = _question(row)
    if reason := context.refuses(_simulation(question)):
        return skipped(row, reason)
    fabric, _, transport = _setting(question)
    slots = _run(question).tail_s / (8 * transport.packet_bytes / (fabric.port_gbps * 1e9))
    return reproduced(row, question.packets / slots, "sim/packets without window and latency", tolerance=TOLERANCE)


def trimmed(row: Row, context: Context) -> Outcome:
    """Share of packets that a full queue cut, in per cent."""
    question = _question(row)
    if reason := context.refuses(_simulation(question)):
        return skipped(row, reason)
    found = _run(question)
    scale = 100.0 if row.unit == "percent" else 1.0
    note = "sim/packets without window and latency"
    return reproduced(row, scale * found.trimmed / found.packets, note, tolerance=TRIMS)


def _question(row: Row) -> Question:
    hosts = said(count(row.conditions, r"hosts?(?! per\b)"), "how many hosts")
    if hosts > MOST_HOSTS:
        raise NotSaid(f"a size that is run here: {hosts:,} hosts are more than {MOST_HOSTS:,}")
    if "swap" in row.quantity:
        raise NotSaid("how paths are swapped")
    return Question(
        hosts=hosts,
        down=count(row.conditions, "hosts? per T0") or RADIX // 2,
        packets=said(count(row.conditions, "packets? per flow"), "how many packets per flow"),
        queue=int(said(number(row.conditions, r"queue (\d+) packets"), "how many packets a queue holds")),
        paths=said(count(row.conditions, "(?:EVs?|paths?)"), "how many EVs"),
        mark=int(number(row.conditions, r"ECN threshold (\d+)") or MARK),
        spray="skip" if "skip" in row.quantity else "oblivious",
    )


def _setting(asked: Question) -> tuple[Fabric, Flows, Transport]:
    fabric = replace(parse_fabric(f"clos2:{asked.hosts}x{PORT_GBPS:g}G/1p/{2 * asked.down}"), hop_s=0.0)
    mark = asked.mark / (fabric.hops + 1)  # of a round trip without latencies, in slots
    transport = replace(
        MRC,
        name="slotted",
        paths=asked.paths,
        spray=asked.spray,
        queue_packets=asked.queue,
        window_packets=float(asked.packets),
        controlled=False,
        host_s=0.0,
        ack_every=1,
        timeout_s=LATE_S,
        marks=(mark, mark + 0.01),
    )
    return fabric, permutation(asked.hosts, asked.packets * transport.payload_bytes), transport


@functools.lru_cache(maxsize=8)
def _run(question: Question) -> PacketResult:
    fabric, traffic, transport = _setting(question)
    found = run(fabric, traffic, transport=transport)
    if found.stopped == "interrupted":
        raise KeyboardInterrupt
    return found


def _wanted(row: Row) -> Simulation | None:
    return _simulation(_question(row))


@functools.lru_cache(maxsize=64)
def _simulation(question: Question) -> Simulation:
    made = sketch(*_setting(question), alike=True)
    return Simulation(key=("slotted", question), cpu_s=made.cost.cpu_s)


SLOWEST, TRIMMED = r"^slowest flow, slotted spray", r"^(trims|trimmed packets|packets trimmed), slotted spray"
READERS: tuple[tuple[str, Reader], ...] = ((SLOWEST, slowest), (TRIMMED, trimmed))
WANTED: tuple[tuple[str, Wanted], ...] = ((SLOWEST, _wanted), (TRIMMED, _wanted))
