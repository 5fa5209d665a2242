"""What runs on a cluster besides jobs: preflight of new nodes, signals of each node, the health controller, balloons.

Nodes join with the taint `phalanx.preflight=pending:NoSchedule` and the label `phalanx.preflight=pending` (kubelet's
--register-with-taints and --node-labels). The preflight takes all devices of such a node; when it passes it removes the
taint and sets the label to `passed`, so the DaemonSet leaves the node, and its devices are free.
"""

from __future__ import annotations

from typing import Any

from phalanx.launch.kube.client import Document
from phalanx.launch.operate.kube_object import made, quantity
from phalanx.launch.operate.teams import PREFLIGHT, NodeFlavour, Teams

NODE_MODULE = "phalanx.launch.operate.node_check"
RBAC = "rbac.authorization.k8s.io"
EVERYWHERE = [{"operator": "Exists"}]
LOCKED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
PERSON = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}


def operator_objects(teams: Teams) -> list[Document]:
    """Accounts with their rights, the DaemonSets, the controller, and balloons."""
    look = {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "patch", "watch"]}
    tell = {"apiGroups": [""], "resources": ["nodes/status"], "verbs": ["patch"]}
    found = _account(teams, "phalanx-node", [{**look, "verbs": ["get", "patch"]}, tell])
    found += _account(teams, "phalanx-health", [look])
    found += [_preflight(teams, flavour) for flavour in teams.flavours]
    found += [_signals(teams), _health_controller(teams)]
    if teams.balloons:
        said = "holds idle nodes until a job wants them"
        found.append(made("scheduling.k8s.io/v1", "PriorityClass", "phalanx-balloon", value=-10, description=said))
        found += [_balloons(teams, flavour) for flavour in teams.flavours]
    return found


def _account(teams: Teams, name: str, rules: list[Document]) -> list[Document]:
    subject = {"kind": "ServiceAccount", "name": name, "namespace": teams.namespace}
    role = {"apiGroup": RBAC, "kind": "ClusterRole", "name": name}
    return [
        made("v1", "ServiceAccount", name, namespace=teams.namespace),
        made(f"{RBAC}/v1", "ClusterRole", name, rules=rules),
        made(f"{RBAC}/v1", "ClusterRoleBinding", name, subjects=[subject], roleRef=role),
    ]


def _container(teams: Teams, name: str, command: list[str], **more: Any) -> Document:
    node = {"name": "PHALANX_NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    return {
        "name": name,
        "image": teams.image,
        "command": ["python", "-P", "-m", *command],
        "env": [{"name": "HOME", "value": "/tmp"}, node],
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
        "securityContext": LOCKED,
        **more,
    }


def _workload(teams: Teams, kind: str, name: str, pod: Document, **spec: Any) -> Document:
    labels = {"app.kubernetes.io/name": name}
    pod = {"volumes": [{"name": "tmp", "emptyDir": {}}], **pod}
    pod["volumes"] = [{"name": "tmp", "emptyDir": {}}, *(one for one in pod["volumes"] if one["name"] != "tmp")]
    template = {"metadata": {"labels": labels}, "spec": pod}
    body = {"selector": {"matchLabels": labels}, "template": template, **spec}
    return made("apps/v1", kind, name, namespace=teams.namespace, spec=body)


def _devices(teams: Teams, flavour: NodeFlavour) -> Document:
    """All devices of a node; on nodes without, nothing is taken."""
    count = flavour.resources.get(teams.device, 0.0)
    wanted = {teams.device: quantity(count)} if count else {}
    return {"requests": wanted, "limits": wanted} if wanted else {"requests": {"cpu": "1"}}


def _preflight(teams: Teams, flavour: NodeFlavour) -> Document:
    count = int(flavour.resources.get(teams.device, 0.0))
    command = [NODE_MODULE, "preflight", "--devices", str(count)]
    pod = {
        "serviceAccountName": "phalanx-node",
        "nodeSelector": {PREFLIGHT: "pending", **flavour.labels},
        "tolerations": EVERYWHERE,
        "securityContext": PERSON,
        "containers": [_container(teams, "preflight", command, resources=_devices(teams, flavour))],
    }
    return _workload(teams, "DaemonSet", f"phalanx-preflight-{flavour.name}", pod)


def _signals(teams: Teams) -> Document:
    """Reads the kernel's log and counters of its node, and writes to the API only when something has changed."""
    log = {"name": "kmsg", "hostPath": {"path": "/dev/kmsg", "type": "CharDevice"}}
    system = {"name": "sys", "hostPath": {"path": "/sys", "type": "Directory"}}
    mounts = [
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "kmsg", "mountPath": "/dev/kmsg", "readOnly": True},
        {"name": "sys", "mountPath": "/host/sys", "readOnly": True},
    ]
    # The kernel's log is for root, and a device file for privileged pods alone; nothing of the node is writable.
    rights = {"privileged": True, "readOnlyRootFilesystem": True}
    container = _container(
        teams,
        "signals",
        [NODE_MODULE, "follow", "--sys", "/host/sys"],
        resources={"requests": {"cpu": "10m", "memory": "128Mi"}},
        volumeMounts=mounts,
        securityContext=rights,
    )
    container["env"].append({"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"})  # to read counters, not to compute
    pod = {
        "serviceAccountName": "phalanx-node",
        "tolerations": EVERYWHERE,
        "containers": [container],
        "volumes": [log, system],
    }
    return _workload(teams, "DaemonSet", "phalanx-signals", pod)


def _health_controller(teams: Teams) -> Document:
    """One for the whole cluster, one watch."""
    command = ["phalanx", "cluster", "health", "--on", "k8s", "--apply", "--follow"]
    pod = {
        "serviceAccountName": "phalanx-health",
        "securityContext": PERSON,
        "containers": [_container(teams, "health", command, resources={"requests": {"cpu": "50m", "memory": "256Mi"}})],
    }
    return _workload(teams, "Deployment", "phalanx-health", pod, replicas=1, strategy={"type": "Recreate"})


def _balloons(teams: Teams, flavour: NodeFlavour) -> Document:
    """Pods that hold idle nodes against the autoscaler, the image pulled; the first real job evicts them at once."""
    name = f"phalanx-balloon-{flavour.name}"
    apart = {
        "labelSelector": {"matchLabels": {"app.kubernetes.io/name": name}},
        "topologyKey": "kubernetes.io/hostname",
    }
    container = _container(teams, "balloon", [], resources=_devices(teams, flavour))
    container["command"] = ["sleep", "infinity"]
    pod = {
        "priorityClassName": "phalanx-balloon",
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
        "nodeSelector": dict(flavour.labels),
        "tolerations": [{"key": teams.device, "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}},
        "securityContext": PERSON,
        "containers": [container],
    }
    return _workload(teams, "Deployment", name, pod, replicas=teams.balloons)


# Name, expression, for how long, what it means. Names of DCGM's exporter, kube-state-metrics, the API server and Kueue.
ALERTS = (
    ("GpuXidError", "DCGM_FI_DEV_XID_ERRORS > 0", "0m", "a GPU reported an XID error: {{ $labels.Hostname }}"),
    (
        "GpuMemoryUncorrectable",
        "increase(DCGM_FI_DEV_ECC_DBE_VOL_TOTAL[10m]) > 0",
        "0m",
        "uncorrectable memory errors: {{ $labels.Hostname }}",
    ),
    (
        "NvlinkErrors",
        "rate(DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL[10m]) > 100",
        "10m",
        "an NVLink repeats data: {{ $labels.Hostname }}",
    ),
    (
        "NodesCordoned",
        "sum(kube_node_spec_unschedulable) / count(kube_node_info) > 0.1",
        "15m",
        "more than a tenth of the nodes is cordoned; at a half, phalanx-health stops",
    ),
    (
        "ApiServerThrottles",
        'sum(rate(apiserver_request_total{code="429"}[5m])) > 1',
        "10m",
        "the API server throttles clients",
    ),
    (
        "ApiServerErrors",
        'sum(rate(apiserver_request_total{code=~"5.."}[5m])) > 1',
        "10m",
        "the API server answers with errors",
    ),
    (
        "QueueStuck",
        'sum by (cluster_queue) (kueue_pending_workloads{status="inadmissible"}) > 0',
        "1h",
        "jobs cannot be admitted to {{ $labels.cluster_queue }}: phalanx why says what they lack",
    ),
)


def prometheus_rules(teams: Teams) -> Document:
    """Alerts for whoever runs the Prometheus operator."""
    rules = [
        {"alert": name, "expr": expression, "for": lasts, "annotations": {"summary": said}}
        for name, expression, lasts, said in ALERTS
    ]
    groups = [{"name": "phalanx", "rules": rules}]
    return made(
        "monitoring.coreos.com/v1", "PrometheusRule", "phalanx", namespace=teams.namespace, spec={"groups": groups}
    )
