"""Checks of requests against the live cluster before anything is submitted; all problems are reported together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from phalanx.errors import Problem, nearest
from phalanx.launch.kube.client import Document, KubeClient, KubeRefusal, has_condition, kind_path
from phalanx.launch.kube.refusals import explain_refusal
from phalanx.launch.pod_template import gpu_resource
from phalanx.launch.resource_request import LaunchRequest
from phalanx.units import plural

KUEUE = "kueue.x-k8s.io/v1beta2"
JOBSET = "jobset.x-k8s.io/v1alpha2"
TRAINER = "trainer.kubeflow.org/v1alpha1"
SCHEDULING = "scheduling.k8s.io/v1beta1"
# API and resource of the flavour's objects, their owner, and the remedy if they are missing.
FLAVOUR_APIS = {
    "jobset": [(JOBSET, "jobsets", "JobSet", "install JobSet 0.8 or newer, or use --flavour job")],
    "trainjob": [(TRAINER, "trainjobs", "Kubeflow Trainer", "install Kubeflow Trainer 2.3, or use --flavour jobset")],
    "podgroup": [
        (SCHEDULING, "podgroups", "PodGroup", "Kubernetes 1.37 with the gate GenericWorkload, or --flavour jobset")
    ],
    "job": [],
}
KUEUE_FIX = "install Kueue 0.14 or newer, or leave --queue out: then nothing counts quota or places by topology"
# Rights that launch, why, logs and cancel need: group, resource, verbs.
RIGHTS: dict[str, list[tuple[str, str, tuple[str, ...]]]] = {
    "jobset": [("jobset.x-k8s.io", "jobsets", ("get", "list", "create", "patch", "delete"))],
    "trainjob": [
        ("trainer.kubeflow.org", "trainjobs", ("get", "list", "create", "patch", "delete")),
        ("trainer.kubeflow.org", "trainingruntimes", ("create", "patch", "delete")),
    ],
    "podgroup": [
        ("scheduling.k8s.io", "podgroups", ("create", "patch", "delete")),
        ("batch", "jobs", ("get", "list", "create", "patch", "delete")),
        ("", "services", ("create", "patch", "delete")),
    ],
    "job": [
        ("batch", "jobs", ("get", "list", "create", "patch", "delete")),
        ("", "services", ("create", "patch", "delete")),
    ],
}
SHARED_RIGHTS = [
    ("", "secrets", ("create", "patch", "delete")),
    ("", "pods", ("get", "list")),
    ("", "pods/log", ("get",)),
    ("networking.k8s.io", "networkpolicies", ("create", "patch", "delete")),
]
SUFFIXES = {
    "": 1.0,
    "m": 1e-3,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "P": 1e15,
    "E": 1e18,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
    "Pi": 2.0**50,
    "Ei": 2.0**60,
}
_QUANTITY = re.compile(r"([0-9.]+(?:e[0-9]+)?)(m|k|[MGTPE]i?|Ki)?")


def check_cluster(
    client: KubeClient, requests: Sequence[LaunchRequest], namespace: str
) -> tuple[list[Problem], list[str]]:
    """Return problems of the requests and remarks; raises UserError or SystemFailure if nothing can be queried."""
    try:
        return _Preflight(client, namespace).check(requests)
    except KubeRefusal as error:
        raise explain_refusal(error, client.access, what=f"namespace {namespace}") from error


class _Preflight:
    def __init__(self, client: KubeClient, namespace: str) -> None:
        self.client, self.namespace = client, namespace
        self.problems: list[Problem] = []
        self.remarks: list[str] = []

    def check(self, requests: Sequence[LaunchRequest]) -> tuple[list[Problem], list[str]]:
        flavours = {request.settings.flavour or "jobset" for request in requests}
        self._check_rights(flavours, is_open=all(request.settings.host_network for request in requests))
        if not self._check_namespace():
            return self.problems, self.remarks  # every other object is in the namespace
        for flavour in sorted(flavours):
            for api, plural_name, owner, fix in FLAVOUR_APIS[flavour]:
                if not self._has_kind(api, plural_name):
                    what = f"the cluster has no {owner} ({api})"
                    self.problems.append(Problem(where=f"--flavour {flavour}", what=what, fix=fix))
        for claim in sorted({request.settings.claim for request in requests}):
            self._check_claim(
                claim, hosts=max(request.all_hosts for request in requests if request.settings.claim == claim)
            )
        queues = sorted({request.settings.queue for request in requests if request.settings.queue})
        if queues and not self._has_kind(KUEUE, "localqueues"):
            self.problems.append(
                Problem(where=f"--queue {queues[0]}", what=f"the cluster has no Kueue ({KUEUE})", fix=KUEUE_FIX)
            )
            queues = []
        for name in queues:
            self._check_queue(name, [request for request in requests if request.settings.queue == name])
        self._check_nodes(requests)
        return list(dict.fromkeys(self.problems)), list(dict.fromkeys(self.remarks))

    def _has_kind(self, api: str, plural_name: str) -> bool:
        api_resources = self.client.get(f"/apis/{api}")
        return api_resources is not None and plural_name in {
            resource.get("name") for resource in api_resources.get("resources") or ()
        }

    def _optional(self, path: str) -> Document | None:
        """Return an object, {} if there is none, or None if this user may not read it, so that it is not checked."""
        try:
            return self.client.get(path) or {}
        except KubeRefusal as error:
            if error.status == 403:
                return None
            raise

    def _check_namespace(self) -> bool:
        if self._optional(f"/api/v1/namespaces/{self.namespace}") == {}:
            self.problems.append(
                Problem(
                    where=f"namespace {self.namespace}",
                    what="does not exist in this cluster",
                    fix="set launch.namespace to yours, or ask the operator for one",
                )
            )
            return False
        return True

    def _check_rights(self, flavours: set[str], *, is_open: bool) -> None:
        """Ask the API what this user may do, and report all missing rights in one sentence."""
        rights = [
            *SHARED_RIGHTS[: -1 if is_open else None],
            *(right for name in sorted(flavours) for right in RIGHTS[name]),
        ]
        missing = []
        for group, resource, verbs in rights:
            refused_verbs = [verb for verb in verbs if not self._may(group, resource, verb)]
            if refused_verbs:
                missing.append(f"{'/'.join(refused_verbs)} {resource}{f'.{group}' if group else ''}")
        if missing:
            self.problems.append(
                Problem(
                    where=f"namespace {self.namespace}",
                    what=f"you may not {', '.join(missing)} there",
                    fix="ask the operator for the role phalanx-user (phalanx cluster init --on k8s makes it), "
                    "or set launch.namespace to yours",
                )
            )

    def _may(self, group: str, resource: str, verb: str) -> bool:
        name, _, sub = resource.partition("/")
        attributes = {"namespace": self.namespace, "verb": verb, "group": group, "resource": name, "subresource": sub}
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        answer = self.client.post("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body)
        return bool((answer.get("status") or {}).get("allowed"))

    def _check_claim(self, name: str, *, hosts: int) -> None:
        path = kind_path("v1", "persistentvolumeclaims", self.namespace)
        claim = self._optional(f"{path}/{name}")
        if claim is None:
            return
        if not claim:
            claims = self._optional(path) or {}
            names = [item["metadata"]["name"] for item in claims.get("items") or ()]
            suggestion = nearest(name, names)
            fix = (
                f"did you mean {suggestion}?"
                if suggestion
                else f"set launch.claim to one of: {', '.join(names) or 'none yet'}"
            )
            what = f"namespace {self.namespace} has no such PersistentVolumeClaim"
            self.problems.append(Problem(where=f"launch.claim {name}", what=what, fix=fix))
            return
        modes = claim.get("spec", {}).get("accessModes") or []
        if hosts > 1 and "ReadWriteMany" not in modes:
            self.problems.append(
                Problem(
                    where=f"launch.claim {name}",
                    what=f"has access mode {', '.join(modes)}, so {plural(hosts, 'host')} cannot share it",
                    fix="use a claim with ReadWriteMany",
                )
            )
        if (claim.get("status") or {}).get("phase") == "Lost":
            self.problems.append(
                Problem(where=f"launch.claim {name}", what="has lost its volume", fix="ask the operator")
            )

    # ---- quota -------------------------------------------------------------------------------------------------------

    def _check_queue(self, name: str, requests: Sequence[LaunchRequest]) -> None:
        path = kind_path(KUEUE, "localqueues", self.namespace)
        queue = self._optional(f"{path}/{name}")
        if queue is None:
            return
        if not queue:
            queues = self._optional(path) or {}
            names = [item["metadata"]["name"] for item in queues.get("items") or ()]
            suggestion = nearest(name, names)
            queue_names = f"the queues are {', '.join(names)}" if names else "it has none yet: ask the operator"
            fix = f"did you mean {suggestion}? {queue_names}" if suggestion else queue_names
            what = f"namespace {self.namespace} has no such LocalQueue"
            self.problems.append(Problem(where=f"--queue {name}", what=what, fix=fix))
            return
        cluster_queue = str(queue.get("spec", {}).get("clusterQueue") or "")
        cluster_queue_object = self._optional(f"{kind_path(KUEUE, 'clusterqueues')}/{cluster_queue}")
        if cluster_queue_object is None:
            return
        if not cluster_queue_object:
            what = f"leads to the ClusterQueue {cluster_queue}, which does not exist"
            self.problems.append(Problem(where=f"--queue {name}", what=what, fix="ask the operator"))
            return
        stop_policy = cluster_queue_object.get("spec", {}).get("stopPolicy") or queue.get("spec", {}).get("stopPolicy")
        if stop_policy and stop_policy != "None":
            self.remarks.append(f"queue {name} is stopped ({stop_policy}): the job waits until the operator opens it")
        elif (inactive := has_condition(cluster_queue_object, "Active", "False")) is not None:
            self.remarks.append(f"queue {name} is not active: {inactive.get('message')}")
        for request in requests:
            self._check_quota(request, name, cluster_queue_object)

    def _check_quota(self, request: LaunchRequest, name: str, cluster_queue: Document) -> None:
        resource = gpu_resource(request) if request.accelerator != "cpu" else "cpu"
        wanted_quota = request.all_hosts * request.devices_per_host
        max_quota = self._most_quota(cluster_queue, resource)
        if max_quota is None:
            self.problems.append(
                Problem(
                    where=f"--queue {name}",
                    what=f"has no quota of {resource}, which {request.name} asks for",
                    fix="use another --queue, or ask the operator to add it to the ClusterQueue",
                )
            )
        elif wanted_quota > max_quota:
            self.problems.append(
                Problem(
                    where=f"--queue {name}",
                    what=f"{request.name} asks for {wanted_quota:,} {resource} "
                    f"({plural(request.all_hosts, 'host')} × {request.devices_per_host}), "
                    f"but the queue gets at most {max_quota:,.0f}, borrowed ones included",
                    fix="use fewer --hosts or --spares, or another --queue",
                )
            )

    def _most_quota(self, cluster_queue: Document, resource: str) -> float | None:
        """Return the most a queue can ever have: its own quota and what it may borrow; None without any quota.

        Kueue gives one flavour to one pod set, so the largest of the flavours counts.
        """
        spec = cluster_queue.get("spec", {})
        own_quotas = _flavour_quotas(spec, resource)
        if not own_quotas:
            return None
        cohort = str(spec.get("cohortName") or "")
        lendable_by_flavour: dict[str, float] = {}
        if cohort:
            try:
                queues, _ = self.client.list_objects(kind_path(KUEUE, "clusterqueues"))
            except KubeRefusal as error:
                if error.status != 403:
                    raise
                return float("inf")
            name = cluster_queue["metadata"]["name"]
            for queue in queues:
                if queue.get("spec", {}).get("cohortName") == cohort and queue["metadata"]["name"] != name:
                    for flavour, quota in _flavour_quotas(queue["spec"], resource).items():
                        limit = quota.get("lendingLimit")
                        lendable = parse_quantity(quota.get("nominalQuota", 0) if limit is None else limit)
                        lendable_by_flavour[flavour] = lendable_by_flavour.get(flavour, 0.0) + lendable
        max_quota = 0.0
        for flavour, quota in own_quotas.items():
            limit = quota.get("borrowingLimit")
            borrowed = (
                lendable_by_flavour.get(flavour, 0.0)
                if limit is None
                else min(lendable_by_flavour.get(flavour, 0.0), parse_quantity(limit))
            )
            max_quota = max(max_quota, parse_quantity(quota.get("nominalQuota", 0)) + borrowed)
        return max_quota

    def _check_nodes(self, requests: Sequence[LaunchRequest]) -> None:
        """Report requests for more nodes than exist, if this user may list nodes."""
        try:
            nodes, _ = self.client.list_objects(kind_path("v1", "nodes"))
        except KubeRefusal as error:
            if error.status == 403:
                return
            raise
        for request in requests:
            resource = gpu_resource(request) if request.accelerator != "cpu" else "cpu"
            able = [node for node in nodes if _allocatable(node, resource) >= request.devices_per_host]
            usable = [node for node in able if is_usable(node)]
            if len(able) < request.all_hosts:
                self.problems.append(
                    Problem(
                        where=request.name,
                        what=f"asks for {plural(request.all_hosts, 'node')} with {request.devices_per_host} "
                        f"{resource}, but the cluster has {len(able)}",
                        fix="use fewer --hosts or --spares, or plan for what is there (--set cluster.spec=…)",
                    )
                )
            elif len(usable) < request.all_hosts:
                self.remarks.append(
                    f"{len(usable)} of {plural(len(able), 'node')} can be used now: {request.name} waits for more"
                )


def is_usable(node: Document) -> bool:
    """Return whether a node is ready and not cordoned."""
    return not node.get("spec", {}).get("unschedulable") and has_condition(node, "Ready") is not None


def _allocatable(node: Document, resource: str) -> float:
    return parse_quantity(((node.get("status") or {}).get("allocatable") or {}).get(resource, 0))


def _flavour_quotas(spec: Document, resource: str) -> dict[str, dict[str, Any]]:
    return {
        str(flavour.get("name")): quota
        for group in spec.get("resourceGroups") or ()
        for flavour in group.get("flavors") or ()
        for quota in flavour.get("resources") or ()
        if quota.get("name") == resource
    }


def parse_quantity(value: object) -> float:
    """Parse a quantity as Kubernetes writes it; 0 if it is invalid.

    >>> [parse_quantity(text) for text in ("8", "500m", "2k", "1Gi", 4)]
    [8.0, 0.5, 2000.0, 1073741824.0, 4.0]
    """
    match = _QUANTITY.fullmatch(str(value))
    if match is None:
        return 0.0
    try:
        return float(match[1]) * SUFFIXES[match[2] or ""]
    except ValueError:
        return 0.0
