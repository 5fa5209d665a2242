"""How fast the packet engine is on one core, and how far from uet-htsim: packets per CPU-second and completion times.

Run: python benchmarks/packet_speed.py [--small] [--write FOLDER]    prints a dated markdown page, or writes it too.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import resource
import statistics
from dataclasses import replace
from pathlib import Path

# One core: nothing here uses BLAS, and the speed is stated per core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from phalanx.network.fabric.fabric_file import parse_fabric
from phalanx.network.fabric.fabric_types import Fabric
from phalanx.sim.packets.packet_run import run_connections
from phalanx.sim.packets.result import PacketResult
from phalanx.sim.packets.transport import HTSIM, Transport
from phalanx.sim.traffic_matrix import make_flows, permutation

NBYTES = 2e6
SEEDS = (1, 2, 3)
HTSIM_PACKETS_PER_S = {"2 tiers": 36_000, "3 tiers": 23_667}  # network_validation.csv: one busy core, 1,024 hosts


def fabric(text: str) -> Fabric:
    """A fabric with uet-htsim's 1 µs per link."""
    return replace(parse_fabric(text), hop_s=1e-6)


LEAF_SPINE, FAT_TREE = fabric("clos2:1024x100G/1p/64/wide"), fabric("clos3:1024x100G/1p/16/wide")
OBLIVIOUS, BITMAP = replace(HTSIM, spray="oblivious"), replace(HTSIM, spray="skip")

# name, fabric, transport, mean and tail in µs that uet-htsim @40ccb05 printed (network_validation.csv); 0 is not given
CASES: tuple[tuple[str, Fabric, Transport, float, float], ...] = (
    *(
        (f"leaf-spine, oblivious, {paths} paths", LEAF_SPINE, replace(OBLIVIOUS, paths=paths), mean, tail)
        for paths, mean, tail in (
            (256, 187.563, 200.286),
            (64, 194.428, 218.669),
            (16, 213.512, 330.958),
            (4, 254.452, 486.18),
            (1, 348.093, 847.315),
        )
    ),
    ("leaf-spine, bitmap, 256 paths", LEAF_SPINE, replace(BITMAP, paths=256), 186.549, 198.61),
    ("leaf-spine, bitmap, 64 paths", LEAF_SPINE, replace(BITMAP, paths=64), 185.9, 0),
    *(
        (f"3 tiers, oblivious, {paths} paths", FAT_TREE, replace(OBLIVIOUS, paths=paths), mean, tail)
        for paths, mean, tail in (
            (256, 195.652, 210.145),
            (128, 0, 212.794),
            (64, 206.682, 271.803),
            (16, 232.321, 0),
            (4, 281.315, 0),
            (1, 403.38, 882.502),
        )
    ),
    ("3 tiers, oblivious, 128 paths, -q 500", FAT_TREE, replace(OBLIVIOUS, paths=128, queue_packets=500), 0, 221.895),
    ("3 tiers, bitmap, 128 paths, -q 500", FAT_TREE, replace(BITMAP, paths=128, queue_packets=500), 0, 202.349),
    ("3 tiers, mixed, 128 paths", FAT_TREE, replace(HTSIM, paths=128), 0, 200.507),
    ("3 tiers, mixed, 128 paths, each acknowledged", FAT_TREE, replace(HTSIM, paths=128, ack_every=1), 0, 193.184),
)
INCASTS = (("clos3:16x100G/1p/4/wide", 2e6, None, 2478.53), ("clos3:128x100G/1p/8/wide", 2e6, None, 21029.3),
           ("clos3:1024x100G/1p/16/wide", 1e5, 50.0, 10556.2))  # fmt: skip


def speed(hosts: int, radix: int) -> tuple[PacketResult, float]:
    """One plane of a full permutation of 2 MB, and the memory of the process in bytes."""
    over = fabric(f"clos2:{hosts}x100G/1p/{radix}")
    result = run_connections(over, permutation(hosts, NBYTES, seed=1), transport=replace(BITMAP, paths=32))
    return result, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def page(*, small: bool) -> str:
    """The result as markdown."""
    run_connections(LEAF_SPINE, permutation(1024, 1e4), transport=HTSIM)  # compiles
    today = datetime.datetime.now(datetime.UTC).date()
    lines = [
        f"# Packet engine, {today}",
        "",
        f"`python benchmarks/packet_speed.py`, one core of a shared machine, Python {platform.python_version()}; "
        "compile time not counted.",
        "",
        "## Speed: a permutation of 2 MB on one plane of 100G, two tiers, 32 paths with skipping",
        "",
        "| hosts | packets | simulated | CPU | packets per CPU-s | × uet-htsim (36,000) | memory of the process |",
        "|---|---|---|---|---|---|---|",
    ]
    for hosts, radix in ((1024, 64), (8192, 128)) if small else ((1024, 64), (8192, 128), (131_072, 512)):
        result, memory = speed(hosts, radix)
        rate = result.packets / result.cpu_s
        lines.append(
            f"| {hosts:,} | {result.packets:,} | {result.simulated_s * 1e6:.0f} µs | {result.cpu_s:.2f} s "
            f"| {rate:,.0f} "
            f"| {rate / HTSIM_PACKETS_PER_S['2 tiers']:.0f} | {memory / 1e9:.2f} GB |"
        )
    return "\n".join([*lines, "", *accuracy(), "", *incasts(), ""])


def accuracy() -> list[str]:
    """Completion times beside uet-htsim's."""
    lines = [
        f"## Accuracy: 1,024 hosts, 2 MB permutation, µs; ours is the median of {len(SEEDS)} permutations",
        "",
        "| case | uet-htsim mean / tail | ours mean / tail | error mean / tail |",
        "|---|---|---|---|",
    ]
    for name, over, transport, mean, tail in CASES:
        found = [
            run_connections(over, permutation(1024, NBYTES, seed=seed), transport=transport, seed=seed)
            for seed in SEEDS
        ]
        ours = [1e6 * statistics.median(r.mean_s for r in found), 1e6 * statistics.median(r.tail_s for r in found)]
        given = [f"{value:.1f}" if value else "–" for value in (mean, tail)]
        wrong = [f"{us / value - 1:+.1%}" if value else "–" for us, value in zip(ours, (mean, tail), strict=True)]
        lines.append(f"| {name} | {' / '.join(given)} | {ours[0]:.1f} / {ours[1]:.1f} | {' / '.join(wrong)} |")
    return lines


def incasts() -> list[str]:
    """All to one, beside uet-htsim's tail."""
    lines = ["| all to one, 3 tiers | uet-htsim tail | ours | error |", "|---|---|---|---|"]
    for text, nbytes, window, tail in INCASTS:
        over = fabric(text)
        traffic = make_flows(range(1, over.hosts), [0] * (over.hosts - 1), nbytes)
        ours = 1e6 * run_connections(over, traffic, transport=replace(HTSIM, window_packets=window)).tail_s
        lines.append(
            f"| {over.hosts:,} hosts, {nbytes / 1e3:.0f} KB | {tail:.1f} | {ours:.1f} | {ours / tail - 1:+.1%} |"
        )
    return lines


def main() -> None:
    """Print the page, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="leave 131,072 hosts out (40 CPU-seconds)")
    parser.add_argument("--write", type=Path, help="folder for the dated page")
    chosen = parser.parse_args()
    text = page(small=chosen.small)
    print(text)
    if chosen.write:
        today = datetime.datetime.now(datetime.UTC).date()
        (chosen.write / f"{today}-packet-speed.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
