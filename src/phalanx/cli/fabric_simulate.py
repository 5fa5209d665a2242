"""`phalanx fabric simulate`: traffic on a fabric, whole or with failed parts, by the fluid or the packet engine."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from phalanx.cli.fabric_files import FABRIC_HELP, Traffic, add_traffic, load_fabric, load_matrix, load_traffic
from phalanx.cli.options import add_json
from phalanx.cli.output import note, print_json
from phalanx.errors import mistake
from phalanx.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from phalanx.network.fabric.types import Fabric
    from phalanx.sim.packets.transport import Transport

INTERRUPTED = 130  # 128 + SIGINT, as shells count
ENGINES = ("fluid", "packets")
CPU_S = 600.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `phalanx fabric simulate`."""
    parser.add_argument("fabric", metavar="FABRIC", help=FABRIC_HELP)
    parser.add_argument("--engine", choices=ENGINES, help="fair rates, or packet by packet (fluid)")
    parser.add_argument("--cm", metavar="FILE.cm", help="traffic from a connection matrix of htsim")
    add_traffic(parser)
    parser.add_argument("--routing", metavar="HOW", help="flow, qp, oblivious, adaptive or all (paths; fluid: all)")
    parser.add_argument("--paths", metavar="K", type=int, default=0, help="per flow: QPs or sprayed paths")
    parser.add_argument(
        "--fail",
        metavar="PART",
        action="append",
        default=[],
        help="nic:PLANE/HOST, link:PLANE/T0/PORT, t0:PLANE/N, t1:PLANE/N or transceiver:HOST; may be repeated; "
        "with packets also t1link:PLANE/T1/PORT, and PART@50us or PART@50us..2ms",
    )
    parser.add_argument("--left", metavar="SHARE", type=float, default=0.0, help="capacity a failed part keeps (0)")
    parser.add_argument("--recovery", metavar="WHO", default="", help="none, conventional or edge")
    parser.add_argument("--wire", metavar="NAME", help="fluid: overheads mrc, htsim or ideal (mrc)")
    parser.add_argument("--transport", metavar="NAME", help="packets: mrc, ecmp or htsim (mrc)")
    parser.add_argument("--converge", metavar="S", type=float, help="packets: seconds until routing knows (1)")
    parser.add_argument("--loss", metavar="SHARE", type=float, help="packets: lost on the failed parts, which stay up")
    parser.add_argument("--cpu", metavar="S", type=float, help=f"packets: CPU seconds it may take ({CPU_S:.0f})")
    parser.add_argument("--compare", action="store_true", help="packets: ECMP and convergence beside edge recovery")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Solve and print."""
    engine = args.engine or ("packets" if args.compare else ENGINES[0])
    _check(args, engine)
    fabric, said = load_fabric(args.fabric)
    traffic = load_matrix(args, fabric) if args.cm else load_traffic(args, fabric)
    traffic = replace(traffic, not_mapped=said + traffic.not_mapped)
    return _fluid(args, fabric, traffic) if engine == "fluid" else _packets(args, fabric, traffic)


def _check(args: argparse.Namespace, engine: str) -> None:
    """An option that would have no effect is a mistake."""
    packets = {"--transport": args.transport, "--converge": args.converge, "--loss": args.loss, "--cpu": args.cpu}
    if engine == "fluid":
        for option, value in packets.items():
            if value is not None:
                raise mistake(option, "the fluid engine has no packets and no time", fix="add --engine packets")
        if args.compare:
            raise mistake("--compare", "convergence takes time, which the fluid engine has not", fix="--engine packets")
    elif args.wire is not None:
        raise mistake("--wire", "packets have the headers of their transport", fix="use --transport mrc or htsim")
    given = {"--transport": args.transport, "--routing": args.routing, "--recovery": args.recovery}
    for option, value in given.items():
        if args.compare and value:
            raise mistake(option, "--compare chooses it for both", fix="leave one of the two out")
    if args.paths < 0:
        raise mistake("--paths", f"{args.paths} paths per flow", fix="use 1 or more")
    if args.cpu is not None and not 0 < args.cpu < 1e9:
        raise mistake("--cpu", f"{args.cpu:g} seconds", fix="use 60, or 600")


def _fluid(args: argparse.Namespace, fabric: Fabric, traffic: Traffic) -> int:
    from phalanx.sim.simulate import simulate

    said = traffic.not_mapped
    if traffic.failed:
        said += (f"{len(traffic.failed)} dead AGG uplinks: only with --engine packets",)
    if args.fabric.strip().lower().endswith(".topo"):
        said += ("latencies: the fluid engine takes them from --wire",)
    found = simulate(
        fabric,
        traffic.name,
        flows=traffic.flows,
        spread=args.routing or "all",
        paths=args.paths,
        failed=args.fail,
        left=args.left,
        recovery=args.recovery,
        wire=args.wire or "mrc",
        seed=args.seed,
    )
    if args.json:
        print_json({**found, "not_mapped": said})
    else:
        print("\n".join([_text(found), *_said(said)]))
    return 0


def _packets(args: argparse.Namespace, fabric: Fabric, traffic: Traffic) -> int:
    from phalanx.sim.simulate_packets import compared, transport_of

    transports: tuple[Transport, ...]
    if args.compare:
        transports = compared(fabric, paths=args.paths, converge_s=args.converge)
    else:
        words = {"routing": args.routing or "", "paths": args.paths, "recovery": args.recovery}
        transports = (transport_of(args.transport or "mrc", converge_s=args.converge, **words),)
    found, code = _each(args, fabric, traffic, transports)
    if args.json:
        rest = {"not_mapped": traffic.not_mapped}
        print_json({"compare": found, **rest} if args.compare else {**found[0], **rest})
    else:
        print("\n".join([_packet_text(found), *_said(traffic.not_mapped)]))
    return code


def _each(
    args: argparse.Namespace, fabric: Fabric, traffic: Traffic, transports: tuple[Transport, ...]
) -> tuple[list[dict[str, Any]], int]:
    """What each transport gives, up to Ctrl-C, and the exit code."""
    from phalanx.sim.failures import Break
    from phalanx.sim.packets.budget import Budget
    from phalanx.sim.simulate_packets import simulate_packets

    broken = Break(failed=(*args.fail, *traffic.failed), left=args.left, loss=args.loss or 0.0)
    rest: dict[str, Any] = {"broken": broken, "seed": args.seed, "budget": Budget(cpu_s=args.cpu or CPU_S)}
    found: list[dict[str, Any]] = []
    for transport in transports:
        try:
            found.append(simulate_packets(fabric, traffic.name, traffic.flows, transport=transport, **rest))
        except KeyboardInterrupt:  # before the first slot; in the middle, the engine itself returns what is finished
            if not found:
                raise
            return found, INTERRUPTED
        one = found[-1]
        for part in one["failed_too_late"]:
            note(f"{one['transport']}: {part} had no effect: all was over after {format_seconds(one['simulated_s'])}")
        if one["stopped"]:
            note(f"stopped ({one['stopped']}): {one['finished_flows']:,} of {one['flows']:,} flows are finished")
        if one["stopped"] == "interrupted":
            return found, INTERRUPTED
    return found, 0


def _said(said: tuple[str, ...]) -> list[str]:
    return [f"  not mapped: {one}" for one in said]


def _head(found: dict[str, Any]) -> str:
    size, total = format_bytes(found["bytes_per_flow"]), format_bytes(found["bytes_total"])
    return f"{found['fabric']}: {found['traffic']}, {found['flows']:,} flows of {size}, {total} in all"


def _broken(found: dict[str, Any]) -> str:
    if not found["failed"]:
        return "nothing"
    how = f"losing {found['loss']:.2%}" if found.get("loss") else f"at {found['left']:.0%}"
    return f"{', '.join(found['failed'])} {how}"


def _text(found: dict[str, Any]) -> str:
    paths = f"{found['paths']} path{'s' if found['paths'] > 1 else ''} per flow"
    lines = [
        _head(found),
        f"  routing   {found['spread']}, {paths}, recovery {found['recovery']}; broken: {_broken(found)}",
        f"  rate      mean {found['rate_mean']:.3f} of line rate, median {found['rate_median']:.3f}, "
        f"slowest 1 % {found['rate_p1']:.3f}, slowest {found['rate_slowest']:.3f}",
        f"  links     {found['full_links']:,} full, {found['idle_links']:,} idle",
        f"  done      mean {_seconds(found['mean_s'])}, 99 % {_seconds(found['p99_s'])}, "
        f"last {_seconds(found['tail_s'])}",
    ]
    if found["stalled_flows"]:
        lines.append(f"  stalled   {found['stalled_flows']:,} flows have no working path")
    return "\n".join(lines)


def _packet_text(found: list[dict[str, Any]]) -> str:
    """One column for each transport."""
    first = found[0]
    rows = [
        ("", [one["transport"] for one in found]),
        ("paths per flow", [f"{one['paths']} {one['spread']}" if one["paths"] > 1 else "1" for one in found]),
        ("recovery", [_recovery(one) for one in found]),
        ("done, mean", [_some(one, "mean_s") for one in found]),
        ("done, 99 %", [_some(one, "p99_s") for one in found]),
        ("done, last", [_last(one) for one in found]),
        ("packets sent", [f"{one['sent']:,}" for one in found]),
        ("packets lost", [f"{one['lost']:,}" for one in found]),
        ("packets trimmed", [f"{one['trimmed']:,}" for one in found]),
        ("flows touched", [f"{one['touched_flows']:,}, {one['touched_by_loss_flows']:,} by loss" for one in found]),
    ]
    if any(one["finished_flows"] < one["flows"] for one in found):
        rows.append(("flows unfinished", [f"{one['flows'] - one['finished_flows']:,}" for one in found]))
    widths = [max(len(cells[at]) for _, cells in rows) for at in range(len(found))]
    table = [
        f"  {name:<17}" + "".join(f"  {c:>{w}}" for c, w in zip(cells, widths, strict=True)) for name, cells in rows
    ]
    return "\n".join([_head(first), f"  broken: {_broken(first)}", *table])


def _recovery(one: dict[str, Any]) -> str:
    after = one["converge_s"]
    return f"{one['recovery']}, {format_seconds(after)}" if after is not None else str(one["recovery"])


def _some(one: dict[str, Any], key: str) -> str:
    """Of the flows that finished."""
    return format_seconds(one[key]) if one["finished_flows"] else "-"


def _last(one: dict[str, Any]) -> str:
    if one["finished_flows"] < one["flows"]:
        return f"not in {format_seconds(one['simulated_s'])}"
    return format_seconds(one["tail_s"])


def _seconds(value: float) -> str:
    return "never" if value == float("inf") else format_seconds(value)
