"""`python -m phalanx.launch.operate.node_check WHAT`: checks that a node runs on itself.

`preflight` runs before a Kubernetes node takes its first job: it removes the node's taint if it passes, else prints
the problems. `follow` reads signals every minute, and writes a condition of its own node only when they change.
`slurm` is Slurm's HealthCheckProgram: it drains its own node with the reason, unless half of a partition is out.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from phalanx.errors import PhalanxError, mistake
from phalanx.launch.kube.access import read_access
from phalanx.launch.kube.client import KubeClient, KubeRefusal
from phalanx.launch.kube.refusals import explain_refusal
from phalanx.launch.operate.kube_health import CONDITION, NODES
from phalanx.launch.operate.node_signals import (
    NodeSignal,
    ask_gpus,
    counter_signals,
    gpu_signals,
    log_signals,
    maintenance_signals,
    read_counters,
)
from phalanx.launch.operate.slurm_health import drain_own_node
from phalanx.launch.operate.teams import PREFLIGHT

EVERY_S = 60.0
LEAST_DISK_BYTES = 1 << 20
KERNEL_LOG = Path("/dev/kmsg")
MOST_LOG_BYTES = 4 << 20
MOST_SAID = 500


def main(arguments: Sequence[str]) -> int:
    """Run one of the checks on this node and print the result."""
    parser = argparse.ArgumentParser(prog="phalanx.launch.operate.node_check", allow_abbrev=False)
    parser.add_argument("what", choices=("preflight", "follow", "slurm"))
    parser.add_argument("--node", default=os.environ.get("PHALANX_NODE") or os.environ.get("SLURMD_NODENAME") or "")
    parser.add_argument("--devices", type=int, default=0, help="GPUs that the node must have")
    parser.add_argument("--sys", type=Path, default=Path("/sys"))
    parser.add_argument("--log", type=Path, default=KERNEL_LOG, help="the kernel's log")
    args = parser.parse_args(arguments)
    try:
        if not args.node:
            raise mistake("--node", "the name of this node is not known", fix="set PHALANX_NODE")
        if args.what == "slurm":
            return _check_slurm_node(args)
        client = KubeClient(read_access(os.environ))
        if args.what == "preflight":
            return _preflight_node(client, args)
        return follow_node(client, args.node, lambda: read_signals(args), sleep=time.sleep)
    except KubeRefusal as error:
        print(explain_refusal(error, client.access, what=f"node {args.node}"), file=sys.stderr)
        return 3
    except PhalanxError as error:
        print(error, file=sys.stderr, flush=True)
        return error.exit_code


def read_signals(args: argparse.Namespace) -> list[NodeSignal]:
    """Return all signals except those from counters, which need two readings."""
    signals = log_signals(_kernel_log(args.log).splitlines()) + maintenance_signals()
    table = ask_gpus()
    if table or args.devices:
        signals += gpu_signals(table, expected=args.devices)
    return signals + _disk_signals()


def _kernel_log(path: Path) -> str:
    """Return the kernel's log since its start: all of a device file, or the end of a plain file."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return ""
    chunks: list[bytes] = []
    try:
        if path.is_file():
            os.lseek(handle, max(0, os.fstat(handle).st_size - MOST_LOG_BYTES), os.SEEK_SET)
        while sum(map(len, chunks)) < MOST_LOG_BYTES and (chunk := os.read(handle, 8192)):
            chunks.append(chunk)
    except OSError:  # EAGAIN: that was the last line
        pass
    finally:
        os.close(handle)
    return b"".join(chunks).decode(errors="replace")


def _disk_signals() -> list[NodeSignal]:
    """Return a signal if the disk cannot be written."""
    try:
        with tempfile.TemporaryFile() as file:
            file.write(bytes(LEAST_DISK_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return [NodeSignal(kind="disk", said=f"disk: {tempfile.gettempdir()} cannot be written: {error.strerror}")]
    return []


def _preflight_node(client: KubeClient, args: argparse.Namespace) -> int:
    """Remove the taint of a node that passes; else exit with the reason, and the restarted pod checks again."""
    signals = read_signals(args)
    if signals:
        print(
            f"node {args.node} fails its preflight: {'; '.join(node_signal.said for node_signal in signals)}",
            file=sys.stderr,
        )
        return 1
    release_node(client, args.node)
    print(f"node {args.node} passed its preflight", flush=True)  # printed before it waits
    signal.pause()  # until the DaemonSet removes the pod
    return 0


def release_node(client: KubeClient, name: str) -> None:
    """Remove the preflight's taint and set the label to "passed"; other taints stay."""
    node = client.get(f"{NODES}/{name}")
    if node is None:
        raise mistake(name, "is no node of this cluster", fix="set PHALANX_NODE to the node's name")
    taints = [taint for taint in node.get("spec", {}).get("taints") or () if taint.get("key") != PREFLIGHT]
    # With the version a concurrent change is a conflict, so that no other program's taint is lost.
    version = node["metadata"]["resourceVersion"]
    change = {
        "metadata": {"labels": {PREFLIGHT: "passed"}, "resourceVersion": version},
        "spec": {"taints": taints or None},
    }
    client.patch(f"{NODES}/{name}", change)


def follow_node(
    client: KubeClient,
    name: str,
    read: Callable[[], Sequence[NodeSignal]],
    *,
    sleep: Callable[[float], None],
    sys_folder: Path = Path("/host/sys"),
    rounds: int | None = None,
) -> int:
    """Write the condition when the signals change; between changes no request is sent."""
    last_message: str | None = None
    previous, number = read_counters(sys_folder), 0
    while rounds is None or number < rounds:
        counters = read_counters(sys_folder)
        message = "; ".join(
            node_signal.said for node_signal in [*read(), *counter_signals(previous, counters, EVERY_S)]
        )[:MOST_SAID]
        previous = counters
        if message != last_message:
            try:
                # The kubelet's own conditions stay: a node without Ready would lose its pods.
                change = {"status": {"conditions": [_condition(message)]}}
                client.patch(f"{NODES}/{name}/status", change, keep_lists=True)
                last_message = message
            except (KubeRefusal, PhalanxError) as error:
                print(f"node {name}: {error}; told again in {EVERY_S:g} s", file=sys.stderr, flush=True)
        number += 1
        sleep(EVERY_S)
    return 0


def _condition(said: str) -> Mapping[str, str]:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "type": CONDITION,
        "status": "True" if said else "False",
        "reason": "Signals" if said else "Healthy",
        "message": said,
        "lastTransitionTime": now,
        "lastHeartbeatTime": now,
    }


def _check_slurm_node(args: argparse.Namespace) -> int:
    signals = read_signals(args)
    if not signals:
        return 0
    print(drain_own_node(args.node, [node_signal.said for node_signal in signals], os.environ))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
