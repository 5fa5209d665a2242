"""`phalanx fabric simulate`: traffic on a fabric, whole or with failed parts, by the fluid or the packet engine."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from phalanx.cli.fabric_compare import (
    CPU_S,
    INTERRUPTED,
    broken_by,
    columns_text,
    notes_text,
    question_of,
    run_compare,
    run_scenarios,
    say_beside,
)
from phalanx.cli.fabric_files import (
    FABRIC_HELP,
    Traffic,
    add_traffic,
    load_fabric,
    load_matrix,
    load_traffic,
    says_bytes,
    who_text,
)
from phalanx.cli.options import add_json
from phalanx.cli.output import note, print_json, say
from phalanx.cli.parser import OnOff
from phalanx.errors import mistake
from phalanx.units import format_bytes, format_seconds, plural

if TYPE_CHECKING:
    from phalanx.network.fabric.fabric_types import Fabric

TRANSPORTS = ("mrc", "ecmp", "roce", "htsim")

ENGINES = ("fluid", "packets")


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `phalanx fabric simulate`."""
    parser.add_argument("fabric", metavar="FABRIC", help=FABRIC_HELP)
    parser.add_argument("--engine", choices=ENGINES, default=ENGINES[0], help="fair rates, or packet by packet (fluid)")
    parser.add_argument("--cm", metavar="FILE.cm", help="traffic from a connection matrix of htsim")
    add_traffic(parser)
    parser.add_argument("--routing", metavar="HOW", help="flow, qp, oblivious, adaptive or all (paths; fluid: all)")
    parser.add_argument("--paths", metavar="K", type=int, help="per flow: QPs or sprayed paths")
    _add_failures(parser)
    parser.add_argument("--wire", metavar="NAME", help="fluid: overheads mrc, htsim or ideal (mrc)")
    parser.add_argument("--transport", metavar="NAME", help=f"packets: {', '.join(TRANSPORTS)} (mrc)")
    onoff = OnOff
    parser.add_argument("--pfc", action=onoff, help="pauses instead of drops: RoCE, or fluid by flow or QP")
    parser.add_argument("--dcqcn", action=onoff, help="packets: RoCE's congestion control")
    parser.add_argument(
        "--each-plane", action="store_true", help="packets: simulate all planes, also where one stands for all"
    )
    parser.add_argument("--cpu", metavar="S", type=float, help=f"CPU seconds it may take ({CPU_S:.0f})")
    add_json(parser)


def _add_failures(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fail",
        metavar="PART",
        action="append",
        default=[],
        help="nic:PLANE/HOST, link:PLANE/T0/PORT, t0:PLANE/N, t1:PLANE/N, t1link:PLANE/T1/PORT, transceiver:HOST or "
        "all; PART@50us fails then, PART@50us..2ms returns; may be repeated",
    )
    parser.add_argument("--left", metavar="SHARE", type=float, default=0.0, help="capacity a failed part keeps (0)")
    parser.add_argument("--loss", metavar="SHARE", type=float, help="packets lost on the failed parts, which stay up")
    parser.add_argument(
        "--deny",
        metavar="PART",
        action="append",
        default=[],
        help="never used, as if the controller had told so before; names as for --fail, without a time",
    )
    parser.add_argument("--recovery", metavar="WHO", help="none, conventional or edge")
    parser.add_argument("--converge", metavar="S", type=float, help="seconds until routing knows (10; packets 0.01)")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="a conventional fabric, PFC off and on, beside recovery at the edge (--bytes: what 200 µs carry)",
    )
    parser.add_argument(
        "--scenario",
        metavar="NAME",
        help="compare a named failure: link-flap, t1-reboot, t0-loss, nic-port, transceiver, grey-path, grey-all, "
        "incast, or all of them",
    )


def run(args: argparse.Namespace) -> int:
    """Solve and print."""
    try:
        return _run(args)
    except KeyboardInterrupt:
        note("stopped (interrupted): nothing is finished yet")
        return INTERRUPTED


def _run(args: argparse.Namespace) -> int:
    _check(args)
    fabric, said = load_fabric(args.fabric)
    _holds(fabric, args.engine)
    if args.compare or args.scenario is not None:
        _usual_bytes(args, fabric)
    if args.scenario is not None:
        return run_scenarios(args, fabric, args.engine)
    traffic = load_matrix(args, fabric) if args.cm else load_traffic(args, fabric)
    traffic = replace(traffic, not_mapped=said + traffic.not_mapped)
    if args.compare:
        return run_compare(args, fabric, traffic, args.engine)
    return _fluid(args, fabric, traffic) if args.engine == "fluid" else _packets(args, fabric, traffic)


def _holds(fabric: Fabric, engine: str) -> None:
    """Refuse a fabric of more links than an engine holds before any traffic is made for it."""
    from phalanx.sim.fabric_links import links_of

    # Planes that are alike are simulated once by the packet engine.
    links_of(fabric if engine == "fluid" else replace(fabric, planes=1, nic_gbps=fabric.port_gbps))


def _usual_bytes(args: argparse.Namespace, fabric: Fabric) -> None:
    """Comparisons need traffic that is still there when something fails, unless the user says how much."""
    from phalanx.sim.fabric_failures import usual_bytes

    if not args.cm and not says_bytes(args.traffic or "") and args.nbytes is None:
        args.nbytes = f"{usual_bytes(fabric):.0f}"


def _check(args: argparse.Namespace) -> None:
    """An option that would have no effect is a mistake."""
    from phalanx.sim.fabric_failures import FabricBreak, faults_of

    for name, value in vars(args).items():
        if value == "" or (isinstance(value, list) and "" in value):
            raise mistake(f"--{'bytes' if name == 'nbytes' else name}", "is empty", fix="leave it out, or say which")
    if not args.cm:  # its file may name parts too
        faults_of(FabricBreak(failed=tuple(args.fail), left=args.left, loss=args.loss or 0.0))
    if args.engine == "fluid":
        for option, value in {"--transport": args.transport, "--dcqcn": args.dcqcn}.items():
            if value is not None:
                raise mistake(option, "the fluid engine has no packets", fix="add --engine packets")
        if args.each_plane:
            raise mistake("--each-plane", "the fluid engine has all planes anyway", fix="leave it out")
    elif args.wire is not None:
        raise mistake("--wire", "packets have the headers of their transport", fix="use --transport mrc or htsim")
    given = {
        "--transport": args.transport,
        "--routing": args.routing,
        "--recovery": args.recovery,
        "--wire": args.wire,
        "--pfc": args.pfc,
        "--dcqcn": args.dcqcn,
    }
    for option, value in given.items():
        if (args.compare or args.scenario) and value not in (None, ""):
            raise mistake(option, "--compare and --scenario choose it for all columns", fix="leave one of the two out")
    if args.each_plane and (args.compare or args.scenario):
        raise mistake("--each-plane", "--compare and --scenario do what a failure needs", fix="leave it out")
    named = {"--fail": args.fail, "--left": args.left, "--loss": args.loss, "--cm": args.cm, "--traffic": args.traffic}
    for option, value in named.items():
        if args.scenario and value:
            raise mistake(option, "--scenario says what fails under which traffic", fix="use --compare for your own")
    if args.paths is not None and args.paths < 1:
        raise mistake("--paths", f"{plural(args.paths, 'path')} per flow", fix="use 1 or more, or leave it out")
    if args.cpu is not None and not 0 < args.cpu < 1e9:
        raise mistake("--cpu", f"{args.cpu:g} seconds", fix="use 60, or 600")


def _fluid(args: argparse.Namespace, fabric: Fabric, traffic: Traffic) -> int:
    said = traffic.not_mapped
    if args.fabric.strip().lower().endswith(".topo"):
        said += ("latencies: the fluid engine takes them from --wire",)
    in_time = args.loss or args.converge is not None or args.pfc or any("@" in one for one in args.fail)
    found = _in_time(args, fabric, traffic) if in_time else _settled(args, fabric, traffic)
    say_beside(found)
    notes = _unsaid(args, traffic, found) if in_time else ()
    if args.json:
        print_json({**found, "notes": notes, "not_mapped": said})
    else:
        text = columns_text([found]) if in_time else _text(found)
        say("\n".join([text, *who_text(traffic), *notes_text(notes), *_said(said)]))
    return INTERRUPTED if found["stopped"] else 0


def _settled(args: argparse.Namespace, fabric: Fabric, traffic: Traffic) -> dict[str, Any]:
    """Rates that settle, with what is broken from the start."""
    from phalanx.sim.packets.build import PacketBudget
    from phalanx.sim.simulate import simulate

    return simulate(
        fabric,
        traffic.name,
        flows=traffic.flows,
        spread=args.routing or "all",
        paths=args.paths or 0,
        failed=(*args.fail, *traffic.failed),
        left=args.left,
        denied=args.deny,
        recovery=args.recovery or "",
        wire=args.wire or "mrc",
        seed=args.seed,
        watched=traffic.watched,
        budget=PacketBudget(cpu_s=args.cpu or CPU_S),
    )


def _in_time(args: argparse.Namespace, fabric: Fabric, traffic: Traffic) -> dict[str, Any]:
    """What happens when something fails on the way."""
    from phalanx.sim.compare_recovery import one_fluid_run
    from phalanx.sim.simulate import WIRES, choice

    return one_fluid_run(
        question_of(args, fabric, traffic, "fluid"),
        spread=args.routing or "adaptive",
        recovery=args.recovery or "",
        converges=args.converge is not None,
        pauses=bool(args.pfc),
        wire=WIRES[choice("--wire", args.wire or "mrc", tuple(WIRES))],
    )


def _packets(args: argparse.Namespace, fabric: Fabric, traffic: Traffic) -> int:
    from phalanx.sim.packets.build import PacketBudget
    from phalanx.sim.simulate import simulate_packets, transport_of

    words = {"routing": args.routing or "", "recovery": args.recovery or "", "pfc": args.pfc, "dcqcn": args.dcqcn}
    found: dict[str, Any] = simulate_packets(
        fabric,
        traffic.name,
        traffic.flows,
        transport=transport_of(args.transport or "mrc", paths=args.paths or 0, converge_s=args.converge, **words),
        broken=broken_by(args, traffic),
        seed=args.seed,
        budget=PacketBudget(cpu_s=args.cpu or CPU_S),
        schedule=traffic.schedule,
        each_plane=args.each_plane,
    )
    say_beside(found)
    notes = _unsaid(args, traffic, found)
    if args.json:
        print_json({**found, "notes": notes, "not_mapped": traffic.not_mapped})
    else:
        say("\n".join([_packet_text(found), *who_text(traffic), *notes_text(notes), *_said(traffic.not_mapped)]))
    return INTERRUPTED if found["stopped"] == "interrupted" else 0


def _unsaid(args: argparse.Namespace, traffic: Traffic, found: dict[str, Any]) -> tuple[str, ...]:
    from phalanx.sim.compare_recovery import unsaid

    return unsaid(broken_by(args, traffic), [found])


def _said(said: tuple[str, ...]) -> list[str]:
    return [f"  not mapped: {one}" for one in said]


def _head(found: dict[str, Any]) -> str:
    size, total = format_bytes(found["bytes_per_flow"]), format_bytes(found["bytes_total"])
    return f"{found['fabric']}: {found['traffic']}, {plural(found['flows'], 'flow')} of {size}, {total} in all"


def _broken(found: dict[str, Any]) -> str:
    denied = f"; denied: {', '.join(found['denied'])}" if found["denied"] else ""
    if not found["failed"]:
        return f"nothing{denied}"
    how = f"losing {found['loss']:.2%}" if found.get("loss") else f"at {found['left']:.0%}"
    return f"{', '.join(found['failed'])} {how}{denied}"


def _text(found: dict[str, Any]) -> str:
    paths = f"{plural(found['paths'], 'path')} per flow"
    paths = "every path of every plane" if found["spread"] == "all" else paths
    never = "not yet" if found["stopped"] else "never"
    lines = [
        _head(found),
        f"  routing   {found['spread']}, {paths}, recovery {found['recovery']}; broken: {_broken(found)}",
        f"  rate      mean {found['rate_mean']:.3f} of line rate, median {found['rate_median']:.3f}, "
        f"slowest 1 % {found['rate_p1']:.3f}, slowest {found['rate_slowest']:.3f}",
        f"  links     {found['full_links']:,} full, {found['idle_links']:,} idle",
        f"  done      mean {_seconds(found['mean_s'], never)}, 99 % {_seconds(found['p99_s'], never)}, "
        f"last {_seconds(found['tail_s'], never)}",
    ]
    if "victim_rate" in found:
        lines.append(f"  victim    {found['victim_rate']:.3f} of line rate")
    if found["stalled_flows"]:
        lines.append(
            f"  stalled   {plural(found['stalled_flows'], 'flow')} without a working path: give hosts ports in more "
            "planes, or "
            "let the part return (PART@0us..1ms)"
        )
    return "\n".join(lines)


def _packet_text(one: dict[str, Any]) -> str:
    rows = [
        ("", one["transport"]),
        ("paths per flow", f"{one['paths']} {one['spread']}" if one["paths"] > 1 else "1"),
        ("recovery", _recovery(one)),
        ("done, mean", _some(one, "mean_s")),
        ("done, 99 %", _some(one, "p99_s")),
        ("done, last", _last(one)),
        ("planes simulated", _planes(one)),
        ("packets sent", f"{one['sent']:,}"),
        ("packets lost", f"{one['lost']:,}" + (f", {one['dropped']:,} dropped" if one["dropped"] else "")),
        ("packets trimmed", f"{one['trimmed']:,}"),
        ("ports paused", f"{one['paused_share']:.1%} of the time" if one["paused_share"] else ""),
        ("flows touched", f"{one['touched_flows']:,}, {one['touched_by_loss_flows']:,} by loss"),
    ]
    if one["finished_flows"] < one["flows"]:
        rows.append(("flows unfinished", f"{one['flows'] - one['finished_flows']:,}"))
    wide = max(len(cell) for _, cell in rows)
    table = [f"  {name:<17}  {cell:>{wide}}" for name, cell in rows if cell]
    return "\n".join([_head(one), f"  broken: {_broken(one)}", *table])


def _planes(one: dict[str, Any]) -> str:
    if one["planes"] == 1:
        return ""
    return f"{one['planes_simulated']} of {one['planes']}" + (", alike" if one["planes_simulated"] == 1 else "")


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


def _seconds(value: float, never: str) -> str:
    return never if value == float("inf") else format_seconds(value)
