"""How well two measurements of a collective give the others: every form, every pair, every source left out in turn.

Run: python benchmarks/collective_fit.py [--write FOLDER]    prints a dated markdown page; writes it with --write.
"""

from __future__ import annotations

import argparse
import csv
import datetime
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from phalanx.network.collective_fit import (
    FILL_ACROSS,
    FILL_INSIDE,
    Operation,
    Point,
    allowed_error,
    fit_ends,
    fit_points,
)
from phalanx.network.nccl_choice import FILL, OPERATIONS, choose_pair, expected_s, unrounded_choice
from phalanx.network.nccl_choice import Operation as NcclOperation
from phalanx.network.nccl_system import NcclSystem, build_system
from phalanx.network.nccl_tables import Family
from phalanx.network.sizes import format_size

DATA = Path(__file__).parent / "data" / "collective_sweeps.csv"
FAMILY: dict[str, Family] = {"A100": "ampere", "H100": "hopper", "H200": "hopper", "B200": "blackwell"}
FILLS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0, 1.25, 1.5, 2.0)
MEASURED: dict[str, Operation] = {"all-to-all": "all-to-all", **{str(one): one for one in OPERATIONS}}
MIB, GIB = 2**20, 2**30
HEAD = "| form | ≥ 1 GiB median | p90 | worst | 16–512 MiB median | p90 | worst | outside |"
SMALL = 64 * MIB  # the largest small point of a recommended pair
Pair = tuple[Point, Point]
Pairs = Callable[[Sequence[Point]], Iterable[Pair]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One sweep over sizes."""

    name: str
    source: str
    operation: Operation
    nodes: int
    per_node: int
    gpu: str
    nic_gbps: float
    forced: str
    points: tuple[Point, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Miss:
    """A held-out time: predicted over measured, less 1."""

    series: str
    error: float
    nbytes: float

    @property
    def outside(self) -> bool:
        """Beyond what a two-point fit is held to."""
        return abs(self.error) > allowed_error(self.nbytes)


def read() -> list[Series]:
    """All sweeps of the data file."""
    with DATA.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    return [
        _series([row for row in rows if row["series"] == name]) for name in dict.fromkeys(r["series"] for r in rows)
    ]


def _series(rows: Sequence[dict[str, str]]) -> Series:
    first = rows[0]
    return Series(
        name=first["series"],
        source=first["source"],
        operation=MEASURED[first["operation"]],
        nodes=int(first["nodes"]),
        per_node=int(first["per_node"]),
        gpu=first["gpu"],
        nic_gbps=float(first["nic_gbps"]),
        forced=first["forced"],
        points=tuple(Point(nbytes=int(row["mib"]) * MIB, seconds=float(row["us"]) * 1e-6) for row in rows),
    )


def both_ends(points: Sequence[Point]) -> Iterable[Pair]:
    """Smallest and largest."""
    picked = fit_ends(points)
    return [picked] if picked else []


def recommended(points: Sequence[Point]) -> Iterable[Pair]:
    """Any size up to 64 MiB with any from 1 GiB on."""
    return [(a, b) for a in points for b in points if a.nbytes <= SMALL and b.nbytes >= GIB]


def with_a_large_one(points: Sequence[Point]) -> Iterable[Pair]:
    """Any two of which one is 1 GiB or more."""
    return [(a, b) for a in points for b in points if a.nbytes < b.nbytes and b.nbytes >= GIB]


def misses(one: Series, pairs: Pairs, fill: float | None) -> list[Miss]:
    """Errors of all sizes but the two fitted on."""
    found = []
    for pair in pairs(one.points):
        ranks = one.nodes * one.per_node
        fit = fit_points(pair, ranks=ranks, nodes=one.nodes, operation=one.operation, fill=fill)
        found += [
            Miss(series=one.name, error=fit.seconds(point.nbytes) / point.seconds - 1, nbytes=point.nbytes)
            for point in one.points
            if point not in pair
        ]
    return found


def _line(name: str, found: Sequence[Miss]) -> str:
    cells = []
    for some in ([m for m in found if m.nbytes >= GIB], [m for m in found if m.nbytes < GIB]):
        sizes = sorted(abs(m.error) for m in some)
        cells += [f"{median(sizes):.1%}", f"{sizes[int(0.9 * len(sizes))]:.1%}", f"{sizes[-1]:.0%}"]
    return f"| {name} | {' | '.join(cells)} | {sum(m.outside for m in found)} of {len(found)} |"


def forms(series: Sequence[Series]) -> list[str]:
    """Errors by form, for three ways to choose the two points."""
    names: tuple[tuple[str, float | None], ...] = (
        ("α + W/B (k = 0)", 0.0),
        ("k = 0.4 everywhere", 0.4),
        ("k = 1 everywhere", 1.0),
        ("(√α + √(W/B))² (k = 2)", 2.0),
        (f"ours: k = {FILL_INSIDE:g} in a node, {FILL_ACROSS:g} between nodes", None),
    )
    lines = []
    for title, pairs in (
        ("fitted on the smallest and the largest size", both_ends),
        ("fitted on any size up to 64 MiB and any from 1 GiB on", recommended),
        ("fitted on any two sizes, one of them 1 GiB or more", with_a_large_one),
    ):
        lines += [
            "",
            f"### {title}",
            "",
            HEAD,
        ]
        lines.append("|---|---|---|---|---|---|---|---|")
        for name, fill in names:
            lines.append(_line(name, [m for one in series for m in misses(one, pairs, fill)]))
    return lines


def scaled(series: Sequence[Series]) -> list[str]:
    """NCCL's own curve with its start-up and its transfer scaled to the two points, where NCCL has one."""
    known = modelled(series)
    some = [one for one in series if one.name in known]
    lines = [
        "",
        f"### {len(some)} sweeps that NCCL's model knows, fitted on any size up to 64 MiB and any from 1 GiB on",
        "",
    ]
    lines += [HEAD, "|---|---|---|---|---|---|---|---|"]
    lines.append(_line("NCCL's start-up and transfer, each scaled", [m for one in some for m in _scaled(one, known)]))
    for name, fill in (("α + W/B (k = 0)", 0.0), ("ours", None)):
        lines.append(_line(name, [m for one in some for m in misses(one, recommended, fill)]))
    return lines


def _scaled(one: Series, known: dict[str, tuple[NcclSystem, NcclOperation]]) -> list[Miss]:
    comm, asked = known[one.name]
    parts = {
        point: unrounded_choice(comm, choose_pair(comm, point.nbytes, operation=asked), point.nbytes, operation=asked)
        for point in one.points
    }
    found = []
    for small, large in recommended(one.points):
        a0, b0, a1, b1 = (x for p in (small, large) for x in (parts[p].latency_s, parts[p].transfer_s))
        start = max(0.0, (small.seconds * b1 - large.seconds * b0) / (a0 * b1 - a1 * b0))
        rest = (large.seconds - start * a1) / b1
        for point, part in parts.items():
            if point not in (small, large):
                seconds = start * part.latency_s + rest * part.transfer_s
                found.append(Miss(series=one.name, error=seconds / point.seconds - 1, nbytes=point.nbytes))
    return found


def left_out(series: Sequence[Series]) -> list[str]:
    """k chosen without a source, and how that source then fares."""
    lines = ["", "| where | source left out | k chosen | outside | worst |", "|---|---|---|---|---|"]
    for where, some in (
        ("in a node", [s for s in series if s.nodes == 1]),
        ("between", [s for s in series if s.nodes > 1]),
    ):
        for source in dict.fromkeys(one.source for one in some):
            others = [one for one in some if one.source != source]
            fill = min(FILLS, key=lambda k: mean(_cost(one, k) for one in others))
            found = [m for one in some if one.source == source for m in misses(one, recommended, fill)]
            worst = max(found, key=lambda m: abs(m.error) / allowed_error(m.nbytes))
            bad = f"{sum(m.outside for m in found)} of {len(found)}"
            lines.append(
                f"| {where} | {source} | {fill:g} | {bad} | {worst.error:+.0%} at {format_size(worst.nbytes)} |"
            )
    return lines


def _cost(one: Series, fill: float) -> float:
    """Mean square of errors in units of what is allowed, outliers cut at 3."""
    return mean(min(3.0, abs(m.error) / allowed_error(m.nbytes)) ** 2 for m in misses(one, recommended, fill))


def by_series(series: Sequence[Series]) -> list[str]:
    """Held-out errors of each sweep, fitted on its ends."""
    sizes = sorted({point.nbytes for one in series for point in one.points})
    lines = ["", f"| sweep | {' | '.join(format_size(size) for size in sizes)} |", "|---|" + "---|" * len(sizes)]
    for one in series:
        found = {m.nbytes: m for m in misses(one, both_ends, None)}
        cells = [
            f"{found[size].error:+.0%}{'!' if found[size].outside else ''}" if size in found else "" for size in sizes
        ]
        lines.append(f"| {one.name} | {' | '.join(cells)} |")
    return lines


def modelled(series: Sequence[Series]) -> dict[str, tuple[NcclSystem, NcclOperation]]:
    """Sweeps that NCCL's model can say something about: its GPUs and operations, its own choice."""
    found = {}
    for one in series:
        asked = next((name for name in OPERATIONS if name == one.operation), None)
        if one.gpu in FAMILY and asked is not None and "ALGO" not in one.forced:
            comm = build_system(nodes=one.nodes, per_node=one.per_node, family=FAMILY[one.gpu], nic_gbps=one.nic_gbps)
            found[one.name] = (comm, asked)
    return found


def unfitted(one: Series, known: tuple[NcclSystem, NcclOperation], fill: float) -> list[Miss]:
    """Errors without any measurement."""
    comm, asked = known
    times = {
        point: expected_s(
            comm, choose_pair(comm, point.nbytes, operation=asked), point.nbytes, operation=asked, fill=fill
        )
        for point in one.points
    }
    return [
        Miss(series=one.name, error=seconds / point.seconds - 1, nbytes=point.nbytes)
        for point, seconds in times.items()
    ]


def against_model(series: Sequence[Series]) -> list[str]:
    """Measured over expected time, of NCCL's pick, without any fit."""
    known = modelled(series)
    some = [one for one in series if one.name in known]
    lines = ["", "| size | sweeps | least | median | most |", "|---|---|---|---|---|"]
    found = [m for one in some for m in unfitted(one, known[one.name], FILL)]
    for size in sorted({m.nbytes for m in found}):
        ratios = [1 / (1 + m.error) for m in found if m.nbytes == size]
        cells = f"{min(ratios):.2f} | {median(ratios):.2f} | {max(ratios):.2f}"
        lines.append(f"| {format_size(size)} | {len(ratios)} | {cells} |")
    lines += ["", "The same with other k (0 is NCCL's sum, with unrounded links):", ""]
    lines += [
        "| k | ≥ 1 GiB median | p90 | worst | 16–512 MiB median | p90 | worst | outside |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for fill in (0.0, 0.3, FILL, 1.0):
        lines.append(_line(f"{fill:g}", [m for one in some for m in unfitted(one, known[one.name], fill)]))
    lines += ["", "k chosen without each source:", ""]
    for source in dict.fromkeys(one.source for one in some):
        others = [one for one in some if one.source != source]
        lines.append(
            f"- without {source}: {min(FILLS, key=lambda k: mean(_model_cost(one, known, k) for one in others)):g}"
        )
    return lines


def _model_cost(one: Series, known: dict[str, tuple[NcclSystem, NcclOperation]], fill: float) -> float:
    found = unfitted(one, known[one.name], fill)
    return mean(min(3.0, abs(m.error) / allowed_error(m.nbytes)) ** 2 for m in found)


def page() -> str:
    """The whole result."""
    series = read()
    sources = len({one.source for one in series})
    lines = [
        f"# Collectives from two measurements, {datetime.date.today().isoformat()}",
        "",
        f"`python benchmarks/collective_fit.py`, {len(series)} sweeps of {sources} sources",
        "(`benchmarks/data/collective_sweeps.csv`). Errors are of the time; held to 10 % from 1 GiB on and 25 % below.",
        "",
        "## Forms",
        *forms(series),
        *scaled(series),
        "",
        "## k without each source",
        "",
        "By the least mean square error of the sources that stay, on pairs of up to 64 MiB and 1 GiB or more.",
        *left_out(series),
        "",
        "## Each sweep, fitted on its smallest and largest size",
        *by_series(series),
        "",
        "## Without any fit: measured over expected time",
        *against_model(series),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", metavar="FOLDER", type=Path)
    args = parser.parse_args()
    text = page()
    print(text, end="")
    if args.write:
        (args.write / f"{datetime.date.today().isoformat()}-collective-fit.md").write_text(text)


if __name__ == "__main__":
    main()
