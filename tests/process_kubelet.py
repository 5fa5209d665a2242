"""A kubelet without containers: registers nodes, runs the pods that are bound to them as processes, reports status.

Addresses of pods are those of the loopback, by number of the pod; names of a manifest are replaced by them.
"""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from phalanx.errors import PhalanxError
from phalanx.launch.kube.client import KubeClient, KubeRefusal

INDEX = "batch.kubernetes.io/job-completion-index"
EVERY_S = 0.3


def pod_address(index: int) -> str:
    return f"127.0.0.{10 + index}"


class ProcessKubelet:
    """Nodes of one machine, and the processes on them."""

    def __init__(self, client: KubeClient, folder: Path, nodes: dict[str, dict[str, str]]) -> None:
        self.client, self.folder, self.nodes = client, folder, nodes
        self.running: dict[str, subprocess.Popen[bytes]] = {}  # by uid of the pod
        self.started: dict[str, str] = {}  # uid -> pod name, of all that ever ran
        self._reported: set[str] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tend, daemon=True)

    def start(self, *, cpus: str = "4") -> None:
        for name, labels in self.nodes.items():
            amounts = {"cpu": cpus, "memory": "8Gi", "pods": "64"}
            ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
            node = {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **labels}},
                "status": {"capacity": amounts, "allocatable": amounts, "conditions": [ready]},
            }
            self.client.post("/api/v1/nodes", node)
            self.client.patch(f"/api/v1/nodes/{name}", {"spec": {"taints": None}})  # no controller of nodes runs here
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()
        for process in self.running.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def kill(self, name: str) -> None:
        """All processes of a pod, at once."""
        [uid] = [uid for uid, process in self.running.items() if self.started[uid] == name]
        os.killpg(self.running[uid].pid, signal.SIGKILL)

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
                self.started[uid] = metadata["name"]
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
            self.client.patch(f"{path}/status", {"status": status})

    @staticmethod
    def _index(pod: dict[str, Any]) -> int:
        return int((pod["metadata"].get("annotations") or {}).get(INDEX, "0"))

    def _run(self, pod: dict[str, Any]) -> subprocess.Popen[bytes]:
        container, index, space = pod["spec"]["containers"][0], self._index(pod), pod["metadata"]["namespace"]
        words = [sys.executable, *map(str, container["command"][1:])]
        hosts = int(words[words.index("--hosts") + 1]) + int(words[words.index("--spares") + 1])
        words[words.index("--names") + 1] = ",".join(pod_address(number) for number in range(hosts))
        [volume] = [one for one in pod["spec"]["volumes"] if one["name"] == "key"]
        secret = self.client.get(f"/api/v1/namespaces/{space}/secrets/{volume['secret']['secretName']}")
        assert secret is not None
        key = self.folder / f"key-{pod['metadata']['uid']}"
        key.write_bytes(base64.b64decode(secret["data"]["secret"]))
        words[words.index("--key") + 1] = str(key)
        environ = {**os.environ, **{one["name"]: one["value"] for one in container["env"] if "value" in one}}
        environ |= {"PHALANX_POD_IP": pod_address(index), "JOB_COMPLETION_INDEX": str(index), "PHALANX_ATTEMPT": "0"}
        environ |= {"HOME": str(self.folder), "TMPDIR": str(self.folder), "PHALANX_NODE": pod["spec"]["nodeName"]}
        with open(self.folder / f"{pod['metadata']['name']}.log", "ab") as log:
            return subprocess.Popen(words, env=environ, stdout=log, stderr=log, start_new_session=True)
