"""A run of uet-htsim from its command line: who sends what over which fabric, and how."""

from __future__ import annotations

import functools
import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

import numpy as np

from phalanx.network.fabric.fabric_file import parse_fabric
from phalanx.network.fabric.fabric_types import Fabric
from phalanx.network.fabric.switch_catalogue import unnamed_switch
from phalanx.sim.packets.link_faults import FabricFault
from phalanx.sim.packets.packet_run import run_connections
from phalanx.sim.packets.result import PacketResult
from phalanx.sim.packets.simulation_arrays import sketch_run
from phalanx.sim.packets.start_times import Schedule, at_once
from phalanx.sim.packets.transport import HTSIM, Spray, Transport, in_slots
from phalanx.sim.traffic_matrix import Flows
from phalanx.validate.network_claims import (
    Claim,
    ClaimContext,
    ClaimOutcome,
    ClaimReader,
    NeededSimulation,
    NotStated,
    SimulationNeed,
    calibrated,
    reproduced,
    skipped,
)

PORT_GBPS = 100  # uet-htsim main.h
HOP_US = 1.0
END_US = 1000.0  # what has not finished then is not printed
PACKET_BYTES = 4150
SACK_BYTES = 4 * PACKET_BYTES  # received without an acknowledgement: one for four packets ("4SACK" in the table)
MOST_HOSTS = 16_384
SPRAYS: dict[str, Spray] = {"oblivious": "oblivious", "bitmap": "skip", "reps": "recycle", "mixed": "recycle"}
# Options by what they do here. What only changes what it prints or its luck changes nothing.
NUMBERS = ("end", "paths", "q", "cwnd", "failed", "sack_threshold", "linkspeed", "hop_latency", "tiers", "mtu")
IDLE = ("seed", "log", "logtime", "o", "nodes", "conns", "tm", "topo", "load_balancing_algo", "sender_cc_algo")
FLAGS = ("sender_cc_only", "receiver_cc_only", "debug")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tree:
    """A full fat tree of two or three tiers."""

    tiers: int
    gbps: float
    down: int  # hosts of a T0
    up: int  # uplinks of a T0, each to a T1 of its own


@dataclass(frozen=True, kw_only=True, slots=True)
class PacketCase:
    """What the packet engine needs."""

    sent: Sent
    tree: Tree
    hop_s: float
    paths: int
    spray: Spray
    ack_every: int
    packet_bytes: int
    queue: int | None
    window: int | None
    credits: bool  # the receiver grants what may be sent, not a window of the sender
    failed: int  # slow links
    end_s: float


def read_case(command: str) -> PacketCase | str:
    """The case of a command line, or the reason why there is none."""
    values = _command_options(command)
    if isinstance(values, str):
        return values
    sent = read_sent(command)
    if isinstance(sent, str):
        return sent
    if not 2 <= sent.hosts <= MOST_HOSTS:
        return f"{sent.hosts:,} hosts are not between 2 and {MOST_HOSTS:,}"
    tree = _command_tree(command, sent.hosts, values)
    if tree is None:
        return f"{sent.hosts:,} hosts are no full fat tree, or the .topo file's name does not give its shape"
    packet_bytes = int(values.get("mtu", PACKET_BYTES))
    found = re.search(r"-load_balancing_algo (\w+)", command)
    command_spray = SPRAYS[found[1]] if found else HTSIM.spray
    return PacketCase(
        sent=sent,
        tree=tree,
        hop_s=1e-6 * values.get("hop_latency", HOP_US),
        paths=int(values.get("paths", HTSIM.paths)),
        spray=command_spray,
        ack_every=max(1, math.ceil(values.get("sack_threshold", SACK_BYTES) / packet_bytes)),
        packet_bytes=packet_bytes,
        queue=_whole_option(values, "q"),
        window=_whole_option(values, "cwnd"),
        credits="-sender_cc_only" not in command,
        failed=int(values.get("failed", 0)),
        end_s=1e-6 * values.get("end", END_US),
    )


def _command_options(command: str) -> dict[str, float] | str:
    """Numbers by option; or the first word that is not known here."""
    found: dict[str, float] = {}
    for name, value in re.findall(r"(?:^|\s)-([a-z]\w*)(?:\s+([^\s-]\S*))?", command):
        if name in FLAGS or name in IDLE:
            continue
        if name not in NUMBERS:
            return f"what -{name[:40]} does in uet-htsim is not modelled"
        try:
            found[name] = float(value.rstrip(",;"))
        except ValueError:
            return f"-{name} {value[:40]!r} is no number"
        if not 0 <= found[name] <= 1e9:
            return f"-{name} {value[:40]} is out of range"
    algorithm = re.search(r"-load_balancing_algo (\w+)", command)
    if algorithm and algorithm[1] not in SPRAYS:
        return f"the load balancing {algorithm[1][:40]!r} is not modelled"
    control = re.search(r"-sender_cc_algo (\w+)", command)
    if control and control[1] != "nscc":
        return f"the congestion control {control[1][:40]!r} is not modelled"
    return found


def _whole_option(values: dict[str, float], name: str) -> int | None:
    return int(values[name]) if values.get(name) else None


def fabric_of(case: PacketCase) -> Fabric:
    """The fabric of a case."""
    hosts, tree = case.sent.hosts, case.tree
    if tree.tiers == 3:
        return replace(parse_fabric(f"clos3:{hosts}x{tree.gbps:g}G/1p/{2 * tree.down}/wide"), hop_s=case.hop_s)
    leaves = hosts // tree.down
    return Fabric(
        name=f"leaf-spine of {hosts:,}",
        hosts=hosts,
        nic_gbps=tree.gbps,
        planes=1,
        tiers=2,
        switch=unnamed_switch(max(tree.down + tree.up, leaves), tree.gbps),
        oversubscription=tree.down / tree.up,
        rails=1,
        t0_down=tree.down,
        t0_up=tree.up,
        t0=leaves,
        t1=tree.up,
        hop_s=case.hop_s,
    )


def _command_tree(command: str, hosts: int, values: dict[str, float]) -> Tree | None:
    """Two tiers where a leaf-spine file or `-tiers 2` is named, else uet-htsim's own fat tree of three.

    None where hosts do not fill it, or a file's name does not say what is in it.
    """
    gbps = values.get("linkspeed", 1000.0 * PORT_GBPS) / 1000
    found = re.search(r"\b(leaf_spine|fat_tree)_(\d+)([\w-]*)\.topo\b", command)
    if found is None:
        if ".topo" in command:
            return None
        return _three_tiers(hosts, gbps) if values.get("tiers", 3) == 3 else _two_tiers(hosts, gbps)
    if int(found[2][:9]) != hosts:
        return None
    name = found[3]
    speed, ratio, flat = re.search(r"_(\d{1,4})g(?![a-z])", name), _oversubscription_of(name), "_2t" in name
    if speed:
        gbps = float(speed[1])
    if found[1] == "leaf_spine" or (speed and flat):
        return _leaf_spine(hosts, gbps, ratio)
    return _three_tiers(hosts, gbps) if speed and ratio == 1 else None


def _three_tiers(hosts: int, gbps: float) -> Tree | None:
    half = round((hosts / 2) ** (1 / 3))
    return Tree(tiers=3, gbps=gbps, down=half, up=half) if 2 * half**3 == hosts else None


def _two_tiers(hosts: int, gbps: float) -> Tree | None:
    """`-tiers 2` without a file: K switches with K/2 hosts each."""
    half = math.isqrt(hosts // 2)
    return Tree(tiers=2, gbps=gbps, down=half, up=half) if 2 * half**2 == hosts else None


def _leaf_spine(hosts: int, gbps: float, ratio: int) -> Tree | None:
    """Leaves of the largest power of two that is not above the root: 32 x 32 for 1,024, 128 x 64 for 8,192."""
    down = 1 << (math.isqrt(hosts).bit_length() - 1)
    if hosts % down or down % ratio:
        return None
    return Tree(tiers=2, gbps=gbps, down=down, up=down // ratio)


def _oversubscription_of(name: str) -> int:
    """`_oversub_8-1`, `_8_to_1` and `_8os` are 8:1; `_oversub` alone is 4:1 in the file of that name."""
    if found := re.search(r"_(?:oversub_)?(\d{1,4})(?:-1|_to_1|os\b|os_)", name):
        return max(1, int(found[1]))
    return 4 if "_oversub" in name else 1


# Who sends what in the connection files of uet-htsim, from the names of the files.
#
# The files are not in a table, but public: Broadcom/csg-htsim and forks of uet-htsim have them, with the scripts that
# wrote them. Permutations are Python's own shuffle: the files of 16 and of 1,024 nodes there are its seed 13, each
# pair. Files whose names say nothing are spelled out here, and the small permutation, of which three public copies
# differ: this one is of tommasobo/REPS_EuroSys_Artifact. The others have pairs under one T0, which take 167 µs; the
# fastest that uet-htsim printed is 188, so they are not its file.


Pattern = Literal["permutation", "incast", "listed"]
# From, to, bytes, and the start in microseconds.
Listed = tuple[tuple[int, int, int, float], ...]

NBYTES = 2_000_000  # per connection, where a name gives none
SEED = 13
UNITS = {"b": 1, "kb": 1000, "k": 1000, "mb": 1_000_000, "m": 1_000_000}
_SIZE = r"(\d+)(b|kb|mb|k|m)"
_PERMUTATION = re.compile(
    rf"^(?:gen_)?perm(?:utation)?_(\d+)n_(\d+)c(?:_\d+us?)?(?:_{_SIZE})?(?:_seed(\d+))?\.[ct]m$", re.IGNORECASE
)
_INCAST = re.compile(rf"^incast_(\d+)(?:n)?(?:_{_SIZE})?\.[ct]m$", re.IGNORECASE)
_FILE = re.compile(r"([\w.+-]+\.[ct]m)\b")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """The connections of a file."""

    pattern: Pattern
    hosts: int
    connections: int
    nbytes: int
    seed: int = SEED
    listed: Listed = ()


def _to_one_with_others(into: int, out: int, nbytes: int) -> Listed:
    """Hosts 1 to `into` send to 0; all but the first of them to `out` - 1 others each, too."""
    found = []
    other = into + 1
    for host in range(1, into + 1):
        found.append((host, 0, nbytes, 0.0))
        if host > 1:
            found += [(host, other + place, nbytes, 0.0) for place in range(out - 1)]
            other += out - 1
    return tuple(found)


# Which of the public copies it is was told by its fastest flow: for that one, agreement is no evidence.
CHOSEN = "perm_16n_16c_2MB.cm"
_SMALL = "13>6 1>4 6>0 2>13 10>5 15>1 8>14 14>2 5>15 4>12 12>11 0>8 9>7 7>9 3>10 11>3"
LISTED: Mapping[str, tuple[int, Listed]] = {
    "one.cm": (16, ((0, 13, NBYTES, 0.0),)),
    "bidir.cm": (16, ((0, 13, NBYTES, 0.0), (13, 0, NBYTES, 0.0))),
    "incast_3-1_overlapped.tm": (
        128,
        ((127, 0, NBYTES, 0.0), (95, 0, 250_000, 40.0), (61, 0, 250_000, 40.0)),
    ),
    CHOSEN: (16, tuple((int(a), int(b), NBYTES, 0.0) for a, b in re.findall(r"(\d+)>(\d+)", _SMALL))),
    "outcast_incast.cm": (128, _to_one_with_others(3, 10, NBYTES)),
}


def read_sent(command: str) -> Sent | str:
    """The connections of the file that a command line names, or the reason why they are not known."""
    name = _FILE.search(command)
    if name is None:
        return "it names no connection file (.cm)"
    file = name[1]
    if file in LISTED:
        hosts, listed = LISTED[file]
        return Sent(pattern="listed", hosts=hosts, connections=len(listed), nbytes=listed[0][2], listed=listed)
    if file == "incast.cm":
        return Sent(pattern="incast", hosts=16, connections=15, nbytes=NBYTES)
    if found := _PERMUTATION.match(file):
        return _file_permutation(file, found)
    if found := _INCAST.match(file):
        hosts = int(found[1][:9])
        return Sent(pattern="incast", hosts=hosts, connections=hosts - 1, nbytes=_byte_count(found[2], found[3]))
    return f"who sends what is in {file[:60]}, which is not in the table"


def _file_permutation(file: str, found: re.Match[str]) -> Sent | str:
    hosts, connections = int(found[1][:9]), int(found[2][:9])
    if not 0 < connections <= hosts:
        return f"{file[:60]}: {connections:,} connections of {hosts:,} hosts are no permutation"
    return Sent(
        pattern="permutation",
        hosts=hosts,
        connections=connections,
        nbytes=_byte_count(found[3], found[4]),
        seed=int(found[5][:9]) if found[5] else SEED,
    )


def _byte_count(digits: str | None, unit: str | None) -> int:
    return int(digits[:12]) * UNITS[(unit or "b").lower()] if digits else NBYTES


def rows_of(sent: Sent) -> Listed:
    """The connections one by one."""
    if sent.pattern == "permutation":
        return tuple((a, b, sent.nbytes, 0.0) for a, b in shuffled(sent.hosts, sent.connections, sent.seed))
    if sent.pattern == "incast":
        last = sent.hosts - 1
        return tuple((host, last, sent.nbytes, 0.0) for host in range(last))
    return sent.listed


def flows_of(sent: Sent) -> Flows:
    """The connections as flows."""
    rows = rows_of(sent)
    return Flows(
        source=np.array([row[0] for row in rows], dtype=np.int64),
        target=np.array([row[1] for row in rows], dtype=np.int64),
        nbytes=np.array([row[2] for row in rows], dtype=np.float64),
    )


def schedule_of(sent: Sent) -> Schedule:
    """When they start."""
    rows = rows_of(sent)
    return replace(at_once(len(rows)), start_s=np.array([1e-6 * row[3] for row in rows]))


def shuffled(hosts: int, connections: int, seed: int) -> list[tuple[int, int]]:
    """Sources and targets shuffled one after the other; who would send to itself swaps targets with the next.

    >>> shuffled(16, 3, 13)
    [(7, 5), (15, 1), (0, 13)]
    """
    draw = random.Random(seed)
    source, target = list(range(hosts)), list(range(hosts))
    draw.shuffle(source)
    draw.shuffle(target)
    for at in range(hosts):
        if source[at] == target[at]:
            after = (at + 1) % hosts
            target[at], target[after] = target[after], target[at]
    return list(zip(source, target, strict=True))[:connections]


# Rows of uet-htsim: completion times, packet by packet.


# What the design asks for: the mean (and here the fastest) and the tail at 64 paths or more, and all of them at fewer
# and with slow links.
MEAN, TAIL, FEW = 0.05, 0.10, 0.15
MANY_PATHS = 64
# With few paths the slowest flow is an accident of hashes, and ours are not uet-htsim's: a median, with its range.
SEEDS = range(5)
SLOW = 0.25  # of its speed: uet-htsim's topology.cpp, though its test plans call such links "10 %"


def completion(row: Claim, context: ClaimContext) -> ClaimOutcome:
    """Mean, tail or fastest completion."""
    case = read_case(row.conditions)
    if isinstance(case, str):
        return skipped(row, case)
    if reason := context.refuses(_needed_simulation(case)):
        return skipped(row, reason)
    measure = row.quantity.split(" ")[0]
    if case.credits and case.sent.pattern != "permutation" and measure != "tail":
        return skipped(row, "in which order a receiver grants credits to several senders is not modelled")
    results = [_run_case(case, seed) for seed in _case_seeds(case)]
    if stopped := [result.stopped for result in results if result.stopped]:
        return skipped(row, f"the simulation ended early: {stopped[0]}")
    ours_us = [1e6 * _measured_time(result, measure, case.end_s) for result in results]
    loose = case.paths < MANY_PATHS or case.failed
    tolerance = FEW if loose else TAIL if measure == "tail" else MEAN
    if measure == "min" and case.paths >= MANY_PATHS and case.sent.listed == LISTED[CHOSEN][1]:
        note = f"{_case_note(case, ours_us)}; which of three copies of the file it is was told by this"
        return calibrated(row, median(ours_us), note, tolerance=tolerance)
    return reproduced(row, median(ours_us), _case_note(case, ours_us), tolerance=tolerance)


def _case_note(case: PacketCase, ours_us: list[float]) -> str:
    parts = ["sim/packets"]
    if len(ours_us) > 1:
        parts.append(f"median of {len(ours_us)} hashes: {min(ours_us):.0f} to {max(ours_us):.0f}")
    if case.credits:
        parts.append("credits as a window that stays")
    if case.failed:
        parts.append(f"{case.failed} links at {SLOW:.0%}")
    return "; ".join(parts)


def _case_seeds(case: PacketCase) -> range:
    return SEEDS if case.paths < MANY_PATHS else SEEDS[:1]


def _measured_time(result: PacketResult, measure: str, end_s: float) -> float:
    """From the beginning of the run, as uet-htsim prints it ("finished at"), and only what finished before its end."""
    ends = result.start_s + result.fct_s
    ends = ends[ends <= end_s]
    if not len(ends):
        raise NotStated(f"an -end after which anything has finished: ours needs {result.best_s * 1e6:.0f} us")
    return {"mean": float(ends.mean()), "tail": float(ends.max()), "min": float(ends.min())}[measure]


@functools.lru_cache(maxsize=256)
def _run_case(case: PacketCase, seed: int) -> PacketResult:
    made = run_connections(
        fabric_of(case),
        flows_of(case.sent),
        transport=_case_transport(case),
        faults=_case_faults(case),
        seed=seed,
        schedule=schedule_of(case.sent),
    )
    if made.stopped == "interrupted":
        raise KeyboardInterrupt  # a number from half a run would be a wrong one
    return made


def _case_transport(case: PacketCase) -> Transport:
    made = replace(
        HTSIM,
        paths=case.paths,
        spray=case.spray,
        ack_every=case.ack_every,
        payload_bytes=case.packet_bytes - HTSIM.header_bytes,
        queue_packets=case.queue,
        window_packets=case.window,
    )
    return _credited_transport(case, made) if case.credits else made


def _credited_transport(case: PacketCase, made: Transport) -> Transport:
    """A receiver grants what its link can take in a round trip, to all its senders together, and marks do not matter.

    With one sender each, as in a permutation, that is a window that stays.
    """
    senders = int(np.bincount(flows_of(case.sent).target).max())
    whole = in_slots(fabric_of(case), made, planes=1).window
    return replace(made, controlled=False, mark_last_hop=False, window_packets=max(1.0, whole / senders))


def _case_faults(case: PacketCase) -> tuple[FabricFault, ...]:
    """Slow links where uet-htsim has them: three tiers, T2 to T1; two, the first T1s both ways."""
    fabric = fabric_of(case)
    if fabric.tiers == 2:
        return tuple(
            FabricFault(part="t1", number=t1, left=SLOW, short=True) for t1 in range(min(case.failed, fabric.t1))
        )
    ports = fabric.t1_up or fabric.switch.radix // 2
    slow = range(min(case.failed, fabric.t1 * ports))
    return tuple(
        FabricFault(part="t1_fall", number=one // ports, port=one % ports, left=SLOW, short=True) for one in slow
    )


def htsim_need(row: Claim) -> NeededSimulation | None:
    """What a row would have simulated."""
    case = read_case(row.conditions)
    return None if isinstance(case, str) else _needed_simulation(case)


@functools.lru_cache(maxsize=4096)
def _needed_simulation(case: PacketCase) -> NeededSimulation:
    made = sketch_run(fabric_of(case), flows_of(case.sent), _case_transport(case), alike=True)
    return NeededSimulation(key=case, cpu_s=made.cost.cpu_s * len(_case_seeds(case)))


HTSIM_READERS: tuple[tuple[str, ClaimReader], ...] = ((r"^(mean|tail|min) FCT", completion),)
HTSIM_NEEDS: tuple[tuple[str, SimulationNeed], ...] = ((r"^(mean|tail|min) FCT", htsim_need),)
