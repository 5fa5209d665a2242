"""A gang of 1,000 pods on 7,500 nodes, and 200 small jobs beside a large one, on the real JobSet and Kueue.

Nodes only report status (tests/status_kubelet.py). What Phalanx asks of the API is counted: it grows with pages of 500
objects, never with a request per node or per pod. PHALANX_SCALE_NODES takes fewer nodes.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from control_plane import ControlPlane, missing_control_plane
from kube_managers import PROGRAMS
from process_kubelet import register_node
from slurm_cluster import wait_for
from status_kubelet import StatusKubelet

import phalanx
from phalanx.launch.book import LaunchRecord, record_launch
from phalanx.launch.k8s import KubernetesSystem
from phalanx.launch.kube.client import KubeClient, object_path
from phalanx.launch.operate.cluster_objects import cluster_objects
from phalanx.launch.operate.kube_health import check_nodes
from phalanx.launch.operate.teams import read_teams
from phalanx.launch.resource_request import LaunchRequest
from phalanx.launch.settings import LaunchSettings

NODES = int(os.environ.get("PHALANX_SCALE_NODES", "7500"))
GANG, RACK, BLOCK = min(1000, NODES // 4), 16, 1600
SMALL_JOBS, SMALL_HOSTS, SMALL_SHARE = 200, 2, 200  # all of them together want twice their team's share
DEVICE, INDEX = "nvidia.com/gpu", "batch.kubernetes.io/job-completion-index"
TEAMS = f"""\
name = "lab"
image = "registry.example/phalanx:0.7"
topology = ["topology/block", "topology/rack"]
[flavours.h100]
nodes = {GANG + SMALL_SHARE}
labels = {{ gpu = "h100" }}
resources = {{ "{DEVICE}" = 8 }}
[teams.language]
share = {{ h100 = {GANG} }}
[teams.vision]
share = {{ h100 = {SMALL_SHARE} }}
"""
PATIENCE_S = 1200.0
WANTED = ("kube-controller-manager", "kube-scheduler", *PROGRAMS)
KUEUE_KINDS = ("Namespace", "WorkloadPriorityClass", "Topology", "ResourceFlavor", "ClusterQueue", "LocalQueue")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing_control_plane(*WANTED)), reason=missing_control_plane(*WANTED) or "they are there"),
]


class LargeCluster:
    """Nodes in racks and blocks, two teams, and a kubelet that reports."""

    def __init__(self, plane: ControlPlane, folder: Path) -> None:
        self.plane, self.folder, self.client = plane, folder, plane.client()
        self.client.rate.per_s = self.client.rate.burst = 1e6
        self.over: set[str] = set()  # runs whose pods end as soon as they run
        self.kubelet = StatusKubelet(plane.client(), is_over=lambda pod: run_of(pod) in self.over)
        self.rack_of: dict[str, str] = {}

    def start(self) -> None:
        (self.folder / "teams.toml").write_text(TEAMS)
        for number in range(NODES):
            name = f"n{number:05d}"
            self.rack_of[name] = f"r{number // RACK:04d}"
            labels = {"gpu": "h100", "topology/block": f"b{number // BLOCK}", "topology/rack": self.rack_of[name]}
            register_node(self.client, name, labels, {DEVICE: "8"})
        for document in cluster_objects(read_teams(self.folder / "teams.toml")):
            if document["kind"] in KUEUE_KINDS:  # a DaemonSet on every node is another test
                path = object_path(document, document["metadata"].get("namespace", ""))
                self.client.apply(path, document, manager="test")
        self.kubelet.start()

    def request(self, name: str, *, hosts: int, team: str) -> LaunchRequest:
        run = self.folder / name
        run.mkdir()
        record_launch(LaunchRecord(id=name, system="k8s", name=name, run=str(run), queue=team), os.environ)
        return LaunchRequest(
            name=name,
            group="",
            run=str(run),
            hosts=hosts,
            spares=0,
            devices_per_host=8,
            accelerator="H100-80GB-SXM",
            time_limit_s=3600.0,
            save_s=60.0,
            environ={},
            checkpoint=str(run),
            placement=(),
            agent=("python",),
            settings=LaunchSettings(
                on="k8s",
                image="registry.example/phalanx:0.7",
                claim="runs",
                queue=team,
                namespace=team,
                topology=("topology/block", "topology/rack"),
            ),
        )

    def running(self, team: str) -> Counter[str]:
        """Pods that run, by run."""
        pods, _ = self.client.list_objects(f"/api/v1/namespaces/{team}/pods")
        return Counter(run_of(pod) for pod in pods if pod["status"].get("phase") == "Running")


def run_of(pod: dict[str, Any]) -> str:
    return str((pod["metadata"].get("labels") or {}).get("phalanx.run", ""))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LargeCluster]:
    before, folder = dict(os.environ), tmp_path_factory.mktemp("large")
    os.environ["XDG_DATA_HOME"] = str(folder / "data-home")
    with tempfile.TemporaryDirectory(prefix="phalanx-plane-", dir="/tmp") as base:
        plane = ControlPlane(Path(base), managers=True)
        made = None
        try:
            plane.start()
            os.environ["KUBECONFIG"] = str(plane.kubeconfig)
            made = LargeCluster(plane, folder)
            begun = time.monotonic()
            made.start()
            print(f"\n{NODES:,} nodes in {time.monotonic() - begun:.1f} s")
            yield made
        finally:
            if made is not None:
                made.kubelet.stop()
            plane.stop()
            os.environ.clear()
            os.environ.update(before)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every request that our client sends from now on, with its method."""
    sent: list[str] = []
    send = KubeClient._send

    def counted(self: KubeClient, connection: Any, method: str, path: str, *more: Any) -> Any:
        if self.rate.per_s < 1e6:  # not the test's own
            sent.append(f"{method} {path}")
        return send(self, connection, method, path, *more)

    monkeypatch.setattr(KubeClient, "_send", counted)
    return sent


def test_a_gang_of_a_thousand_pods_in_rank_order_and_few_requests(large: LargeCluster, asked: list[str]) -> None:
    system = KubernetesSystem(os.environ)
    counts = {}
    for name, hosts in (("pair", 2), ("gang", GANG)):
        request = large.request(name, hosts=hosts, team="language")
        asked.clear()
        begun = time.monotonic()
        system.submit([request])
        counts[name] = len(asked)
        wait_for(lambda name=name, hosts=hosts: large.running("language")[name] == hosts, name, patience_s=PATIENCE_S)
        print(f"{name}: {hosts:,} pods run {time.monotonic() - begun:.1f} s after submission; {counts[name]} requests")
    assert counts["pair"] == counts["gang"]
    pods, _ = large.client.list_objects("/api/v1/namespaces/language/pods", labels="phalanx.run=gang")
    ordered = sorted(pods, key=lambda pod: int(pod["metadata"]["labels"][INDEX]))
    racks = [large.rack_of[pod["spec"]["nodeName"]] for pod in ordered]
    assert len({pod["spec"]["nodeName"] for pod in pods}) == GANG  # a node each
    assert len([rack for rack, _ in groupby(racks)]) == len(set(racks))  # a rack holds consecutive numbers
    assert len(set(racks)) <= -(-GANG // RACK) + 1  # as few racks as can be
    for what, work, most in (
        ("why", lambda: phalanx.why("gang"), 10),
        ("queue", lambda: phalanx.queue(on="k8s"), 10),
        ("health", lambda: check_nodes(system._client(), apply=True, now_s=time.time()), -(-NODES // 500) + 1),
    ):
        asked.clear()
        begun = time.monotonic()
        work()
        print(f"{what}: {len(asked)} requests, {time.monotonic() - begun:.2f} s")
        assert len(asked) <= most, (what, asked)
    assert phalanx.why("gang").explanation.reason == f"on {GANG:,} pods"
    for name in ("pair", "gang"):
        phalanx.cancel(name)
    assert not large.running("language")


def test_two_hundred_small_jobs_do_not_starve_a_large_one(large: LargeCluster) -> None:
    """They borrow what is idle; whose it is takes it back, and all of them end."""
    system = KubernetesSystem(os.environ)
    small = [large.request(f"small-{number:03d}", hosts=SMALL_HOSTS, team="vision") for number in range(SMALL_JOBS)]
    begun = time.monotonic()
    system.submit(small)
    submitted = time.monotonic() - begun
    wait_for(
        lambda: sum(large.running("vision").values()) > SMALL_SHARE, "small jobs that borrow", patience_s=PATIENCE_S
    )
    begun = time.monotonic()
    system.submit([large.request("large", hosts=GANG, team="language")])
    wait_for(lambda: large.running("language")["large"] == GANG, "the large job", patience_s=PATIENCE_S)
    print(
        f"{SMALL_JOBS} submitted in {submitted:.1f} s; the large one ran {time.monotonic() - begun:.1f} s after its own"
    )
    assert 0 < sum(large.running("vision").values()) <= SMALL_SHARE
    large.over |= {one.name for one in small}
    large.kubelet.look_again()
    jobsets = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/vision/jobsets"

    def all_over() -> bool:
        listed, _ = large.client.list_objects(jobsets)
        return sum((one.get("status") or {}).get("terminalState") == "Completed" for one in listed) == SMALL_JOBS

    wait_for(all_over, "all small jobs", patience_s=PATIENCE_S)
    print(f"all small jobs over after {time.monotonic() - begun:.1f} s")
