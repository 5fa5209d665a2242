"""Access to a cluster: kubeconfig files as kubectl reads them, or the service account of a pod.

The standard library is enough: it starts and lists faster than the fastest client library and needs no extra
(benchmarks/2026-11-17-kubernetes.md), and it runs the log-in helpers of every API version.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import ssl
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from phalanx.errors import Problem, SystemFailure, UserError, mistake, nearest
from phalanx.io.files import read_bounded
from phalanx.io.visible import one_line

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
MOST_BYTES = 1 << 20  # of a kubeconfig
HELPER_S = 60.0  # for a log-in helper, which may open a browser
HELPER_API = "client.authentication.k8s.io/"


@dataclass(kw_only=True, slots=True)
class KubeAccess:
    """A cluster's address and this user's credentials. Tokens from files and helpers are renewed."""

    server: str
    namespace: str
    context: str  # the context's name in the kubeconfig; empty in a pod
    tls: ssl.SSLContext | None
    server_name: str = ""  # the name in the certificate, where it is not the address
    token: str = ""
    token_file: str = ""
    basic: str = ""
    helper: Mapping[str, Any] = field(default_factory=dict)
    folder: Path = Path()  # of the kubeconfig, to which relative commands refer
    environ: Mapping[str, str] = field(default_factory=dict)
    _helped: str = ""
    _helped_until: float = 0.0

    def headers(self) -> dict[str, str]:
        """Return the headers that authenticate a request."""
        if self.token_file:
            try:
                token = read_bounded(Path(self.token_file), MOST_BYTES).decode().strip()
            except (OSError, ValueError) as error:
                raise mistake(self.token_file, f"the token cannot be read: {error}", fix="log in again") from error
        elif self.helper:
            token = self._token_of_helper()
        else:
            token = self.token
        if token:
            return {"Authorization": f"Bearer {token}"}
        return {"Authorization": f"Basic {self.basic}"} if self.basic else {}

    def forget_token(self) -> bool:
        """Forget a token that the server refused; return True if another can be obtained."""
        had_token, self._helped = bool(self._helped), ""
        return had_token or bool(self.token_file)

    def _token_of_helper(self) -> str:
        if self._helped and time.time() < self._helped_until:
            return self._helped
        version = str(self.helper.get("apiVersion") or "")
        command = str(self.helper.get("command") or "")
        if not command or not version.startswith(HELPER_API):
            raise mistake(
                f"context {self.context}", f"users.exec names no helper we can run ({version or 'no version'})"
            )
        if "/" in command and not os.path.isabs(command):
            command = str(self.folder / command)
        credential_request = {"apiVersion": version, "kind": "ExecCredential", "spec": {"interactive": False}}
        variables = {str(entry.get("name")): str(entry.get("value")) for entry in self.helper.get("env") or ()}
        words = [command, *(str(entry) for entry in self.helper.get("args") or ())]
        try:
            result = subprocess.run(
                words,
                env={**self.environ, **variables, "KUBERNETES_EXEC_INFO": json.dumps(credential_request)},
                capture_output=True,
                text=True,
                errors="replace",
                stdin=subprocess.DEVNULL,
                timeout=HELPER_S,
                check=False,
            )
            credential = json.loads(result.stdout) if result.returncode == 0 else {}
            status = credential.get("status", {})
            self._helped = str(status.get("token") or "")
            self._helped_until = _until(str(status.get("expirationTimestamp") or ""))
            problem = one_line(result.stderr.strip())[:200] or f"exit code {result.returncode}"
        except (OSError, ValueError, AttributeError, subprocess.TimeoutExpired) as error:
            problem = one_line(str(error))[:200]
        if not self._helped:
            raise mistake(
                f"context {self.context}",
                f"the log-in helper {Path(command).name} gave no token: {problem}",
                fix=f"log in again as your cluster's operator says; {Path(command).name} must work by itself",
            )
        return self._helped


def has_access(environ: Mapping[str, str]) -> bool:
    """Return whether a cluster is configured here."""
    return bool(_config_files(environ)) or bool(environ.get("KUBERNETES_SERVICE_HOST"))


def read_access(
    environ: Mapping[str, str], *, context: str = "", account: Path = ACCOUNT, instead: str = ""
) -> KubeAccess:
    """Return the access to the cluster of the current context, or of the one named; raises UserError if there is none.

    `instead` is what the caller's command can do without a cluster.
    """
    files = _config_files(environ)
    if files:
        return _from_kubeconfig(files, environ, context)
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        kubeconfig = environ.get("KUBECONFIG", "")
        raise mistake(
            "--on k8s",
            f"KUBECONFIG names no file that exists: {kubeconfig}"
            if kubeconfig
            else "no cluster is configured on this machine",
            why="a kubeconfig says where the cluster is, and who you are",
            fix="get one from the cluster's operator as ~/.kube/config, or name it in KUBECONFIG"
            + (f"; {instead}" if instead else ""),
        )
    try:
        tls = ssl.create_default_context(cafile=str(account / "ca.crt"))
        namespace = (account / "namespace").read_text(encoding="utf-8").strip()
    except (OSError, ssl.SSLError) as error:
        raise mistake(str(account), f"the pod has no usable service account: {error}", fix="mount its token") from error
    address = f"[{host}]" if ":" in host else host
    server = f"https://{address}:{port}"
    return KubeAccess(
        server=server, namespace=namespace, context="", tls=tls, token_file=str(account / "token"), environ=environ
    )


def _config_files(environ: Mapping[str, str]) -> list[Path]:
    if kubeconfig := environ.get("KUBECONFIG"):
        paths = [Path(path_text) for path_text in kubeconfig.split(os.pathsep) if path_text]
    else:
        paths = [Path(environ.get("HOME") or "/nonexistent") / ".kube" / "config"]
    return [path for path in paths if path.is_file()]


def _from_kubeconfig(files: list[Path], environ: Mapping[str, str], wanted: str) -> KubeAccess:
    """Merge kubeconfig files as kubectl does: the first entry of a name counts."""
    entries: dict[str, dict[str, tuple[dict[str, Any], Path]]] = {"contexts": {}, "clusters": {}, "users": {}}
    current = wanted
    for path in files:
        table = _read_kubeconfig(path)
        current = current or str(table.get("current-context") or "")
        for kind, entries_of_kind in entries.items():
            for entry in table.get(kind) or ():
                if isinstance(entry, dict) and isinstance(entry.get(kind[:-1]), dict):
                    entries_of_kind.setdefault(str(entry.get("name")), (entry[kind[:-1]], path.parent))
    where = os.pathsep.join(map(str, files))
    if current not in entries["contexts"]:
        context_names = ", ".join(sorted(entries["contexts"])) or "none"
        suggestion = nearest(current, entries["contexts"])
        what = f"has no context {current!r}" if current else "names no current context"
        fix = (
            f"did you mean {suggestion}?"
            if suggestion
            else f"kubectl config use-context NAME chooses one; there is {context_names}"
        )
        raise mistake(where, what, fix=fix)
    context, _ = entries["contexts"][current]
    sections = []
    for kind in ("cluster", "user"):
        key = str(context.get(kind) or "")
        if key not in entries[f"{kind}s"]:
            raise mistake(where, f"context {current} names the {kind} {key!r}, which is not there", fix="mend the file")
        sections.append(entries[f"{kind}s"][key])
    (cluster, home), (user, user_home) = sections
    server = str(cluster.get("server") or "").rstrip("/")
    if urlsplit(server).scheme not in ("http", "https") or not urlsplit(server).hostname:
        raise mistake(where, f"{server[:100]!r} is no address of a server", fix="such as https://cluster.example:6443")
    basic = ""
    if user.get("username"):
        pair = f"{user['username']}:{user.get('password', '')}"
        basic = base64.b64encode(pair.encode()).decode()
    return KubeAccess(
        server=server,
        namespace=str(context.get("namespace") or "default"),
        context=current,
        tls=_tls_context(cluster, home, user, user_home, where) if server.startswith("https") else None,
        server_name=str(cluster.get("tls-server-name") or ""),
        token=str(user.get("token") or ""),
        token_file=str(user_home / user["tokenFile"]) if user.get("tokenFile") else "",
        basic=basic,
        helper=user["exec"] if isinstance(user.get("exec"), dict) else {},
        folder=user_home,
        environ=environ,
    )


def _read_kubeconfig(path: Path) -> dict[str, Any]:
    try:
        table = yaml.safe_load(read_bounded(path, MOST_BYTES).decode())
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        message = one_line(str(error))[:200]
        raise mistake(
            str(path), f"is no kubeconfig: {message}", fix="kubectl config view says what is wrong"
        ) from error
    if not isinstance(table, dict):
        raise mistake(str(path), "is no kubeconfig: it holds no table", fix="get a new one from the operator")
    return table


def _tls_context(
    cluster: Mapping[str, Any], home: Path, user: Mapping[str, Any], user_home: Path, where: str
) -> ssl.SSLContext:
    try:
        if cluster.get("certificate-authority-data"):
            tls = ssl.create_default_context(cadata=_decoded(cluster["certificate-authority-data"]))
        elif cluster.get("certificate-authority"):
            tls = ssl.create_default_context(cafile=str(home / cluster["certificate-authority"]))
        else:
            tls = ssl.create_default_context()
        if cluster.get("insecure-skip-tls-verify"):
            tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
        _load_client_certificate(tls, user, user_home)
    except (OSError, ValueError, binascii.Error) as error:  # ssl.SSLError is an OSError
        what = f"a certificate or key cannot be read: {one_line(str(error))[:200]}"
        raise UserError(Problem(where=where, what=what, fix="log in again, or get a new kubeconfig")) from error
    return tls


def _load_client_certificate(context: ssl.SSLContext, user: Mapping[str, Any], home: Path) -> None:
    """Load a client certificate; data in a kubeconfig goes through a private temporary folder, as ssl needs files."""
    certificate, key = user.get("client-certificate"), user.get("client-key")
    inline_data = [user.get("client-certificate-data"), user.get("client-key-data")]
    if all(inline_data):
        with tempfile.TemporaryDirectory(prefix="phalanx-") as folder:  # mode 0700
            paths = [Path(folder) / name for name in ("certificate", "key")]
            for path, data in zip(paths, inline_data, strict=True):
                path.write_text(_decoded(str(data)), encoding="ascii")
            context.load_cert_chain(*map(str, paths))
    elif certificate and key:
        context.load_cert_chain(str(home / certificate), str(home / key))


def _decoded(data: str) -> str:
    return base64.b64decode(str(data), validate=True).decode("ascii")


def _until(stamp: str) -> float:
    """Return the Unix time to renew a helper's token: a minute before it expires; never, if it has no expiry."""
    try:
        return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp() - 60.0
    except ValueError:
        return float("inf")


def unreachable(access: KubeAccess, said: str) -> SystemFailure:
    """Return the error for an API server that does not answer."""
    name = f"context {access.context}" if access.context else "the cluster"
    return SystemFailure(
        Problem(
            where=f"{name} ({access.server})",
            what=f"the Kubernetes API does not answer: {said}",
            fix="kubectl cluster-info says whether it is up; a VPN or another context may be needed",
        )
    )
