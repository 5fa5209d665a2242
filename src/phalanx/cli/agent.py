"""`phalanx agent`: join a run as one of its hosts; started on each host, by hand or by a scheduler."""

from __future__ import annotations

import argparse

import phalanx


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx agent`."""
    parser.add_argument("run", metavar="RUN", help="the run folder, on a file system that all hosts share")
    parser.add_argument(
        "--slots", metavar="N", type=int, help="number of ranks this host can run (default: its share of the plan)"
    )
    parser.add_argument(
        "--address", metavar="IP", help="address at which other hosts reach this one (default: fault.interface)"
    )
    parser.add_argument("--host", metavar="NAME", help="name of this host in the run (default: its host name)")
    parser.add_argument(
        "--election",
        metavar="HOW",
        help="how the coordinator is elected, as file, etcd:URL or kubernetes (default: what the launcher chose)",
    )
    parser.add_argument(
        "--allow-code", action="store_true", help="allow code named in the job file: your own model or plug-ins"
    )


def run_command(args: argparse.Namespace) -> int:
    """Join the run and block until it is over."""
    names = ("slots", "address", "host", "election", "allow_code")
    phalanx.join_run(args.run, **{name: getattr(args, name) for name in names})
    return 0
