"""`phalanx fabric simulate`: a traffic pattern on a fabric, whole or with failed parts, by the fluid engine."""

from __future__ import annotations

import argparse
from typing import Any

from phalanx.cli.options import add_json
from phalanx.cli.output import print_json
from phalanx.errors import mistake
from phalanx.units import format_bytes, format_seconds, parse_count


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `phalanx fabric simulate`."""
    parser.add_argument("fabric", metavar="FABRIC", help="clos2:131072x800G/8p/512, a .toml file or a name")
    parser.add_argument("--traffic", metavar="NAME", default="permutation", help="permutation, incast, ring, … ")
    parser.add_argument("--bytes", dest="nbytes", metavar="B", default="2M", help="sent by each host (2M)")
    parser.add_argument("--routing", metavar="HOW", default="all", help="flow, qp, oblivious, adaptive or all (paths)")
    parser.add_argument("--paths", metavar="K", type=int, default=0, help="per flow: QPs or sprayed paths")
    parser.add_argument(
        "--fail",
        metavar="PART",
        action="append",
        default=[],
        help="nic:PLANE/HOST, link:PLANE/T0/PORT, t0:PLANE/N, t1:PLANE/N or transceiver:HOST; may be repeated",
    )
    parser.add_argument("--left", metavar="SHARE", type=float, default=0.0, help="capacity a failed part keeps (0)")
    parser.add_argument("--recovery", metavar="WHO", default="", help="none, conventional or edge")
    parser.add_argument("--wire", metavar="NAME", default="mrc", help="overheads: mrc, htsim or ideal")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the traffic and the hashes (0)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Solve and print."""
    from phalanx.network.fabric.parse import parse_fabric
    from phalanx.sim.simulate import simulate

    found = simulate(
        parse_fabric(args.fabric),
        args.traffic,
        nbytes=_bytes(args.nbytes),
        spread=args.routing,
        paths=args.paths,
        failed=args.fail,
        left=args.left,
        recovery=args.recovery,
        wire=args.wire,
        seed=args.seed,
    )
    if args.json:
        print_json(found)
    else:
        print(_text(found))
    return 0


def _bytes(text: str) -> float:
    try:
        return parse_count(text)
    except ValueError as error:
        raise mistake("--bytes", f"{error}"[:160], fix="write it as 2M or 2000000") from None


def _text(found: dict[str, Any]) -> str:
    parts = f"{', '.join(found['failed'])} at {found['left']:.0%}" if found["failed"] else "nothing"
    paths = f"{found['paths']} path{'s' if found['paths'] > 1 else ''} per flow"
    lines = [
        f"{found['fabric']}: {found['traffic']}, {found['flows']:,} flows of {format_bytes(found['bytes'])} per host",
        f"  routing   {found['spread']}, {paths}, recovery {found['recovery']}; broken: {parts}",
        f"  rate      mean {found['rate_mean']:.3f} of line rate, median {found['rate_median']:.3f}, "
        f"slowest 1 % {found['rate_p1']:.3f}, slowest {found['rate_slowest']:.3f}",
        f"  links     {found['full_links']:,} full, {found['idle_links']:,} idle",
        f"  done      mean {_seconds(found['mean_s'])}, 99 % {_seconds(found['p99_s'])}, "
        f"last {_seconds(found['tail_s'])}",
    ]
    if found["stalled_flows"]:
        lines.append(f"  stalled   {found['stalled_flows']:,} flows have no working path")
    return "\n".join(lines)


def _seconds(value: float) -> str:
    return "never" if value == float("inf") else format_seconds(value)
