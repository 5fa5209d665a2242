"""`python -m phalanx.launch.node WHAT RUN …`: the commands on the hosts that a launch system placed.

describe   print this host's topology, name and address; on every host
prepare    make the run ready for these hosts, in this order; once, on the first host, with their lines on stdin
serve      start the host's agent, start it again when it dies, and stay until the run is over; on every host
conclude   exit 0 when the run is done, 75 when it saved and should resume, else with the run's exit code; once
local      prepare, serve and conclude on this machine alone
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.elastic.local_launch import (
    HostSpec,
    agent_command,
    collected_signals,
    prepare_launch,
    tend_agents,
)
from phalanx.elastic.rank_process import SYSTEM_STOPS
from phalanx.elastic.transports import interface_addresses
from phalanx.errors import PhalanxError, Problem, SystemFailure, UserError, mistake
from phalanx.hardware.discover import discover
from phalanx.io.values import text as text_value
from phalanx.io.visible import one_line
from phalanx.launch.lost_script import ScriptSuccessor
from phalanx.launch.system import CONCLUDED, REQUEUE, WANTS_TO_GO_ON
from phalanx.record.events import read_events
from phalanx.record.run import Run, open_run
from phalanx.units import plural

HELD_S = 30.0  # for the coordinator of an interrupted launch to lose its lease
REFUSED = "! "  # prefix of the line of a host that cannot take part
HOST = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,252}")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostLine:
    """One host's description of itself: its place in the topology, its name, and its address for other hosts."""

    topology: str
    name: str
    address: str

    @classmethod
    def parse(cls, line: str) -> HostLine:
        """Parse a line that `describe` printed; raises ValueError for any other line."""
        topology, name, address = line.split()
        if not HOST.fullmatch(name) or not ipaddress.ip_address(address):
            raise ValueError(line)
        return cls(topology=topology, name=name, address=address)

    @property
    def order(self) -> tuple[tuple[int, str, int], ...]:
        """A sort key by which hosts of one switch are neighbours, and leaf10 comes after leaf9."""
        parts = re.findall(r"\d+|\D+", f"{self.topology} {self.name}")
        return tuple((1, "", int(word)) if word.isdigit() else (0, word, 0) for word in parts)


def own_host(environ: Mapping[str, str]) -> str:
    """Return the name of this host as its launch system knows it."""
    return environ.get("PHALANX_HOST") or environ.get("SLURMD_NODENAME") or platform.node() or "localhost"


def describe_host(environ: Mapping[str, str], interface: str) -> HostLine:
    """Return this host's line; raises UserError if it has no address on `interface`."""
    name = own_host(environ)
    topology = environ.get("PHALANX_TOPOLOGY") or environ.get("SLURM_TOPOLOGY_ADDR") or name
    return HostLine(topology=topology.replace(" ", "_"), name=name, address=own_address(interface))


def own_address(interface: str) -> str:
    """Return this host's address on an interface ("ib0"), in a network ("10.0.0.0/8"), or the address of its name.

    >>> own_address("127.0.0.0/8")
    '127.0.0.1'
    """
    addresses = interface_addresses()
    if "/" in interface:
        network = ipaddress.ip_network(interface, strict=False)
        matching = [address for _, address in addresses if ipaddress.ip_address(address) in network]
    elif interface:
        matching = [address for device, address in addresses if interface in (device, address)]
    else:
        matching = _addresses_of_name() or [address for _, address in addresses if not address.startswith("127.")]
    if not matching:
        known_addresses = ", ".join(f"{device} {address}" for device, address in addresses)
        raise mistake(
            f"host {platform.node()}",
            f"has no address on {interface or 'any network'}",
            why="other hosts could not reach it",
            fix=f"set launch.interface to one of: {known_addresses}",
        )
    return matching[0]


def _addresses_of_name() -> list[str]:
    """Return the addresses of this host's name, without the unreachable 127.0.1.1 that Debian puts into /etc/hosts."""
    with contextlib.suppress(OSError):
        results = socket.getaddrinfo(platform.node(), None, socket.AF_INET, socket.SOCK_STREAM)
        return [str(result[4][0]) for result in results if not str(result[4][0]).startswith("127.")]
    return []


def prepare_run(run: Run, lines: Sequence[str], *, hosts: int, slots: int) -> None:
    """Make a run ready for agents on the hosts of `lines`, in topology order; hosts beyond `hosts` are spares.

    Raises SystemFailure if fewer than `hosts` have described themselves.
    """
    if run.status().get("state") == "done":
        return
    hosts_by_name: dict[str, HostLine] = {}
    for line in lines:
        # Output of a module or a login message between the lines.
        with contextlib.suppress(ValueError):
            host = HostLine.parse(line)
            hosts_by_name[host.name] = host
    if len(hosts_by_name) < hosts:
        refusals = [one_line(line.removeprefix(REFUSED))[:200] for line in lines if line.startswith(REFUSED)]
        reason = f"; {refusals[0]}" if refusals else ""
        what = f"{len(hosts_by_name)} of {plural(hosts, 'host')} answered: {', '.join(hosts_by_name) or 'none'}{reason}"
        why = "" if refusals else "the others do not see this folder, or have no Phalanx at the same path"
        fix = "put the run folder and Python on storage that all hosts share (--runs, launch.python)"
        run.set_status("failed", message=what, exit_code=3)  # for `phalanx why`
        raise SystemFailure(
            Problem(where=str(run.path), what=what, why=why, fix=fix if not refusals else "the log above says more")
        )
    ordered = sorted(hosts_by_name.values(), key=lambda host: host.order)
    _prepare_when_free(run, [HostSpec(name=host.name, slots=slots, address=host.address) for host in ordered])


def _prepare_when_free(run: Run, hosts: Sequence[HostSpec]) -> None:
    """Prepare the launch, waiting if a killed earlier launch still holds its lease for some seconds."""
    saved = max(run.saved_steps(), default=0)
    deadline = time.monotonic() + HELD_S
    while True:
        try:
            prepare_launch(run, hosts, began_at_step=saved)
            return
        except UserError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def serve_host(
    run: Run, environ: Mapping[str, str], *, allow_code: bool, script_node: str = "", save_s: float = 0.0
) -> int:
    """Run this host's agent until the run is over, and return the run's exit code.

    `script_node` runs Slurm's batch script, which would stop the run `save_s` before the time limit (lost_script.py).
    """
    launch, name = run.launch(), own_host(environ)
    if run.status().get("state") == "done":
        return 0
    names = [str(host) for host in launch.get("hosts", ())]
    if name not in names:
        print(f"host {name} is not part of this launch: it did not describe itself in time", file=sys.stderr)
        return 0
    position = names.index(name)
    spec = HostSpec(name=name, slots=int(launch["slots"][position]), address=str(launch["addresses"][position]))
    successor = ScriptSuccessor(
        run, names, environ, own=name, script_node=script_node, save_s=save_s, conclude=lambda: conclude_run(run)
    )
    successor.begin()
    try:
        return tend_hosts(run, [spec], environ, is_first=position == 0, allow_code=allow_code)
    finally:
        successor.end()


class _SingleStopRequest(Sequence[int]):
    """A list of at most one stop request, since Slurm and srun both signal an agent, and the run should save once."""

    def __init__(self, stop_requests: Sequence[int]) -> None:
        self._stop_requests = stop_requests

    def __len__(self) -> int:
        return min(1, len(self._stop_requests))

    def __getitem__(self, place: Any) -> Any:
        return self._stop_requests[:1][place]


def tend_hosts(
    run: Run, hosts: Sequence[HostSpec], environ: Mapping[str, str], *, is_first: bool, allow_code: bool
) -> int:
    slots = sum(host.slots for host in hosts)
    # The ranks of a host share its cores.
    threads = str(max(1, discover().usable_cores // slots))
    thread_counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads)
    with collected_signals() as stop_requests:
        outcome = tend_agents(
            run,
            hosts=hosts,
            environ={**thread_counts, **environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1", SYSTEM_STOPS: "1"},
            tick=lambda: None,
            asked=lambda count: None,
            stop_requests=_SingleStopRequest(stop_requests),
            agent=agent_command(allow_code=allow_code),
            is_first=is_first,
        )
    return outcome.exit_code


def conclude_run(run: Run) -> tuple[int, str]:
    """Return the exit code of a launch, and the sentence for its log.

    A run that was stopped should resume (75), unless a user stopped it with a stop file, or a time limit passed
    without a new checkpoint, as it would the next time, too. A run that failed because a host was lost, and no other
    host could take its ranks, should resume on other hosts, if it has a new checkpoint.
    """
    status = run.status()
    state, message = status.get("state"), text_value(status, "message")
    if state == "done":
        return 0, "done"
    saved_step, began = max(run.saved_steps(), default=0), int(run.launch().get("began_at_step") or 0)
    if state == "stopped":
        request_text = _stop_request(run)
        if request_text is not None and request_text != WANTS_TO_GO_ON:
            return 0, f"stopped as asked: {message}"
        if request_text == WANTS_TO_GO_ON and saved_step <= began:
            return (
                3,
                f"reached the time limit before a checkpoint after step {began:,}: launch it with a longer --time-s",
            )
        return REQUEUE, f"interrupted at step {saved_step:,}: {message}"
    code = int(status.get("exit_code") or 3)
    if state == "failed" and saved_step > began and (host := _lost_host(run)):
        return REQUEUE, f"lost host {host}, and has no spare for it: goes on from step {saved_step:,} elsewhere"
    return (code if code != REQUEUE else 3), f"{state or 'never started'}: {message}"


def _lost_host(run: Run) -> str:
    """Return the host whose loss ended a run; empty for another cause, or if the job sets recovery = "stop"."""
    with contextlib.suppress(OSError):
        if run.plan()["job"]["fault"]["recovery"] == "stop":
            return ""
        incidents = [event for event in read_events(run.supervisor)[0] if event["event"] == "incident"]
        if incidents and incidents[-1]["cause"]["kind"] == "HostLost":
            return str(incidents[-1]["host"])
    return ""


def _stop_request(run: Run) -> str | None:
    """Return the text of the stop file; None if there is none."""
    try:
        return run.stop_file.read_text(encoding="utf-8", errors="replace")[:100].strip()
    except OSError:
        return None


def _run_here(run: Run, environ: Mapping[str, str], args: argparse.Namespace) -> int:
    """Run a launch on this machine alone, simulating `hosts` hosts."""
    hosts = [HostSpec(name=f"host-{number}", slots=args.slots) for number in range(args.hosts + args.spares)]
    with run.held():
        _prepare_when_free(run, hosts)
        tend_hosts(run, hosts, environ, is_first=True, allow_code=args.allow_code)
    return conclude_run(run)[0]


def main(arguments: Sequence[str]) -> int:
    """Run one of the commands; called by the batch script, by srun, by a pod, or by the local system."""
    parser = argparse.ArgumentParser(prog="phalanx.launch.node", allow_abbrev=False)
    parser.add_argument("what", choices=("describe", "prepare", "serve", "conclude", "local"))
    parser.add_argument("run")
    parser.add_argument("--interface", default="")
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--spares", type=int, default=0)
    parser.add_argument("--slots", type=int, default=1)
    parser.add_argument("--allow-code", action="store_true")
    parser.add_argument("--script-node", default="")
    parser.add_argument("--save-s", type=float, default=0.0)
    args = parser.parse_args(arguments)
    try:
        run = open_run(Path(args.run))
        if args.what == "describe":
            run.check_settings()  # checks that this host reads the same settings as the others
            line = describe_host(os.environ, args.interface)
            print(line.topology, line.name, line.address, flush=True)
        elif args.what == "prepare":
            prepare_run(run, sys.stdin.read().splitlines(), hosts=args.hosts, slots=args.slots)
        elif args.what == "serve":
            return serve_host(
                run, os.environ, allow_code=args.allow_code, script_node=args.script_node, save_s=args.save_s
            )
        elif args.what == "conclude":
            code, sentence = conclude_run(run)
            print(f"{CONCLUDED}{sentence}", file=sys.stderr)
            return code
        else:
            return _run_here(run, os.environ, args)
    except PhalanxError as error:
        print(error, file=sys.stderr, flush=True)
        if args.what == "describe":  # read by the host that prepares the run
            print(f"{REFUSED}{own_host(os.environ)}: {one_line(error.problems[0].what)}", flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
