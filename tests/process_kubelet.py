"""A kubelet without containers: registers nodes, runs the pods that are bound to them as processes, reports status.

Addresses of pods are those of the loopback, by number of the pod; names of a manifest are replaced by them.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from phalanx.errors import PhalanxError
from phalanx.launch.kube.client import KubeClient, KubeRefusal
from phalanx.launch.pod_template import POD_MODULE

INDEX = "batch.kubernetes.io/job-completion-index"
EVERY_S = 0.3


def pod_address(index: int) -> str:
    return f"127.0.0.{10 + index}"


def register_node(
    client: KubeClient, name: str, labels: dict[str, str], amounts: dict[str, str], *, taints: Sequence[Any] = ()
) -> None:
    """A node that is ready."""
    amounts = {"memory": "8Gi", "pods": "64", **amounts}
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
    node = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **labels}},
        "spec": {"taints": list(taints)},
        "status": {"capacity": amounts, "allocatable": amounts, "conditions": [ready]},
    }
    client.post("/api/v1/nodes", node)


def write_kubeconfig(path: Path, server: str, token: str, *, namespace: str = "default") -> None:
    cluster = {"server": server, "insecure-skip-tls-verify": True}  # it signs its own certificate anew each time
    table = {
        "current-context": "real",
        "contexts": [{"name": "real", "context": {"cluster": "c", "user": "u", "namespace": namespace}}],
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": {"token": token}}],
    }
    path.write_text(json.dumps(table))


class ProcessKubelet:
    """Nodes of one machine, and the processes on them."""

    def __init__(self, client: KubeClient, folder: Path, nodes: dict[str, dict[str, str]]) -> None:
        self.client, self.folder, self.nodes = client, folder, nodes
        self.running: dict[str, subprocess.Popen[bytes]] = {}  # by uid of the pod
        self.started: dict[str, str] = {}  # uid -> pod name, of all that ever ran
        self._placed: dict[str, str] = {}  # uid -> node
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tend, daemon=True)

    def start(self, *, cpus: str = "4") -> None:
        for name, labels in self.nodes.items():
            register_node(self.client, name, labels, {"cpu": cpus})
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()
        for uid, process in self.running.items():
            self._kill(uid)
            process.wait()

    def kill(self, name: str) -> None:
        """All processes of a pod, at once."""
        [uid] = [uid for uid in self.running if self.started[uid] == name]
        self._kill(uid)

    def _kill(self, uid: str) -> None:
        with suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.running[uid].pid)
            for process in [parent, *parent.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()

    def lose_node(self, name: str) -> list[str]:
        """The machine is gone: its pods with all their processes, and the Node, as a cloud's controller removes it."""
        lost = [uid for uid in self.running if self._placed[uid] == name]
        del self.nodes[name]
        for uid in lost:
            self._kill(uid)
        self.client.delete(f"/api/v1/nodes/{name}")
        return [self.started[uid] for uid in lost]

    def _tend(self) -> None:
        while not self._over.wait(EVERY_S):
            with suppress(KubeRefusal, PhalanxError):
                pods, _ = self.client.list_objects("/api/v1/pods")
                for pod in pods:
                    if pod.get("spec", {}).get("nodeName") in self.nodes:
                        self._tend_pod(pod)

    def _tend_pod(self, pod: dict[str, Any]) -> None:
        uid, metadata = pod["metadata"]["uid"], pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        process = self.running.get(uid)
        if process is None and uid not in self.started:
            if not metadata.get("deletionTimestamp"):
                self.started[uid], self._placed[uid] = metadata["name"], pod["spec"]["nodeName"]
                self.running[uid] = self._run(pod)
                self._report(path, pod, "Running", {"running": {}})
        elif process is not None and metadata.get("deletionTimestamp") and process.poll() is None:
            process.send_signal(signal.SIGTERM)
        if process is not None and (code := process.poll()) is not None:
            del self.running[uid]
            ended = {
                "terminated": {
                    "exitCode": code if code >= 0 else 128 - code,
                    "reason": "Error" if code else "Completed",
                }
            }
            self._report(path, pod, "Failed" if code else "Succeeded", ended)
        if metadata.get("deletionTimestamp") and uid not in self.running:
            options = {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0}
            with suppress(KubeRefusal):
                self.client._ask("DELETE", path, body=options)

    def _report(self, path: str, pod: dict[str, Any], phase: str, state: dict[str, Any]) -> None:
        address = pod_address(self._index(pod))
        container = pod["spec"]["containers"][0]
        status = {
            "phase": phase,
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": [{"type": "Ready", "status": str(phase == "Running")}],
            "containerStatuses": [
                {
                    "name": container["name"],
                    "image": container["image"],
                    "imageID": "",
                    "ready": phase == "Running",
                    "restartCount": 0,
                    "state": state,
                }
            ],
        }
        with suppress(KubeRefusal):
            self.client.patch(f"{path}/status", {"status": status}, keep_lists=True)

    @staticmethod
    def _index(pod: dict[str, Any]) -> int:
        return int((pod["metadata"].get("annotations") or {}).get(INDEX, "0"))

    def _value(self, variable: dict[str, Any], pod: dict[str, Any]) -> str:
        """Of a variable of the container, which may be a field of the pod."""
        if "value" in variable:
            return str(variable["value"])
        path = variable["valueFrom"]["fieldRef"]["fieldPath"]
        if path == "status.podIP":
            return pod_address(self._index(pod))
        if path == "spec.nodeName":
            return str(pod["spec"]["nodeName"])
        kind, _, name = path.removeprefix("metadata.").partition("[")
        return str((pod["metadata"].get(kind) or {}).get(name.strip("']"), ""))

    def _run(self, pod: dict[str, Any]) -> subprocess.Popen[bytes]:
        container = pod["spec"]["containers"][0]
        words = [sys.executable, *map(str, container["command"][1:])]  # the image's Python is ours
        environ = {**os.environ, **{one["name"]: self._value(one, pod) for one in container["env"]}}
        environ |= {"HOME": str(self.folder), "TMPDIR": str(self.folder)}
        if POD_MODULE in words:
            self._mount_key(pod, words)
        elif "sleep" in container["command"] or "follow" in words:
            words = ["sleep", "infinity"]  # of this machine's kernel log, no node of a test has to tell
        else:
            environ["KUBECONFIG"] = str(self._account(pod))
        with open(self.folder / f"{pod['metadata']['name']}.log", "ab") as log:
            return subprocess.Popen(words, env=environ, stdout=log, stderr=log, start_new_session=True)

    def _mount_key(self, pod: dict[str, Any], words: list[str]) -> None:
        """The run's key as a file, and addresses of this machine in place of host names."""
        space, uid = pod["metadata"]["namespace"], pod["metadata"]["uid"]
        hosts = int(words[words.index("--hosts") + 1]) + int(words[words.index("--spares") + 1])
        words[words.index("--names") + 1] = ",".join(pod_address(number) for number in range(hosts))
        [volume] = [one for one in pod["spec"]["volumes"] if one["name"] == "key"]
        secret = self.client.get(f"/api/v1/namespaces/{space}/secrets/{volume['secret']['secretName']}")
        assert secret is not None
        key = self.folder / f"key-{uid}"
        key.write_bytes(base64.b64decode(secret["data"]["secret"]))
        words[words.index("--key") + 1] = str(key)

    def _account(self, pod: dict[str, Any]) -> Path:
        """A kubeconfig with the token of the pod's service account: it has the rights that were given, and no more."""
        space, name = pod["metadata"]["namespace"], pod["spec"]["serviceAccountName"]
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        made = self.client.post(f"/api/v1/namespaces/{space}/serviceaccounts/{name}/token", asked)
        path = self.folder / f"kubeconfig-{pod['metadata']['uid']}"
        write_kubeconfig(path, self.client.access.server, made["status"]["token"])
        return path
