"""The pod of one host: what runs in it, with which rights, volumes and network. docs/launch-kubernetes.md says why."""

from __future__ import annotations

import os
import re
from pathlib import PurePosixPath
from typing import Any

from phalanx.launch.resource_request import LaunchRequest
from phalanx.launch.system import REQUEUE

POD_MODULE = "phalanx.launch.pod"
CONTAINER = "agent"
USER = 1000  # where root launches: no root in the container
RUN_LABEL = "phalanx.run"
KEY_FOLDER = "/etc/phalanx"  # the Secret with the run's key
RETRIES_PER_INDEX = 6  # of one host, for failures that are its own
USER_ERROR = 2  # exit code: trying again would fail the same way
VENDORS = {"amd": "amd.com/gpu"}


def object_name(request: LaunchRequest) -> str:
    """The run's name as Kubernetes takes it: lower case, digits and dashes, short enough for host names made of it."""
    plain = re.sub(r"[^a-z0-9]+", "-", PurePosixPath(request.run).name.lower()).strip("-")
    return (plain if plain[:1].isalpha() else f"run-{plain}")[:45].rstrip("-")


def host_command(request: LaunchRequest) -> list[str]:
    """What a host runs, without its name."""
    words = [request.settings.python or "python", "-P", "-m", POD_MODULE, request.run]
    words += ["--hosts", str(request.hosts), "--spares", str(request.spares), "--slots", str(request.devices_per_host)]
    return words + (["--allow-code"] if "--allow-code" in request.agent else [])


def pod_template(request: LaunchRequest, host_pattern: str, *, annotations: dict[str, str]) -> dict[str, Any]:
    """A PodTemplateSpec for every host of the run."""
    settings = request.settings
    metadata: dict[str, Any] = {"labels": {RUN_LABEL: object_name(request)}}
    if annotations:
        metadata["annotations"] = annotations
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": int(request.save_s),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": run_user(),
            "runAsGroup": run_user(),
            "fsGroup": run_user(),
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_host_container(request, host_pattern)],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": settings.claim}},
            {"name": "key", "secret": {"secretName": f"{object_name(request)}-key", "defaultMode": 0o440}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    if settings.host_network:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if request.accelerator != "cpu":
        spec["tolerations"] = [{"key": gpu_resource(request), "operator": "Exists", "effect": "NoSchedule"}]
    return {"metadata": metadata, "spec": spec}


def run_user() -> int:
    """Who made the run folder, and so may write into it; agents refuse the key of another user."""
    return os.getuid() or USER


def gpu_resource(request: LaunchRequest) -> str:
    """The extended resource of the accelerator."""
    kind = "amd" if request.accelerator.upper().startswith("MI") else "nvidia"
    return VENDORS.get(kind, "nvidia.com/gpu")


def _host_container(request: LaunchRequest, host_pattern: str) -> dict[str, Any]:
    settings = request.settings
    counted: dict[str, Any] = {}
    if request.accelerator != "cpu":
        counted[gpu_resource(request)] = request.devices_per_host
    rights: dict[str, Any] = {"drop": ["ALL"]}
    if settings.rdma:
        counted[settings.rdma] = 1
        rights["add"] = ["IPC_LOCK"]  # RDMA pins memory
    requests = dict(counted) if counted else {"cpu": request.devices_per_host}
    variables = {**request.environ, "HOME": "/tmp", "TMPDIR": "/tmp"}
    env: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in sorted(variables.items())]
    env += [
        _pod_field("PHALANX_POD_IP", "status.podIP"),
        _pod_field("PHALANX_NODE", "spec.nodeName"),
        _pod_field("PHALANX_ATTEMPT", "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"),
    ]
    return {
        "name": CONTAINER,
        "image": settings.image,
        "command": [*host_command(request), "--names", host_pattern, "--key", f"{KEY_FOLDER}/secret"],
        "env": env,
        "resources": {"requests": requests, "limits": counted} if counted else {"requests": requests},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": rights,
        },
        "volumeMounts": [
            {"name": "runs", "mountPath": str(request.volume_folder)},
            {"name": "key", "mountPath": KEY_FOLDER, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }


def _pod_field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def job_spec(request: LaunchRequest, host_pattern: str, *, annotations: dict[str, str]) -> dict[str, Any]:
    """An indexed Job: a pod per host, of which a failed one is replaced alone."""
    return {
        "parallelism": request.all_hosts,
        "completions": request.all_hosts,
        "completionMode": "Indexed",
        "backoffLimitPerIndex": RETRIES_PER_INDEX,
        "maxFailedIndexes": request.spares,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                # Preempted, drained, or its node is gone: not the job's fault, and no retry is used up.
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "Ignore", "onExitCodes": _exit_codes(REQUEUE)},
                {"action": "FailJob", "onExitCodes": _exit_codes(USER_ERROR)},
            ]
        },
        "template": pod_template(request, host_pattern, annotations=annotations),
    }


def _exit_codes(code: int) -> dict[str, Any]:
    return {"containerName": CONTAINER, "operator": "In", "values": [code]}
