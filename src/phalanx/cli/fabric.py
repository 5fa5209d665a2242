"""`phalanx fabric`: design the network of N GPUs, its cost and failures, and simulate traffic on it."""

from __future__ import annotations

import argparse
from pathlib import Path

import phalanx
from phalanx.api.fabric_collective import KINDS, SIZES
from phalanx.cli.output import note, page_width, print_json, say, show
from phalanx.cli.parser import OnOff, add_json, add_set
from phalanx.errors import mistake
from phalanx.units import plural

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.api.fabric_design import FabricCatalogue, FabricDecisions, FabricDesigns, FabricPage

FABRIC_HELP = "clos2:131072x800G/8p/512, a .toml or .topo file, or a name"
TRANSPORTS = ("mrc", "ecmp", "roce", "htsim")
ENGINES = ("fluid", "packets")
INTERRUPTED = 130  # 128 + SIGINT, as shells count


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands of `phalanx fabric`."""
    verbs = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    _configure_design(verbs.add_parser("design", help="list the fabrics that connect N GPUs, and recommend one"))
    _configure_decisions(
        verbs.add_parser("decisions", help="quantify three design decisions: planes, paths and recovery")
    )
    show_parser = verbs.add_parser("show", help="describe one fabric: parts, weak points, failures per day")
    show_parser.add_argument("fabric", metavar="FABRIC", nargs="?", help=FABRIC_HELP)
    add_json(show_parser)
    _configure_simulate(
        verbs.add_parser(
            "simulate", help="simulate traffic on a healthy or damaged fabric, and compare ways to recover"
        )
    )
    export_parser = verbs.add_parser("export", help="write a fabric and its traffic as .topo and .cm files for htsim")
    export_parser.add_argument("fabric", metavar="FABRIC", help=FABRIC_HELP)
    export_parser.add_argument("--topo", metavar="FILE.topo", help="write the fabric")
    export_parser.add_argument("--cm", metavar="FILE.cm", help="write the traffic")
    _add_traffic(export_parser)
    add_json(export_parser)
    _configure_collective(
        verbs.add_parser(
            "collective", help="show which algorithm and protocol NCCL picks for a collective, and its time"
        )
    )


def run_command(args: argparse.Namespace) -> int:
    """Run the sub-command: design, decisions, show, simulate, export or collective."""
    static_commands = {"design": _run_design, "decisions": _run_decisions, "show": _run_show}
    return {**static_commands, "simulate": _run_simulate, "export": _run_export, "collective": _run_collective}[
        args.what
    ](args)


def _show_folded(found: FabricDesigns | FabricDecisions | FabricPage | FabricCatalogue, *, as_json: bool) -> int:
    """Print the result, its lines folded to the terminal's width; return its exit code."""
    if as_json:
        print_json(found.to_dict())
    else:
        say(found.page(page_width()))
    return found.exit_code


# ---- design ----------------------------------------------------------------------------------------------------------


def _configure_design(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx fabric design`."""
    parser.add_argument("--gpus", metavar="N", help="GPUs to connect, one NIC each, e.g. 131072 or 64k")
    parser.add_argument(
        "--nic-gbps", metavar="G", type=float, help="NIC speed in Gbit/s, e.g. 400 (default: the job's, or 800)"
    )
    parser.add_argument("--switch", metavar="NAME", help='switch model, or ports as in 512x100G, e.g. "Tomahawk 5"')
    parser.add_argument(
        "--tiers", metavar="L", type=int, help="exactly this many tiers (default: the fewest that suffice)"
    )
    parser.add_argument(
        "--planes", metavar="P", type=int, help="exactly this many planes (default: every number the switch allows)"
    )
    parser.add_argument(
        "--oversubscription", metavar="R", type=float, help="downlinks per uplink at T0 (default: 1, 2 and 4)"
    )
    parser.add_argument(
        "--rails",
        metavar="K",
        type=int,
        help="connect the NICs of a server to K different T0s (default: compare none and 8)",
    )
    parser.add_argument(
        "--catalogue", metavar="FILE.csv", help="choose among these switches instead of the built-in catalogue"
    )
    parser.add_argument(
        "--top", metavar="N", type=int, default=6, help="designs shown per oversubscription (default: 6)"
    )
    job = parser.add_argument_group("for a job")
    job.add_argument(
        "--job",
        metavar="JOB",
        help="take GPUs and NICs from this job's cluster, and simulate its step on the best designs",
    )
    job.add_argument("--cluster", metavar="SPEC", help="use this cluster instead of the job's, e.g. 8xH100:16")
    add_set(parser)
    money = parser.add_argument_group("costs")
    money.add_argument(
        "--gpu-hour-usd", metavar="X", type=float, help="price of a GPU-hour (default: the job's, or 3.25)"
    )
    money.add_argument("--kwh-usd", metavar="X", type=float, help="price of a kWh (default: 0.08)")
    money.add_argument("--years", metavar="X", type=float, help="lifetime of the fabric (default: 4)")
    money.add_argument(
        "--recovery-s", metavar="S", type=float, help="seconds from a failure until traffic avoids it (default: 30e-6)"
    )
    files = parser.add_argument_group("files")
    files.add_argument(
        "--save", metavar="FILE.toml", help="write the recommended fabric, for fabric show, fabric simulate and sim"
    )
    files.add_argument("--csv", metavar="FILE.csv", help="write all designs, one per line")
    add_json(parser)


def _run_design(args: argparse.Namespace) -> int:
    names = ("gpus", "nic_gbps", "switch", "tiers", "planes", "oversubscription", "rails", "catalogue", "job")
    money = ("cluster", "overrides", "gpu_hour_usd", "kwh_usd", "years", "recovery_s", "top")
    designs = phalanx.fabric.design(**{name: getattr(args, name) for name in (*names, *money)}, progress=note)
    if args.csv:
        designs.write_csv(args.csv)
        note(f"wrote {args.csv}: {plural(len(designs.designs), 'design')}")
    if args.save:
        designs.save(args.save)
        note(f"wrote {args.save}: {designs.pick.name}")
    return _show_folded(designs, as_json=args.json)


# ---- decisions, show -------------------------------------------------------------------------------------------------


def _configure_decisions(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx fabric decisions`."""
    parser.add_argument("--gpus", metavar="N", help="GPUs to connect, one NIC each")
    parser.add_argument(
        "--fabric", metavar="F", help="use this fabric instead: a short form, a .toml or .topo file, or a name"
    )
    parser.add_argument("--nic-gbps", metavar="G", type=float, help="NIC speed in Gbit/s (default: 800)")
    parser.add_argument("--switch", metavar="NAME", help="the switch whose ports are split (default: Spectrum-5)")
    parser.add_argument(
        "--planes", metavar="P", type=int, help="number of planes (default: the most the switch allows)"
    )
    parser.add_argument("--paths", metavar="K", type=int, default=256, help="paths per connection (default: 256)")
    parser.add_argument(
        "--recovery-s", metavar="S", type=float, help="seconds from a failure until traffic avoids it (default: 30e-6)"
    )
    parser.add_argument(
        "--restart-s",
        metavar="S",
        type=float,
        help="seconds a restart takes, from the failure to the next step (default: 600)",
    )
    parser.add_argument("--picture", metavar="FILE.svg", help="write the three decisions as a picture")
    add_json(parser)


def _run_decisions(args: argparse.Namespace) -> int:
    if args.picture is not None and Path(args.picture).suffix.lower() != ".svg":
        what = f"--picture {args.picture[:80]} does not end in .svg"
        fix = "use a name such as decisions.svg"
        raise mistake("phalanx fabric decisions", what, why="the picture is an SVG", fix=fix)
    names = ("gpus", "fabric", "nic_gbps", "switch", "planes", "paths", "recovery_s", "restart_s")
    decisions = phalanx.fabric.decisions(**{name: getattr(args, name) for name in names}, progress=note)
    if args.picture:
        from phalanx.io.files import write_text

        write_text(Path(args.picture), decisions.picture(), fix="name another --picture")
        note(f"wrote {args.picture}")
    return _show_folded(decisions, as_json=args.json)


def _run_show(args: argparse.Namespace) -> int:
    if args.fabric is None:
        return _show_folded(phalanx.fabric.catalogue(), as_json=args.json)
    return _show_folded(phalanx.fabric.show(args.fabric, progress=note), as_json=args.json)


# ---- traffic ---------------------------------------------------------------------------------------------------------


def _add_traffic(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the traffic."""
    parser.add_argument(
        "--traffic",
        metavar="NAME",
        help="permutation, incast, ring, …, FILE.csv, or JOB.toml[:AXIS] (default: permutation)",
    )
    parser.add_argument("--bytes", dest="nbytes", metavar="B", help="bytes sent by each host (default: 2M)")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="seed for traffic and hashing (default: 0)")


def _configure_simulate(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx fabric simulate`."""
    parser.add_argument("fabric", metavar="FABRIC", help=FABRIC_HELP)
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default=ENGINES[0],
        help="fluid: fair rates; packets: packet by packet (default: fluid)",
    )
    parser.add_argument("--cm", metavar="FILE.cm", help="read traffic from an htsim connection matrix")
    _add_traffic(parser)
    parser.add_argument(
        "--routing", metavar="HOW", help="flow, qp, oblivious, adaptive or all (default with fluid: all)"
    )
    parser.add_argument("--paths", metavar="K", type=int, help="QPs or sprayed paths per flow")
    parser.add_argument(
        "--fail",
        metavar="PART",
        action="append",
        default=[],
        help="nic:PLANE/HOST, link:PLANE/T0/PORT, t0:PLANE/N, t1:PLANE/N, t1link:PLANE/T1/PORT, transceiver:HOST or "
        "all; PART@50us fails at that time, PART@50us..2ms also returns; may be repeated",
    )
    parser.add_argument(
        "--left",
        metavar="SHARE",
        type=float,
        default=0.0,
        help="share of capacity that a failed part keeps (default: 0)",
    )
    parser.add_argument(
        "--loss", metavar="SHARE", type=float, help="share of packets lost on the failed parts, which stay up"
    )
    parser.add_argument(
        "--deny",
        metavar="PART",
        action="append",
        default=[],
        help="never use this part, as if the controller had excluded it; named as for --fail, without a time",
    )
    parser.add_argument("--recovery", metavar="WHO", help="none, conventional or edge")
    parser.add_argument(
        "--converge", metavar="S", type=float, help="seconds until routing converges (default: 10; packets: 0.01)"
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="compare a conventional fabric, with PFC off and on, with recovery at the edge (--bytes defaults to "
        "200 µs of traffic)",
    )
    parser.add_argument(
        "--scenario",
        metavar="NAME",
        help="compare a named failure: link-flap, t1-reboot, t0-loss, nic-port, transceiver, grey-path, grey-all, "
        "incast, or all of them",
    )
    parser.add_argument("--wire", metavar="NAME", help="fluid: protocol overheads, mrc, htsim or ideal (default: mrc)")
    parser.add_argument("--transport", metavar="NAME", help=f"packets: {', '.join(TRANSPORTS)} (default: mrc)")
    parser.add_argument(
        "--pfc", action=OnOff, help="pause instead of dropping packets (RoCE, or fluid with routing flow or qp)"
    )
    parser.add_argument("--dcqcn", action=OnOff, help="packets: congestion control of RoCE")
    parser.add_argument(
        "--each-plane", action="store_true", help="packets: simulate every plane, even if one could represent all"
    )
    parser.add_argument("--cpu", metavar="S", type=float, help="limit of CPU seconds (default: 600)")
    add_json(parser)


def _run_simulate(args: argparse.Namespace) -> int:
    names = ("traffic", "nbytes", "cm", "engine", "seed", "routing", "paths", "fail", "left", "loss", "deny")
    more = ("recovery", "converge", "compare", "scenario", "wire", "transport", "pfc", "dcqcn", "each_plane", "cpu")
    try:
        options = {name: getattr(args, name) for name in (*names, *more)}
        return show(phalanx.fabric.simulate(args.fabric, progress=note, **options), as_json=args.json)
    except KeyboardInterrupt:
        note("stopped (interrupted): nothing is finished yet")
        return INTERRUPTED


def _run_export(args: argparse.Namespace) -> int:
    options = {name: getattr(args, name) for name in ("topo", "cm", "traffic", "nbytes", "seed")}
    return show(phalanx.fabric.export(args.fabric, progress=note, **options), as_json=args.json)


# ---- collectives -----------------------------------------------------------------------------------------------------


def _configure_collective(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx fabric collective`."""
    parser.add_argument("cluster", metavar="CLUSTER", help="8xH100:16 (16 nodes of 8), 72xGB200:2, or a .toml file")
    parser.add_argument("--kind", metavar="WHAT", default=KINDS[0], help=f"{', '.join(KINDS)} (default: {KINDS[0]})")
    parser.add_argument(
        "--bytes", metavar="SIZE", default=SIZES, help=f"64MiB, or a range such as 1MiB..16GiB (default: {SIZES})"
    )
    parser.add_argument(
        "--nic-gbps", metavar="G", type=float, help="NIC speed per GPU in Gbit/s (default: the cluster's)"
    )
    parser.add_argument(
        "--cpu", choices=("intel", "amd", "arm"), help="processor of the hosts (default: intel; arm with GB200)"
    )
    parser.add_argument(
        "--no-nvls", action="store_true", help="no reductions in the NVSwitch, as with NCCL_NVLS_ENABLE=0"
    )
    parser.add_argument("--sharp", action="store_true", help="reductions in the network's switches too (CollNet)")
    parser.add_argument("--fit", metavar="FILE", help="your measurements: nccl-tests' output, or CSV with bytes and us")
    add_json(parser)


def _run_collective(args: argparse.Namespace) -> int:
    times = phalanx.fabric.collective(
        args.cluster,
        args.kind,
        args.bytes,
        nic_gbps=args.nic_gbps,
        cpu=args.cpu,
        nvls=not args.no_nvls,
        sharp=args.sharp,
        fit=args.fit,
    )
    return show(times, as_json=args.json)
