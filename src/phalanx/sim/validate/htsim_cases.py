"""A run of uet-htsim from its command line: who sends what over which fabric.

The connection files themselves are not in a table, but their names say it: `perm_1024n_1024c_0u_2000000b.cm`,
`incast_128.cm`. Those without numbers are spelled out here as they are in Broadcom/csg-htsim (BSD-3), from which
uet-htsim took them: 16 nodes, 2 MB per connection.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from phalanx.sim.packets.transport import HTSIM

Pattern = Literal["permutation", "incast", "one", "both ways"]

PORT_GBPS = 100
MOST_HOSTS = 4096
NBYTES = 2_000_000  # per connection, where a name gives none
ADAPTIVE = ("bitmap", "reps", "mixed")  # all skip what is marked; their bookkeeping differs and is not modelled apart
UNNUMBERED: Mapping[str, Pattern] = {"one.cm": "one", "bidir.cm": "both ways", "incast.cm": "incast"}
SMALL = 16
OVERSUBSCRIBED = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What the packet engine needs."""

    pattern: Pattern
    hosts: int
    nbytes: int
    fabric: str
    paths: int
    adaptive: bool
    queue: int | None
    window: int | None


def read_case(command: str) -> Case | str:
    """The case of a command line, or the reason why there is none."""
    if reason := _unknown(command):
        return reason
    traffic = _traffic(command)
    if isinstance(traffic, str):
        return traffic
    pattern, hosts, nbytes = traffic
    fabric = _fabric(command, hosts)
    if fabric is None or not 2 <= hosts <= MOST_HOSTS:
        return f"{hosts:,} hosts are no full fat tree, or more than {MOST_HOSTS:,}"
    algorithm = re.search(r"-load_balancing_algo (\w+)", command)
    return Case(
        pattern=pattern,
        hosts=hosts,
        nbytes=nbytes,
        fabric=fabric,
        paths=_option(command, "paths") or HTSIM.paths,
        adaptive=algorithm is None or algorithm[1] in ADAPTIVE,
        queue=_option(command, "q"),
        window=_option(command, "cwnd"),
    )


def _unknown(command: str) -> str:
    if "-receiver_cc_only" in command:
        return "credits from the receiver are not modelled"
    if "-failed" in command:  # core to aggregation, to 25 % (uet-htsim fat_tree_topology.cpp)
        return "slow links between the two upper tiers: the packet engine's faults name T0-T1 links and switches"
    return ""


def _traffic(command: str) -> tuple[Pattern, int, int] | str:
    if found := re.search(r"\bperm_(\d+)n_(\d+)c_(?:\d+u_)?(\d+)(b|MB)\.cm\b", command):
        if found[1] != found[2]:
            return "not every host sends, and who does is in a file that is not in the table"
        return "permutation", int(found[1][:9]), int(found[3][:12]) * (1 if found[4] == "b" else 1_000_000)
    if found := re.search(r"\bincast_(\d+)(?:_(\d+)K)?\.cm\b", command):
        return "incast", int(found[1][:9]), int(found[2][:9]) * 1000 if found[2] else NBYTES
    for name, pattern in UNNUMBERED.items():
        if re.search(rf"[/ ]{re.escape(name)}\b", command):
            return pattern, SMALL, NBYTES
    return "who sends what is in a file that is not in the table"


def _fabric(command: str, hosts: int) -> str | None:
    """Two tiers where a leaf-spine file is named, else uet-htsim's own fat tree of three; None where it is not full."""
    if "leaf_spine" in command:
        down, ratio = round(hosts**0.5), _oversubscription(command)
        if down * down != hosts or down % ratio:
            return None
        return f"clos2:{hosts}x{PORT_GBPS}G/1p/{down + down // ratio}/{ratio}:1/wide"
    half = round((hosts / 2) ** (1 / 3))
    return f"clos3:{hosts}x{PORT_GBPS}G/1p/{2 * half}/wide" if 2 * half**3 == hosts else None


def _oversubscription(command: str) -> int:
    """`leaf_spine_1024_oversub_8-1.topo` is 8:1; without numbers such a file is 4:1."""
    found = re.search(r"_oversub(?:_(\d{1,4})-1)?\.topo", command)
    return max(1, int(found[1] or OVERSUBSCRIBED)) if found else 1


def _option(command: str, name: str) -> int | None:
    found = re.search(rf" -{name} (\d{{1,9}})\b", command)
    return int(found[1]) if found else None
