"""A run of uet-htsim from its command line: who sends what over which fabric, and how."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from phalanx.network.fabric.catalogue import unnamed
from phalanx.network.fabric.parse import parse_fabric
from phalanx.network.fabric.types import Fabric
from phalanx.sim.packets.transport import HTSIM, Spray
from phalanx.validate.network.htsim_traffic import Sent, read_sent

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
class Case:
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


def read_case(command: str) -> Case | str:
    """The case of a command line, or the reason why there is none."""
    values = _options(command)
    if isinstance(values, str):
        return values
    sent = read_sent(command)
    if isinstance(sent, str):
        return sent
    if not 2 <= sent.hosts <= MOST_HOSTS:
        return f"{sent.hosts:,} hosts are not between 2 and {MOST_HOSTS:,}"
    tree = _tree(command, sent.hosts, values)
    if tree is None:
        return f"{sent.hosts:,} hosts are no full fat tree, or the .topo file's name does not give its shape"
    packet_bytes = int(values.get("mtu", PACKET_BYTES))
    return Case(
        sent=sent,
        tree=tree,
        hop_s=1e-6 * values.get("hop_latency", HOP_US),
        paths=int(values.get("paths", HTSIM.paths)),
        spray=_spray(command),
        ack_every=max(1, math.ceil(values.get("sack_threshold", SACK_BYTES) / packet_bytes)),
        packet_bytes=packet_bytes,
        queue=_whole(values, "q"),
        window=_whole(values, "cwnd"),
        credits="-sender_cc_only" not in command,
        failed=int(values.get("failed", 0)),
        end_s=1e-6 * values.get("end", END_US),
    )


def _options(command: str) -> dict[str, float] | str:
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


def _spray(command: str) -> Spray:
    found = re.search(r"-load_balancing_algo (\w+)", command)
    return SPRAYS[found[1]] if found else HTSIM.spray


def _whole(values: dict[str, float], name: str) -> int | None:
    return int(values[name]) if values.get(name) else None


def fabric_of(case: Case) -> Fabric:
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
        switch=unnamed(max(tree.down + tree.up, leaves), tree.gbps),
        oversubscription=tree.down / tree.up,
        rails=1,
        t0_down=tree.down,
        t0_up=tree.up,
        t0=leaves,
        t1=tree.up,
        hop_s=case.hop_s,
    )


def _tree(command: str, hosts: int, values: dict[str, float]) -> Tree | None:
    """Two tiers where a leaf-spine file or `-tiers 2` is named, else uet-htsim's own fat tree of three.

    None where hosts do not fill it, or a file's name does not say what is in it.
    """
    gbps = values.get("linkspeed", 1000.0 * PORT_GBPS) / 1000
    found = re.search(r"\b(leaf_spine|fat_tree)_(\d+)([\w-]*)\.topo\b", command)
    if found is None:
        if ".topo" in command:
            return None
        return _three(hosts, gbps) if values.get("tiers", 3) == 3 else _two(hosts, gbps)
    if int(found[2][:9]) != hosts:
        return None
    name = found[3]
    speed, ratio, flat = re.search(r"_(\d{1,4})g(?![a-z])", name), _oversubscription(name), "_2t" in name
    if speed:
        gbps = float(speed[1])
    if found[1] == "leaf_spine" or (speed and flat):
        return _leaf_spine(hosts, gbps, ratio)
    return _three(hosts, gbps) if speed and ratio == 1 else None


def _three(hosts: int, gbps: float) -> Tree | None:
    half = round((hosts / 2) ** (1 / 3))
    return Tree(tiers=3, gbps=gbps, down=half, up=half) if 2 * half**3 == hosts else None


def _two(hosts: int, gbps: float) -> Tree | None:
    """`-tiers 2` without a file: K switches with K/2 hosts each."""
    half = math.isqrt(hosts // 2)
    return Tree(tiers=2, gbps=gbps, down=half, up=half) if 2 * half**2 == hosts else None


def _leaf_spine(hosts: int, gbps: float, ratio: int) -> Tree | None:
    """Leaves of the largest power of two that is not above the root: 32 x 32 for 1,024, 128 x 64 for 8,192."""
    down = 1 << (math.isqrt(hosts).bit_length() - 1)
    if hosts % down or down % ratio:
        return None
    return Tree(tiers=2, gbps=gbps, down=down, up=down // ratio)


def _oversubscription(name: str) -> int:
    """`_oversub_8-1`, `_8_to_1` and `_8os` are 8:1; `_oversub` alone is 4:1 in the file of that name."""
    if found := re.search(r"_(?:oversub_)?(\d{1,4})(?:-1|_to_1|os\b|os_)", name):
        return max(1, int(found[1]))
    return 4 if "_oversub" in name else 1
