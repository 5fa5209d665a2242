"""The pod of one host: its command, rights, volumes and network. docs/launch-kubernetes.md has the reasons."""

from __future__ import annotations

import os
import re
from pathlib import PurePosixPath
from typing import Any

from phalanx.launch.resource_request import LaunchRequest
from phalanx.launch.system import REQUEUE

POD_MODULE = "phalanx.launch.pod"
CONTAINER = "agent"
USER = 1000  # used when root launches, so that the container does not run as root
RUN_LABEL = "phalanx.run"
KEY_FOLDER = "/etc/phalanx"  # the Secret with the run's key
RETRIES_PER_INDEX = 6  # for failures of one host
USER_ERROR = 2  # exit code: another attempt would fail the same way
VENDORS = {"amd": "amd.com/gpu"}


def object_name(request: LaunchRequest) -> str:
    """Return the run's name as a Kubernetes name: lower case, digits and dashes, short enough for host names."""
    cleaned = re.sub(r"[^a-z0-9]+", "-", PurePosixPath(request.run).name.lower()).strip("-")
    return (cleaned if cleaned[:1].isalpha() else f"run-{cleaned}")[:45].rstrip("-")


def host_command(request: LaunchRequest) -> list[str]:
    """Return the command of a host, without its name."""
    words = [request.settings.python or "python", "-P", "-m", POD_MODULE, request.run]
    words += ["--hosts", str(request.hosts), "--spares", str(request.spares), "--slots", str(request.devices_per_host)]
    return words + (["--allow-code"] if "--allow-code" in request.agent else [])


def pod_template(request: LaunchRequest, host_pattern: str, *, annotations: dict[str, str]) -> dict[str, Any]:
    """Return the PodTemplateSpec for every host of the run."""
    settings = request.settings
    metadata: dict[str, Any] = {"labels": {RUN_LABEL: object_name(request)}}
    if annotations:
        metadata["annotations"] = annotations
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        # Training needs no rights in the cluster, and no variables of other services.
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": int(request.save_s),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": run_user(),
            "runAsGroup": run_user(),
            "fsGroup": run_user(),
            # The default policy changes the owner of every file on the volume at each start.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_host_container(request, host_pattern)],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": settings.claim}},
            {"name": "key", "secret": {"secretName": f"{object_name(request)}-key", "defaultMode": 0o440}},
            {"name": "tmp", "emptyDir": {}},
            # A container's default /dev/shm of 64 MiB is too small for NCCL and data loaders.
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    if settings.host_network:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if request.accelerator != "cpu":
        spec["tolerations"] = [{"key": gpu_resource(request), "operator": "Exists", "effect": "NoSchedule"}]
    return {"metadata": metadata, "spec": spec}


def run_user() -> int:
    """Return the user who owns the run folder and may write into it; agents refuse the key of another user."""
    return os.getuid() or USER


def gpu_resource(request: LaunchRequest) -> str:
    """Return the extended resource of the accelerator."""
    kind = "amd" if request.accelerator.upper().startswith("MI") else "nvidia"
    return VENDORS.get(kind, "nvidia.com/gpu")


def _host_container(request: LaunchRequest, host_pattern: str) -> dict[str, Any]:
    settings = request.settings
    device_counts: dict[str, Any] = {}
    if request.accelerator != "cpu":
        device_counts[gpu_resource(request)] = request.devices_per_host
    rights: dict[str, Any] = {"drop": ["ALL"]}
    if settings.rdma:
        device_counts[settings.rdma] = 1
        rights["add"] = ["IPC_LOCK"]  # RDMA pins memory
    requests = dict(device_counts) if device_counts else {"cpu": request.devices_per_host}
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
        "resources": {"requests": requests, "limits": device_counts} if device_counts else {"requests": requests},
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
    """Return an indexed Job: a pod per host, where only a failed pod is replaced."""
    return {
        "parallelism": request.all_hosts,
        "completions": request.all_hosts,
        "completionMode": "Indexed",
        # A failed pod is replaced alone; `backoffLimit: 0` would end the whole gang.
        "backoffLimitPerIndex": RETRIES_PER_INDEX,
        # Each spare may replace one host that failed for good.
        "maxFailedIndexes": request.spares,
        # Not before the old pod has ended: two pods must not have the same number.
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                # Preempted, drained, or its node is gone: not the job's fault, so it uses up no retry.
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "Ignore", "onExitCodes": _exit_codes(REQUEUE)},
                {"action": "FailJob", "onExitCodes": _exit_codes(USER_ERROR)},
            ]
        },
        "template": pod_template(request, host_pattern, annotations=annotations),
    }


def _exit_codes(code: int) -> dict[str, Any]:
    return {"containerName": CONTAINER, "operator": "In", "values": [code]}
