"""`python -m phalanx.launch.pod RUN …`: one numbered host of a run: a pod, or a node of SkyPilot or dstack.

Number 0 makes the run ready when all hosts can be found; the others wait for that. A pod that is recreated with the
same number joins again, and the others keep their processes. When all pods are recreated, as after Kueue's preemption,
number 0 makes the run ready again.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from phalanx.elastic.local_launch import HostSpec
from phalanx.errors import PhalanxError, Problem, SystemFailure, mistake
from phalanx.io.files import read_bounded, replace_bytes
from phalanx.launch.node import conclude_run, prepare_run, tend_hosts
from phalanx.record.run import Run, open_run
from phalanx.record.run_files import read_json, write_json
from phalanx.units import plural

READY = "pods.json"  # in the run folder: the attempt for which number 0 made the run ready
FOUND_S = 1800.0  # for all pods to have an address: images of 17 GB take half an hour to pull
POLL_S = 1.0
MOST_KEY_BYTES = 4096


def main(arguments: Sequence[str]) -> int:
    """Serve one host until the run is over."""
    parser = argparse.ArgumentParser(prog="phalanx.launch.pod", allow_abbrev=False)
    parser.add_argument("run")
    parser.add_argument("--names", required=True, help="host names with {} for the number, or all with commas between")
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--spares", type=int, default=0)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--index", type=int, default=None, help="number of this host (default: JOB_COMPLETION_INDEX)")
    parser.add_argument("--key", default="", help="file with the run's key, which is put into the run folder")
    parser.add_argument("--allow-code", action="store_true")
    args = parser.parse_args(arguments)
    try:
        return serve_pod(open_run(Path(args.run)), os.environ, args)
    except PhalanxError as error:
        print(error, file=sys.stderr, flush=True)
        return error.exit_code


def serve_pod(run: Run, environ: Mapping[str, str], args: argparse.Namespace) -> int:
    """Make the run ready or wait for it, then run this host's agent."""
    index = args.index if args.index is not None else _own_index(environ)
    names = host_names(args.names, args.hosts + args.spares)
    attempt = environ.get("PHALANX_ATTEMPT") or "0"
    if index == 0:
        if not is_ready(run, attempt):
            prepare_run(run, _find_hosts(names, args.hosts), hosts=args.hosts, slots=args.slots)
            if args.key:  # replaces the key that was created with the launch
                replace_bytes(run.path / "secret", read_bounded(Path(args.key), MOST_KEY_BYTES), mode=0o600)
            write_json(run.path / READY, {"attempt": attempt})
    else:
        _wait_until(lambda: is_ready(run, attempt), f"number 0 to make {run.path} ready")
    if run.status().get("state") == "done":
        return 0
    run_hosts = [str(host) for host in run.launch().get("hosts", ())]
    if host_name(index) not in run_hosts:
        print(f"{host_name(index)} was not found in time and is not part of this launch", file=sys.stderr)
        return 0
    address = environ.get("PHALANX_POD_IP") or address_of(names[index]) or "127.0.0.1"
    spec = HostSpec(name=host_name(index), slots=args.slots, address=address)
    tend_hosts(run, [spec], environ, is_first=index == 0, allow_code=args.allow_code)
    code, sentence = conclude_run(run)
    print(f"phalanx: {sentence}", file=sys.stderr, flush=True)
    return code


def is_ready(run: Run, attempt: str) -> bool:
    """Return whether hosts of this attempt may join: the run was made ready, and has not ended since."""
    if not (run.path / READY).exists() or read_json(run.path / READY).get("attempt") != attempt:
        return False
    return run.status().get("state") not in ("stopped", "failed")


def host_name(index: int) -> str:
    """Return the name of a host in the run.

    Names sort like numbers, so ranks follow the order of pods, which is that of the topology.
    """
    return f"host-{index:06d}"


def host_names(pattern: str, count: int) -> list[str]:
    """Return the names under which hosts are found.

    >>> host_names("run-w-0-{}.run", 2), host_names("10.0.0.1,10.0.0.2,", 2)
    (['run-w-0-0.run', 'run-w-0-1.run'], ['10.0.0.1', '10.0.0.2'])
    """
    if "{}" in pattern:
        return [pattern.replace("{}", str(number)) for number in range(count)]
    names = [name for name in pattern.split(",") if name]
    if len(names) < count:
        raise mistake(
            "--names",
            f"{plural(len(names), 'name')} for {plural(count, 'host')}",
            fix="name every host, or use {} in one name",
        )
    return names


def address_of(name: str) -> str | None:
    """Return the present address of a name; None if it has none."""
    try:
        return str(socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None


def _own_index(environ: Mapping[str, str]) -> int:
    text = environ.get("JOB_COMPLETION_INDEX", "")
    if not text.isdecimal():
        fix = "Kubernetes sets it in pods of an indexed Job; or give --index"
        raise mistake("JOB_COMPLETION_INDEX", f"{text[:20]!r} is not a host number", fix=fix)
    return int(text)


def _find_hosts(names: Sequence[str], needed: int) -> list[str]:
    """Return a line per host with an address: topology, name, address. Spares that are late are omitted."""
    addresses: dict[int, str] = {}

    def look() -> bool:
        for number, name in enumerate(names):
            if number not in addresses and (address := address_of(name)) is not None:
                addresses[number] = address
        return len(addresses) == len(names)

    try:
        _wait_until(look, f"addresses of {plural(len(names), 'host')}")
    except SystemFailure:
        if len(addresses) < needed or 0 not in addresses:
            raise
    return [f"{host_name(number)} {host_name(number)} {address}" for number, address in sorted(addresses.items())]


def _wait_until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + FOUND_S
    while not is_so():
        if time.monotonic() > deadline:
            fix = "kubectl get pods -o wide shows where they are"
            raise SystemFailure(Problem(where="phalanx.launch.pod", what=f"waited {FOUND_S:g} s for {what}", fix=fix))
        time.sleep(POLL_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
