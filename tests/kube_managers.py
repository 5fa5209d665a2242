"""The managers of JobSet and Kueue beside a control plane: processes of this machine, their webhooks on the loopback.

KUBEBUILDER_ASSETS holds them as `jobset-manager` and `kueue-manager`, and their webhook configurations, as their
projects publish them, as `webhooks/jobset.yaml` and `webhooks/kueue.yaml`. Kueue 0.19 reads tls.crt and tls.key of its
metrics from a fixed place below /etc when it does not make its certificates itself, also where no metrics are served;
no key of its configuration changes that. It runs with an /etc of its own: nothing is written to this machine's.
"""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from phalanx.launch.kube.client import KubeClient

PROGRAMS = ("jobset-manager", "kueue-manager")
KUEUE_CERTIFICATES = Path("/etc/kueue/metrics/certs")
DAY = datetime.timedelta(days=1)


def write_certificate(folder: Path) -> str:
    """tls.crt and tls.key for the loopback; what a webhook configuration has as its caBundle."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "webhooks of a test")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - DAY, now + DAY)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tls.crt").write_bytes(made.public_bytes(pem))
    (folder / "tls.key").write_bytes(key.private_bytes(pem, plain, serialization.NoEncryption()))
    return base64.b64encode(made.public_bytes(pem)).decode()


def own_mounts() -> list[str]:
    """The command that gives a program mounts of its own: as root, or as root of a user namespace."""
    return ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]


def may_mount() -> bool:
    """Whether this machine lets us."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*own_mounts(), "true"], capture_output=True, check=False).returncode == 0


def with_certificates(folder: Path) -> list[str]:
    """The beginning of a command that finds a new certificate at Kueue's fixed place; the rest of /etc is empty there,
    and the loopback is all that Kueue talks to."""
    write_certificate(folder / KUEUE_CERTIFICATES.relative_to("/etc"))
    return [*own_mounts(), "sh", "-c", 'mount --bind "$0" /etc && exec "$@"', str(folder)]


def manager_configuration(program: str, *, webhook: int, health: int, certificates: Path) -> dict[str, Any]:
    """What a manager reads: as installed by default, but without leader election and outside of the cluster."""
    shared: dict[str, Any] = {
        "kind": "Configuration",
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": "127.0.0.1", "port": webhook, "certDir": str(certificates)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
    }
    if program == "jobset-manager":
        return {"apiVersion": "config.jobset.x-k8s.io/v1alpha1", **shared}
    return {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        **shared,
        "clientConnection": {"qps": 300, "burst": 500},
        "integrations": {"frameworks": ["batch/job", "jobset.x-k8s.io/jobset", "pod", "deployment"]},
        "featureGates": {"VisibilityOnDemand": False},  # an API server of its own, which nothing here asks
    }


def apply_webhooks(client: KubeClient, path: Path, *, port: int, bundle: str) -> None:
    """The manager's webhooks, led to a port of this machine in place of a Service; those of kinds that are not here
    stay out."""
    for document in yaml.safe_load_all(path.read_text()):
        if not document or not document["kind"].endswith("WebhookConfiguration"):
            continue
        for webhook in document["webhooks"]:
            service = webhook["clientConfig"].pop("service")
            webhook["clientConfig"] = {"url": f"https://127.0.0.1:{port}{service['path']}", "caBundle": bundle}
        document["metadata"]["name"] = f"{path.stem}-{document['metadata']['name']}"
        plural = f"{document['kind'].lower()}s"
        root = f"/apis/admissionregistration.k8s.io/v1/{plural}"
        client.apply(f"{root}/{document['metadata']['name']}", document, manager="test", force=True)


def write_configuration(path: Path, configuration: dict[str, Any]) -> Path:
    path.write_text(json.dumps(configuration))  # which is YAML too
    return path
