"""A launch as Kubernetes objects (JobSet, TrainJob, native PodGroup or plain Job), and as SkyPilot or dstack task."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from typing import Any

import yaml

from phalanx.launch.pod_template import RUN_LABEL, host_command, job_spec, object_name
from phalanx.launch.resource_request import LaunchRequest

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
TIME_LABEL = "kueue.x-k8s.io/max-exec-time-seconds"
WHOLE = {
    "preferred": "kueue.x-k8s.io/podset-preferred-topology",
    "required": "kueue.x-k8s.io/podset-required-topology",
}
SLICE, SLICE_SIZE = "kueue.x-k8s.io/podset-slice-required-topology", "kueue.x-k8s.io/podset-slice-size"
GROUP = "w"  # the only replicated job of a JobSet
TRAIN_STEP = "trainer.kubeflow.org/trainjob-ancestor-step"
RESTARTS = 3  # of the whole gang, for failures that replacing a single host cannot fix
KEEP_S = 7 * 86400  # a finished job stays in the API for a week
Document = dict[str, Any]


def render_manifests(request: LaunchRequest, *, secret: str | None = None) -> str:
    """Return all objects of a launch as YAML; with `secret`, the run's key is among them."""
    name = object_name(request)
    documents = FLAVOURS[request.settings.flavour or "jobset"](request, name)
    # Policies do not apply to pods in the network of their node.
    if not request.settings.host_network:
        documents.append(network_policy(request, name))
    if secret is not None:
        documents.insert(
            0, _kubernetes_object("v1", "Secret", request, f"{name}-key", type="Opaque", stringData={"secret": secret})
        )
    head = ""
    if secret is None:
        head = (
            "# The run's key is not in this file. Before it is applied:\n"
            f"#   kubectl create secret generic {name}-key --from-literal=secret=$(openssl rand -hex 32)\n"
        )
    return head + yaml.safe_dump_all(documents, sort_keys=False, default_flow_style=False, width=120)


def topology_annotations(request: LaunchRequest) -> dict[str, str]:
    """Return Kueue's annotations for the placement: the whole job, and the groups that communicate most within it.

    `settings.topology` are node labels, the widest domain first. A group is requested only if it divides the pods
    evenly.
    """
    labels = request.settings.topology
    if not labels or not request.settings.queue:
        return {}
    annotations = {WHOLE[request.settings.placement or "preferred"]: labels[0]}
    groups = [group.hosts for group in request.placement if group.hosts < request.all_hosts]
    if groups and len(labels) > 1 and request.all_hosts % groups[0] == 0:
        annotations |= {SLICE: labels[-1], SLICE_SIZE: str(groups[0])}
    return annotations


def _kubernetes_object(api: str, kind: str, request: LaunchRequest, name: str, **body: Any) -> Document:
    metadata: dict[str, Any] = {"name": name, "labels": {RUN_LABEL: object_name(request)}}
    if request.settings.namespace:
        metadata["namespace"] = request.settings.namespace
    if request.group:
        metadata["labels"]["phalanx.group"] = request.group
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **body}


def _with_kueue(document: Document, request: LaunchRequest) -> Document:
    """Label a job for Kueue, which starts it when quota and topology allow."""
    if request.settings.queue:
        labels = document["metadata"]["labels"]
        labels[QUEUE_LABEL] = request.settings.queue
        labels[TIME_LABEL] = str(math.ceil(request.time_limit_s))
        if request.settings.qos:
            labels[PRIORITY_LABEL] = request.settings.qos
    return document


def _jobset_objects(request: LaunchRequest, name: str) -> list[Document]:
    spec = job_spec(request, f"{name}-{GROUP}-0-{{}}.{name}", annotations=topology_annotations(request))
    body = {
        "failurePolicy": {"maxRestarts": RESTARTS},
        # Hosts look up each other's addresses before their pods are ready.
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": name},
        "ttlSecondsAfterFinished": KEEP_S,
        "replicatedJobs": [{"name": GROUP, "replicas": 1, "template": {"spec": spec}}],
    }
    return [_with_kueue(_kubernetes_object("jobset.x-k8s.io/v1alpha2", "JobSet", request, name, spec=body), request)]


def _trainjob_objects(request: LaunchRequest, name: str) -> list[Document]:
    """Return a TrainingRuntime and a TrainJob that uses it; Kubeflow Trainer creates the JobSet."""
    api = "trainer.kubeflow.org/v1alpha1"
    spec = job_spec(request, f"{name}-node-0-{{}}.{name}", annotations=topology_annotations(request))
    template = {"metadata": {"labels": {TRAIN_STEP: "trainer"}}, "spec": spec}
    runtime = {
        "mlPolicy": {"numNodes": request.all_hosts},
        "template": {
            "spec": {
                # Hosts look up each other's addresses before their pods are ready.
                "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": name},
                "replicatedJobs": [{"name": "node", "replicas": 1, "template": template}],
            }
        },
    }
    # Kubeflow requires the trainer's container to be called "node".
    spec["template"]["spec"]["containers"][0]["name"] = "node"
    for rule in spec["podFailurePolicy"]["rules"]:
        if "onExitCodes" in rule:
            rule["onExitCodes"]["containerName"] = "node"
    train_spec = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name},
        "trainer": {"numNodes": request.all_hosts},
    }
    return [
        _kubernetes_object(api, "TrainingRuntime", request, name, spec=runtime),
        _with_kueue(_kubernetes_object(api, "TrainJob", request, name, spec=train_spec), request),
    ]


def _plain_job(request: LaunchRequest, name: str) -> list[Document]:
    """Return an indexed Job and the headless Service that gives its pods names."""
    spec = job_spec(request, f"{name}-{{}}.{name}", annotations=topology_annotations(request))
    spec["ttlSecondsAfterFinished"] = KEEP_S
    spec["template"]["spec"]["subdomain"] = name
    if request.settings.queue:
        spec["suspend"] = True  # Kueue resumes it
    service = _kubernetes_object(
        "v1",
        "Service",
        request,
        name,
        # Hosts look up each other's addresses before their pods are ready.
        spec={"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {RUN_LABEL: name}},
    )
    return [service, _with_kueue(_kubernetes_object("batch/v1", "Job", request, name, spec=spec), request)]


def _podgroup_objects(request: LaunchRequest, name: str) -> list[Document]:
    """Return the scheduler's own gang (Kubernetes 1.37, gate GenericWorkload): all pods are bound, or none."""
    group = _kubernetes_object(
        "scheduling.k8s.io/v1beta1",
        "PodGroup",
        request,
        name,
        spec={"schedulingPolicy": {"gang": {"minCount": request.all_hosts}}},
    )
    service, job = _plain_job(request, name)
    job["spec"]["template"]["spec"]["schedulingGroup"] = {"podGroupName": name}
    return [group, service, job]


FLAVOURS: dict[str, Callable[[LaunchRequest, str], list[Document]]] = {
    "jobset": _jobset_objects,
    "trainjob": _trainjob_objects,
    "podgroup": _podgroup_objects,
    "job": _plain_job,
}


def network_policy(request: LaunchRequest, name: str) -> Document:
    """Return the policy of a run's pods: they reach only each other, DNS, and an object store."""
    run_pods = {"podSelector": {"matchLabels": {RUN_LABEL: name}}}
    dns = {"ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]}
    egress: list[dict[str, Any]] = [{"to": [run_pods]}, dns]
    if "://" in request.checkpoint:
        egress.append({"ports": [{"protocol": "TCP", "port": 443}]})
    return _kubernetes_object(
        "networking.k8s.io/v1",
        "NetworkPolicy",
        request,
        name,
        spec={
            "podSelector": {"matchLabels": {RUN_LABEL: name}},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [run_pods]}],
            "egress": egress,
        },
    )


# ---- files for other tools ----------------------------------------------------------------------------------------


def render_skypilot(request: LaunchRequest) -> str:
    """Return a SkyPilot task; its nodes are hosts, in the order of SKYPILOT_NODE_IPS."""
    resources: dict[str, Any] = {"image_id": f"docker:{request.settings.image}"} if request.settings.image else {}
    if request.accelerator != "cpu":
        resources["accelerators"] = f"{request.accelerator.split('-')[0]}:{request.devices_per_host}"
    task = {
        "name": object_name(request),
        "num_nodes": request.all_hosts,
        "resources": resources,
        "envs": dict(sorted(request.environ.items())),
        "run": _shell_command(request, '"$(echo "$SKYPILOT_NODE_IPS" | tr "\\n" ,)"', '"$SKYPILOT_NODE_RANK"'),
    }
    return yaml.safe_dump(task, sort_keys=False, width=120)


def render_dstack(request: LaunchRequest) -> str:
    """Return a dstack task; its nodes are hosts, in the order of DSTACK_NODES_IPS."""
    task: dict[str, Any] = {
        "type": "task",
        "name": object_name(request),
        "nodes": request.all_hosts,
        "env": [f"{name}={value}" for name, value in sorted(request.environ.items())],
        "commands": [_shell_command(request, '"$(echo "$DSTACK_NODES_IPS" | tr "\\n" ,)"', '"$DSTACK_NODE_RANK"')],
    }
    if request.settings.image:
        task["image"] = request.settings.image
    if request.accelerator != "cpu":
        task["resources"] = {"gpu": f"{request.accelerator.split('-')[0]}:{request.devices_per_host}"}
    return yaml.safe_dump(task, sort_keys=False, width=120)


def _shell_command(request: LaunchRequest, addresses: str, index: str) -> str:
    """Return the command of a host; its names and number are the tool's variables, the key is in the run folder."""
    return f"{shlex.join(host_command(request))} --names {addresses} --index {index}"
