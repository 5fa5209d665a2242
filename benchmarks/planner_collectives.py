"""Why the planner's seconds on the wire are not the NCCL model's: both in the planner, against published steps.

Run: python benchmarks/planner_collectives.py TABLE.csv [--write FOLDER]    prints a dated markdown page.
The table has the columns of benchmarks/data/throughput_public.csv. About three minutes on one core.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np

from phalanx.network import collectives as net
from phalanx.network.nccl_choice import MIB, Operation, expect_collective
from phalanx.network.nccl_system import NcclSystem, build_system
from phalanx.network.nccl_tables import Family
from phalanx.plan.physics import shipped_physics
from phalanx.validate.throughput_score import Scorecard, predict_table, score_predictions
from phalanx.validate.throughput_table import read_table

# Families by one direction of a device's links, bytes/s.
LINKS: tuple[tuple[float, Family], ...] = (
    (200e9, "volta"),
    (375e9, "ampere"),
    (600e9, "hopper"),
    (math.inf, "blackwell"),
)
IN_TRAINING = 1.30  # "NCCL in training is 30 % slower than alone": vTrain, MICRO'24 (shared/data/comm.csv)
RANKS = (8, 16, 64, 256, 1024)
SIZES = tuple(2.0**power * MIB for power in range(0, 11, 2))
Seconds = Callable[[net.Group, net.Floats], net.Floats]


@functools.cache
def nccl_seconds(ranks: int, per_domain: int, link: float, nic: float, nbytes: float, operation: Operation) -> float:
    """The NCCL model for one group of the planner's; rates are line rates."""
    if ranks < 2 or not nbytes > 0:
        return 0.0
    found = expect_collective(_system(ranks, per_domain, link, nic), nbytes, operation=operation)
    assert found is not None
    return found.seconds


def _system(ranks: int, per_domain: int, link: float, nic: float) -> NcclSystem:
    family = next(name for most, name in LINKS if link < most)
    nodes = max(1, math.ceil(ranks / per_domain))
    return build_system(nodes=nodes, per_node=min(per_domain, ranks), family=family, nic_gbps=max(1e-3, nic * 8e-9))


def through_nccl(operation: Operation, pace: float) -> Seconds:
    """A stand-in for net.all_reduce or net.all_gather that asks the NCCL model, slower by `pace`."""
    k = shipped_physics()

    def seconds(group: net.Group, nbytes: net.Floats) -> net.Floats:
        parts = np.broadcast_arrays(
            group.ranks, group.per_domain, group.link_bytes_per_s / k.link, group.nic_bytes_per_s / k.nic, nbytes
        )
        flat = zip(*(part.ravel() for part in parts), strict=True)
        found = [
            pace * nccl_seconds(round(n), max(1, round(d)), round(link, -6), round(nic, -6), _short(b), operation)
            for n, d, link, nic, b in flat
        ]
        return np.asarray(found, dtype=np.float64).reshape(parts[0].shape)

    return seconds


def _short(nbytes: float) -> float:
    """Four digits are enough, and are asked for again."""
    return float(f"{nbytes:.4g}")


@contextmanager
def asked(pace: float) -> Iterator[None]:
    """The planner with the NCCL model's times."""
    kept = net.all_reduce, net.all_gather, net.reduce_scatter
    try:
        net.all_reduce = through_nccl("all-reduce", pace)
        net.all_gather = through_nccl("all-gather", pace)
        net.reduce_scatter = through_nccl("reduce-scatter", pace)
        yield
    finally:
        net.all_reduce, net.all_gather, net.reduce_scatter = kept


def planner_over_nccl() -> list[str]:
    """The planner's own seconds of one message over the NCCL model's, on nodes of 8 H100."""
    k = shipped_physics()
    lines = [f"| ranks | {' | '.join(f'{size / MIB:g} MiB' for size in SIZES)} |", "|---|" + "---|" * len(SIZES)]
    for ranks in RANKS:
        cells = []
        for size in SIZES:
            group = net.place_group(
                np.array([float(ranks)]), np.array([1.0]), domain=np.array([8.0]), devices=np.array([float(ranks)]),
                link_bytes_per_s=np.array([450e9 * k.link]), nic_bytes_per_s=np.array([50e9 * k.nic]),
                link_latency_s=np.array([3.4e-6 * k.link_latency]), nic_latency_s=np.array([14e-6 * k.nic_latency]),
                pacing=k.pacing, loss=0.067, switch=np.array([1.0]),
            )  # fmt: skip
            own = float(net.all_reduce(group, np.array([size]))[0])
            cells.append(f"{own / nccl_seconds(ranks, 8, 450e9, 50e9, size, 'all-reduce'):.2f}")
        lines.append(f"| {ranks:,} | {' | '.join(cells)} |")
    return lines


def page(table: Path) -> str:
    """The dated page."""
    rows = read_table(table).rows
    cards: dict[str, Scorecard] = {"the planner's own": score_predictions(rows, predict_table(rows))}
    for name, pace in (("NCCL model, alone", 1.0), (f"NCCL model × {IN_TRAINING:g}", IN_TRAINING)):
        with asked(pace):
            cards[name] = score_predictions(rows, predict_table(rows))
    sources = [one.source for one in cards["the planner's own"].sources]
    lines = [
        f"# The planner's collectives beside the NCCL model's, {datetime.date.today().isoformat()}",
        "",
        f"`python benchmarks/planner_collectives.py {table.name}`: error of the step, median / p90, with the times of",
        "all-reduce, all-gather and reduce-scatter from each (nothing refitted; everything else is the same).",
        "",
        f"| source | {' | '.join(cards)} |",
        "|---|" + "---|" * len(cards),
    ]
    for source in sources:
        cells = []
        for card in cards.values():
            (one,) = (each for each in card.sources if each.source == source)
            cells.append(f"{one.median:.1%} / {one.p90:.1%}")
        lines.append(f"| {source} | {' | '.join(cells)} |")
    means = [f"{card.mean_median:.1%} / {card.mean_p90:.1%}" for card in cards.values()]
    lines.append(f"| mean over sources | {' | '.join(means)} |")
    ratios = [float(cell) for line in planner_over_nccl()[2:] for cell in line.split("|")[2:-1]]
    lines += [
        "",
        "## One all-reduce: the planner's seconds over the NCCL model's",
        "",
        "Nodes of 8 H100, 400 Gb/s per GPU, profile of the default framework.",
        "",
        *planner_over_nccl(),
        "",
        f"Median {median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the page, and keep it where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("--write", metavar="FOLDER", type=Path)
    args = parser.parse_args()
    text = page(args.table)
    print(text, end="")
    if args.write:
        (args.write / f"{datetime.date.today().isoformat()}-planner-collectives.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
