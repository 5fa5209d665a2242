"""Kubernetes manifests: golden files, the API's own schemas, and what must hold in every flavour."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api import models

import phalanx
from phalanx.launch import pod_template
from phalanx.launch.k8s import KubernetesSystem
from phalanx.launch.manifests import render_manifests, topology_annotations
from phalanx.launch.pod import host_names
from phalanx.launch.resource_request import LaunchRequest, PlacementGroup
from phalanx.launch.settings import LaunchSettings

GOLDEN = Path(__file__).parent / "golden"
FLAVOURS = ("jobset", "trainjob", "podgroup", "job", "skypilot", "dstack")
KUBERNETES = "1.37"


def settings(**more: Any) -> LaunchSettings:
    given: dict[str, Any] = {
        "on": "k8s",
        "queue": "team-a",
        "image": "registry.example/phalanx:0.7",
        "claim": "runs",
        "topology": ("topology/block", "topology/rack"),
    }
    return LaunchSettings(**given | more)


def request_for(chosen: LaunchSettings, **more: Any) -> LaunchRequest:
    given: dict[str, Any] = {
        "name": "llama",
        "group": "",
        "run": "/runs/Llama_3-2026-11-17",
        "hosts": 14,
        "spares": 2,
        "devices_per_host": 8,
        "accelerator": "H100-80GB-SXM",
        "time_limit_s": 7200.0,
        "save_s": 90.0,
        "environ": {"NCCL_IB_HCA": "mlx5"},
        "checkpoint": "s3://bucket/llama",
        "placement": (PlacementGroup(axes=("pipeline",), hosts=4), PlacementGroup(axes=("data",), hosts=16)),
        "agent": ("python",),
        "settings": chosen,
    }
    return LaunchRequest(**given | more)


@pytest.fixture(autouse=True)
def user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_template, "run_user", lambda: 1234)


def documents(text: str) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(text) if one]


def pod_spec(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The one pod template of all documents."""

    def search(value: Any) -> list[dict[str, Any]]:
        if isinstance(value, dict):
            here = [value] if "containers" in value else []
            return here + [one for item in value.values() for one in search(item)]
        return [one for item in value for one in search(item)] if isinstance(value, list) else []

    [spec] = search(found)
    return spec


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_golden_files(flavour: str) -> None:
    """PHALANX_WRITE_GOLDEN=1 writes them anew; read the difference before it is committed."""
    [text] = KubernetesSystem({}).render([request_for(settings(flavour=flavour))]).values()
    path = GOLDEN / f"{flavour}.yaml"
    if os.environ.get("PHALANX_WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("host_network", [False, True])
@pytest.mark.parametrize("flavour", ["jobset", "trainjob", "podgroup", "job"])
def test_objects_are_valid_and_pods_are_locked_down(flavour: str, host_network: bool) -> None:
    chosen = settings(flavour=flavour, host_network=host_network, rdma="rdma/hca", namespace="ml")
    found = documents(render_manifests(request_for(chosen), secret="00ff"))
    for document in found:
        assert document["metadata"]["namespace"] == "ml"
        if document["apiVersion"].startswith(("jobset", "trainer")):
            check_model(document)
        else:
            kubernetes_validate.validate(document, KUBERNETES, strict=True)
    kinds = [document["kind"] for document in found]
    assert ("NetworkPolicy" in kinds) != host_network
    assert kinds[0] == "Secret"
    spec = pod_spec(found)
    [container] = spec["containers"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert spec.get("hostNetwork", False) == host_network


def check_model(document: dict[str, Any]) -> None:
    """Wrong types raise; a field that the API does not know is dropped, and so missed on the way back."""
    names = {"JobSet": "JobsetV1alpha2JobSet", "TrainJob": "TrainerV1alpha1TrainJob"}
    model = getattr(models, names.get(document["kind"], f"TrainerV1alpha1{document['kind']}"))
    back = json.loads(model.from_dict(document).to_json())
    assert back == document
    # What a JobSet wraps is a Job, which has a stricter schema of its own.
    template = document["spec"].get("template", document)
    for job in template["spec"].get("replicatedJobs", ()):
        body = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": job["template"]["spec"]}
        kubernetes_validate.validate(body, KUBERNETES, strict=True)


@pytest.mark.parametrize("flavour", ["jobset", "trainjob", "podgroup", "job"])
def test_a_failed_pod_is_replaced_alone_and_infrastructure_uses_no_retry(flavour: str) -> None:
    text = render_manifests(request_for(settings(flavour=flavour)))
    assert "backoffLimitPerIndex: 6" in text
    assert "backoffLimit: " not in text  # a limit for all would end the gang with one pod
    rules = yaml.safe_load_all(text)
    found = json.dumps(list(rules))
    assert '"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"' in found
    assert '"values": [75]' in found


def test_every_pod_finds_every_other() -> None:
    """Names in the command are those that JobSet gives its pods: JOBSET-GROUP-0-INDEX.SUBDOMAIN."""
    [jobset, _] = documents(render_manifests(request_for(settings())))
    command = pod_spec([jobset])["containers"][0]["command"]
    name, group = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"][0]["name"]
    pattern = command[command.index("--names") + 1]
    assert host_names(pattern, 2)[1] == f"{name}-{group}-0-1.{jobset['spec']['network']['subdomain']}"
    assert len(host_names(pattern, 100_000)[-1].split(".")[0]) <= 63


def test_topology_follows_the_plan() -> None:
    request = request_for(settings())
    assert topology_annotations(request) == {
        "kueue.x-k8s.io/podset-preferred-topology": "topology/block",
        "kueue.x-k8s.io/podset-slice-required-topology": "topology/rack",
        "kueue.x-k8s.io/podset-slice-size": "4",
    }
    uneven = replace(request, spares=1)  # 15 pods are no whole number of groups of four
    assert topology_annotations(uneven) == {"kueue.x-k8s.io/podset-preferred-topology": "topology/block"}
    strict = replace(request, settings=settings(placement="required", topology=("topology/rack",)))
    assert topology_annotations(strict) == {"kueue.x-k8s.io/podset-required-topology": "topology/rack"}
    assert topology_annotations(replace(request, settings=settings(queue=""))) == {}


def test_what_is_missing_is_said_at_once() -> None:
    bare = LaunchSettings(on="k8s", topology=("two words",), mounts=("/data",))
    with pytest.raises(phalanx.UserError) as error:
        KubernetesSystem({}).check([request_for(bare)])
    for part in ("launch.image: is not set", "launch.claim: is not set", "'two words' is no label", "launch.mounts"):
        assert part in str(error.value)


def test_names_and_hostile_texts_stay_values() -> None:
    request = request_for(settings(), run="/runs/7 $(reboot): 'x'\n- y", environ={"A": "b\nkind: Pod\n---\n"})
    found = documents(render_manifests(request))
    assert [one["kind"] for one in found] == ["JobSet", "NetworkPolicy"]
    assert found[0]["metadata"]["name"] == "run-7-reboot-x-y"
    assert {"name": "A", "value": "b\nkind: Pod\n---\n"} in pod_spec(found)["containers"][0]["env"]
    shell = KubernetesSystem({}).render([replace(request, settings=settings(flavour="skypilot"))])
    [task] = [yaml.safe_load(text) for text in shell.values()]
    assert "'/runs/7 $(reboot): '\"'\"'x'\"'\"'" in task["run"]


def test_the_key_is_in_a_file_of_its_owner_alone(tmp_path: Path) -> None:
    request = request_for(settings(), run=str(tmp_path))
    [submitted] = KubernetesSystem({}).write([request])
    path = tmp_path / "kubernetes.yaml"
    assert path.stat().st_mode & 0o777 == 0o600
    secret, jobset, _ = documents(path.read_text())
    assert re.fullmatch("[0-9a-f]{64}", secret["stringData"]["secret"])
    [volume] = [one for one in pod_spec([jobset])["volumes"] if one["name"] == "key"]
    assert volume["secret"]["secretName"] == secret["metadata"]["name"]
    assert submitted.id == jobset["metadata"]["name"]
