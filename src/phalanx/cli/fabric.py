"""`phalanx fabric`: which fabric joins N GPUs, what it costs and loses, and the decisions behind it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli import fabric_collective, fabric_design, fabric_export, fabric_simulate
from phalanx.cli.fabric_files import named_fabric
from phalanx.cli.fabric_plain import fabric_plain, gpus_of, page_width, value_plain
from phalanx.cli.options import add_json
from phalanx.cli.output import note, print_json, say
from phalanx.errors import mistake

if TYPE_CHECKING:
    from phalanx.network.fabric.decisions import Decisions

WHERE = "phalanx fabric"


def configure(parser: argparse.ArgumentParser) -> None:
    """Sub-commands of `phalanx fabric`."""
    verbs = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    design = verbs.add_parser("design", help="every fabric that joins N GPUs, and which to take")
    fabric_design.configure(design)
    _configure_decisions(
        verbs.add_parser("decisions", help="planes, paths and recovery: the three decisions in numbers")
    )
    show = verbs.add_parser("show", help="one fabric: parts, weak points, failures per day")
    show.add_argument(
        "fabric", metavar="FABRIC", nargs="?", help="clos2:131072x800G/8p/512, a .toml or .topo file, or a name"
    )
    add_json(show)
    simulate = verbs.add_parser("simulate", help="traffic on a fabric, whole or broken, and recoveries compared")
    fabric_simulate.configure(simulate)
    export = verbs.add_parser("export", help="a fabric and its traffic as .topo and .cm files of htsim")
    fabric_export.configure(export)
    collective = verbs.add_parser("collective", help="which algorithm and protocol NCCL picks, and how long it takes")
    fabric_collective.configure(collective)


def _configure_decisions(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", metavar="N", help="GPUs to join, one NIC each")
    parser.add_argument(
        "--fabric", metavar="F", help="of this fabric instead: a short form, a .toml or .topo file, or a name"
    )
    parser.add_argument("--nic-gbps", metavar="G", type=float, help="speed of a NIC (800)")
    parser.add_argument("--switch", metavar="NAME", help="the box whose ports are split (Spectrum-5)")
    parser.add_argument("--planes", metavar="P", type=int, help="planes (the most the box can do)")
    parser.add_argument("--paths", metavar="K", type=int, default=256, help="paths per connection (256)")
    parser.add_argument("--recovery-s", metavar="S", type=float, help="from failure to bypass (30e-6)")
    parser.add_argument("--restart-s", metavar="S", type=float, help="from failure to the next step of a restart (600)")
    parser.add_argument("--picture", metavar="FILE.svg", help="write the three decisions as a picture")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Design, decide, show, simulate or export."""
    own = {"design": fabric_design.run, "decisions": _decisions, "show": _show}
    others = {"simulate": fabric_simulate.run, "export": fabric_export.run, "collective": fabric_collective.run}
    return {**own, **others}[args.what](args)


def _decisions(args: argparse.Namespace) -> int:
    from phalanx.network.fabric.decisions_text import show_decisions

    if args.picture is not None and Path(args.picture).suffix.lower() != ".svg":
        what = f"--picture {args.picture[:80]} does not end in .svg"
        raise mistake(f"{WHERE} decisions", what, why="the picture is an SVG", fix="name it as decisions.svg")
    found = _decide(args)
    if args.picture:
        from phalanx.io.files import write_text
        from phalanx.network.fabric.decisions_picture import decisions_svg

        write_text(Path(args.picture), decisions_svg(found), fix="name another --picture")
        note(f"wrote {args.picture}")
    if args.json:
        print_json({**value_plain(found), "fabric": fabric_plain(found.fabric)})
    else:
        say(show_decisions(found, width=page_width()))
    return 0


def _decide(args: argparse.Namespace) -> Decisions:
    """For a number of GPUs, or for a fabric that exists."""
    from phalanx.network.fabric.decisions import BOX, decisions, decisions_of
    from phalanx.network.fabric.failure_budget import EDGE_RECOVERY_S, RESTART_S

    recovery_s = EDGE_RECOVERY_S if args.recovery_s is None else args.recovery_s
    restart_s = RESTART_S[0] if args.restart_s is None else args.restart_s
    if args.fabric is not None:
        given = {"--gpus": args.gpus, "--nic-gbps": args.nic_gbps, "--switch": args.switch, "--planes": args.planes}
        for option, value in given.items():
            if value is not None:
                raise mistake(f"{WHERE} decisions", f"--fabric already says {option}", fix="leave one of them out")
        return decisions_of(named_fabric(args.fabric), paths=args.paths, recovery_s=recovery_s, restart_s=restart_s)
    if args.gpus is None:
        raise mistake(f"{WHERE} decisions", "--gpus is missing", fix="give --gpus 131072, or --fabric F")
    return decisions(
        gpus_of(args.gpus, f"{WHERE} decisions"),
        nic_gbps=800.0 if args.nic_gbps is None else args.nic_gbps,
        box=args.switch if args.switch is not None else BOX,
        planes=args.planes,
        paths=args.paths,
        recovery_s=recovery_s,
        restart_s=restart_s,
    )


def _show(args: argparse.Namespace) -> int:
    from phalanx.network.fabric.bill import fabric_bill, failure_loss
    from phalanx.network.fabric.fabric_text import show_fabric
    from phalanx.network.fabric.failure_budget import failure_budget

    if args.fabric is None:
        return _list(args)
    fabric = named_fabric(args.fabric)
    if args.json:
        print_json(
            {
                "fabric": fabric_plain(fabric),
                "bill": fabric_bill(fabric),
                "loss": failure_loss(fabric),
                "budget": failure_budget(fabric),
            }
        )
    else:
        say(show_fabric(fabric, width=page_width()))
    return 0


def _list(args: argparse.Namespace) -> int:
    """The catalogue: named fabrics and switches."""
    from phalanx.network.fabric.fabric_text import folded, money, table
    from phalanx.network.fabric.switch_catalogue import named_fabrics, switches

    if args.json:
        names = [{"name": name, "spec": spec, "source": source} for name, (spec, source) in named_fabrics().items()]
        print_json({"fabrics": names, "switches": switches()})
        return 0
    fabrics = [(f"  {name}", spec, source) for name, (spec, source) in named_fabrics().items()]
    boxes = [
        (
            f"  {one.name}",
            one.kind,
            f"{one.watts:,.0f} W" if one.watts else "unknown",
            money(one.usd),
            one.evidence,
            one.also,
        )
        for one in switches()
    ]
    page = (
        f"fabrics\n{table(fabrics, left=3)}\n\nswitches (power without optics, list price, how far both can be trusted)"
    )
    say(folded(f"{page}\n{table(boxes, left=2)}", page_width()))
    return 0
