"""Convert a `.topo` file of htsim to a fabric, and a fabric to a `.topo` file.

It is interpreted as by fat_tree_topology.cpp of Broadcom/csg-htsim: `Nodes`, `Tiers`, `Podsize`, then per `Tier` its
link speed and latency downwards, its ports down and up, and the number of links in a bundle to each switch below.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.errors import UserError, mistake
from phalanx.io.visible import one_line
from phalanx.network.fabric.fabric_types import Fabric
from phalanx.network.fabric.sizing import MOST_NIC_GBPS
from phalanx.network.fabric.switch_catalogue import unnamed_switch
from phalanx.sim.htsim.connection_matrix import MatrixLine, read_lines

MOST_BYTES = 1 << 20  # a page of text
MOST_NODES = 10**7
MOST_PORTS = 10**6
HEAD = ("nodes", "tiers", "podsize")
LEAST = {  # least value of each word of a tier
    "downlink_speed_gbps": 1,
    "radix_down": 1,
    "radix_up": 1,
    "downlink_latency_ns": 0,
    "switch_latency_ns": 0,
    "bundle": 1,
    "oversubscribed": 1,
    "queue_down": 1,
    "queue_up": 1,
}
# Largest values; latencies are at most a second.
MOST = {"downlink_speed_gbps": int(MOST_NIC_GBPS), "downlink_latency_ns": 10**9, "switch_latency_ns": 10**9}
NEEDED = ("downlink_speed_gbps", "radix_down")


@dataclass(frozen=True, kw_only=True, slots=True)
class Topo:
    """The fabric of a file, and the settings of the file that a fabric cannot represent."""

    fabric: Fabric
    not_mapped: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TopoText:
    """A fabric as the text of a file, its number of hosts there, and what the file cannot represent."""

    text: str
    nodes: int
    not_mapped: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    """The numbers of a file by word, and their lines."""

    path: Path
    head: dict[str, int] = field(default_factory=dict)
    tiers: list[dict[str, int]] = field(default_factory=list)
    lines: dict[tuple[int, str], MatrixLine] = field(default_factory=dict)  # by (tier, word); tier -1 is the head

    def wrong(self, tier: int, word: str, what: str, *, why: str = "", fix: str = "") -> UserError:
        line = self.lines.get((tier, word))
        return mistake(line.where if line else str(self.path), what, why=why, fix=fix)

    def all_of(self, word: str, default: int) -> list[int]:
        return [tier.get(word, default) for tier in self.tiers]


def read_topo(path: Path) -> Topo:
    """Read the fabric of a `.topo` file; raises UserError with file and line."""
    file = _parse_topology(path)
    _check_topology(file)
    return Topo(fabric=_topology_fabric(file), not_mapped=tuple(_not_mapped(file)))


def _parse_topology(path: Path) -> _File:
    """Read the head and tiers of a file; raises UserError with file and line."""
    file, tiers, current = _File(path=path), dict[int, dict[str, int]](), -1
    for line in read_lines(path, most_bytes=MOST_BYTES):
        word = line.words[0].lower()
        if len(line.words) > 2:
            raise line.wrong(f'"{" ".join(line.words)[:60]}" has more than a word and a number', fix="one per line")
        if word == "tier":
            current = line.whole(1, most=2)
            if current in tiers:
                raise line.wrong(f"tier {current} is described twice", fix="keep one of the two")
            tiers[current] = {}
        _take_tier(file, tiers, current, word, line)
    for word in HEAD:
        if word not in file.head:
            raise mistake(str(path), f"{word.capitalize()} is missing", fix="begin with Nodes, Tiers and Podsize")
    for tier in range(file.head["tiers"]):
        if tier not in tiers:
            raise mistake(str(path), f"tier {tier} is missing", fix=f"describe tiers 0 to {file.head['tiers'] - 1}")
        file.tiers.append(tiers.pop(tier))
    for tier in tiers:
        problem = f"a tier {tier}, but there are {file.head['tiers']} tiers"
        raise file.wrong(tier, "tier", problem, fix="raise Tiers, or leave it out")
    return file


def _take_tier(file: _File, found: dict[int, dict[str, int]], current: int, word: str, line: MatrixLine) -> None:
    """Store the number of one line for the head or the current tier."""
    if (current, word) in file.lines:
        raise line.wrong(f"{line.words[0]} is given twice", fix="keep one of the two")
    file.lines[current, word] = line
    if word == "tier":
        return
    if current < 0:
        if word not in HEAD:
            raise line.unknown(line.words[0], [*HEAD, "tier"])
        limits = {"nodes": (2, MOST_NODES), "podsize": (1, MOST_NODES), "tiers": (2, 3)}[word]
        file.head[word] = line.whole(1, least=limits[0], most=limits[1])
        return
    if word not in LEAST:
        raise line.unknown(line.words[0], LEAST)
    most = MOST_PORTS if word.startswith(("radix", "bundle")) else MOST.get(word, 10**12)
    found[current][word] = line.whole(1, least=LEAST[word], most=most)


def _check_topology(file: _File) -> None:
    """Check that ports, pods and bundles fit each other, as htsim does; raises UserError."""
    top = len(file.tiers) - 1
    for tier, values in enumerate(file.tiers):
        for word in (*NEEDED, "radix_up")[: 3 if tier < top else 2]:
            if word not in values:
                raise file.wrong(tier, "tier", f"tier {tier} has no {word}", fix=f"add {word} N")
        if tier == top and "radix_up" in values:
            raise file.wrong(tier, "radix_up", "the highest tier has ports up", fix="leave it out, or raise Tiers")
    nodes, pod, down = file.head["nodes"], file.head["podsize"], file.tiers[0]["radix_down"]
    if nodes % pod or pod % down:
        problem = f"{nodes:,} nodes are not whole pods of {pod:,}, or those not whole switches of {down:,}"
        raise file.wrong(
            -1, "podsize", problem, fix="let Radix_Down of tier 0 divide Podsize, and Podsize divide Nodes"
        )
    if top == 1 and pod != nodes:
        problem = f"pods of {pod:,} of {nodes:,} nodes, but two tiers have nothing above that joins pods"
        raise file.wrong(-1, "podsize", problem, fix=f"use Podsize {nodes}")
    if file.tiers[0].get("bundle", 1) != 1:
        raise file.wrong(0, "bundle", "several links to each host", why="htsim has one port per host", fix="use 1")
    _check_speeds(file)
    below = (1, pod // down, nodes // pod)
    for tier in range(1, top + 1):
        _check_tier(file, tier, below[tier])


def _check_speeds(file: _File) -> None:
    speeds = file.all_of("downlink_speed_gbps", 0)
    for tier, speed in enumerate(speeds):
        if speed != speeds[0]:
            raise file.wrong(
                tier,
                "downlink_speed_gbps",
                f"links of {speed} Gb/s above links of {speeds[0]} Gb/s",
                why="all ports of a fabric have one speed here",
                fix=f"use {speeds[0]} in every tier, with more ports up in proportion",
            )


def _check_tier(file: _File, tier: int, below: int) -> None:
    """Raise UserError where the ports of a tier do not fit the tier below."""
    lower, values = file.tiers[tier - 1], file.tiers[tier]
    bundle = values.get("bundle", 1)
    if lower["radix_up"] % bundle:
        problem = f"{lower['radix_up']} ports up in tier {tier - 1} are no whole bundles of {bundle}"
        raise file.wrong(tier, "bundle", problem, fix="let Bundle divide Radix_Up of the tier below")
    if values["radix_down"] != below * bundle:
        raise file.wrong(
            tier,
            "radix_down",
            f"tier {tier} has {values['radix_down']} ports down for {below} switches below with {bundle} links each",
            fix=f"use Radix_Down {below * bundle}",
        )
    ratio = lower.get("oversubscribed", 1)
    if lower["radix_down"] != ratio * lower["radix_up"]:
        raise file.wrong(
            tier - 1,
            "oversubscribed" if "oversubscribed" in lower else "radix_up",
            f"{lower['radix_down']} ports down and {lower['radix_up']} up, but oversubscribed {ratio}",
            why="htsim refuses it too",
            fix="let Oversubscribed be ports down over ports up, a whole number",
        )


def _topology_fabric(file: _File) -> Fabric:
    """Return the fabric that the numbers of a checked file describe."""
    nodes, tiers = file.head["nodes"], file.tiers
    down, up = tiers[0]["radix_down"], tiers[0]["radix_up"]
    pods, deep = nodes // file.head["podsize"], len(tiers) == 3
    t1_per_pod = up // tiers[1].get("bundle", 1)
    radix = max(tier["radix_down"] + tier.get("radix_up", 0) for tier in tiers)
    gbps = float(tiers[0]["downlink_speed_gbps"])
    return Fabric(
        name=one_line(file.path.stem)[:80],
        hosts=nodes,
        nic_gbps=gbps,
        planes=1,
        tiers=len(tiers),
        switch=unnamed_switch(radix, gbps),
        oversubscription=down / up,
        rails=1,
        t0_down=down,
        t0_up=up,
        t0=nodes // down,
        t1=pods * t1_per_pod,
        t2=t1_per_pod * (tiers[1]["radix_up"] // tiers[2].get("bundle", 1)) if deep else 0,
        pods=pods,
        t1_up=tiers[1]["radix_up"] if deep else 0,
        hop_s=_one_way_ns(file) / (2 * len(tiers)) * 1e-9,
    )


def _one_way_ns(file: _File) -> float:
    """Return the one-way latency of the longest path: each tier's link and switch twice, the highest switch once."""
    links, switches = file.all_of("downlink_latency_ns", 0), file.all_of("switch_latency_ns", 0)
    return 2.0 * sum(links) + 2.0 * sum(switches) - switches[-1]


def _not_mapped(file: _File) -> list[str]:
    remarks = []
    links, switches = file.all_of("downlink_latency_ns", 0), file.all_of("switch_latency_ns", 0)
    if len(set(links)) > 1 or any(switches):
        mean_ns = _one_way_ns(file) / (2 * len(links))
        remarks.append(
            f"latencies by tier: every link has {mean_ns:g} ns, their mean on the longest path, switches included"
        )
    if any("queue_down" in tier or "queue_up" in tier for tier in file.tiers):
        remarks.append("Queue_Down and Queue_Up: queues are the transport's, one bandwidth-delay product")
    return remarks


def write_topo(fabric: Fabric) -> TopoText:
    """Return one plane of a fabric as a `.topo` file; raises UserError for a fabric that the format cannot describe."""
    _check_writable(fabric)
    remarks: list[str] = []
    if fabric.planes > 1:
        remarks.append(f"{fabric.planes} planes: the file is one of them, with NICs of {fabric.port_gbps:g} Gb/s")
    nodes = fabric.t0 * fabric.t0_down
    if nodes != fabric.hosts:
        remarks.append(f"empty ports: {fabric.hosts:,} hosts are {nodes:,} nodes there, the last of them silent")
    latency_ns = round(fabric.hop_s * 1e9)
    if abs(latency_ns - fabric.hop_s * 1e9) > 1e-6:
        remarks.append(f"a latency of {fabric.hop_s * 1e9:g} ns per link is {latency_ns} ns there")
    lines = [
        f"# {_plain_text(fabric.name)}, written by Phalanx",
        *(f"# not mapped: {_plain_text(remark)}" for remark in remarks),
    ]
    lines += [f"Nodes {nodes}", f"Tiers {fabric.tiers}", f"Podsize {nodes // fabric.pods}"]
    for tier, (down, up, bundle) in enumerate(_tier_ports(fabric)):
        lines += ["", f"Tier {tier}", f"Downlink_speed_Gbps {fabric.port_gbps:.0f}", f"Radix_Down {down}"]
        lines += [f"Radix_Up {up}", f"Oversubscribed {down // up}"] if up else []
        lines += [f"Downlink_Latency_ns {latency_ns}", "Switch_Latency_ns 0"]
        lines += [f"Bundle {bundle}"] if bundle > 1 else []
    return TopoText(text="\n".join(lines) + "\n", nodes=nodes, not_mapped=tuple(remarks))


def _plain_text(text: str) -> str:
    return text.encode("ascii", "replace").decode("ascii").replace("\n", " ")


def _tier_ports(fabric: Fabric) -> list[tuple[int, int, int]]:
    """Return ports down, ports up and bundle of each tier."""
    bundle = fabric.t0_up // fabric.t1_per_pod
    t1_down = fabric.t0 // fabric.pods * bundle
    if fabric.tiers == 2:
        return [(fabric.t0_down, fabric.t0_up, 1), (t1_down, 0, bundle)]
    up = _t1_up(fabric)
    wide = up // (fabric.t2 // fabric.t1_per_pod)
    return [(fabric.t0_down, fabric.t0_up, 1), (t1_down, up, bundle), (fabric.pods * wide, 0, wide)]


def _t1_up(fabric: Fabric) -> int:
    return fabric.t1_up or fabric.switch.radix // 2


def _check_writable(fabric: Fabric) -> None:
    """Raise UserError for a fabric that a .topo file cannot describe."""
    f = fabric
    if f.tiers not in (2, 3):
        raise _refused_fabric(f, f"{f.tiers} tiers", "htsim has two or three")
    if f.rails > 1:
        raise _refused_fabric(
            f, f"{f.rails} rails", "node i of a .topo is under switch i // Radix_Down", fix="use 1 rail"
        )
    if f.port_gbps != int(f.port_gbps):
        raise _refused_fabric(f, f"ports of {f.port_gbps:g} Gb/s", "htsim reads whole Gb/s")
    if f.t1 < f.pods or f.t0 % f.pods or f.t1 % f.pods or f.t0_up % f.t1_per_pod:
        raise _refused_fabric(f, f"{f.t0_up} uplinks of a T0 to {f.t1_per_pod} T1s", "htsim has equal bundles and pods")
    if f.tiers == 3 and (f.t2 < f.t1_per_pod or f.t2 % f.t1_per_pod or _t1_up(f) % (f.t2 // f.t1_per_pod)):
        raise _refused_fabric(f, f"{_t1_up(f)} uplinks of a T1 to {f.t2} T2s", "htsim has equal bundles")
    for tier, (down, up, _) in enumerate(_tier_ports(f)):
        if up and down % up:
            ratio = math.ceil(down / up)
            fix = f"use {ratio}:1" if tier == 0 else ""
            raise _refused_fabric(
                f, f"{down} ports down and {up} up in tier {tier}", "htsim's ratio is a whole number", fix=fix
            )


def _refused_fabric(fabric: Fabric, what: str, why: str, *, fix: str = "") -> UserError:
    return mistake(f"{fabric.name} as a .topo file", what, why=why, fix=fix)
