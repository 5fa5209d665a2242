"""What the packet engine says of loss, incast and faults, beside what arXiv:2605.04333 measured.

Run: python benchmarks/packet_physics.py [--write FOLDER]    about four CPU-minutes; prints a dated markdown page.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
from dataclasses import replace
from pathlib import Path

# One core: nothing here uses BLAS.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from phalanx.network.fabric.fabric_file import parse_fabric
from phalanx.sim.fabric_links import links_of
from phalanx.sim.packets.link_faults import FabricFault
from phalanx.sim.packets.packet_run import run_connections
from phalanx.sim.packets.roce_run import roce_routes
from phalanx.sim.packets.transport import MRC, ROCE, ROCE_PFC, Roce, Transport
from phalanx.sim.traffic_matrix import make_flows, permutation, shift

SETTLED_S = 5e-3
INCAST_FABRIC = parse_fabric("clos2:64x400G/1p/16/wide")
# Seven hosts of seven T0s to host 0, and a victim from a neighbour of the first of them to a neighbour of host 0.
INCAST = make_flows([*range(8, 64, 8), 15], [0] * 7 + [1], 4e9)
FAULT_FABRIC = parse_fabric("clos2:256x800G/8p/32/wide")
AT_S = 50e-6
FAULTS: tuple[tuple[str, tuple[FabricFault, ...]], ...] = (
    ("none", ()),
    ("T0–T1 link, 1 ms", (FabricFault(part="link", number=2, port=3, at_s=AT_S, until_s=AT_S + 1e-3),)),
    ("a T1 stops", (FabricFault(part="t1", number=3, at_s=AT_S),)),
    ("a T0 stops, 10 ms", (FabricFault(part="t0", number=2, at_s=AT_S, until_s=AT_S + 10e-3),)),
    ("a NIC port", (FabricFault(part="nic", number=5, at_s=AT_S),)),
    ("a whole transceiver, 1 ms", (FabricFault(part="transceiver", number=5, at_s=AT_S, until_s=AT_S + 1e-3),)),
    ("20 % loss on a link", (FabricFault(part="link", number=2, port=3, loss=0.2, at_s=AT_S),)),
    ("1 % loss everywhere", (FabricFault(part="traffic", loss=0.01),)),
    ("a link at 10 % of its speed", (FabricFault(part="link", number=2, port=3, left=0.1, at_s=AT_S),)),
)


def throughput_gbps(loss: float, transport: Transport | Roce, limit_s: float) -> float:
    """Per host, after the first 5 ms, of 64 hosts that each send to the one eight further."""
    fabric = parse_fabric("clos2:64x400G/4p/16/wide")
    faults = (FabricFault(part="traffic", loss=loss),) if loss else ()
    result = run_connections(fabric, shift(64, 4e9, step=8), transport=transport, faults=faults, limit_s=limit_s,
                             sample_s=1e-3, each_plane=True)  # fmt: skip
    return float(result.throughput_gbps[result.time_s > SETTLED_S].mean()) / 64


def losses() -> list[str]:
    """Random loss on all paths."""
    healthy = throughput_gbps(0, MRC, 15e-3)
    lines = ["| loss on all paths | MRC, Gb/s per host | of healthy | paper |", "|---|---|---|---|"]
    lines.append(f"| none | {healthy:.0f} | 1 | |")
    for loss, limit_s, paper in ((0.001, 25e-3, "little impact"), (0.01, 45e-3, "about a third: calibrated on it")):
        ours = throughput_gbps(loss, MRC, limit_s)
        lines.append(f"| {loss:.1%} | {ours:.0f} | {ours / healthy:.3f} | {paper} |")
    ours = throughput_gbps(0.01, replace(ROCE, qps=4), 45e-3)
    lines.append(f"| 1 %, RoCE with 4 queue pairs | {ours:.1f} | {ours / healthy:.3f} | unusable |")
    return lines


def incast() -> list[str]:
    """Seven to one beside a victim."""
    lines = ["| 7:1 at 400G | seeds | the seven, Gb/s | victim | paper |", "|---|---|---|---|---|"]
    for name, transport, limit_s, seeds, paper in (
        ("MRC", MRC, 30e-3, (0, 1, 2), "57.1 each, no impact"),
        ("PFC alone, 1 QP, path shared", ROCE_PFC, 10e-3, _sharing(ROCE_PFC), "30 to 100"),
        ("PFC alone, 8 QPs", replace(ROCE_PFC, qps=8), 10e-3, (0, 1, 2), ""),
        ("PFC and DCQCN, 1 QP, path shared", ROCE, 40e-3, _sharing(ROCE), "-25 %"),
        ("PFC and DCQCN, 8 QPs", replace(ROCE, qps=8), 10e-3, (0, 1, 2), "dips of 75 %"),
    ):
        found = np.array([_rates(transport, seed, limit_s) for seed in seeds])
        seven, victim = found[:, :7], found[:, 7]
        lines.append(
            f"| {name}, {limit_s * 1e3:.0f} ms | {', '.join(map(str, seeds))} | {seven.min():.1f} to {seven.max():.1f} "
            f"| {', '.join(f'{gbps:.0f}' for gbps in victim)} | {paper} |"
        )
    return lines


def _rates(transport: Transport | Roce, seed: int, limit_s: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Line rate that each gets after the first quarter."""
    result = run_connections(
        INCAST_FABRIC,
        INCAST,
        transport=transport,
        watch=tuple(range(8)),
        limit_s=limit_s,
        sample_s=limit_s / 40,
        seed=seed,
    )
    rates: np.ndarray[tuple[int], np.dtype[np.float64]] = result.watched_gbps[:, 10:].mean(axis=1)
    return rates * transport.packet_bytes / transport.payload_bytes


def _sharing(roce: Roce) -> tuple[int, ...]:
    """The first seeds with which the victim's path shares a link with the incast."""
    found = []
    for seed in range(30):
        routes, _ = roce_routes(links_of(INCAST_FABRIC), INCAST, roce, seed, None)
        if np.isin(routes[7, 1:3], routes[:7, 1:3]).any():
            found.append(seed)
    return tuple(found[:3])


def touched() -> list[str]:
    """Connections that lose a packet when a T1 stops."""
    fabric = parse_fabric("clos2:256x800G/4p/256/wide")
    lines = ["| paths of 512 | connections touched by a T1's stop | 1 − (1 − 1/512)^paths |", "|---|---|---|"]
    for paths in (128, 256):
        stop = (FabricFault(part="t1", number=3, at_s=20e-6),)
        result = run_connections(fabric, shift(256, 8e6, step=128), transport=replace(MRC, paths=paths), faults=stop)
        lines.append(f"| {paths} | {result.touched_by_loss / 256:.1%} | {1 - (1 - 1 / 512) ** paths:.1%} |")
    return lines


def faults() -> list[str]:
    """The same faults under MRC and under RoCE."""
    lines = [
        "| fault, plane 0 | MRC | lost | touched | RoCE, 8 QPs, PFC, DCQCN | lost | touched |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, broken in FAULTS:
        cells = []
        for transport in (MRC, replace(ROCE, qps=8)):
            traffic = permutation(256, 16e6, seed=1)
            found = run_connections(
                FAULT_FABRIC, traffic, transport=transport, faults=broken, limit_s=1.2, each_plane=True
            )
            rest = len(traffic) - found.finished
            slowest = f"{rest} never finish" if rest else f"{found.tail_s * 1e6:,.0f}"
            cells.append(f"{found.mean_s * 1e6:,.0f} / {slowest} | {found.lost:,} | {found.touched_by_loss}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def page() -> str:
    """The result as markdown."""
    today = datetime.datetime.now(datetime.UTC).date()
    return "\n".join([
        f"# Packet engine: loss, incast, faults, {today}", "",
        f"`python benchmarks/packet_physics.py`, Python {platform.python_version()}.", "",
        "## Random loss: clos2:64x400G/4p/16/wide, everyone to the host eight further, after the first 5 ms", "",
        *losses(), "",
        "## Incast: clos2:64x400G/1p/16/wide, line rate per connection, after the first quarter of the time", "",
        *incast(), "",
        "## A T1 stops: clos2:256x800G/4p/256/wide", "", *touched(), "",
        "## Faults after 50 µs: clos2:256x800G/8p/32/wide, permutation of 16 MB, mean / slowest completion in µs", "",
        *faults(), "",
    ])  # fmt: skip


def main() -> None:
    """Print the page, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="folder for the dated page")
    chosen = parser.parse_args()
    text = page()
    print(text)
    if chosen.write:
        today = datetime.datetime.now(datetime.UTC).date()
        (chosen.write / f"{today}-packet-physics.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
