"""How sure the NCCL model is without a measurement: its constants and its range, every source left out in turn.

Run: python benchmarks/collective_interval.py [--write FOLDER]    prints a dated markdown page; writes it with --write.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from collective_fit import FAMILY, modelled, read

from phalanx.hardware.failures import student_quantile
from phalanx.network.nccl_choice import (
    FILL,
    MIB,
    RATIOS,
    START_ACROSS_S,
    START_INSIDE_S,
    SWEPT_NODES,
    AlgorithmChoice,
    Operation,
    choose_pair,
    expect_collective,
    unrounded_choice,
)
from phalanx.network.nccl_system import NcclSystem, build_system

SMALL = Path(__file__).parent / "data" / "collective_small.csv"
MODEL_OF_06 = (0.0, 0.0, 0.6)  # start-up of the call inside and across, fill
NOW = (START_INSIDE_S, START_ACROSS_S, FILL)
INSIDE = [1e-6 * us for us in (0, 10, 15, 20, 25, 30, 40)]
ACROSS = [1e-6 * us for us in (0, 10, 20, 30, 40, 60, 80, 100, 150)]
FILLS = [0.2, 0.4, 0.6, 0.8]
OUTLIER = 1.5  # log error that counts at most: a fabric that does not deliver says nothing about start-up
NAMES = ("below 1 MiB", "1 to 16 MiB", "16 to 256 MiB", "256 MiB and more")
# HF Ultra-Scale Playbook, 256 MB on H100 with EFA (shared/data/comm.csv): nodes, GB/s of all-reduce, all-gather.
CROWDED = ((1, 435.97, 249.85), (2, 361.75, 184.61), (4, 160.14, 118.97), (8, 99.56, 69.0), (16, 84.74, 54.97),
           (32, 64.93, 27.97), (64, 32.94, 11.04))  # fmt: skip
CROWDED_BYTES = 256e6
CROWDED_SOURCE = "HF Ultra-Scale Playbook (H100, EFA, shared)"
FEW = 10  # sweeps, below which their own quantiles say little
Constants = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Time:
    """One measured size of one sweep, with the parts of NCCL's pick."""

    source: str
    series: str
    nodes: int
    nbytes: float
    pick: AlgorithmChoice  # on the wire
    seconds: float

    @property
    def size_class(self) -> int:
        """Row of RATIOS."""
        return next(place for place, row in enumerate(RATIOS) if self.nbytes < row[0])

    def log_ratio(self, constants: Constants) -> float:
        """Measured over expected."""
        inside, across, fill = constants
        filling = fill * math.sqrt(self.pick.latency_s * self.pick.transfer_s)
        return math.log(self.seconds / ((inside if self.nodes == 1 else across) + self.pick.seconds + filling))


def times() -> list[Time]:
    """All sweeps that NCCL's model knows, large and small sizes."""
    series = read()
    known = modelled(series)
    found = [
        _time(one.source, one.name, known[one.name], point.nbytes, point.seconds)
        for one in series
        if one.name in known
        for point in one.points
    ]
    with SMALL.open(newline="") as stream:
        for row in csv.DictReader(stream):
            nodes, per_node = int(row["nodes"]), int(row["per_node"])
            comm = build_system(
                nodes=nodes, per_node=per_node, family=FAMILY[row["gpu"]], nic_gbps=float(row["nic_gbps"])
            )
            asked: tuple[NcclSystem, Operation] = (comm, "all-reduce")
            found.append(_time(row["source"], row["series"], asked, float(row["bytes"]), 1e-6 * float(row["us"])))
    return found


def crowded() -> list[Time]:
    """The shared cluster up to eight nodes: it says how far a system may be off, and nothing about start-up."""
    found = []
    operations: tuple[Operation, ...] = ("all-reduce", "all-gather")
    for nodes, *rates in CROWDED:
        comm = build_system(nodes=nodes, per_node=8, family="hopper", nic_gbps=400)
        for operation, rate in zip(operations, rates, strict=True):
            share = (2 if operation == "all-reduce" else 1) * (comm.ranks - 1) / comm.ranks
            seconds = share * CROWDED_BYTES / (rate * 1e9)
            if nodes <= SWEPT_NODES:
                found.append(_time(CROWDED_SOURCE, f"hf-{operation}", (comm, operation), CROWDED_BYTES, seconds))
    return found


def _time(source: str, series: str, known: tuple[NcclSystem, Operation], nbytes: float, seconds: float) -> Time:
    comm, operation = known
    pick = unrounded_choice(comm, choose_pair(comm, nbytes, operation=operation), nbytes, operation=operation)
    return Time(source=source, series=series, nodes=comm.nodes, nbytes=nbytes, pick=pick, seconds=seconds)


def cost(some: Iterable[Time], constants: Constants) -> float:
    """Mean absolute log error; sources count alike, and sweeps within them."""
    errors: dict[str, dict[str, list[float]]] = {}
    for one in some:
        error = min(abs(one.log_ratio(constants)), OUTLIER)
        errors.setdefault(one.source, {}).setdefault(one.series, []).append(error)
    return mean(mean(mean(found) for found in sweeps.values()) for sweeps in errors.values())


def fitted(some: Sequence[Time]) -> Constants:
    """The best of the grid."""
    return min(itertools.product(INSIDE, ACROSS, FILLS), key=lambda constants: cost(some, constants))


def ratios(some: Sequence[Time], size_class: int, *, inside: bool) -> tuple[float, float, int]:
    """Logs of the 80 % range, sweeps weighted alike, one sweep wider for the next; and the number of sweeps.

    Quantiles of the sweeps, or of Student's distribution where they are few. Below 16 MiB sweeps in a node and between
    nodes are too few to be told apart.
    """
    kept = [one for one in some if one.size_class == size_class and (size_class < 2 or (one.nodes == 1) == inside)]
    sweeps: dict[str, list[float]] = {}
    for one in kept:
        sweeps.setdefault(one.series, []).append(one.log_ratio(NOW))
    if len(sweeps) < FEW:
        middle = mean(mean(found) for found in sweeps.values())
        spread = mean(mean((x - middle) ** 2 for x in found) for found in sweeps.values())
        spread *= len(sweeps) / (len(sweeps) - 1)
        half = student_quantile(len(sweeps) - 1) * math.sqrt(spread * (1 + 1 / len(sweeps)))
        return middle - half, middle + half, len(sweeps)
    weighted = sorted((x, 1 / len(found) / len(sweeps)) for found in sweeps.values() for x in found)
    high = min(1.0, 0.9 * (1 + 1 / len(sweeps)))
    return _quantile(weighted, 1 - high), _quantile(weighted, high), len(sweeps)


def _quantile(weighted: Sequence[tuple[float, float]], share: float) -> float:
    total = 0.0
    for value, weight in weighted:
        total += weight
        if total >= share - 1e-9:
            return value
    return weighted[-1][0]


def constants_table(found: Sequence[Time]) -> list[str]:
    """What is chosen without each source, and how it then fares."""
    lines = [
        "| source left out | call in a node, between; fill | log error, held out | 0.6 | below 16 MiB, median | 0.6 |",
        "|---|---|---|---|---|---|",
    ]
    for source in dict.fromkeys(one.source for one in found):
        inside, across, fill = constants = fitted([one for one in found if one.source != source])
        mine = [one for one in found if one.source == source]
        small = [one for one in mine if one.nbytes < 16 * MIB]
        cells = [
            f"x{math.exp(median(abs(one.log_ratio(which)) for one in small)):.2f}" if small else ""
            for which in (constants, MODEL_OF_06)
        ]
        lines.append(
            f"| {source} | {1e6 * inside:.0f}, {1e6 * across:.0f} µs; {fill:g} | {cost(mine, constants):.3f} | "
            f"{cost(mine, MODEL_OF_06):.3f} | {cells[0]} | {cells[1]} |"
        )
    return lines


def ratio_table(found: Sequence[Time]) -> list[str]:
    """The range by size, with how often a source that is left out falls in it."""
    lines = [
        "| messages | where | sweeps | measured over expected, 80 % | in use | held out, covered |",
        "|---|---|---|---|---|---|",
    ]
    for size_class, name in enumerate(NAMES):
        for inside in (True, False):
            low, high, count = ratios(found, size_class, inside=inside)
            used = RATIOS[size_class][1 if inside else 2]
            hits = covered(found, size_class, inside=inside)
            where = "in a node" if inside else "between nodes"
            span = f"{math.exp(low):.2f} to {math.exp(high):.2f}"
            told = f"{sum(hit for _, hit in hits)} of {len(hits)}"
            lines.append(f"| {name} | {where} | {count} | {span} | {used[0]:g} to {used[1]:g} | {told} |")
    return lines


def covered(found: Sequence[Time], size_class: int, *, inside: bool) -> list[tuple[str, bool]]:
    """(source, covered) of every time of a class, by the range of the other sources."""
    hits = []
    for source in dict.fromkeys(one.source for one in found):
        others = [one for one in found if one.source != source]
        for one in found:
            if one.source == source and one.size_class == size_class and (one.nodes == 1) == inside:
                low, high, _ = ratios(others, size_class, inside=inside)
                hits.append((source, low <= one.log_ratio(NOW) <= high))
    return hits


def crowded_table() -> list[str]:
    """One cluster with other jobs on it, which set the slow end beyond eight nodes and nothing else."""
    lines = ["| nodes | all-reduce GB/s | expected, 80 % | all-gather GB/s | expected, 80 % |", "|---|---|---|---|---|"]
    nbytes = CROWDED_BYTES
    for nodes, reduced, gathered in CROWDED:
        comm = build_system(nodes=nodes, per_node=8, family="hopper", nic_gbps=400)
        cells = []
        asked: tuple[tuple[Operation, float], ...] = (("all-reduce", reduced), ("all-gather", gathered))
        for operation, measured in asked:
            one = expect_collective(comm, nbytes, operation=operation)
            assert one is not None
            share = (2 if operation == "all-reduce" else 1) * (comm.ranks - 1) / comm.ranks
            slow, fast = share * nbytes / one.high_s / 1e9, share * nbytes / one.low_s / 1e9
            inside = "" if slow <= measured <= fast else " **no**"
            middle = share * nbytes / one.seconds / 1e9
            cells += [f"{measured:g}", f"{middle:.0f} ({slow:.0f} to {fast:.0f}){inside}"]
        lines.append(f"| {nodes} | {' | '.join(cells)} |")
    return lines


def page() -> str:
    """The whole result."""
    found = times()
    everything = [*found, *crowded()]
    hits = [hit for c in range(len(NAMES)) for inside in (True, False) for hit in covered(everything, c, inside=inside)]
    by_source = [mean(hit for source, hit in hits if source == one) for one in dict.fromkeys(one for one, _ in hits)]
    sweeps, sources = len({one.series for one in found}), len({one.source for one in found})
    inside, across, fill = fitted(found)
    lines = [
        f"# How sure the NCCL model is, {datetime.date.today().isoformat()}",
        "",
        f"`python benchmarks/collective_interval.py`, {len(found)} times of {sweeps} sweeps of {sources} sources",
        "(`benchmarks/data/collective_sweeps.csv` from 16 MiB on, `collective_small.csv` below and one more sweep), no",
        "measurement of the system itself. Time = the call + NCCL's start-up a + transfer b + fill √(a b).",
        "",
        "## Constants, each source left out",
        "",
        f"All sources choose {1e6 * inside:.0f} µs in a node, {1e6 * across:.0f} µs between nodes, fill {fill:g}: mean "
        f"log error {cost(found, (inside, across, fill)):.3f}; 0.6 had no call and fill 0.6: "
        f"{cost(found, MODEL_OF_06):.3f}.",
        "",
        *constants_table(found),
        "",
        "Between nodes the call is the network's: about 10 µs on InfiniBand (Crusoe), 110 on Google's TCPXO, 290 on",
        "EFA. No public table says which a cluster will have; the range below does.",
        "",
        "## Range",
        "",
        f"Held out, {mean(hit for _, hit in hits):.0%} of the times lie in the range of the other sources; "
        f"{mean(by_source):.0%} where sources count alike.",
        "",
        *ratio_table(everything),
        "",
        "## Many nodes: one crowded cluster",
        "",
        "HF Ultra-Scale Playbook, 256 MB, medians of a shared H100 cluster on EFA. Up to 8 nodes it is among the",
        "sources above; its all-reduce at 8 and 64 nodes sets the growth of the slow end beyond, (nodes / 8)^0.53.",
        "",
        *crowded_table(),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", metavar="FOLDER", type=Path)
    args = parser.parse_args()
    text = page()
    print(text, end="")
    if args.write:
        (args.write / f"{datetime.date.today().isoformat()}-collective-interval.md").write_text(text)


if __name__ == "__main__":
    main()
