"""`phalanx agent`: be one host of a run that another host prepared; started on each host, by hand or by a scheduler."""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys

from phalanx.cli.output import note
from phalanx.errors import mistake
from phalanx.units import plural

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.record.run import Run


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx agent`."""
    parser.add_argument("run", metavar="RUN", help="the run folder, on a disk that all hosts share")
    parser.add_argument("--slots", metavar="N", type=int, help="ranks that this host can hold (its share of the plan)")
    parser.add_argument("--address", metavar="IP", help="address of this host that the others reach (fault.interface)")
    parser.add_argument("--host", metavar="NAME", help="name of this host in the run (its host name)")


def run(args: argparse.Namespace) -> int:
    """Join and stay until the run is over."""
    from phalanx.elastic.local_launch import AGENT, ENDED, STOPPING, share_of
    from phalanx.record.run import open_run
    from phalanx.train.prepare import need_torch

    need_torch()
    made = open_run(args.run)
    if not (made.path / "secret").is_file():
        raise mistake(
            args.run,
            "has no secret: nobody has launched it yet",
            why="agents prove with it that they belong to the run",
            fix="phalanx train JOB --join N on the first host, then this on the others",
        )
    state = made.status().get("state")
    if state == "done":
        raise mistake(
            args.run, "is over: every step is done", fix=f"phalanx train --report {made.path} shows what came of it"
        )
    if state in ENDED:
        raise mistake(
            args.run, f"is over: {state}", fix=f"phalanx train --resume {made.path} --join N goes on, on the first host"
        )
    slots = args.slots if args.slots is not None else share_of(made)
    if slots < 1:
        raise mistake("phalanx agent", f"--slots {slots} is below 1", fix="use 1 or more")
    host = args.host or platform.node() or "localhost"
    words = [str(made.path), host, str(slots), args.address or _address(made), "0"]
    note(f"host {host} joins {made.path} with {plural(slots, 'slot')}")
    # Signals are held back until the agent counts them: in its first half second Python would answer with a traceback.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        os.execv(sys.executable, [sys.executable, *AGENT, *words])
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def _address(made: Run) -> str:
    """Where the others reach this host when nobody says so: the job's interface, or the loopback of one machine."""
    from phalanx.elastic.local_launch import LOOPBACK, is_loopback

    given = str(made.plan()["job"]["fault"]["interface"])
    first = [str(address) for address in made.launch().get("addresses", ())][:1]
    if not given and first and not is_loopback(first[0]):
        raise mistake(
            "phalanx agent",
            "no --address is given",
            why=f"the first host is at {first[0]}, and would look for this one at {LOOPBACK}",
            fix="--address with an address of this host that the others reach; ip address lists them",
        )
    return given or LOOPBACK
