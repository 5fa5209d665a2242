"""Launches on a real Kubernetes control plane, where KUBEBUILDER_ASSETS names its programs; skipped elsewhere.

With etcd and kube-apiserver alone: refusals, conflicts, rights and trials are the real ones. With the scheduler and the
controllers too, a plain Job (`--flavour job`) trains in processes: a pod that is killed is replaced alone.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from control_plane import ControlPlane, missing_control_plane
from process_kubelet import ProcessKubelet, write_kubeconfig
from slurm_cluster import wait_for
from tiny_dataset import write_dataset
from tiny_job import ENDLESS, ON_KUBERNETES, tiny_job

import phalanx
from phalanx.launch.k8s import KubernetesSystem
from phalanx.launch.kube.client import has_condition
from phalanx.record.events import read_events
from phalanx.record.run import Run

JOB = tiny_job(
    data=ENDLESS,
    parallel={"tensor": 1, "pipeline": 1, "shard": 1},
    cluster={"spec": "local-cpu:2"},
    fault={"dead_after_s": 8},
    launch={**ON_KUBERNETES, "flavour": "job"},
)
EXAMPLES = Path(__file__).parents[2] / "examples"
OPTIONS: dict[str, Any] = {"hosts": 2, "progress": False, "check": False, "runs": "."}  # with the data, on the claim

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing_control_plane()), reason=missing_control_plane() or "there is one"),
]


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    with tempfile.TemporaryDirectory(prefix="phalanx-plane-", dir="/tmp") as folder:
        made = ControlPlane(Path(folder))
        try:
            made.start()
            yield made
        finally:
            made.stop()


@pytest.fixture
def folder(plane: ControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KUBECONFIG", str(plane.kubeconfig))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data-home"))
    monkeypatch.chdir(tmp_path)
    write_dataset(tmp_path, documents=2500)
    (tmp_path / "job.toml").write_text(JOB)
    plane.make_claim("default")
    return tmp_path


def test_refusals_of_a_real_server(plane: ControlPlane, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(phalanx.UserError, match="asks for 2 nodes with 1 cpu, but the cluster has 0"):
        phalanx.launch("job.toml", **OPTIONS)
    has_kinds = (plane.assets / "crds").is_dir()
    said = "namespace default has no such LocalQueue" if has_kinds else "the cluster has no Kueue"
    with pytest.raises(phalanx.UserError, match=said):
        phalanx.launch("job.toml", queue="team-a", flavour="jobset", **OPTIONS)
    with pytest.raises(phalanx.UserError, match="the cluster has no Kubeflow Trainer"):
        phalanx.launch("job.toml", flavour="trainjob", **OPTIONS)
    table = json.loads(plane.kubeconfig.read_text())
    for token, said in (
        ("guest-token", "you may not create/patch/delete secrets"),
        ("nobody", "the token is wrong or has expired"),
    ):
        other = folder / token
        write_kubeconfig(other, table["clusters"][0]["cluster"]["server"], token)
        monkeypatch.setenv("KUBECONFIG", str(other))
        with pytest.raises(phalanx.UserError, match=said):
            phalanx.launch("job.toml", **OPTIONS)
    assert not list(folder.glob("tiny-*"))
    assert plane.client().list_objects("/api/v1/namespaces/default/secrets")[0] == []


def test_teams_jobsets_conflicts_and_health(plane: ControlPlane, folder: Path) -> None:
    """Real schemas of JobSet and Kueue, real server-side apply; nobody admits or starts anything."""
    if not (plane.assets / "crds").is_dir():
        pytest.skip("KUBEBUILDER_ASSETS has no folder crds")
    client = plane.client()
    teams = EXAMPLES / "operator" / "teams.toml"
    shown = phalanx.cluster_init(teams)
    assert {one.change for one in shown.changes} == {"new", "left out"}
    phalanx.cluster_init(teams, apply=True)
    assert {one.change for one in phalanx.cluster_init(teams).changes} == {"unchanged", "left out"}
    (folder / "teams.toml").write_text(teams.read_text().replace("most = { h100 = 32 }", "most = { h100 = 24 }"))
    changed = phalanx.cluster_init(folder / "teams.toml")
    assert [one.name for one in changed.changes if one.change == "changed"] == ["vision"]

    for number in range(4):
        status = {
            "allocatable": {"cpu": "4", "pods": "9"},
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": f"m{number}"}, "status": status}
        client.post("/api/v1/nodes", node)
    options = {**OPTIONS, "flavour": "jobset", "overrides": ["launch.namespace=vision", "launch.qos=high"]}
    plane.make_claim("vision")
    launched = phalanx.launch("job.toml", queue="vision", **options)
    [job] = launched.ids
    jobset = client.get(f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/vision/jobsets/{job}")
    assert jobset["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == "high"
    secret = client.get(f"/api/v1/namespaces/vision/secrets/{job}-key")
    assert secret["metadata"]["ownerReferences"][0]["uid"] == jobset["metadata"]["uid"]
    with pytest.raises(phalanx.UserError, match="is there already, made by another launch"):
        KubernetesSystem(os.environ).submit(launched.requests)
    assert phalanx.queue().jobs[0].state == "waiting"
    assert "its pods are being made" in str(phalanx.why(job))
    phalanx.cancel(job)
    assert client.list_objects("/apis/jobset.x-k8s.io/v1alpha2/jobsets")[0] == []

    bad = {"type": "PhalanxUnhealthy", "status": "True", "message": "XID 79"}
    client.patch("/api/v1/nodes/m0/status", {"status": {"conditions": [bad]}}, keep_lists=True)
    assert has_condition(client.get("/api/v1/nodes/m0"), "Ready") is not None
    assert "m0: taken out of service: phalanx: XID 79" in str(phalanx.cluster_health(apply=True))
    node = client.get("/api/v1/nodes/m0")
    assert node["spec"]["unschedulable"] is True
    for number in range(4):
        client.delete(f"/api/v1/nodes/m{number}")


@pytest.mark.skipif(
    bool(missing_control_plane("kube-controller-manager", "kube-scheduler")),
    reason=missing_control_plane("kube-controller-manager", "kube-scheduler") or "they are there",
)
def test_a_killed_pod_is_replaced_alone_and_cancel_leaves_nothing(plane: ControlPlane, folder: Path) -> None:
    client = plane.client()
    kubelet = ProcessKubelet(plane.client(), folder, {name: {} for name in ("n1", "n2", "n3")})
    kubelet.start(cpus="1500m")  # one pod, and what the operator runs beside it
    try:
        [job] = phalanx.launch("job.toml", **OPTIONS).ids
        run = Run(path=next(folder.glob("tiny-*")))
        assert os.path.exists(run.path / "kubernetes.json")
        wait_for(lambda: last_step(run) >= 3, "steps of two pods", patience_s=900)
        assert phalanx.why(job).explanation.reason == "on 2 pods"
        assert [one.state for one in phalanx.queue().jobs] == ["running"]

        def pods() -> dict[str, str]:  # and not what the operator runs
            return {uid: name for uid, name in kubelet.started.items() if name.startswith(job)}

        names = pods()
        [first] = [name for name in names.values() if "-1-" in name]
        survivor = {uid for uid, name in names.items() if name != first}
        kubelet.kill(first)
        wait_for(lambda: len(pods()) == 3, "another pod under the same number", patience_s=900)
        steps = last_step(run)
        wait_for(lambda: last_step(run) > steps + 2, "steps after the loss", patience_s=900)
        assert survivor <= set(kubelet.running)  # it kept its process
        phalanx.cancel(job)
        for kind in ("pods", "secrets", "services"):
            left, _ = client.list_objects(f"/api/v1/namespaces/default/{kind}", labels="phalanx.run")
            assert left == [], kind
        assert phalanx.why(job).explanation.state == "cancelled"
    finally:
        kubelet.stop()


def last_step(run: Run) -> int:
    if not run.events(0).exists():
        return -1
    return max((int(event["step"]) for event in read_events(run.events(0))[0] if event["event"] == "step"), default=-1)
