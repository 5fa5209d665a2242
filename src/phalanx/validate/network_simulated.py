"""Readers for claims that need simulations: max-min fair rates, rings on hashed paths, loss, incast, slotted spray."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

import numpy as np

from phalanx.network.fabric.fabric_file import parse_fabric
from phalanx.network.fabric.fabric_types import Fabric
from phalanx.sim.fabric_links import Floats
from phalanx.sim.fluid import Rates, solve_rates
from phalanx.sim.packets.link_faults import FabricFault
from phalanx.sim.packets.packet_run import run_connections
from phalanx.sim.packets.result import PacketResult
from phalanx.sim.packets.simulation_arrays import sketch_run
from phalanx.sim.packets.transport import MRC, ROCE, ROCE_PFC, Roce, Spray, Transport
from phalanx.sim.routes import Routing, by_flow, by_qp
from phalanx.sim.traffic_matrix import Flows, make_flows, permutation, shift
from phalanx.validate.network_claims import (
    Claim,
    ClaimContext,
    ClaimOutcome,
    ClaimReader,
    NeededSimulation,
    NotStated,
    SimulationNeed,
    calibrated,
    count_before,
    number_matching,
    pair_before,
    ranged,
    reproduced,
    skipped,
    stated,
)

MEAN = 0.02 / 0.50  # the design requires 0.50 ± 0.02
# The slowest of 131,072 is one flow of one permutation: 1/7, 1/8 or 1/9 of a link.
EXTREME = 0.25
FLUID_MOST_HOSTS = 131_072
FLUID_PORT_GBPS = 100.0
FLUID_RADIX = 512  # ports of 100G, for a row that names none


def mean_rate(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Compare the mean rate over the flows of a permutation."""
    return reproduced(row, _fluid_rates(row).mean, "sim/fluid, one seed", tolerance=MEAN)


def slowest_rate(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Compare the rate of the slowest flow of a permutation."""
    return reproduced(row, _fluid_rates(row).slowest, "sim/fluid, one seed", tolerance=EXTREME)


def _fluid_rates(row: Claim) -> Rates:
    text = f"{row.conditions}, {row.quantity}"
    hosts = stated(count_before(row.conditions, r"hosts?(?! per\b)"), "how many hosts")
    if hosts > FLUID_MOST_HOSTS:
        raise NotStated(f"a size that is run here: {hosts:,} hosts are more than {FLUID_MOST_HOSTS:,}")
    qps = count_before(text, "(?:QPs?|paths?)(?: per flow| over)") or 1
    return _solve_spec(
        _fabric_spec(text, hosts, count_before(text, "planes?") or 1), hosts, by_qp(qps) if qps > 1 else by_flow()
    )


def _fabric_spec(text: str, hosts: int, planes: int) -> str:
    nic = f"{hosts}x{planes * FLUID_PORT_GBPS:g}G/{planes}p"
    if leaf_spine := pair_before(text, " leaf"):
        return f"clos2:{nic}/{2 * hosts // leaf_spine[0]}/wide"
    down = count_before(text, "hosts? per T0")
    up = count_before(text, "T1s?") or down
    if not down or not up:
        return f"clos2:{nic}/{FLUID_RADIX}"
    return f"clos2:{nic}/{down + up}/{down / up:g}:1/wide" if up != down else f"clos2:{nic}/{2 * down}"


@functools.lru_cache(maxsize=8)
def _solve_spec(spec: str, hosts: int, routing: Routing) -> Rates:
    return solve_rates(parse_fabric(spec), permutation(hosts, 1.0), routing=routing)


FLUID_READERS: tuple[tuple[str, ClaimReader], ...] = (
    (r"^max-min mean rate", mean_rate),
    (r"^max-min slowest flow", slowest_rate),
)


# ---- a ring on hashed paths: RoCE with several queue pairs per connection --------------------------------------------
# A ring is as fast as its slowest step. How the NICs of arXiv:2605.04333's Cluster C share T0s is not published. Here
# eight NICs of the ring, one server's, are under each T0 with 64 ports down and 64 up (a 51.2T box at 400G), and the
# range is from 4 to 32 NICs.


T0_DOWN, RING_RADIX = 64, 128
TOGETHER, RANGE = 8, (4, 32)  # NICs of the ring under one T0
# Seeds of the hashes: one draw of 64 flows is not representative.
RING_SEEDS = range(20)
# Ranks: four per T0 of 64 are as many as two tiers connect.
MOST = 512
QPS = (1, 2, 4, 8, 16, 32, 64)
# Relative gain from twice as many queue pairs that counts as none.
LITTLE = 0.05


def fraction(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Compare the share of line rate of the slowest step."""
    ranks, qps = _stated_ranks(row), stated(count_before(row.quantity, "QPs?"), "how many QPs")
    computed, *ends = (_slowest_rate(ranks, together, min(qps, QPS[-1])) for together in (TOGETHER, *RANGE))
    note = f"sim/fluid, {TOGETHER} to a T0 of {T0_DOWN}; {ends[0]:.2f} with {RANGE[0]}, {ends[1]:.2f} with {RANGE[1]}"
    return ranged(row, computed, note, between=(min(computed, *ends), max(computed, *ends)))


def enough(row: Claim, _: ClaimContext) -> ClaimOutcome:
    """Compare the smallest number of queue pairs beyond which twice as many add little."""
    ranks = _stated_ranks(row)
    computed, *ends = (_enough_qps(ranks, together) for together in (TOGETHER, *RANGE))
    note = f"sim/fluid, {TOGETHER} to a T0 of {T0_DOWN}; {ends[0]} with {RANGE[0]}, {ends[1]} with {RANGE[1]}"
    return ranged(row, computed, note, between=(min(computed, *ends), max(computed, *ends)))


def _enough_qps(ranks: int, together: int) -> int:
    for fewer, more in pairwise(QPS):
        if _slowest_rate(ranks, together, more) / _slowest_rate(ranks, together, fewer) - 1 < LITTLE:
            return fewer
    return QPS[-1]


def _stated_ranks(row: Claim) -> int:
    ranks = stated(count_before(row.conditions, "(?:way|ranks?|GPUs?|hosts?)"), "how many ranks")
    if ranks % TOGETHER or not 2 * RANGE[1] <= ranks <= MOST:
        raise NotStated(f"a ring that is run here: {ranks:,} ranks are not 64, 72, … {MOST:,}")
    return ranks


@functools.lru_cache(maxsize=64)
def _slowest_rate(ranks: int, together: int, qps: int) -> float:
    """Return the slowest rate, averaged over hashes, of a ring in which every step leaves its T0."""
    place = np.arange(ranks)
    host = place // together * T0_DOWN + place % together
    fabric = parse_fabric(f"clos2:{-(-ranks // together) * T0_DOWN}x400G/1p/{RING_RADIX}/wide")
    ring = make_flows(host, host[(place + together) % ranks], 1.0)
    hashed = (by_qp(qps, seed=seed) if qps > 1 else by_flow(seed=seed) for seed in RING_SEEDS)
    return float(np.mean([solve_rates(fabric, ring, routing=routing).slowest for routing in hashed]))


RING_READERS: tuple[tuple[str, ClaimReader], ...] = (
    (r"^RoCE \d+ QPs? fraction", fraction),
    (r"^RoCE QPs beyond", enough),
)


# ---- random loss on every NIC: the packet engine in steady state -----------------------------------------------------


# arXiv:2605.04333 section 5.2.7 is about its Cluster C: 400G NICs in four planes. T0s are small, so that every flow
# crosses a T1. Only the loss affects a flow, so more hosts give the same mean.
FABRIC, PLANES, T0_HOSTS, LOSS_MOST_HOSTS = "clos2:{hosts}x400G/4p/16/wide", 4, 8, 16
NBYTES = 1e9  # "large messages"
SAMPLE_S = 1e-3
LOSS_TOLERANCE = 0.07 / 0.33  # the design requires 0.33 ± 0.07
# Per cent; `Transport.probe_s` was fitted at this loss.
CALIBRATED = 1.0
CPU_S = 6.0  # for a pair of runs, measured on 2026-11-15


def lossy(row: Claim, context: ClaimContext) -> ClaimOutcome:
    """Compare the mean throughput of one ring step over T1s, as a share of the throughput without loss."""
    percent, hosts = _loss_question(row)
    if reason := context.refuses(_loss_simulation(percent, hosts)):
        return skipped(row, reason)
    computed = _mean_s(hosts, 0.0) / _mean_s(hosts, percent / 100)
    note = f"sim/packets, {NBYTES / 1e9:g} GB per connection, {hosts} hosts"
    if percent == CALIBRATED:
        return calibrated(row, computed, f"{note}; the time between probes was set here", tolerance=LOSS_TOLERANCE)
    return reproduced(row, computed, note, tolerance=LOSS_TOLERANCE)


def _loss_question(row: Claim) -> tuple[float, int]:
    percent = number_matching(row.quantity, r"at ([\d.]+) percent loss")
    hosts = stated(count_before(row.conditions, "(?:GPUs?|hosts?)"), "how many GPUs")
    return min(stated(percent, "how many per cent are lost"), 99.0), max(2, min(hosts, LOSS_MOST_HOSTS))


@functools.lru_cache(maxsize=16)
def _mean_s(hosts: int, loss: float) -> float:
    # Loss on the sender's and on the receiver's NIC link, so that a path loses `loss`.
    each = 1 - math.sqrt(1 - loss)
    faults = tuple(
        FabricFault(part="nic", number=host, plane=plane, loss=each) for host in range(hosts) for plane in range(PLANES)
    )
    fabric = parse_fabric(FABRIC.format(hosts=hosts))
    step = min(T0_HOSTS, hosts // 2)
    traffic = shift(hosts, NBYTES, step=step)
    loss_faults = faults if loss else ()
    result = run_connections(
        fabric, traffic, transport=MRC, faults=loss_faults, sample_s=SAMPLE_S, limit_s=10.0, each_plane=True
    )
    if result.stopped == "interrupted":
        raise KeyboardInterrupt
    return float(np.mean(result.fct_s))


def loss_need(row: Claim) -> NeededSimulation | None:
    """Return the simulation that a row needs."""
    return _loss_simulation(*_loss_question(row))


def _loss_simulation(percent: float, hosts: int) -> NeededSimulation:
    return NeededSimulation(key=("loss", percent, hosts), cpu_s=CPU_S)


LOSS_READERS: tuple[tuple[str, ClaimReader], ...] = ((r"^MRC fraction at [\d.]+ percent loss", lossy),)
LOSS_NEEDS: tuple[tuple[str, SimulationNeed], ...] = ((r"^MRC fraction at [\d.]+ percent loss", loss_need),)


# ---- a flow next to an incast: several hosts under one T0 send to one host under another -----------------------------
# The victim flow goes from another host of the first T0 to a neighbour of the incast's target. With hashed paths it is
# slowed only if its path shares a link with the incast: of 24 hashes, all that do so are run and counted. The paper's
# cluster, wiring and hash are not published (arXiv:2605.04333 section 5.2.8 and appendix); it shows one such case.


INCAST_SEEDS = range(24)
INCAST_SAMPLE_S = 1e-3
# Simulated seconds. Pauses settle immediately; DCQCN's rates rise by 1/1000 of the line every 55 µs; MRC's shares
# fluctuate slowly and need a long average.
PFC_S, DCQCN_S, MRC_S = 2e-3, 40e-3, 25e-3
INCAST_CPU_S = {"PFC": 4.0, "DCQCN": 34.0, "MRC": 3.0}  # measured on 2026-11-15
# Share of the victim's rate alone; pauses leave it a fifth or everything, so any threshold between works.
HARMED = 0.98
# Per cent of the victim's rate: the design's limit for MRC.
WHOLE = 1.0
MOST_SENDERS = 63


def loss_mrc(row: Claim, context: ClaimContext) -> ClaimOutcome:
    """Compare the victim's loss of rate if packets are sprayed."""
    senders, gbps = _incast_crowd(row)
    if reason := context.refuses(_incast_simulation("MRC", senders, gbps)):
        return skipped(row, reason)
    rates = _incast_rates(MRC, senders, gbps, 0, MRC_S)
    shares = rates[:-1].mean(axis=1) * MRC.packet_bytes / MRC.payload_bytes
    note = f"sim/packets; senders {shares.min():.1f} to {shares.max():.1f} Gb/s on the wire"
    return reproduced(row, 100 * (1 - rates[-1].mean() / _lone_rate(MRC, gbps)), note, tolerance=WHOLE)


def share_mrc(row: Claim, context: ClaimContext) -> ClaimOutcome:
    """Compare the rate of each sender of the incast, on the wire."""
    senders, gbps = _incast_crowd(row)
    if reason := context.refuses(_incast_simulation("MRC", senders, gbps)):
        return skipped(row, reason)
    shares = _incast_rates(MRC, senders, gbps, 0, MRC_S)[:-1].mean(axis=1) * MRC.packet_bytes / MRC.payload_bytes
    return reproduced(row, float(shares.mean()), f"sim/packets; {shares.min():.1f} to {shares.max():.1f}")


def loss_dcqcn(row: Claim, context: ClaimContext) -> ClaimOutcome:
    """Compare the victim's loss in the second half: the median over all hashes that put it next to the incast."""
    senders, gbps = _incast_crowd(row)
    qps = count_before(row.quantity, "QPs?") or 1
    if qps > 1 or "1-s" in row.quantity:
        return skipped(row, "a second is beyond what is simulated by packets; over 40 ms: docs/simulation/packets.md")
    if reason := context.refuses(_incast_simulation("DCQCN", senders, gbps)):
        return skipped(row, reason)
    shares = [
        _late_rate(_incast_rates(ROCE, senders, gbps, seed, DCQCN_S)) / _lone_rate(ROCE, gbps)
        for seed in _harmful_hashes(row)
    ]
    losses = [100 * (1 - share) for share in shares]
    note = f"sim/packets, median of {_drawn_text(losses)}"
    return ranged(row, median(losses), note, between=(min(losses), max(losses)))


def _pfc_reader(pick: Callable[[list[float]], float], name: str) -> ClaimReader:
    def read(row: Claim, context: ClaimContext) -> ClaimOutcome:
        """Compare the victim's rate under pauses, over the hashes that put it next to the incast."""
        senders, gbps = _incast_crowd(row)
        if reason := context.refuses(_incast_simulation("PFC", senders, gbps)):
            return skipped(row, reason)
        rates = [_late_rate(_incast_rates(ROCE_PFC, senders, gbps, seed, PFC_S)) for seed in _harmful_hashes(row)]
        note = f"sim/packets, {name} of {_drawn_text(rates)}, median {median(rates):.0f}"
        return ranged(row, pick(rates), note, between=(min(rates), max(rates)))

    return read


def _drawn_text(values: list[float]) -> str:
    spread = f"{min(values):.0f} to {max(values):.0f}"
    return f"the {len(values)} of {len(INCAST_SEEDS)} hashes that put it beside the crowd: {spread}"


def _late_rate(rates: Floats) -> float:
    """Return the victim's mean rate over the second half."""
    return float(rates[-1, rates.shape[1] // 2 :].mean())


def _harmful_hashes(row: Claim) -> list[int]:
    """Return the hashes with which pauses reach the victim."""
    senders, gbps = _incast_crowd(row)
    alone = _lone_rate(ROCE_PFC, gbps)
    seeds = [
        seed
        for seed in INCAST_SEEDS
        if _late_rate(_incast_rates(ROCE_PFC, senders, gbps, seed, PFC_S)) < HARMED * alone
    ]
    if not seeds:
        raise NotStated(f"a hash that matters: none of {len(INCAST_SEEDS)} put the victim beside the crowd")
    return seeds


def _incast_crowd(row: Claim) -> tuple[int, float]:
    senders = stated(number_matching(row.conditions, r"(\d+) ?(?::|to) ?1 incast"), "how many to one (7:1 incast)")
    gbps = number_matching(row.conditions, r"(\d+)G\b") or 400.0
    if not 2 <= senders <= MOST_SENDERS:
        raise NotStated(f"an incast that is run here: {senders:g}:1 is not 2:1 to {MOST_SENDERS}:1")
    return int(senders), gbps


def _lone_rate(transport: Transport | Roce, gbps: float) -> float:
    return gbps * transport.payload_bytes / transport.packet_bytes


@functools.lru_cache(maxsize=64)
def _incast_rates(transport: Transport | Roce, senders: int, gbps: float, seed: int, limit_s: float) -> Floats:
    """Return the Gb/s of every flow over time; the victim is the last row."""
    side = senders + 1
    fabric = parse_fabric(f"clos2:{2 * side}x{gbps:g}G/1p/{2 * side}/wide")
    source, target = np.arange(side), np.full(side, side)
    target[-1] += 1
    endless = np.full(side, math.ceil(2 * limit_s * gbps * 1e9 / 8))
    result = run_connections(
        fabric,
        make_flows(source, target, endless),
        transport=transport,
        seed=seed,
        limit_s=limit_s,
        sample_s=INCAST_SAMPLE_S if limit_s > 10 * INCAST_SAMPLE_S else limit_s / 10,
        watch=tuple(range(side)),
    )
    if result.stopped == "interrupted":
        raise KeyboardInterrupt
    return result.watched_gbps


def _incast_simulation(kind: str, senders: int, gbps: float) -> NeededSimulation:
    return NeededSimulation(key=("incast", kind, senders, gbps), cpu_s=INCAST_CPU_S[kind] * senders / 7)


def _incast_need(kind: str) -> SimulationNeed:
    def wanted(row: Claim) -> NeededSimulation | None:
        return None if "1-s" in row.quantity else _incast_simulation(kind, *_incast_crowd(row))

    return wanted


MRC_LOSS, DCQCN_LOSS = r"^victim flow loss MRC", r"^victim flow (worst 1-s )?loss RoCE\+DCQCN"
PFC_LOW, PFC_HIGH = r"^victim flow PFC only, low", r"^victim flow PFC only, high"
MRC_SHARE = r"^(fair )?share (per|of each) sender|^sender share"
INCAST_READERS: tuple[tuple[str, ClaimReader], ...] = (
    (MRC_LOSS, loss_mrc),
    (MRC_SHARE, share_mrc),
    (DCQCN_LOSS, loss_dcqcn),
    (PFC_LOW, _pfc_reader(min, "least")),
    (PFC_HIGH, _pfc_reader(max, "most")),
)
INCAST_NEEDS: tuple[tuple[str, SimulationNeed], ...] = (
    (MRC_LOSS, _incast_need("MRC")),
    (MRC_SHARE, _incast_need("MRC")),
    (DCQCN_LOSS, _incast_need("DCQCN")),
    (PFC_LOW, _incast_need("PFC")),
    (PFC_HIGH, _incast_need("PFC")),
)


# ---- a slotted spray without windows or latencies: the packet engine with both removed -------------------------------


SLOTTED_PORT_GBPS = 100.0
SLOTTED_RADIX = 512
SLOTTED_MOST_HOSTS = 131_072
MARK = 8  # packets, if the row states no ECN threshold
LATE_S = 1e-3  # no packet is lost, so no timeout may fire
SLOTTED_TOLERANCE = 0.10  # tolerance that the design requires for a tail
# Relative tolerance of a share of a few per cent, from one seed.
TRIMS = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """The parameters of a slotted spray."""

    hosts: int
    down: int  # hosts of a T0
    packets: int  # per flow
    queue: int
    paths: int
    mark: int
    spray: Spray


def slowest(row: Claim, context: ClaimContext) -> ClaimOutcome:
    """Compare the packets of a flow divided by the slots of the slowest flow."""
    question = _slotted_question(row)
    if reason := context.refuses(_slotted_simulation(question)):
        return skipped(row, reason)
    fabric, _, transport = _slotted_setting(question)
    slots = _run_slotted(question).tail_s / (8 * transport.packet_bytes / (fabric.port_gbps * 1e9))
    return reproduced(
        row, question.packets / slots, "sim/packets without window and latency", tolerance=SLOTTED_TOLERANCE
    )


def trimmed(row: Claim, context: ClaimContext) -> ClaimOutcome:
    """Compare the share of packets that a full queue trimmed, in per cent."""
    question = _slotted_question(row)
    if reason := context.refuses(_slotted_simulation(question)):
        return skipped(row, reason)
    result = _run_slotted(question)
    scale = 100.0 if row.unit == "percent" else 1.0
    note = "sim/packets without window and latency"
    return reproduced(row, scale * result.trimmed / result.packets, note, tolerance=TRIMS)


def _slotted_question(row: Claim) -> Question:
    hosts = stated(count_before(row.conditions, r"hosts?(?! per\b)"), "how many hosts")
    if hosts > SLOTTED_MOST_HOSTS:
        raise NotStated(f"a size that is run here: {hosts:,} hosts are more than {SLOTTED_MOST_HOSTS:,}")
    if "swap" in row.quantity:
        raise NotStated("how paths are swapped")
    return Question(
        hosts=hosts,
        down=count_before(row.conditions, "hosts? per T0") or SLOTTED_RADIX // 2,
        packets=stated(count_before(row.conditions, "packets? per flow"), "how many packets per flow"),
        queue=int(stated(number_matching(row.conditions, r"queue (\d+) packets"), "how many packets a queue holds")),
        paths=stated(count_before(row.conditions, "(?:EVs?|paths?)"), "how many EVs"),
        mark=int(number_matching(row.conditions, r"ECN threshold (\d+)") or MARK),
        spray="skip" if "skip" in row.quantity else "oblivious",
    )


def _slotted_setting(asked: Question) -> tuple[Fabric, Flows, Transport]:
    fabric = replace(parse_fabric(f"clos2:{asked.hosts}x{SLOTTED_PORT_GBPS:g}G/1p/{2 * asked.down}"), hop_s=0.0)
    # Share of a round trip without latencies, in slots.
    mark = asked.mark / (fabric.hops + 1)
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
def _run_slotted(question: Question) -> PacketResult:
    fabric, traffic, transport = _slotted_setting(question)
    result = run_connections(fabric, traffic, transport=transport)
    if result.stopped == "interrupted":
        raise KeyboardInterrupt
    return result


def _slotted_need(row: Claim) -> NeededSimulation | None:
    return _slotted_simulation(_slotted_question(row))


@functools.lru_cache(maxsize=64)
def _slotted_simulation(question: Question) -> NeededSimulation:
    sketch = sketch_run(*_slotted_setting(question), alike=True)
    return NeededSimulation(key=("slotted", question), cpu_s=sketch.cost.cpu_s)


SLOWEST, TRIMMED = r"^slowest flow, slotted spray", r"^(trims|trimmed packets|packets trimmed), slotted spray"
SLOTTED_READERS: tuple[tuple[str, ClaimReader], ...] = ((SLOWEST, slowest), (TRIMMED, trimmed))
SLOTTED_NEEDS: tuple[tuple[str, SimulationNeed], ...] = ((SLOWEST, _slotted_need), (TRIMMED, _slotted_need))
