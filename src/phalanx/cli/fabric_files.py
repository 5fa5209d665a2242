"""Fabrics and traffic of `phalanx fabric simulate` and `export`: by name, or from files of htsim."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.output import note
from phalanx.errors import mistake
from phalanx.io.visible import one_line
from phalanx.units import parse_count

if TYPE_CHECKING:
    from phalanx.network.fabric.fabric_types import Fabric
    from phalanx.sim.packets.schedule import Schedule
    from phalanx.sim.traffic_matrix import Flows

FABRIC_HELP = "clos2:131072x800G/8p/512, a .toml or .topo file, or a name"
TRAFFIC, NBYTES = "permutation", "2M"


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Flows, what they are called, when they start, what fails in their file, and what of it is not simulated."""

    name: str
    flows: Flows
    schedule: Schedule | None = None  # None: together
    watched: int | None = None  # a flow whose own rate matters: the victim of an incast
    failed: tuple[str, ...] = ()
    not_mapped: tuple[str, ...] = ()


def who_text(traffic: Traffic) -> list[str]:
    """Hosts of an incast, whose numbers nobody gave."""
    if traffic.watched is None:
        return []
    source, target = traffic.flows.source.tolist(), traffic.flows.target.tolist()
    crowd = ", ".join(f"{host:,}" for at, host in enumerate(source) if at != traffic.watched)
    victim = f"{source[traffic.watched]:,} to {target[traffic.watched]:,}"
    return [f"  incast: hosts {crowd} to {target[0]:,}; the victim sends from {victim}"]


def add_traffic(parser: argparse.ArgumentParser) -> None:
    """Options that name the traffic."""
    parser.add_argument(
        "--traffic", metavar="NAME", help=f"permutation, incast, ring, …, FILE.csv, or JOB.toml[:AXIS] ({TRAFFIC})"
    )
    parser.add_argument("--bytes", dest="nbytes", metavar="B", help=f"sent by each host ({NBYTES})")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the traffic and the hashes (0)")


def load_fabric(text: str) -> tuple[Fabric, tuple[str, ...]]:
    """The fabric a text names, and what of its file it cannot hold."""
    if text.strip().lower().endswith(".topo"):
        from phalanx.sim.htsim.topology import read_topo

        topo = read_topo(Path(text.strip()))
        return topo.fabric, topo.not_mapped
    from phalanx.network.fabric.fabric_file import parse_fabric

    return parse_fabric(text), ()


def named_fabric(text: str) -> Fabric:
    """The same for commands that have no page for what a file's fabric leaves out: it goes to stderr."""
    fabric, said = load_fabric(text)
    for one in said:
        note(f"{text.strip()}: not mapped: {one}")
    return fabric


def load_traffic(args: argparse.Namespace, fabric: Fabric) -> Traffic:
    """By name; `--seed` below zero is refused, since numpy would."""
    from phalanx.sim.traffic_matrix import INCAST, named_traffic

    if args.seed < 0:
        raise mistake("--seed", f"{args.seed} is below zero", fix="use 0 or more")
    name = args.traffic or TRAFFIC
    if says_bytes(name):
        return _from_file(name.strip(), args.nbytes, fabric)
    made = named_traffic(name, fabric, _bytes(args.nbytes or NBYTES), seed=args.seed)
    return Traffic(name=name, flows=made, watched=len(made) - 1 if name == INCAST else None)


def load_matrix(args: argparse.Namespace, fabric: Fabric) -> Traffic:
    """From a .cm file."""
    from phalanx.sim.htsim.connection_matrix import read_cm

    if args.traffic or args.nbytes:
        raise mistake("--cm", "the file already says who sends how much", fix="leave out --traffic and --bytes")
    matrix = read_cm(Path(args.cm))
    if matrix.nodes > fabric.hosts:
        what = f"{matrix.nodes:,} nodes, but {fabric.name} has {fabric.hosts:,} hosts"
        raise mistake(args.cm, what, fix="use a larger fabric, or the .topo file of this matrix")
    # The fluid engine and comparisons have no clock of starts.
    timed = args.engine == "packets" and not args.compare
    return Traffic(
        name=one_line(Path(args.cm).name),
        flows=matrix.flows(),
        schedule=matrix.schedule() if timed else None,
        failed=matrix.failed(),
        not_mapped=matrix.not_mapped(timed=timed),
    )


def says_bytes(name: str) -> bool:
    """Whether traffic is named by a file, which also says how much is sent: a CSV matrix, or a job."""
    return re.search(r"\.(csv|toml(:[a-z_-]+)?)$", name.strip().lower()) is not None


def _from_file(name: str, nbytes: str | None, fabric: Fabric) -> Traffic:
    if nbytes:
        raise mistake("--bytes", f"{name[:80]} already says who sends how much", fix="leave out --bytes")
    if name.lower().endswith(".csv"):
        from phalanx.sim.traffic_matrix import read_matrix

        return Traffic(name=one_line(Path(name).name), flows=read_matrix(Path(name), fabric.hosts))
    from phalanx.cli.fabric_plan import plan_flows

    return Traffic(name=one_line(Path(name).name), flows=plan_flows(name, fabric))


def _bytes(text: str) -> float:
    try:
        return parse_count(text)
    except ValueError as error:
        raise mistake("--bytes", f"{error}"[:160], fix="write it as 2M or 2000000") from None
