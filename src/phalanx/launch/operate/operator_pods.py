"""The operator's pods: preflight of new nodes, signals of each node, the health controller, balloons.

Nodes join with the taint `phalanx.preflight=pending:NoSchedule` and the label `phalanx.preflight=pending` (kubelet's
--register-with-taints and --node-labels). The preflight takes all devices of such a node; when it passes it removes
the taint and sets the label to `passed`, so that the DaemonSet leaves the node and frees its devices.
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
    """Return accounts with their rights, the DaemonSets, the controller, and balloons."""
    read_nodes = {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "patch", "watch"]}
    patch_status = {"apiGroups": [""], "resources": ["nodes/status"], "verbs": ["patch"]}
    objects = _account(teams, "phalanx-node", [{**read_nodes, "verbs": ["get", "patch"]}, patch_status])
    objects += _account(teams, "phalanx-health", [read_nodes])
    objects += [_preflight(teams, flavour) for flavour in teams.flavours]
    objects += [_signals(teams), _health_controller(teams)]
    if teams.balloons:
        description = "holds idle nodes until a job wants them"
        objects.append(
            made("scheduling.k8s.io/v1", "PriorityClass", "phalanx-balloon", value=-10, description=description)
        )
        objects += [_balloons(teams, flavour) for flavour in teams.flavours]
    return objects


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
    pod["volumes"] = [
        {"name": "tmp", "emptyDir": {}},
        *(volume for volume in pod["volumes"] if volume["name"] != "tmp"),
    ]
    template = {"metadata": {"labels": labels}, "spec": pod}
    body = {"selector": {"matchLabels": labels}, "template": template, **spec}
    return made("apps/v1", kind, name, namespace=teams.namespace, spec=body)


def _devices(teams: Teams, flavour: NodeFlavour) -> Document:
    """Return requests for all devices of a node; for nodes without devices, a request for one CPU."""
    count = flavour.resources.get(teams.device, 0.0)
    requested = {teams.device: quantity(count)} if count else {}
    return {"requests": requested, "limits": requested} if requested else {"requests": {"cpu": "1"}}


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
    """Return the DaemonSet that reads its node's kernel log and counters, and writes to the API only on changes."""
    log = {"name": "kmsg", "hostPath": {"path": "/dev/kmsg", "type": "CharDevice"}}
    system = {"name": "sys", "hostPath": {"path": "/sys", "type": "Directory"}}
    mounts = [
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "kmsg", "mountPath": "/dev/kmsg", "readOnly": True},
        {"name": "sys", "mountPath": "/host/sys", "readOnly": True},
    ]
    # The kernel's log is readable only by root, and a device file only by privileged pods; nothing of the node is
    # writable.
    rights = {"privileged": True, "readOnlyRootFilesystem": True}
    container = _container(
        teams,
        "signals",
        [NODE_MODULE, "follow", "--sys", "/host/sys"],
        resources={"requests": {"cpu": "10m", "memory": "128Mi"}},
        volumeMounts=mounts,
        securityContext=rights,
    )
    # To read counters, not to compute.
    container["env"].append({"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"})
    pod = {
        "serviceAccountName": "phalanx-node",
        "tolerations": EVERYWHERE,
        "containers": [container],
        "volumes": [log, system],
    }
    return _workload(teams, "DaemonSet", "phalanx-signals", pod)


def _health_controller(teams: Teams) -> Document:
    """Return the health controller, a single pod with one watch for the whole cluster."""
    command = ["phalanx", "cluster", "health", "--on", "k8s", "--apply", "--follow"]
    pod = {
        "serviceAccountName": "phalanx-health",
        "securityContext": PERSON,
        "containers": [_container(teams, "health", command, resources={"requests": {"cpu": "50m", "memory": "256Mi"}})],
    }
    return _workload(teams, "Deployment", "phalanx-health", pod, replicas=1, strategy={"type": "Recreate"})


def _balloons(teams: Teams, flavour: NodeFlavour) -> Document:
    """Return pods that keep idle nodes from the autoscaler, with the image pulled, until a job evicts them."""
    name = f"phalanx-balloon-{flavour.name}"
    anti_affinity = {
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
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [anti_affinity]}},
        "securityContext": PERSON,
        "containers": [container],
    }
    return _workload(teams, "Deployment", name, pod, replicas=teams.balloons)


# Name, expression, duration, meaning. Metrics of DCGM's exporter, kube-state-metrics, the API server and Kueue.
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
    """Return alerts for clusters with the Prometheus operator."""
    rules = [
        {"alert": name, "expr": expression, "for": lasts, "annotations": {"summary": summary}}
        for name, expression, lasts, summary in ALERTS
    ]
    groups = [{"name": "phalanx", "rules": rules}]
    return made(
        "monitoring.coreos.com/v1", "PrometheusRule", "phalanx", namespace=teams.namespace, spec={"groups": groups}
    )
