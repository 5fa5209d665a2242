"""Many nodes that only report status, two teams on the real Kueue, and jobs of any size that need no plan."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from control_plane import ControlPlane, missing_control_plane
from kube_managers import PROGRAMS
from process_kubelet import register_node
from status_kubelet import StatusKubelet

from phalanx.launch.book import LaunchRecord, record_launch
from phalanx.launch.k8s import KubernetesSystem
from phalanx.launch.kube.client import Document, object_path
from phalanx.launch.operate.cluster_objects import cluster_objects
from phalanx.launch.operate.teams import read_teams
from phalanx.launch.resource_request import LaunchRequest
from phalanx.launch.settings import LaunchSettings
from phalanx.record.run import Run

RACK, BLOCK = 16, 1600  # nodes
DEVICE, INDEX = "nvidia.com/gpu", "batch.kubernetes.io/job-completion-index"
KUEUE = "/apis/kueue.x-k8s.io/v1beta2"
WANTED = ("kube-controller-manager", "kube-scheduler", *PROGRAMS)
MISSING = missing_control_plane(*WANTED)
KUEUE_KINDS = ("Namespace", "WorkloadPriorityClass", "Topology", "ResourceFlavor", "ClusterQueue", "LocalQueue")
TEAMS = """\
name = "lab"
image = "registry.example/phalanx:0.7"
topology = ["topology/block", "topology/rack"]
[flavours.h100]
nodes = {nodes}
labels = {{ gpu = "h100" }}
resources = {{ "nvidia.com/gpu" = 8 }}
[teams.language]
share = {{ h100 = {language} }}
[teams.vision]
share = {{ h100 = {vision} }}
"""


class KueueCluster:
    """Nodes in racks and blocks, the teams language and vision, and a kubelet that reports."""

    def __init__(self, plane: ControlPlane, folder: Path, *, nodes: int, language: int, vision: int) -> None:
        self.plane, self.folder, self.client = plane, folder, plane.client()
        self.client.rate.per_s = self.client.rate.burst = 1e6
        self.teams = TEAMS.format(nodes=language + vision, language=language, vision=vision)
        self.over: set[str] = set()  # runs whose pods end as soon as they run
        self.kubelet = StatusKubelet(plane.client(), is_over=lambda pod: run_of(pod) in self.over)
        self.rack_of = {f"n{number:05d}": f"r{number // RACK:04d}" for number in range(nodes)}
        self.system = KubernetesSystem(os.environ)

    def start(self) -> None:
        for number, (name, rack) in enumerate(self.rack_of.items()):
            labels = {"gpu": "h100", "topology/block": f"b{number // BLOCK}", "topology/rack": rack}
            register_node(self.client, name, labels, {DEVICE: "8"})
        self.apply_teams()
        for team in ("language", "vision"):
            self.plane.make_claim(team)
        self.kubelet.start()

    def apply_teams(self) -> None:
        """Queues, quotas and topology as `cluster init` makes them; a DaemonSet on every node is another test."""
        (self.folder / "teams.toml").write_text(self.teams)
        for document in cluster_objects(read_teams(self.folder / "teams.toml")):
            if document["kind"] in KUEUE_KINDS:
                path = object_path(document, document["metadata"].get("namespace", ""))
                self.client.apply(path, document, manager="test", force=True)

    def request(self, name: str, *, hosts: int, team: str, **settings: Any) -> LaunchRequest:
        """What a launch asks for, without a plan; recorded, so that `why`, `queue` and `cancel` find it."""
        run = Run(path=self.folder / name)
        run.path.mkdir()
        (run.path / "plan.json").write_text("{}")  # what makes a folder a run; nobody reads it here
        run.set_status("created")
        record_launch(LaunchRecord(id=name, system="k8s", name=name, run=str(run.path), queue=team), os.environ)
        given: dict[str, Any] = {"claim": "runs", "image": "registry.example/phalanx:0.7", "queue": team}
        given |= {"namespace": team, "topology": ("topology/block", "topology/rack"), **settings}
        return LaunchRequest(
            name=name,
            group="",
            run=str(run.path),
            hosts=hosts,
            spares=0,
            devices_per_host=8,
            accelerator="H100-80GB-SXM",
            time_limit_s=3600.0,
            save_s=60.0,
            environ={},
            checkpoint=str(run.path),
            placement=(),
            agent=("python",),
            settings=LaunchSettings(on="k8s", **given),
        )

    def submit(self, name: str, *, hosts: int, team: str, **settings: Any) -> str:
        self.system.submit([self.request(name, hosts=hosts, team=team, **settings)])
        return name

    def running(self, team: str) -> Counter[str]:
        """Pods that run, by run."""
        pods, _ = self.client.list_objects(f"/api/v1/namespaces/{team}/pods")
        return Counter(run_of(pod) for pod in pods if (pod.get("status") or {}).get("phase") == "Running")

    def racks(self, team: str, run: str) -> list[str]:
        """The racks of a run's pods, in the order of their numbers; a node each."""
        pods, _ = self.client.list_objects(f"/api/v1/namespaces/{team}/pods", labels=f"phalanx.run={run}")
        assert len({pod["spec"]["nodeName"] for pod in pods}) == len(pods)
        ordered = sorted(pods, key=lambda pod: int(pod["metadata"]["labels"][INDEX]))
        return [self.rack_of[pod["spec"]["nodeName"]] for pod in ordered]


def run_of(pod: Document) -> str:
    return str((pod["metadata"].get("labels") or {}).get("phalanx.run", ""))


@contextmanager
def kueue_cluster(folder: Path, *, nodes: int, language: int, vision: int) -> Iterator[KueueCluster]:
    """A control plane with its managers, and the environment of this process led to it."""
    before, made = dict(os.environ), None
    with tempfile.TemporaryDirectory(prefix="phalanx-plane-", dir="/tmp") as base:
        plane = ControlPlane(Path(base), managers=True)
        os.environ |= {"XDG_DATA_HOME": str(folder / "data-home"), "KUBECONFIG": str(plane.kubeconfig)}
        try:
            plane.start()
            made = KueueCluster(plane, folder, nodes=nodes, language=language, vision=vision)
            made.start()
            yield made
        finally:
            if made is not None:
                made.kubelet.stop()
            plane.stop()
            os.environ.clear()
            os.environ.update(before)
