"""Checks of launch settings that no Kubernetes cluster could accept, without a cluster."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from phalanx.errors import Problem
from phalanx.launch.manifests import render_dstack, render_skypilot
from phalanx.launch.pod_template import object_name
from phalanx.launch.resource_request import LaunchRequest

EXPORTS = {"skypilot": render_skypilot, "dstack": render_dstack}
LABEL = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
IMAGE = re.compile(r"[a-z0-9][A-Za-z0-9._:/-]{0,254}(@sha256:[0-9a-f]{64})?")
NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def check_settings(requests: Sequence[LaunchRequest]) -> tuple[list[Problem], list[str]]:
    """Return problems of the settings that are known without a cluster, and remarks."""
    problems: list[Problem] = []
    remarks: list[str] = []

    def wrong(where: str, what: str, fix: str, why: str = "") -> None:
        problems.append(Problem(where=where, what=what, why=why, fix=fix))

    for request in requests:
        settings = request.settings
        if (settings.flavour or "jobset") in EXPORTS:
            continue
        for key, value, why in (
            ("image", settings.image, "pods run a container image with Phalanx in it"),
            ("claim", settings.claim, "all pods see the run folder on a volume that many nodes may write"),
        ):
            if not value:
                what = "is not set, and Kubernetes needs it"
                wrong(f"launch.{key}", what, f"--set launch.{key}=… or {key} in launch.toml", why)
        if settings.image and not IMAGE.fullmatch(settings.image):
            wrong("launch.image", f"{settings.image[:80]!r} is no image name", "such as registry.example/phalanx:0.7")
        if settings.namespace and not NAMESPACE.fullmatch(settings.namespace):
            wrong("launch.namespace", f"{settings.namespace[:80]!r} is no namespace", "lower case, digits and dashes")
        for label in settings.topology:
            if not LABEL.fullmatch(label):
                wrong("launch.topology", f"{label[:60]!r} is no label of a node", "such as topology/rack")
        mount, mount_text = (
            request.volume_folder,
            "where --runs is" if not request.volume else "at the folder around --out",
        )
        for key, path in request.inputs:
            if not PurePosixPath(path).is_relative_to(mount):
                alternative = (
                    "a folder above both with --runs" if not request.volume else "an --out whose parent is above both"
                )
                fix = f"put it below {mount} (phalanx data build makes datasets anywhere), or name {alternative}"
                why = f"the claim is mounted {mount_text}, {mount}, and pods see nothing else of this machine"
                wrong(f"{key} {path}", "would not be seen by the pods", fix, why)
        if settings.mounts:
            what = "mounts folders of the host, which pods of this profile may not"
            wrong("launch.mounts", what, "put the data on the claim")
        if not settings.queue:
            remarks.append(f"{request.name}: no --queue, so Kueue neither counts nor places it")
        if settings.host_network:
            remarks.append(f"{request.name}: in the network of its nodes, where no NetworkPolicy holds")
    names = [object_name(request) for request in requests]
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        wrong(duplicates[0], "would be the name of two jobs in Kubernetes", "use --name or --group")
    return list(dict.fromkeys(problems)), remarks
