"""A real Kubernetes control plane on the loopback, of the binaries in KUBEBUILDER_ASSETS; nothing is left behind.

The folder must hold `etcd` and `kube-apiserver`; with `kube-controller-manager` and `kube-scheduler`, Jobs run; what is
in its folder `crds` (those of JobSet and Kueue) is applied, without their controllers.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from slurm_cluster import free_ports, wait_for

from phalanx.errors import PhalanxError
from phalanx.launch.kube.access import read_access
from phalanx.launch.kube.client import KubeClient, KubeRefusal

TOKEN = "admin-of-this-test"
CONTROLLERS = "*,-node-lifecycle-controller,-taint-eviction-controller,-pod-garbage-collector-controller"


def missing_control_plane(*programs: str) -> str:
    """Why there is none; empty where there is."""
    folder = os.environ.get("KUBEBUILDER_ASSETS", "")
    if not folder:
        return "KUBEBUILDER_ASSETS names no folder with etcd and kube-apiserver"
    lost = [name for name in ("etcd", "kube-apiserver", *programs) if not os.access(Path(folder) / name, os.X_OK)]
    return f"KUBEBUILDER_ASSETS has no {', '.join(lost)}" if lost else ""


class ControlPlane:
    """etcd, the API server, and controllers and scheduler where they are."""

    def __init__(self, base: Path) -> None:
        self.base, self.assets = base, Path(os.environ["KUBEBUILDER_ASSETS"])
        self.kubeconfig = base / "kubeconfig"
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        etcd, peer, secure, *others = free_ports(5)
        self.base.mkdir(parents=True, exist_ok=True)
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        private, public = self.base / "sa.key", self.base / "sa.pub"
        kinds = serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL
        private.write_bytes(key.private_bytes(*kinds, serialization.NoEncryption()))
        pem = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        public.write_bytes(key.public_key().public_bytes(*pem))
        people = [f'{TOKEN},admin,admin,"system:masters"', "guest-token,guest,guest,"]
        (self.base / "tokens.csv").write_text("\n".join(people) + "\n")
        url = f"http://127.0.0.1:{etcd}"
        self._spawn(
            *("etcd", "--data-dir", str(self.base / "etcd"), "--unsafe-no-fsync", "--name", "one"),
            *(f"--listen-client-urls={url}", f"--advertise-client-urls={url}"),
            *(f"--listen-peer-urls=http://127.0.0.1:{peer}", f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}"),
            f"--initial-cluster=one=http://127.0.0.1:{peer}",
        )
        has_controllers = os.access(self.assets / "kube-controller-manager", os.X_OK)
        lonely = [] if has_controllers else ["--disable-admission-plugins=ServiceAccount,TaintNodesByCondition"]
        self._spawn(
            *("kube-apiserver", f"--etcd-servers={url}", "--bind-address=127.0.0.1", f"--secure-port={secure}"),
            *(f"--cert-dir={self.base / 'certificates'}", "--service-account-issuer=https://kubernetes.default.svc"),
            *(f"--service-account-key-file={public}", f"--service-account-signing-key-file={private}"),
            *(f"--token-auth-file={self.base / 'tokens.csv'}", "--authorization-mode=RBAC", "--allow-privileged"),
            *("--service-cluster-ip-range=10.96.0.0/16", "--endpoint-reconciler-type=none", *lonely),
        )
        self.write_kubeconfig(self.kubeconfig, f"https://127.0.0.1:{secure}", TOKEN)
        wait_for(self._is_ready, "the API server")
        self.apply_crds(*sorted((self.assets / "crds").glob("*.yaml")))
        options = [f"--kubeconfig={self.kubeconfig}", "--leader-elect=false"]
        options += [f"--{kind}-kubeconfig={self.kubeconfig}" for kind in ("authentication", "authorization")]
        if has_controllers:
            port = others[0]
            private_key = f"--service-account-private-key-file={private}"
            more = [f"--secure-port={port}", "--bind-address=127.0.0.1", f"--controllers={CONTROLLERS}", private_key]
            self._spawn("kube-controller-manager", *options, *more)
        if os.access(self.assets / "kube-scheduler", os.X_OK):
            port = others[1]
            self._spawn("kube-scheduler", *options, f"--secure-port={port}", "--bind-address=127.0.0.1")

    def client(self) -> KubeClient:
        return KubeClient(read_access({"KUBECONFIG": str(self.kubeconfig)}))

    def apply_crds(self, *paths: Path) -> None:
        """Kinds of JobSet and Kueue, without their controllers."""
        client = self.client()
        root = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        for path in paths:
            for document in yaml.safe_load_all(path.read_text()):
                if document and document["kind"] == "CustomResourceDefinition":
                    document["spec"].pop("conversion", None)  # a webhook that is not here
                    client.apply(f"{root}/{document['metadata']['name']}", document, manager="test", force=True)

    @staticmethod
    def write_kubeconfig(path: Path, server: str, token: str) -> None:
        cluster = {"server": server, "insecure-skip-tls-verify": True}  # it signs its own certificate anew each time
        table = {
            "current-context": "real",
            "contexts": [{"name": "real", "context": {"cluster": "c", "user": "u", "namespace": "default"}}],
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": token}}],
        }
        path.write_text(json.dumps(table))

    def _is_ready(self) -> bool:
        for process in self._processes:
            assert process.poll() is None, (self.base / "log").read_text(errors="replace")[-3000:]
        client = self.client()
        client.rate.sleep = lambda seconds: time.sleep(0.1)
        try:
            return client.text("/readyz", {}) == "ok" and client.get("/api/v1/namespaces/default") is not None
        except (PhalanxError, KubeRefusal):
            return False

    def _spawn(self, program: str, *options: str) -> None:
        with open(self.base / "log", "ab") as log:
            command = [str(self.assets / program), *options]
            self._processes.append(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True))

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.send_signal(signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=60)
