"""A teams.toml as objects of Kubernetes and Kueue: rights, quotas, priorities and placement."""

from __future__ import annotations

from typing import Any

from phalanx.launch.kube.client import Document
from phalanx.launch.kube.preflight import KUEUE, RIGHTS, SHARED_RIGHTS
from phalanx.launch.operate.kube_object import made, quantity
from phalanx.launch.operate.operator_pods import operator_objects, prometheus_rules
from phalanx.launch.operate.teams import HOSTNAME, NodeFlavour, Team, Teams

USER_ROLE = "phalanx-user"
RBAC = "rbac.authorization.k8s.io/v1"
# Rights besides those of a launch, for `why` and the preflight.
READ_RIGHTS = [
    ("", "events", ("get", "list")),
    ("", "persistentvolumeclaims", ("get", "list")),
    ("kueue.x-k8s.io", "workloads", ("get", "list", "patch")),
    ("kueue.x-k8s.io", "localqueues", ("get", "list")),
]


def cluster_objects(teams: Teams) -> list[Document]:
    """Return all objects, in an order in which they can be applied."""
    objects = [_namespace(teams.namespace)]
    objects += [_namespace(team.namespace) for team in teams.teams if team.namespace != teams.namespace]
    objects += [_priority(name, value) for name, value in sorted(teams.priorities.items(), key=lambda item: item[1])]
    levels = [{"nodeLabel": label} for label in (*teams.topology, HOSTNAME)]
    objects.append(made(KUEUE, "Topology", teams.name, spec={"levels": levels}))
    objects += [_flavour(teams, flavour) for flavour in teams.flavours]
    objects += [_cluster_queue(teams, team) for team in teams.teams]
    objects += [
        made(KUEUE, "LocalQueue", team.name, namespace=team.namespace, spec={"clusterQueue": team.name})
        for team in teams.teams
    ]
    objects += _user_rights(teams)
    objects += operator_objects(teams)
    return [*objects, *([prometheus_rules(teams)] if teams.prometheus else [])]


def _namespace(name: str) -> Document:
    return made("v1", "Namespace", name)


def _priority(name: str, value: int) -> Document:
    return made(KUEUE, "WorkloadPriorityClass", name, value=value, description=f"launch.qos = {name!r}")


def _flavour(teams: Teams, flavour: NodeFlavour) -> Document:
    spec: dict[str, Any] = {"nodeLabels": dict(flavour.labels), "topologyName": teams.name}
    # Nodes with devices are tainted, so that no other pods are placed on them.
    if teams.device in flavour.resources:
        spec["tolerations"] = [{"key": teams.device, "operator": "Exists", "effect": "NoSchedule"}]
    return made(KUEUE, "ResourceFlavor", flavour.name, spec=spec)


def _cluster_queue(teams: Teams, team: Team) -> Document:
    """Return a team's queue: it owns a share, lends it while idle and reclaims it; higher priorities go first."""
    # Kueue requires every resource in one group, and every flavour of a group to state a quota for each.
    names = sorted({name for flavour in teams.flavours for name in flavour.resources})
    flavours = []
    for flavour in teams.flavours:
        share, max_nodes = team.share.get(flavour.name, 0), team.most.get(flavour.name)
        quotas = []
        for name in names:
            amount = flavour.resources.get(name, 0.0)
            quota = {"name": name, "nominalQuota": quantity(share * amount)}
            if max_nodes is not None:
                quota["borrowingLimit"] = quantity(max(0, max_nodes - share) * amount)
            quotas.append(quota)
        flavours.append({"name": flavour.name, "resources": quotas})
    spec = {
        "cohortName": teams.name,
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": team.namespace}},
        # A job that does not fit now must not block smaller ones behind it.
        "queueingStrategy": "BestEffortFIFO",
        "preemption": {"reclaimWithinCohort": "Any", "withinClusterQueue": "LowerPriority"},
        "fairSharing": {"weight": quantity(team.weight)},
        "resourceGroups": [{"coveredResources": names, "flavors": flavours}],
    }
    return made(KUEUE, "ClusterQueue", team.name, spec=spec)


def _user_rights(teams: Teams) -> list[Document]:
    """Return the rights that a user needs to launch, query and cancel in the team's namespace, and no others."""
    verbs_by_resource: dict[tuple[str, str], set[str]] = {}
    for group, resource, verbs in [
        *SHARED_RIGHTS,
        *(right for rights in RIGHTS.values() for right in rights),
        *READ_RIGHTS,
    ]:
        verbs_by_resource.setdefault((group, resource), set()).update(verbs)
    rules = [
        {"apiGroups": [group], "resources": [resource], "verbs": sorted(verbs)}
        for (group, resource), verbs in sorted(verbs_by_resource.items())
    ]
    objects = [made(RBAC, "ClusterRole", USER_ROLE, rules=rules)]
    for team in teams.teams:
        people = [{"apiGroup": RBAC.partition("/")[0], "kind": "Group", "name": name} for name in team.groups]
        people += [{"apiGroup": RBAC.partition("/")[0], "kind": "User", "name": name} for name in team.users]
        if people:
            role = {"apiGroup": RBAC.partition("/")[0], "kind": "ClusterRole", "name": USER_ROLE}
            objects.append(
                made(RBAC, "RoleBinding", USER_ROLE, namespace=team.namespace, subjects=people, roleRef=role)
            )
    return objects
