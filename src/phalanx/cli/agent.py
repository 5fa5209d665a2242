"""`phalanx agent`: be one host of a run that another host prepared; started on each host, by hand or by a scheduler."""

from __future__ import annotations

import argparse
import os
import platform
import sys

from phalanx.errors import mistake


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx agent`."""
    parser.add_argument("run", metavar="RUN", help="the run folder, on a disk that all hosts share")
    parser.add_argument("--slots", metavar="N", type=int, help="ranks that this host can hold (its share of the plan)")
    parser.add_argument("--address", metavar="IP", help="address of this host that the others reach (fault.interface)")
    parser.add_argument("--host", metavar="NAME", help="name of this host in the run (its host name)")


def run(args: argparse.Namespace) -> int:
    """Join and stay until the run is over."""
    from phalanx.record.run import open_run
    from phalanx.train.supervise.client import AGENT, ENDED, address_of, share_of
    from phalanx.train.supervise.prepare import need_torch

    need_torch()
    made = open_run(args.run)
    if not (made.path / "secret").is_file():
        raise mistake(
            args.run,
            "has no secret: nobody has launched it yet",
            why="agents prove with it that they belong to the run",
            fix="phalanx train JOB --join N on the first host, then this on the others",
        )
    if made.status().get("state") in ENDED:
        raise mistake(args.run, f"is over: {made.status()['state']}", fix=f"phalanx train --resume {made.path}")
    slots = args.slots if args.slots is not None else share_of(made)
    if slots < 1:
        raise mistake("phalanx agent", f"--slots {slots} is below 1", fix="use 1 or more")
    host = args.host or platform.node() or "localhost"
    words = [str(made.path), host, str(slots), args.address or address_of(made), "0"]
    print(f"host {host} joins {made.path} with {slots} slots", file=sys.stderr, flush=True)
    os.execv(sys.executable, [sys.executable, *AGENT, *words])
