"""A real Kubernetes control plane on the loopback, of the binaries in KUBEBUILDER_ASSETS; nothing is left behind.

The folder must hold `etcd` and `kube-apiserver`; with `kube-controller-manager` and `kube-scheduler`, Jobs run; what is
in its folder `crds` (those of JobSet and Kueue) is applied. Their managers run where a test asks for them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from kube_managers import (
    KUEUE_CERTIFICATES,
    PROGRAMS,
    apply_webhooks,
    manager_configuration,
    may_mount,
    with_certificates,
    write_certificate,
    write_configuration,
)
from process_kubelet import write_kubeconfig
from slurm_cluster import free_ports, wait_for

from phalanx.errors import PhalanxError
from phalanx.launch.kube.access import read_access
from phalanx.launch.kube.client import KubeClient, KubeRefusal, has_condition

TOKEN = "admin-of-this-test"
PEOPLE = {"guest-token": "guest", "ada-token": "ada@example.org", "ben-token": "ben@example.org"}
CONTROLLERS = "*,-node-lifecycle-controller,-taint-eviction-controller"  # nodes here send no heartbeats
QUICK = ("--kube-api-qps=2000", "--kube-api-burst=4000")


def missing_control_plane(*programs: str) -> str:
    """Why there is none; empty where there is."""
    folder = os.environ.get("KUBEBUILDER_ASSETS", "")
    if not folder:
        return "KUBEBUILDER_ASSETS names no folder with etcd and kube-apiserver"
    lost = [name for name in ("etcd", "kube-apiserver", *programs) if not os.access(Path(folder) / name, os.X_OK)]
    if lost:
        return f"KUBEBUILDER_ASSETS has no {', '.join(lost)}"
    if "kueue-manager" in programs and not KUEUE_CERTIFICATES.is_dir() and not may_mount():
        return f"kueue-manager reads a certificate from {KUEUE_CERTIFICATES}: make tls.crt and tls.key there"
    return ""


class ControlPlane:
    """etcd, the API server, and controllers and scheduler where they are; the managers of JobSet and Kueue if asked."""

    def __init__(self, base: Path, *, managers: bool = False) -> None:
        self.base, self.assets, self.managers = base, Path(os.environ["KUBEBUILDER_ASSETS"]), managers
        self.kubeconfig = base / "kubeconfig"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs: dict[int, Path] = {}

    def start(self) -> None:
        etcd, peer, secure, *others = free_ports(5 + 2 * len(PROGRAMS))
        self.base.mkdir(parents=True, exist_ok=True)
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        private, public = self.base / "sa.key", self.base / "sa.pub"
        kinds = serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL
        private.write_bytes(key.private_bytes(*kinds, serialization.NoEncryption()))
        pem = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        public.write_bytes(key.public_key().public_bytes(*pem))
        people = [f'{TOKEN},admin,admin,"system:masters"', *(f"{token},{one},{one}," for token, one in PEOPLE.items())]
        (self.base / "tokens.csv").write_text("\n".join(people) + "\n")
        url = f"http://127.0.0.1:{etcd}"
        self._spawn(
            *("etcd", "--data-dir", str(self.base / "etcd"), "--unsafe-no-fsync", "--name", "one"),
            *(f"--listen-client-urls={url}", f"--advertise-client-urls={url}"),
            *(f"--listen-peer-urls=http://127.0.0.1:{peer}", f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}"),
            f"--initial-cluster=one=http://127.0.0.1:{peer}",
        )
        has_controllers = os.access(self.assets / "kube-controller-manager", os.X_OK)
        # The API server would taint new nodes until a controller of nodes, which does not run here, finds them ready.
        without = "TaintNodesByCondition" if has_controllers else "TaintNodesByCondition,ServiceAccount"
        self._spawn(
            *("kube-apiserver", f"--etcd-servers={url}", "--bind-address=127.0.0.1", f"--secure-port={secure}"),
            *(f"--cert-dir={self.base / 'certificates'}", "--service-account-issuer=https://kubernetes.default.svc"),
            *(f"--service-account-key-file={public}", f"--service-account-signing-key-file={private}"),
            *(f"--token-auth-file={self.base / 'tokens.csv'}", "--authorization-mode=RBAC", "--allow-privileged"),
            *("--service-cluster-ip-range=10.96.0.0/16", "--endpoint-reconciler-type=none"),
            f"--disable-admission-plugins={without}",
        )
        write_kubeconfig(self.kubeconfig, f"https://127.0.0.1:{secure}", TOKEN)
        wait_for(self._is_ready, "the API server")
        self.apply_crds(*sorted((self.assets / "crds").glob("*.yaml")))
        options = [f"--kubeconfig={self.kubeconfig}", "--leader-elect=false"]
        options += [f"--{kind}-kubeconfig={self.kubeconfig}" for kind in ("authentication", "authorization")]
        if has_controllers:
            port = others[0]
            private_key = f"--service-account-private-key-file={private}"
            more = [f"--secure-port={port}", "--bind-address=127.0.0.1", f"--controllers={CONTROLLERS}", private_key]
            self._spawn("kube-controller-manager", *options, *QUICK, *more)
        if os.access(self.assets / "kube-scheduler", os.X_OK):
            port = others[1]
            self._spawn("kube-scheduler", *options, *QUICK, f"--secure-port={port}", "--bind-address=127.0.0.1")
        if self.managers:
            self._start_managers(others[2:])

    def _start_managers(self, ports: Sequence[int]) -> None:
        """JobSet's and Kueue's; returns when both answer their webhooks."""
        bundle = write_certificate(self.base / "webhooks")
        for number, program in enumerate(PROGRAMS):
            webhook, health = ports[2 * number : 2 * number + 2]
            made = manager_configuration(program, webhook=webhook, health=health, certificates=self.base / "webhooks")
            path = write_configuration(self.base / f"{program}.json", made)
            needs_place = program == "kueue-manager" and not KUEUE_CERTIFICATES.is_dir()
            before = with_certificates(self.base / "etc") if needs_place else []
            self._spawn(program, f"--config={path}", f"--kubeconfig={self.kubeconfig}", before=before)
            url = f"http://127.0.0.1:{health}/readyz"
            wait_for(lambda url=url: self._answers(url), f"{program}", patience_s=600)
            name = program.removesuffix("-manager")
            apply_webhooks(self.client(), self.assets / "webhooks" / f"{name}.yaml", port=webhook, bundle=bundle)

    def _answers(self, url: str) -> bool:
        self._assert_alive()
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def client(self) -> KubeClient:
        return KubeClient(read_access({"KUBECONFIG": str(self.kubeconfig)}))

    def apply_crds(self, *paths: Path) -> None:
        """Kinds of JobSet and Kueue, without their controllers."""
        client = self.client()
        root = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        names: list[str] = []
        for path in paths:
            for document in yaml.safe_load_all(path.read_text()):
                if document and document["kind"] == "CustomResourceDefinition":
                    document["spec"].pop("conversion", None)  # a webhook that is not here
                    name = f"{root}/{document['metadata']['name']}"
                    client.apply(name, document, manager="test", force=True)
                    names.append(name)
        # A manager that starts before its kinds are served gives up.
        wait_for(lambda: all(has_condition(client.get(one), "Established") for one in names), "the CRDs")

    def make_claim(self, namespace: str) -> None:
        """The claim `runs`, bound to a volume of its own on this machine: pods of the namespace can be placed."""
        modes, size = ["ReadWriteMany"], {"storage": "1Gi"}
        owner = {"namespace": namespace, "name": "runs"}
        volume = {"accessModes": modes, "capacity": size, "hostPath": {"path": "/tmp"}, "claimRef": owner}
        claim = {
            "accessModes": modes,
            "resources": {"requests": size},
            "storageClassName": "",
            "volumeName": f"runs-{namespace}",
        }
        paths = {
            "PersistentVolume": f"/api/v1/persistentvolumes/runs-{namespace}",
            "PersistentVolumeClaim": f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/runs",
        }
        client = self.client()
        for kind, spec in (("PersistentVolume", volume), ("PersistentVolumeClaim", claim)):
            metadata = {"name": paths[kind].rpartition("/")[2]}
            metadata |= {"annotations": {"pv.kubernetes.io/bind-completed": "yes"}} if spec is claim else {}
            document = {"apiVersion": "v1", "kind": kind, "metadata": metadata, "spec": spec}
            made = client.apply(paths[kind], document, manager="test", force=True)
        # Bound at once: nothing here waits for a binder.
        client.patch(paths["PersistentVolume"], {"spec": {"claimRef": {"uid": made["metadata"]["uid"]}}})
        for kind, path in paths.items():
            phase = {"phase": "Bound", **({"capacity": size, "accessModes": modes} if kind.endswith("Claim") else {})}
            client.patch(f"{path}/status", {"status": phase})

    def _is_ready(self) -> bool:
        self._assert_alive()
        client = self.client()
        client.rate.sleep = lambda seconds: time.sleep(0.1)
        try:
            return client.text("/readyz", {}) == "ok" and client.get("/api/v1/namespaces/default") is not None
        except (PhalanxError, KubeRefusal):
            return False

    def _assert_alive(self) -> None:
        for process in self._processes:
            assert process.poll() is None, self._logs[process.pid].read_text()[-3000:]

    def _spawn(self, program: str, *options: str, before: Sequence[str] = ()) -> None:
        path = self.base / f"{program}.log"
        with open(path, "ab") as log:
            command = [*before, str(self.assets / program), *options]
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self._processes.append(process)
        self._logs[process.pid] = path

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.send_signal(signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=60)
