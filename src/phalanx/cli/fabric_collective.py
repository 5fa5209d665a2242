"""`phalanx fabric collective`: which algorithm and protocol NCCL picks, and how long the collective takes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.options import add_json
from phalanx.cli.output import print_json, say
from phalanx.errors import mistake, nearest
from phalanx.units import plural

if TYPE_CHECKING:
    from phalanx.hardware.types import Cluster
    from phalanx.network.collective_fit import AlphaBeta, Measured, Operation, Point
    from phalanx.network.nccl_system import NcclSystem

KINDS: tuple[Operation, ...] = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce", "all-to-all")
SIZES = "64KiB..16GiB"
MOST_FILE_BYTES = 16 << 20


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `phalanx fabric collective`."""
    parser.add_argument("cluster", metavar="CLUSTER", help="8xH100:16 (16 nodes of 8), 72xGB200:2, or a .toml file")
    parser.add_argument("--kind", metavar="WHAT", default=KINDS[0], help=f"{', '.join(KINDS)} ({KINDS[0]})")
    parser.add_argument("--bytes", metavar="SIZE", default=SIZES, help=f"64MiB, or a range as 1MiB..16GiB ({SIZES})")
    parser.add_argument("--nic-gbps", metavar="G", type=float, help="per GPU (the cluster's)")
    parser.add_argument("--cpu", choices=("intel", "amd", "arm"), help="of the hosts (intel; arm with GB200)")
    parser.add_argument("--no-nvls", action="store_true", help="NCCL_NVLS_ENABLE=0: no sums in the NVSwitch")
    parser.add_argument("--sharp", action="store_true", help="the network's switches add too (CollNet)")
    parser.add_argument("--fit", metavar="FILE", help="your measurements: nccl-tests' output, or CSV with bytes and us")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Ask and print."""
    from phalanx.hardware.cluster import resolve
    from phalanx.network.collective_answer import collective_answers, pick_ranges
    from phalanx.network.sizes import parse_sizes

    kind, sizes = _kind(args.kind), parse_sizes(args.bytes, "--bytes")
    cluster = _with_nic(resolve(args.cluster), args.nic_gbps)
    if cluster.devices < 2:
        raise mistake(f"cluster {cluster.name}", "one rank has nobody to talk to", fix="use 8xH100, or 8xH100:16")
    measured = _measured(args.fit, kind, cluster) if args.fit else None
    comm = _model(args, cluster, kind)
    fit = _fit(measured.points, cluster, kind) if measured else None
    found = collective_answers(comm, None if kind == "all-to-all" else kind, sizes, fit)
    ruled = pick_ranges(comm, kind, sizes[0], sizes[-1]) if comm and kind != "all-to-all" else ()
    if args.json:
        assumed = measured is not None and not measured.named
        group = {"cluster": cluster.name, "ranks": cluster.devices, "kind": kind, "fit": fit}
        print_json({**group, "fit_kind_assumed": assumed, "sizes": found, "reigns": ruled})
        return 0
    from phalanx.network import collective_answer

    say(f"{kind}, {_named(cluster)}\n")
    if len(sizes) == 1:
        say(
            (collective_answer.show_pairs(found[0]) + "\n\n" if comm else "")
            + collective_answer.show_expected(found[0])
        )
    else:
        say(collective_answer.show_sizes(found))
    if ruled and len(sizes) > 1:
        say("\n" + collective_answer.show_pick_ranges(ruled))
    say(_footing(fit, measured, kind) if fit and measured else collective_answer.MODEL_NOTE)
    return 0


def _named(cluster: Cluster) -> str:
    device = cluster.accelerator.name
    if cluster.domains == 1:
        return f"{plural(cluster.devices, 'rank')}: one node of {device}"
    nic_gbps = cluster.nic_bytes_per_s * 8e-9
    nodes = f"{plural(cluster.domains, 'node')} of {cluster.domain_devices} {device}"
    return f"{plural(cluster.devices, 'rank')}: {nodes}, {nic_gbps:g} Gb/s per GPU"


def _kind(text: str) -> Operation:
    word = text.strip().lower().replace("_", "").replace("-", "")
    found = next((one for one in KINDS if one.replace("-", "") == word), None)
    if found is None:
        close = nearest(text, KINDS)
        raise mistake("--kind", f'there is no collective "{text[:40]}"', fix=f"use {close or ', '.join(KINDS)}")
    return found


def _with_nic(cluster: Cluster, nic_gbps: float | None) -> Cluster:
    from dataclasses import replace

    if nic_gbps is None:
        return cluster
    if not 0 < nic_gbps < 1e6:
        raise mistake("--nic-gbps", f"a NIC of {nic_gbps:g} Gb/s", fix="use 100, 200, 400 or 800")
    return replace(cluster, nic_bytes_per_s=nic_gbps * 1e9 / 8)


def _model(args: argparse.Namespace, cluster: Cluster, kind: Operation) -> NcclSystem | None:
    """None where only the fit can speak."""
    from phalanx.errors import UserError
    from phalanx.network.nccl_cluster import nccl_system

    if kind == "all-to-all":
        if not args.fit:
            raise mistake(
                "--kind all-to-all",
                "NCCL has no algorithms for it: it is sends and receives",
                fix="give two measurements with --fit, or use phalanx fabric simulate FABRIC --traffic all-to-all",
            )
        return None
    try:
        return nccl_system(cluster, nvls=not args.no_nvls, cpu=args.cpu, sharp=args.sharp)
    except UserError:
        if args.fit:
            return None
        raise


def _measured(name: str, kind: Operation, cluster: Cluster) -> Measured:
    from phalanx.network.collective_fit import read_points

    path = Path(name)
    try:
        with path.open("rb") as stream:
            text = stream.read(MOST_FILE_BYTES).decode("utf-8", errors="replace")
    except OSError as error:
        raise mistake(f"--fit {name}", f"cannot be read: {error.strerror or error}", fix="name a text file") from None
    return read_points(text, where=f"--fit {name}", operation=kind, ranks=cluster.devices)


def _fit(points: tuple[Point, ...], cluster: Cluster, kind: Operation) -> AlphaBeta:
    from phalanx.network.collective_fit import LEAST_BYTES, fit_points

    usable = [one for one in points if one.nbytes >= LEAST_BYTES]
    if len({one.nbytes for one in usable}) < 2:
        raise mistake(
            "--fit",
            f"{plural(len(points), 'measurement')}, {len(usable)} of them from 16 MiB on",
            why="below 16 MiB launches and protocols decide, and tell nothing about the rest",
            fix="measure two sizes, as 16 MiB and 4 GiB",
        )
    return fit_points(usable, ranks=cluster.devices, nodes=cluster.domains, operation=kind)


def _footing(fit: AlphaBeta, measured: Measured, kind: Operation) -> str:
    from phalanx.network.collective_answer import show_fit
    from phalanx.network.collective_fit import LEAST_BYTES, worst_error

    usable = [one for one in measured.points if one.nbytes >= LEAST_BYTES]
    error, at = worst_error(usable, [fit.seconds(one.nbytes) for one in usable])
    said = show_fit(fit, len(usable), error, at.nbytes)
    return said if measured.named else f"{said}\nthe file names no collective: taken for {kind}"
