"""`phalanx cluster`: describe this machine or a named cluster.

`phalanx cluster init` and `phalanx cluster health` are for the cluster's operator.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import phalanx
from phalanx.cli.output import note, print_json, say, show
from phalanx.cli.parser import add_json
from phalanx.errors import mistake


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx cluster`."""
    parser.add_argument(
        "spec",
        nargs="?",
        default="local",
        metavar="SPEC",
        help="8xH100:16, H100:64, a .toml file, or local (default: local); init or health: see below",
    )
    parser.add_argument("teams", nargs="?", metavar="TEAMS", help="init: teams.toml, the teams that share the cluster")
    add_json(parser)
    parser.add_argument("--toml", action="store_true", help="print a cluster file to edit")
    parser.add_argument("--list", action="store_true", help="list the accelerators Phalanx knows")
    parser.add_argument("--ranks", type=int, default=0, metavar="N", help="local: number of ranks that share the cores")
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="local: use this profile, written by phalanx probe"
    )
    parser.add_argument(
        "--hardware",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="file with more accelerators, .toml or .csv; may be repeated",
    )
    parser.add_argument("--on", metavar="SYSTEM", default="k8s", help="init, health: k8s or slurm (default: k8s)")
    parser.add_argument("--queue", metavar="NAME", default="", help="health: only this partition of Slurm")
    parser.add_argument(
        "--apply",
        action="store_true",
        help="init: apply the objects; health: cordon or drain the nodes that are blamed",
    )
    parser.add_argument("--follow", action="store_true", help="health, on k8s: go on, with one watch of all nodes")
    parser.add_argument("--out", metavar="DIR", help="init: also write the manifests to this folder")
    parser.epilog = (
        "phalanx cluster init TEAMS prints what a Kubernetes cluster needs for teams, or the difference to what is "
        "there; phalanx cluster health says which nodes should be out of service (exit code 1 if there are any). "
        "Both change something with --apply only."
    )


def run_command(args: argparse.Namespace) -> int:
    """Print the machine or the cluster, or run `init` or `health`."""
    if args.spec == "init":
        if args.teams is None:
            fix = "phalanx cluster init teams.toml; docs/launch-operator.md has one to copy"
            raise mistake("phalanx cluster init", "no teams file is named", fix=fix)
        return show(phalanx.cluster_init(args.teams, on=args.on, apply=args.apply, out=args.out), as_json=args.json)
    if args.teams is not None:
        fix = f"did you mean phalanx cluster init {args.teams}?"
        raise mistake("phalanx cluster", f"{args.spec} takes no second file {args.teams!r}", fix=fix)
    if args.spec == "health":
        options = {"on": args.on, "queue": args.queue, "apply": args.apply, "follow": args.follow}
        return show(phalanx.cluster_health(**options, progress=note), as_json=args.json)
    if args.list:
        catalogue = phalanx.accelerators(hardware=args.hardware)
        if args.json:
            print_json(catalogue.accelerators)
        else:
            say(catalogue)
        return 0
    page = phalanx.describe_cluster(args.spec, ranks=args.ranks, profile=args.profile, hardware=args.hardware)
    for text in page.machine.notes if page.machine is not None else ():
        note(f"note: {text}")
    if page.problem is not None:
        if not args.json and not args.toml:
            say(page)
        raise page.problem
    if args.toml:
        print(page.to_toml(), end="")
        return 0
    return show(page, as_json=args.json)
