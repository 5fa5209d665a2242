"""`phalanx peers`: train with peers over slow links.

The owner starts a run and writes invitations; peers join with them. Further sub-commands list and revoke members, or
let the remaining peers continue without a majority.
"""

from __future__ import annotations

import argparse

import phalanx
from phalanx.cli.output import note, print_json, say, show
from phalanx.cli.parser import add_json, add_set

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.record.run import Run


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx peers`."""
    verbs = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    start = verbs.add_parser("start", help="start a run that others can join, as its owner; Ctrl-C saves and leaves")
    start.add_argument("job", metavar="JOB", nargs="?", help="the job file, with [sync]")
    start.add_argument("--name", metavar="NAME", default="owner", help="what others call this peer (default: owner)")
    start.add_argument("--resume", metavar="RUN", help="go on with the run of a peer, from its newest checkpoint")
    start.add_argument("--steps", metavar="N", type=int, help="train N steps instead of data.tokens")
    _add_link(start)
    join = verbs.add_parser("join", help="join a run with an invitation; Ctrl-C saves and leaves")
    join.add_argument("invitation", metavar="INVITATION", help="the file that phalanx peers invite wrote")
    join.add_argument("--job", metavar="JOB", help="the job file (default: the job in the invitation)")
    join.add_argument("--data", metavar="DIR", help="where this machine has the dataset (default: data.path)")
    join.add_argument("--client-only", action="store_true", help="accept no connections: for a peer behind NAT")
    _add_link(join)
    invite = verbs.add_parser("invite", help="write an invitation for a new peer")
    invite.add_argument("run", metavar="RUN", help="the run folder of the owner")
    invite.add_argument("name", metavar="NAME", help="what the new peer is called")
    invite.add_argument("--out", metavar="FILE", help="the file to write (default: NAME.invitation.json)")
    invite.add_argument(
        "--address",
        metavar="HOST:PORT",
        action="append",
        default=[],
        help="where the new peer connects to (default: where members listen); may be repeated",
    )
    add_json(invite)
    members = verbs.add_parser("list", help="list the members of a peer's group")
    members.add_argument("run", metavar="RUN", help="the run folder of a peer")
    add_json(members)
    go_on_alone = verbs.add_parser(
        "go-on-alone", help="go on without the peers that are lost, although no majority is left"
    )
    go_on_alone.add_argument("run", metavar="RUN", help="the run folder of a running peer")
    add_json(go_on_alone)
    revoke = verbs.add_parser("revoke", help="send a peer away for good")
    revoke.add_argument("run", metavar="RUN", help="the run folder of the owner")
    revoke.add_argument("name", metavar="NAME", help="name or id of the peer")
    add_json(revoke)


def _add_link(parser: argparse.ArgumentParser) -> None:
    """Add the options that `phalanx peers start` and `join` share."""
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        default="127.0.0.1:0",
        help="where others connect to (default: this machine only, a free port)",
    )
    parser.add_argument("--advertise", metavar="HOST:PORT", help="another address that leads to --listen")
    parser.add_argument("--bandwidth", metavar="UP/DOWN", help="speed of the link in Mbit/s, as 40/200")
    add_set(parser)
    parser.add_argument("--cluster", metavar="SPEC", help="run on this cluster instead of the job's, e.g. local:2")
    parser.add_argument("--runs", metavar="DIR", default="runs", help="where to create run folders (default: runs)")
    parser.add_argument(
        "--no-check", action="store_true", help="start in spite of errors against the training specification"
    )
    parser.add_argument(
        "--allow-code", action="store_true", help="allow code named in the job file: your own model or plug-ins"
    )
    add_json(parser)


def run_command(args: argparse.Namespace) -> int:
    """Start or join a run, write an invitation, list or revoke members, or continue without the lost peers."""
    if args.what == "invite":
        invitation = phalanx.peers.invite(args.run, args.name, out=args.out, addresses=args.address)
        return show(invitation, as_json=args.json)
    if args.what == "list":
        return show(phalanx.peers.members(args.run), as_json=args.json)
    if args.what == "go-on-alone":
        return show(phalanx.peers.go_on_alone(args.run), as_json=args.json)
    if args.what == "revoke":
        return show(phalanx.peers.revoke(args.run, args.name), as_json=args.json)
    names = ("listen", "advertise", "bandwidth", "cluster", "overrides", "runs", "allow_code")
    options = {name: getattr(args, name) for name in names} | {"check": not args.no_check}
    if args.what == "start":
        run = phalanx.peers.start(args.job, name=args.name, resume=args.resume, steps=args.steps, **options)
    else:
        run = phalanx.peers.join(args.invitation, job=args.job, data=args.data, client_only=args.client_only, **options)
    return _print_run(run, as_json=args.json)


def _print_run(run: Run, *, as_json: bool) -> int:
    if as_json:
        print_json(run.summary())
    else:
        say(run)
    note(f"members and what each has learnt: phalanx peers list {run.path}")
    return int(run.status().get("exit_code", 0))
