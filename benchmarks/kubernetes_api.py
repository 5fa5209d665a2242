"""What Phalanx asks of a Kubernetes API server, measured on a real one.

Run: KUBEBUILDER_ASSETS=DIR python benchmarks/kubernetes_api.py [--nodes N] [--jobs N]    prints a Markdown table.

etcd and kube-apiserver on the loopback (tests/control_plane.py), CRDs of JobSet and Kueue from DIR/crds without their
controllers. Another client is measured beside ours where it is installed (`pip install lightkube`).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from control_plane import ControlPlane

from phalanx.launch.k8s import KubernetesSystem
from phalanx.launch.kube.client import KubeClient
from phalanx.launch.operate.kube_health import check_nodes
from phalanx.launch.resource_request import LaunchRequest
from phalanx.launch.settings import LaunchSettings

OURS = (
    "from phalanx.launch.kube.access import read_access\n"
    "from phalanx.launch.kube.client import KubeClient\n"
    "import os; c = KubeClient(read_access(os.environ)); started = time.perf_counter()\n"
    "found = c.list_objects('/api/v1/nodes')[0]\n"
)
LIGHTKUBE = (
    "from lightkube import Client\nfrom lightkube.resources.core_v1 import Node\n"
    "c = Client(); started = time.perf_counter()\nfound = list(c.list(Node, chunk_size=500))\n"
)
TIMED = (
    "import time; begun = time.perf_counter()\n{code}ended = time.perf_counter()\n"
    "print(len(found), started - begun, ended - started)\n"
)


def measure_client(code: str, kubeconfig: Path) -> str:
    """Import and configuration, and a list; the best of three processes."""
    rows = []
    for _ in range(3):
        command = [sys.executable, "-c", TIMED.format(code=code)]
        done = subprocess.run(
            command, env={**os.environ, "KUBECONFIG": str(kubeconfig)}, capture_output=True, text=True
        )
        if done.returncode:
            return "not installed"
        rows.append([float(word) for word in done.stdout.split()])
    count, start, listed = (min(column) for column in zip(*rows, strict=True))
    return f"{count:,.0f} nodes: import and configuration {start:.2f} s, list {listed:.2f} s"


def make_nodes(client: KubeClient, count: int, first: int = 0) -> None:
    for number in range(first, count):
        status = {
            "allocatable": {"nvidia.com/gpu": "8", "pods": "9"},
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        labels = {"topology/rack": f"r{number // 16}", "gpu": "h100"}
        metadata = {"name": f"n{number:05d}", "labels": labels}
        client.post("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status})


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.perf_counter()
    found = work()
    return time.perf_counter() - begun, found


def request_for(folder: Path, number: int) -> LaunchRequest:
    run = folder / f"job-{number:03d}"
    run.mkdir()
    chosen = LaunchSettings(on="k8s", image="registry.example/phalanx:0.7", claim="runs", flavour="jobset")
    return LaunchRequest(
        name=run.name,
        group="sweep",
        run=str(run),
        hosts=2,
        spares=0,
        devices_per_host=8,
        accelerator="H100-80GB-SXM",
        time_limit_s=600.0,
        save_s=60.0,
        environ={},
        checkpoint=str(run),
        placement=(),
        agent=("python",),
        settings=chosen,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=2000)
    parser.add_argument("--jobs", type=int, default=200)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="phalanx-plane-", dir="/tmp") as folder:
        plane = ControlPlane(Path(folder) / "plane")
        try:
            took, _ = timed(plane.start)
            rows.append(("control plane up, with CRDs", f"{took:.1f} s"))
            client = plane.client()
            client.rate.per_s = client.rate.burst = 1e6  # set-up, not what is measured
            took, _ = timed(lambda: make_nodes(client, args.nodes))
            rows.append((f"{args.nodes:,} nodes created", f"{took:.1f} s"))
            rows.append(("our client", measure_client(OURS, plane.kubeconfig)))
            rows.append(("lightkube", measure_client(LIGHTKUBE, plane.kubeconfig)))
            took, found = timed(lambda: check_nodes(plane.client(), apply=True, now_s=time.time()))
            rows.append(
                (f"cluster health, {len(found[0]):,} nodes", f"{took:.2f} s, {-(-len(found[0]) // 500)} requests")
            )
            runs = Path(folder) / "runs"
            runs.mkdir()
            requests = [request_for(runs, number) for number in range(args.jobs)]
            system = KubernetesSystem({"KUBECONFIG": str(plane.kubeconfig)})
            took, _ = timed(lambda: system.submit(requests))
            rows.append((f"{args.jobs} JobSets submitted, all or none, at most 50 requests/s", f"{took:.1f} s"))
        finally:
            plane.stop()
    print("| what | measured |\n|---|---|")
    for name, said in rows:
        print(f"| {name} | {said} |")


if __name__ == "__main__":
    main()
