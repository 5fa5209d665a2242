"""For operators: a cluster for teams, node signals, cordons and drains with their reason, and the brake."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kube_server import KubeServer, running_server
from slurm_cluster import SlurmCluster

import phalanx
from phalanx.launch.book import LaunchRecord, record_launch
from phalanx.launch.kube.access import read_access
from phalanx.launch.kube.client import KubeClient
from phalanx.launch.operate import node_check
from phalanx.launch.operate.cluster_objects import cluster_objects
from phalanx.launch.operate.kube_health import follow_nodes
from phalanx.launch.operate.node_signals import NodeSignal, counter_signals, gpu_signals, log_signals, read_counters
from phalanx.launch.operate.slurm_health import drain_own_node
from phalanx.launch.operate.teams import read_teams

TEAMS = Path(__file__).parents[2] / "examples" / "operator" / "teams.toml"
NODES = "/api/v1/nodes"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeServer]:
    with running_server() as made:
        monkeypatch.setenv("KUBECONFIG", str(made.kubeconfig(tmp_path / "kubeconfig")))
        yield made


def test_objects_of_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    made = phalanx.cluster_init(TEAMS, out=tmp_path / "out")
    assert "no cluster is configured here" in str(made)
    documents = list(yaml.safe_load_all((tmp_path / "out" / "lab.yaml").read_text()))
    for document in documents:
        if not any(word in document["apiVersion"] for word in ("kueue", "monitoring")):
            kubernetes_validate.validate(document, "1.37", strict=True)
    found = {(one["kind"], one["metadata"]["name"]): one for one in documents}
    queue = found["ClusterQueue", "vision"]["spec"]
    [group] = queue["resourceGroups"]
    assert group["coveredResources"] == ["cpu", "nvidia.com/gpu"]
    assert group["flavors"] == [
        {
            "name": "h100",
            "resources": [
                {"name": "cpu", "nominalQuota": "1536", "borrowingLimit": "1536"},
                {"name": "nvidia.com/gpu", "nominalQuota": "128", "borrowingLimit": "128"},
            ],
        }
    ]
    assert queue["preemption"] == {"reclaimWithinCohort": "Any", "withinClusterQueue": "LowerPriority"}
    levels = [one["nodeLabel"] for one in found["Topology", "lab"]["spec"]["levels"]]
    assert levels == ["topology/block", "topology/rack", "kubernetes.io/hostname"]
    assert found["LocalQueue", "language"]["metadata"]["namespace"] == "language"
    preflight = found["DaemonSet", "phalanx-preflight-h100"]["spec"]["template"]["spec"]
    assert preflight["nodeSelector"] == {"phalanx.preflight": "pending", "gpu": "h100"}
    assert preflight["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert found["PriorityClass", "phalanx-balloon"]["value"] < 0


def test_mistakes_in_a_teams_file_are_said_at_once(tmp_path: Path) -> None:
    path = tmp_path / "teams.toml"
    path.write_text(
        'image = "two words"\nballons = 1\ntopology = "rack"\n[flavours.h100]\nnodes = 4\nlabels = {gpu = "h100"}\n'
        '[teams.a]\nshare = {h100 = 3}\n[teams.b]\nshare = {h100 = 2, h100s = 1}\nnamespace = "a"\nweight = 0\n'
    )
    with pytest.raises(phalanx.UserError) as error:
        phalanx.cluster_init(path)
    for part in (
        f"{path}:1: 'two words' is no image",
        f'{path}:2: there is no key "ballons" here\n  did you mean "balloons"?',
        f"{path}:3: topology must be labels of nodes",
        "resources must say what one node has",
        "teams own 5 nodes of h100, but there are 4",
        "there is no flavour 'h100s'\n  did you mean h100?",
        "two teams have the namespace a",
        f"{path}:12: weight 0 must be above 0",
    ):
        assert part in str(error.value)
    with pytest.raises(phalanx.UserError, match="--on slurm cannot be set up from here"):
        phalanx.cluster_init(path, on="slurm")


def test_differences_to_a_cluster_are_shown_and_applied(server: KubeServer) -> None:
    server.apis |= {
        "/apis/apps/v1": ["daemonsets", "deployments"],
        "/apis/rbac.authorization.k8s.io/v1": ["clusterroles"],
        "/apis/scheduling.k8s.io/v1": ["priorityclasses"],
    }
    before = set(server.objects)
    shown = phalanx.cluster_init(TEAMS)
    assert {one.change for one in shown.changes} == {"new", "left out"}
    assert "left out  PrometheusRule phalanx in phalanx-system: the cluster has no monitoring.coreos.com/v1" in str(
        shown
    )
    assert set(server.objects) == before  # a trial
    phalanx.cluster_init(TEAMS, apply=True)
    queue = server.objects["/apis/kueue.x-k8s.io/v1beta2/clusterqueues/vision"]
    assert {one.change for one in phalanx.cluster_init(TEAMS).changes} == {"unchanged", "left out"}
    queue["spec"] = {**queue["spec"], "cohortName": "other"}
    again = phalanx.cluster_init(TEAMS)
    assert [one.name for one in again.changes if one.change == "changed"] == ["vision"]
    assert "-  cohortName: other" in str(again)
    assert "+  cohortName: lab" in str(again)


def put_nodes(server: KubeServer, count: int, *, bad: int) -> None:
    for number in range(count):
        conditions = [{"type": "Ready", "status": "True"}]
        if number < bad:
            conditions.append({"type": "PhalanxUnhealthy", "status": "True", "message": "XID 79 of 3b:00"})
        server.put(f"{NODES}/n{number}", {"spec": {}, "status": {"conditions": conditions}})


def test_blamed_nodes_are_cordoned_with_the_reason_and_never_more_than_half(server: KubeServer) -> None:
    put_nodes(server, 6, bad=2)
    shown = phalanx.cluster_health()
    assert shown.exit_code == 1
    assert "n0: would be taken out of service: phalanx: XID 79 of 3b:00" in str(shown)
    assert not server.objects[f"{NODES}/n0"]["spec"]
    done = phalanx.cluster_health(apply=True)
    assert (done.exit_code, str(done).splitlines()[-1]) == (0, "4 of 6 nodes in service")
    node = server.objects[f"{NODES}/n0"]
    assert node["spec"] == {"unschedulable": True}
    assert node["metadata"]["annotations"] == {"phalanx.cordoned": "phalanx: XID 79 of 3b:00"}
    assert "n0: out of service: phalanx: XID 79 of 3b:00" in str(phalanx.cluster_health())
    notice = {"key": "cloud.google.com/impending-node-termination", "effect": "NoSchedule"}
    for name in ("n2", "n3"):
        server.objects[f"{NODES}/{name}"]["spec"] = {"taints": [notice]}
    braked = phalanx.cluster_health(apply=True)
    assert "nothing was done: 4 of 6 nodes would be out of service, more than half" in str(braked)
    assert braked.exit_code == 1
    assert "unschedulable" not in server.objects[f"{NODES}/n2"]["spec"]


def test_one_watch_follows_all_nodes(server: KubeServer) -> None:
    put_nodes(server, 4, bad=0)
    client = KubeClient(read_access(os.environ))
    blamed = json.loads(json.dumps(server.objects[f"{NODES}/n1"]))
    heartbeat = json.loads(json.dumps(blamed))
    blamed["status"]["conditions"].append({"type": "KernelDeadlock", "status": "True", "reason": "Hung"})
    server.watches = [
        [
            {"type": "MODIFIED", "object": heartbeat},
            {"type": "MODIFIED", "object": blamed},
            {"type": "ERROR", "object": {"code": 410, "reason": "Expired"}},
        ]
    ]
    server.requests.clear()
    seen = follow_nodes(client, apply=True)
    assert next(seen)[1].take_out == ()
    assert next(seen)[1].take_out == (("n1", "phalanx: KernelDeadlock: Hung"),)  # the heartbeat changed nothing
    assert next(seen)[1].out == 1  # listed anew after the watch had expired
    asked = [one.partition("?")[0] for one in server.requests]
    assert asked == ["GET /api/v1/nodes"] * 2 + ["PATCH /api/v1/nodes/n1", "GET /api/v1/nodes"]


def test_signals_of_a_node(tmp_path: Path) -> None:
    log = [
        "6,1,2,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.",
        "6,1,2,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.",
        "NVRM: Xid (PCI:0000:3b:00): 31, pid=7, MMU fault",  # a program's own mistake
        "EXT4-fs (nvme0n1p1): Remounting filesystem read-only",
        "mlx5_core 0000:5e:00.0: device's health compromised - reached miss count",
        "all is well",
    ]
    assert [one.said for one in log_signals(log)] == [
        "XID 79 (GPU has fallen off the bus) of PCI:0000:3b:00",
        "disk: a file system became read-only",
        "network: an RDMA card reports bad health",
    ]
    table = "0, 0, No, No, No\n1, 2, No, No, No\n2, 0, Yes, No, [N/A]\n3, [N/A], No, Yes, No\n"
    assert [one.said for one in gpu_signals(table, expected=5)] == [
        "GPU 1: 2 uncorrectable memory errors",
        "GPU 2: a memory row could not be remapped",
        "GPU 3: needs a reset to retire bad memory",
        "4 of 5 GPUs answer",
    ]
    assert gpu_signals(table.splitlines()[0], expected=1) == []
    folder = tmp_path / "class" / "net" / "eth0" / "statistics"
    folder.mkdir(parents=True)
    (folder / "rx_crc_errors").write_text("100\n")
    (folder / "rx_bytes").write_text("1\n")
    before = read_counters(tmp_path)
    (folder / "rx_crc_errors").write_text("400\n")
    [signal] = counter_signals(before, read_counters(tmp_path), 60.0)
    assert signal == NodeSignal(kind="network", said="eth0: rx_crc_errors grew by 300 in 60 s")
    assert counter_signals(before, read_counters(tmp_path), 3600.0) == []


def test_a_node_tells_the_api_only_of_changes_and_is_released_by_its_preflight(server: KubeServer) -> None:
    taints = [{"key": "phalanx.preflight", "effect": "NoSchedule"}, {"key": "other", "effect": "NoSchedule"}]
    server.put(f"{NODES}/n0", {"spec": {"taints": taints}})
    ready = {"type": "Ready", "status": "True"}
    server.put(f"{NODES}/n0/status", {"status": {"conditions": [ready]}})
    client = KubeClient(read_access(os.environ))
    said = [[], [], [NodeSignal(kind="xid", said="XID 79")], [NodeSignal(kind="xid", said="XID 79")], []]
    server.requests.clear()
    node_check.follow_node(client, "n0", lambda: said.pop(0), sleep=lambda seconds: None, rounds=5)
    assert len(server.requests) == 3
    kubelets, condition = server.objects[f"{NODES}/n0/status"]["status"]["conditions"]
    assert kubelets == ready  # of the kubelet: without it, the node would lose its pods
    assert (condition["type"], condition["status"]) == ("PhalanxUnhealthy", "False")
    node_check.release_node(client, "n0")
    node = server.objects[f"{NODES}/n0"]
    assert node["spec"]["taints"] == taints[1:]
    assert node["metadata"]["labels"] == {"phalanx.preflight": "passed"}


def test_the_preflight_of_the_daemonset_as_a_process(server: KubeServer, tmp_path: Path) -> None:
    """The container's own command: a node without its GPUs keeps the taint; one that is as it should be loses it."""
    documents = cluster_objects(read_teams(TEAMS))
    [daemon] = [one for one in documents if one["metadata"]["name"] == "phalanx-preflight-h100"]
    [container] = daemon["spec"]["template"]["spec"]["containers"]
    (tmp_path / "log").touch()  # this machine's kernel may have anything to say
    words = [sys.executable, *container["command"][1:], "--log", str(tmp_path / "log")]
    environ = {**os.environ, "PHALANX_NODE": "n0", "PATH": "/nonexistent"}  # where no nvidia-smi is
    environ.pop("PYTHONUNBUFFERED", None)
    taint = {"key": "phalanx.preflight", "effect": "NoSchedule"}
    server.put(f"{NODES}/n0", {"metadata": {"labels": {}}, "spec": {"taints": [taint]}})
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "node n0 fails its preflight" in done.stderr
    assert "8" in done.stderr
    assert server.objects[f"{NODES}/n0"]["spec"]["taints"] == [taint]
    words[words.index("--devices") + 1] = "0"
    with subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "node n0 passed its preflight\n"
        finally:
            process.terminate()  # as the DaemonSet does: until then it waits
    assert process.returncode == -signal.SIGTERM
    node = server.objects[f"{NODES}/n0"]
    assert not node["spec"].get("taints")
    assert node["metadata"]["labels"]["phalanx.preflight"] == "passed"


@pytest.mark.slow
def test_slurm_drains_nodes_that_runs_excluded_and_brakes(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the real Slurm; all nodes are in service again at the end."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    nodes = sorted(set(slurm.run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").split()))

    def exclude(name: str, *hosts: str, **more: Any) -> None:
        run = tmp_path / name
        run.mkdir()
        events = [{"event": "quarantine", "host": host, "reason": "failed the preflight", **more} for host in hosts]
        lines = [json.dumps({"v": 1, "t": time.time(), "epoch": 1, **event}) for event in events]
        (run / phalanx.Run(path=run).supervisor.name).write_text("\n".join(lines) + "\n")
        record_launch(LaunchRecord(id=name, system="slurm", name="x", run=str(run)), os.environ)

    def reason_of(node: str) -> str:
        return slurm.run("sinfo", "-h", "-N", "-n", node, "-o", "%E").splitlines()[0]

    with pytest.raises(phalanx.UserError, match="--queue wid: this cluster has no such partition\n  did you mean wide"):
        phalanx.cluster_health(on="slurm", queue="wid")
    try:
        exclude("1", nodes[0], slot=1)  # one slot, not the host
        assert phalanx.cluster_health(on="slurm", apply=True).exit_code == 0
        exclude("2", nodes[0])
        assert phalanx.cluster_health(on="slurm").exit_code == 1  # told, not done
        assert "phalanx" not in reason_of(nodes[0])
        phalanx.cluster_health(on="slurm", apply=True)
        assert reason_of(nodes[0]) == "phalanx: failed the preflight (job 2)"
        slurm.run("scontrol", "update", f"NodeName={nodes[0]}", "State=RESUME")
        assert phalanx.cluster_health(on="slurm", apply=True).exit_code == 0  # repaired: it stays in service
        exclude("3", *nodes[: len(nodes) // 2 + 1])
        braked = phalanx.cluster_health(on="slurm", apply=True)
        assert "more than half" in str(braked)
        assert "phalanx" not in reason_of(nodes[1])
        assert drain_own_node(nodes[2], ["XID 79"], os.environ) == f"{nodes[2]} is drained: XID 79"
        assert reason_of(nodes[2]) == "phalanx: XID 79"
    finally:
        for node in set(slurm.run("sinfo", "-h", "-N", "-t", "drain", "-o", "%N").split()):
            slurm.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
