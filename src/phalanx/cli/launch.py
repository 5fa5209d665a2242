"""`phalanx launch JOB…`: launch jobs in the background: on this machine, Slurm or Kubernetes."""

from __future__ import annotations

import argparse

import phalanx
from phalanx.cli.output import show
from phalanx.cli.parser import add_json, add_set


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx launch`."""
    parser.add_argument(
        "jobs", metavar="JOB", nargs="+", help="job files; several are submitted together, or not at all"
    )
    parser.add_argument("--on", metavar="SYSTEM", help="local, slurm or k8s (default: launch.on, else local)")
    parser.add_argument("--queue", metavar="NAME", help="Slurm's partition, or Kueue's queue (default: launch.queue)")
    parser.add_argument(
        "--flavour", metavar="F", help="on k8s: jobset (default), trainjob, podgroup, job; or skypilot, dstack as files"
    )
    parser.add_argument("--hosts", metavar="N", type=int, help="spread the ranks over N hosts (default: as planned)")
    parser.add_argument(
        "--spares",
        metavar="N",
        type=int,
        default=0,
        help="spare hosts, which replace failed hosts (default: 0); train and drill count spare slots",
    )
    parser.add_argument("--group", metavar="NAME", default="", help="name for jobs that belong together, e.g. sweep-7")
    parser.add_argument(
        "--time-s", metavar="S", type=float, help="time limit in seconds (default: from the prediction)"
    )
    parser.add_argument("--cluster", metavar="SPEC", help="plan for this cluster instead of the job's")
    parser.add_argument("--steps", metavar="N", type=int, help="train N steps instead of data.tokens")
    parser.add_argument(
        "--runs",
        metavar="DIR",
        default="runs",
        help="where to create run folders; all hosts must see it (default: runs)",
    )
    parser.add_argument("--name", metavar="NAME", help="name of the run folder (default: the job's name)")
    add_set(parser)
    parser.add_argument("--again", action="store_true", help="launch a job even if it is already queued or running")
    parser.add_argument("--no-check", action="store_true", help="launch even if phalanx check finds errors")
    parser.add_argument(
        "--allow-code", action="store_true", help="allow code named in the job file: your own model or plug-ins"
    )
    parser.add_argument(
        "--share-hosts",
        action="store_true",
        help="on slurm: let jobs share a host (default: a host belongs to one job)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be submitted, and submit nothing")
    parser.add_argument(
        "--no-submit",
        dest="submit",
        action="store_false",
        help="on k8s: make run folders and write manifests into them, for kubectl; submit nothing",
    )
    parser.add_argument("--out", metavar="DIR", help="also write what is submitted to this folder")
    parser.add_argument("--wait", action="store_true", help="wait until all jobs have ended; exit code 3 if one failed")
    add_json(parser)


def run_command(args: argparse.Namespace) -> int:
    """Check the jobs, launch them and print their ids."""
    names = (
        *("on", "queue", "flavour", "hosts", "spares", "group", "time_s", "cluster", "steps", "runs", "name"),
        *("overrides", "again", "allow_code", "share_hosts", "dry_run", "submit", "out", "wait"),
    )
    options = {name: getattr(args, name) for name in names}
    return show(phalanx.launch(args.jobs, check=not args.no_check, **options), as_json=args.json)
