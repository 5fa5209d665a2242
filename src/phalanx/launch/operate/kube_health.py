"""Node health on Kubernetes: one list and one watch for all nodes; cordons carry their reason."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime

from phalanx.errors import PhalanxError
from phalanx.io.visible import one_line
from phalanx.launch.kube.client import Document, KubeClient, KubeRefusal, WatchExpired, conditions_of, kind_path
from phalanx.launch.kube.refusals import explain_refusal
from phalanx.launch.operate.health import HealthDecision, NodeHealth, decide_health

NODES = kind_path("v1", "nodes")
CONDITION = "PhalanxUnhealthy"  # set by phalanx-signals on its own node
REASON = "phalanx.cordoned"  # annotation: the reason of our cordon
# Conditions that blame a node when True: Phalanx's, and those of node-problem-detector and clouds.
BAD_CONDITIONS = (
    *(CONDITION, "KernelDeadlock", "ReadonlyFilesystem", "CorruptDockerOverlay2", "FrequentKubeletRestart"),
    *("FrequentContainerdRestart", "XidError", "GpuUnhealthy", "GPUFallenOffBus", "NVLinkError", "EccError"),
    *("DiskPressure", "NetworkUnavailable", "VMEventScheduled", "MaintenanceScheduled"),
)
# Taints by which clouds and tools announce that a node will be removed.
NOTICES = (
    *("cloud.google.com/impending-node-termination", "aws-node-termination-handler/scheduled-maintenance"),
    *("aws-node-termination-handler/spot-itn", "node.cloudprovider.kubernetes.io/shutdown", "nvsentinel"),
)
SETTLE_S = 300.0  # a node that has just joined may have no network yet
WATCH_S = 300.0
BACK_OFF_S = 5.0


def node_health(node: Document, now_s: float) -> NodeHealth:
    """Return a node's health with the conditions and notices against it."""
    spec = node.get("spec", {})
    blamed = []
    is_new = now_s - _unix_seconds(str(node["metadata"].get("creationTimestamp") or "")) < SETTLE_S
    for condition in conditions_of(node):
        kind = str(condition.get("type"))
        if (
            condition.get("status") == "True"
            and kind in BAD_CONDITIONS
            and not (is_new and kind == "NetworkUnavailable")
        ):
            message = one_line(str(condition.get("message") or condition.get("reason") or ""))[:120]
            blamed.append(message if kind == CONDITION and message else f"{kind}: {message}" if message else kind)
    for taint in spec.get("taints") or ():
        if str(taint.get("key")) in NOTICES:
            blamed.append(f"{taint.get('key')} {taint.get('value') or ''}".strip())
    is_ready = any(
        condition.get("type") == "Ready" and condition.get("status") == "True" for condition in conditions_of(node)
    )
    return NodeHealth(
        name=str(node["metadata"]["name"]),
        is_out=bool(spec.get("unschedulable")) or not is_ready,
        blamed=tuple(blamed),
        reason=str((node["metadata"].get("annotations") or {}).get(REASON) or ""),
    )


def check_nodes(client: KubeClient, *, apply: bool, now_s: float) -> tuple[list[NodeHealth], HealthDecision]:
    """Check all nodes once, and cordon the bad ones if asked."""
    health = [node_health(node, now_s) for node in _list_nodes(client)[0]]
    return health, _act(client, health, apply=apply)


def follow_nodes(
    client: KubeClient,
    *,
    apply: bool,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[tuple[list[NodeHealth], HealthDecision]]:
    """Check once, then at every change of one watch; a watch that has expired starts again with a new list."""
    while True:
        try:
            documents, version = _list_nodes(client)
            nodes: dict[str, Document] = {str(node["metadata"]["name"]): node for node in documents}
            views = {name: node_health(node, clock()) for name, node in nodes.items()}
            yield list(views.values()), _act(client, list(views.values()), apply=apply)
            while True:
                for kind, node in client.watch(NODES, version, timeout_s=WATCH_S):
                    version = str(node.get("metadata", {}).get("resourceVersion") or version)
                    if kind == "BOOKMARK":
                        continue
                    name, before = str(node["metadata"]["name"]), views.get(str(node["metadata"]["name"]))
                    if kind == "DELETED":
                        views.pop(name, None)
                        continue
                    views[name] = node_health(node, clock())
                    # Heartbeats change a node's status every few minutes, but nothing that is checked here.
                    if views[name] != before:
                        yield list(views.values()), _act(client, list(views.values()), apply=apply)
        except WatchExpired:
            continue
        except KubeRefusal as error:
            raise explain_refusal(error, client.access, what="nodes") from error
        except PhalanxError:
            if not apply:
                raise
            # The API does not answer: the cluster's state is unknown, so nothing is changed.
            sleep(BACK_OFF_S)


def _list_nodes(client: KubeClient) -> tuple[list[Document], str]:
    try:
        return client.list_objects(NODES)
    except KubeRefusal as error:
        raise explain_refusal(error, client.access, what="nodes") from error


def _act(client: KubeClient, nodes: list[NodeHealth], *, apply: bool) -> HealthDecision:
    decision = decide_health(nodes)
    if apply:
        for name, reason in decision.take_out:
            cordon_node(client, name, reason)
    return decision


def cordon_node(client: KubeClient, name: str, reason: str) -> None:
    """Cordon a node: it gets no new pods, and running pods stay. `kubectl uncordon` undoes it."""
    change: Mapping[str, object] = {"metadata": {"annotations": {REASON: reason}}, "spec": {"unschedulable": True}}
    try:
        client.patch(f"{NODES}/{name}", dict(change))
    except KubeRefusal as error:
        raise explain_refusal(error, client.access, what=f"node {name}") from error


def _unix_seconds(stamp: str) -> float:
    try:
        return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0
