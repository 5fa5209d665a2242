"""Launches on a real Kubernetes with the managers of JobSet and Kueue, pods run as processes; skipped without them.

Users have the rights that `phalanx cluster init` gave them, and no more. Digests of a run that something happened to
are those of an undisturbed one.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from control_plane import ControlPlane, missing_control_plane
from kube_managers import PROGRAMS
from process_kubelet import ProcessKubelet, register_node, write_kubeconfig
from slurm_cluster import wait_for
from tiny_dataset import write_dataset
from tiny_job import ON_KUBERNETES, tiny_job

import phalanx
from phalanx.launch.kube.client import Document, has_condition
from phalanx.launch.operate import node_check
from phalanx.launch.operate.node_signals import NodeSignal
from phalanx.record.events import read_events
from phalanx.record.run import Run

TEAMS = """\
name = "lab"
image = "registry.example/phalanx:0.7"
topology = ["topology/block", "topology/rack"]
[flavours.cpu]
nodes = 3
labels = { kind = "cpu" }
resources = { cpu = 1 }
[teams.language]
share = { cpu = 1 }
users = ["ada@example.org"]
[teams.vision]
share = { cpu = 2 }
users = ["ben@example.org"]
"""
USERS = {"language": "ada-token", "vision": "ben-token"}
JOB = tiny_job(
    parallel={"tensor": 1, "pipeline": 1, "shard": 1},
    cluster={"spec": "local-cpu:2"},
    train={"samples": 0},
    fault={"dead_after_s": 8, "digest_every": 1, "grace_s": 100},
    checkpoint={"interval_s": 3600},
    comm={"init_timeout_s": 240},
    plugins={"callbacks": ["pace.py:Pace"]},
    launch={**ON_KUBERNETES, "topology": ["topology/block", "topology/rack"]},
)
# Steps take two seconds, so that pods can start between them, until a file called "fast" is there.
PACE = """\
import os, time
from phalanx.train.callbacks import Callback
class Pace(Callback):
    def on_step_begin(self, training):
        if not os.path.exists(os.path.join(os.path.dirname(__file__), "fast")):
            time.sleep(2.0)
"""
STEPS = 160
PATIENCE_S = 900.0
PREFLIGHT = "phalanx.preflight"
WANTED = ("kube-controller-manager", "kube-scheduler", *PROGRAMS)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing_control_plane(*WANTED)), reason=missing_control_plane(*WANTED) or "they are there"),
]


class Cluster:
    """Three nodes in two racks, two teams, and a folder that all see."""

    def __init__(self, plane: ControlPlane, folder: Path) -> None:
        self.plane, self.folder, self.client = plane, folder, plane.client()
        labels = {"kind": "cpu", "topology/block": "b1"}
        racks = {"n1": "r1", "n2": "r1", "n3": "r2"}
        nodes = {name: {**labels, "topology/rack": rack} for name, rack in racks.items()}
        self.kubelet = ProcessKubelet(plane.client(), folder, nodes)

    def start(self) -> None:
        write_dataset(self.folder, documents=2500)
        (self.folder / "job.toml").write_text(JOB)
        (self.folder / "pace.py").write_text(PACE)
        (self.folder / "teams.toml").write_text(TEAMS)
        self.become("")
        phalanx.cluster_init(self.folder / "teams.toml", apply=True)
        for team in USERS:
            self.plane.make_claim(team)
        self.kubelet.start(cpus="1500m")  # one pod and what the operator runs beside it

    def become(self, team: str) -> None:
        """The operator, or a user of a team."""
        path = self.plane.kubeconfig
        if team:
            path = self.folder / f"kubeconfig-{team}"
            write_kubeconfig(path, self.client.access.server, USERS[team], namespace=team)
        os.environ["KUBECONFIG"] = str(path)

    def launch(self, team: str, **options: Any) -> tuple[str, Run]:
        self.become(team)
        wanted = {"hosts": 2, "steps": STEPS, "runs": self.folder, "progress": False, "check": False}
        done = phalanx.launch(self.folder / "job.toml", queue=team, allow_code=True, again=True, **wanted | options)
        return done.ids[0], Run(path=Path(done.requests[0].run))

    def objects(self, kind: str, team: str, job: str = "") -> list[Document]:
        roots = {"pods": "/api/v1", "jobsets": "/apis/jobset.x-k8s.io/v1alpha2"}
        root = roots.get(kind, "/apis/kueue.x-k8s.io/v1beta2")
        labels = f"phalanx.run={job}" if job else ""
        return self.client.list_objects(f"{root}/namespaces/{team}/{kind}", labels=labels)[0]

    def workload(self, team: str, job: str) -> Document:
        [found] = [
            one
            for one in self.objects("workloads", team)
            if any(owner["name"] == job for owner in one["metadata"]["ownerReferences"])
        ]
        return found

    def why(self, job: str) -> str:
        return str(phalanx.why(job))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    before, folder = dict(os.environ), tmp_path_factory.mktemp("kueue")
    os.environ["XDG_DATA_HOME"] = str(folder / "data-home")
    with tempfile.TemporaryDirectory(prefix="phalanx-plane-", dir="/tmp") as base:
        plane = ControlPlane(Path(base), managers=True)
        made = None
        try:
            plane.start()
            made = Cluster(plane, folder)
            made.start()
            yield made
        finally:
            if made is not None:
                made.kubelet.stop()
            plane.stop()
            os.environ.clear()
            os.environ.update(before)


def last_step(run: Run) -> int:
    events, _ = read_events(run.events(0)) if run.events(0).exists() else ([], None)
    return max((int(event["step"]) for event in events if event["event"] == "step"), default=-1)


def digests(run: Run) -> dict[int, Any]:
    """The digest of the weights by step; a step done again must have the same."""
    events, _ = read_events(run.events(0))
    return {event["step"]: event["digest"] for event in events if event["event"] == "step" and event.get("digest")}


def worlds(run: Run) -> list[int]:
    """How many ranks trained, one after the other."""
    return [int(event["world"]) for event in read_events(run.supervisor)[0] if event["event"] == "epoch"]


def await_done(job: str) -> None:
    def is_done() -> bool:
        [one] = [row for row in phalanx.queue(on="k8s").jobs if row.id == job]
        assert one.state not in ("failed", "cancelled"), str(phalanx.why(job))
        return one.state == "done"

    wait_for(is_done, f"{job} to be done", patience_s=PATIENCE_S)


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> Run:
    """Admitted by Kueue, made by JobSet, trained, done."""
    (cluster.folder / "fast").touch()
    job, run = cluster.launch("vision")
    await_done(job)
    assert last_step(run) == STEPS - 1
    assert len(digests(run)) == STEPS
    assert has_condition(cluster.workload("vision", job), "Admitted") is not None
    wait_for(lambda: has_condition(cluster.objects("jobsets", "vision", job)[0], "Completed"), "JobSet's own word")
    pods = sorted(cluster.objects("pods", "vision", job), key=lambda pod: str(pod["spec"]["hostname"]))
    racks = [cluster.kubelet.nodes[pod["spec"]["nodeName"]]["topology/rack"] for pod in pods]
    assert racks == ["r1", "r1"]  # both in one rack, in which there is room
    return run


def test_a_killed_pod_and_a_lost_node_are_replaced_alone_and_change_no_digest(
    cluster: Cluster, undisturbed: Run
) -> None:
    (cluster.folder / "fast").unlink(missing_ok=True)
    job, run = cluster.launch("vision")
    wait_for(lambda: last_step(run) >= 3, "steps of two pods", patience_s=PATIENCE_S)
    assert phalanx.why(job).explanation.reason == "on 2 pods"

    def pod_of(index: int) -> Document:
        label = "batch.kubernetes.io/job-completion-index"
        found = [
            one for one in cluster.objects("pods", "vision", job) if one["metadata"]["labels"][label] == str(index)
        ]
        return max(found, key=lambda one: str(one["metadata"]["creationTimestamp"]))

    survivor, killed = pod_of(0), pod_of(1)
    cluster.kubelet.kill(killed["metadata"]["name"])
    wait_for(
        lambda: (
            pod_of(1)["metadata"]["uid"] in cluster.kubelet.running
            and pod_of(1)["metadata"]["uid"] != killed["metadata"]["uid"]
        ),
        "another pod under the same number",
        patience_s=PATIENCE_S,
    )
    replaced = pod_of(1)
    assert replaced["spec"]["nodeName"] == killed["spec"]["nodeName"]  # Kueue's assignment stands
    wait_for(lambda: worlds(run) == [2, 1, 2], "the replaced pod to train again", patience_s=PATIENCE_S)
    steps = last_step(run)
    wait_for(lambda: last_step(run) > steps + 2, "steps after the lost pod", patience_s=PATIENCE_S)

    lost = replaced["spec"]["nodeName"]
    assert replaced["metadata"]["name"] in cluster.kubelet.lose_node(lost)
    wait_for(
        lambda: (
            pod_of(1)["metadata"]["uid"] in cluster.kubelet.running
            and pod_of(1)["metadata"]["uid"] != replaced["metadata"]["uid"]
        ),
        "a pod on another node",
        patience_s=PATIENCE_S,
    )
    assert pod_of(1)["spec"]["nodeName"] not in (lost, survivor["spec"]["nodeName"])
    wait_for(lambda: worlds(run) == [2, 1, 2, 1, 2], "the pod on another node to train", patience_s=PATIENCE_S)
    steps = last_step(run)
    wait_for(lambda: last_step(run) > steps + 2, "steps after the lost node", patience_s=PATIENCE_S)
    assert survivor["metadata"]["uid"] in cluster.kubelet.running  # it kept its process all the time
    (cluster.folder / "fast").touch()
    await_done(job)
    [jobset] = cluster.objects("jobsets", "vision", job)
    assert (jobset["status"].get("restarts") or 0) == 0
    assert digests(run) == digests(undisturbed)
    labels = {"kind": "cpu", "topology/block": "b1", "topology/rack": "r1"}
    register_node(cluster.client, lost, labels, {"cpu": "1500m"})
    cluster.kubelet.nodes[lost] = labels


def test_borrowed_quota_is_reclaimed_and_the_borrower_goes_on_with_the_same_digests(
    cluster: Cluster, undisturbed: Run
) -> None:
    (cluster.folder / "fast").unlink(missing_ok=True)
    borrower, run = cluster.launch("language")  # owns one node, borrows one
    wait_for(lambda: last_step(run) >= 3, "steps of the borrower", patience_s=PATIENCE_S)
    owner, _ = cluster.launch("vision")
    cluster.become("language")
    wait_for(lambda: phalanx.why(borrower).explanation.state == "waiting", "its eviction", patience_s=PATIENCE_S)
    (cluster.folder / "fast").touch()
    assert "another job took its quota or nodes" in cluster.why(borrower)
    cluster.become("vision")
    await_done(owner)
    cluster.become("language")
    await_done(borrower)
    saved = [event["step"] for event in read_events(run.supervisor)[0] if event["event"] == "restore"]
    assert saved[-1] > 0  # it went on where it was
    assert digests(run) == digests(undisturbed)


def test_a_new_node_passes_its_preflight_before_it_takes_work(cluster: Cluster) -> None:
    """The DaemonSet's own command and account: it may take off the taint of its node."""
    labels = {"kind": "cpu", "topology/block": "b1", "topology/rack": "r2", PREFLIGHT: "pending"}
    cluster.kubelet.nodes["n4"] = labels
    register_node(cluster.client, "n4", labels, {"cpu": "1500m"}, taints=[{"key": PREFLIGHT, "effect": "NoSchedule"}])

    def has_passed() -> bool:
        node = cluster.client.get("/api/v1/nodes/n4") or {}
        return node["metadata"]["labels"][PREFLIGHT] == "passed" and not node["spec"].get("taints")

    wait_for(has_passed, "the preflight of n4", patience_s=PATIENCE_S)
    pods = "/api/v1/namespaces/phalanx-system/pods"

    def is_gone() -> bool:
        return not [
            one
            for one in cluster.client.list_objects(pods)[0]
            if one["metadata"]["name"].startswith("phalanx-preflight")
        ]

    wait_for(is_gone, "the DaemonSet to leave the node", patience_s=PATIENCE_S)
    said = [NodeSignal(kind="xid", said="XID 79")]
    node_check.follow_node(cluster.client, "n4", lambda: said, sleep=lambda seconds: None, rounds=1)
    node = cluster.client.get("/api/v1/nodes/n4")
    assert has_condition(node, "Ready") is not None
    assert has_condition(node, "PhalanxUnhealthy") is not None
    wait_for(
        lambda: (cluster.client.get("/api/v1/nodes/n4") or {})["spec"].get("unschedulable"),
        "phalanx-health, with its own account, to cordon it",
        patience_s=PATIENCE_S,
    )
