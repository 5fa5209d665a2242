"""Election in a Kubernetes Lease (coordination.k8s.io/v1), as the controllers of Kubernetes elect theirs.

The API server accepts a change only with the `resourceVersion` that was read: a compare-and-swap. A process that wants
the lease of another one watches its version with its own clock; the times in a Lease are for people.
`leaseTransitions` grows with every holder: it is the term.

The service account of the pods needs get, create and update on leases of their namespace.
"""

from __future__ import annotations

import os
import secrets
import ssl
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from phalanx.elastic.election import Deposed, ElectionUnavailable
from phalanx.elastic.json_http import HttpProblem, ask_json
from phalanx.elastic.lease_clock import LeaseClock

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
OK, CREATED, NOT_FOUND, CONFLICT = 200, 201, 404, 409


class KubernetesElection:
    """An election whose terms are the holders of a Lease."""

    def __init__(
        self,
        server: str,
        *,
        namespace: str,
        name: str,
        token: Callable[[], str] = lambda: "",
        context: ssl.SSLContext | None = None,
        lease_clock: LeaseClock | None = None,
    ) -> None:
        self.term = 0
        self._server, self._namespace, self._name = server, namespace, name
        self._leases = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._token, self._context = token, context
        self.lease_clock = LeaseClock() if lease_clock is None else lease_clock
        self._identity = f"{os.uname().nodename}_{secrets.token_hex(8)}"
        self._version = ""  # as this process wrote it last
        self._acquired = ""

    @classmethod
    def in_cluster(cls, *, namespace: str, name: str, account: Path = ACCOUNT) -> KubernetesElection:
        """Use the pod's environment: the server's address, its certificate, and a token that is renewed in time."""
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ElectionUnavailable("KUBERNETES_SERVICE_HOST is not set: this is no pod of a Kubernetes cluster")
        try:
            context = ssl.create_default_context(cafile=str(account / "ca.crt"))
            namespace = namespace or (account / "namespace").read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ElectionUnavailable(f"no service account at {account}: {error}") from error

        def token() -> str:
            return (account / "token").read_text(encoding="ascii").strip()

        host = f"[{host}]" if ":" in host else host
        return cls(f"https://{host}:{port}", namespace=namespace, name=name, token=token, context=context)

    def take(self) -> bool:
        """Become the coordinator, unless another process renews the lease."""
        while True:
            asked_s, lease = self.lease_clock.now(), self._get()
            spec = lease.get("spec", {}) if lease is not None else {}
            if lease is not None and spec.get("holderIdentity") and self._is_renewed(lease):
                return False
            term = int(spec.get("leaseTransitions") or 0) + 1
            version = _version(lease)
            self._acquired = _now()
            if self._write(term, version=version):
                self.term = term
                self.lease_clock.take_lease(asked_s)
                return True

    def _is_renewed(self, found: dict[str, Any]) -> bool:
        """True when the holder renews within the lease duration it wrote, or this process's if longer."""
        lease_s = max(self.lease_clock.lease_s, float(found["spec"].get("leaseDurationSeconds") or 0))
        version, until_s = _version(found), self.lease_clock.now() + lease_s
        while self.lease_clock.now() < until_s:
            self.lease_clock.sleep(min(self.lease_clock.renew_s, max(0.0, until_s - self.lease_clock.now())))
            lease = self._get()
            if _version(lease) != version:
                return lease is not None and bool(lease["spec"].get("holderIdentity"))
        return False

    def renew(self) -> None:
        """Write the lease again, at most once in `renew_s`; raises Deposed."""
        if not self.lease_clock.begin_renewal():
            return
        try:
            if not self._write(self.term, version=self._version):
                self._adopt()
                if not self._write(self.term, version=self._version):
                    # A user labels it at the same time: the next renewal comes soon.
                    return
            self.lease_clock.end_renewal()
        except ElectionUnavailable:
            self.lease_clock.trust_lease(self.term)

    def _adopt(self) -> None:
        """Read a lease that was changed by another client: a user who labels it does not change its holder."""
        lease = self._get()
        spec = lease.get("spec", {}) if lease is not None else {}
        if (spec.get("holderIdentity"), int(spec.get("leaseTransitions") or 0)) != (self._identity, self.term):
            raise Deposed(f"term {self.term} is over")
        self._version = _version(lease)

    def check(self) -> None:
        """Raise Deposed when another process holds the lease."""
        try:
            self._adopt()
        except ElectionUnavailable:
            self.lease_clock.trust_lease(self.term)

    def release(self) -> None:
        """Give the lease up, so that the next holder need not wait."""
        with suppress(ElectionUnavailable):
            self._write(self.term, version=self._version, holder="")

    def is_held(self) -> bool:
        """True when some process holds the lease and renews it within 1.5 renewals."""
        lease = self._get()
        if lease is None or not lease.get("spec", {}).get("holderIdentity"):
            return False
        self.lease_clock.sleep(1.5 * self.lease_clock.renew_s)
        return _version(self._get()) != _version(lease)

    # ---- the API server --------------------------------------------------------------------------------------------

    def _get(self) -> dict[str, Any] | None:
        status, answer = self._ask("GET", f"{self._leases}/{self._name}")
        if status == NOT_FOUND:
            return None
        return self._expect(status, answer, OK)

    def _write(self, term: int, *, version: str, holder: str | None = None) -> bool:
        """Create the lease, or replace the version that was read; False when another process was first."""
        metadata = {"name": self._name, "namespace": self._namespace}
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata | ({"resourceVersion": version} if version else {}),
            "spec": {
                "holderIdentity": self._identity if holder is None else holder,
                "leaseDurationSeconds": max(1, round(self.lease_clock.lease_s)),
                "acquireTime": self._acquired,
                "renewTime": _now(),
                "leaseTransitions": term,
            },
        }
        if version:
            status, answer = self._ask("PUT", f"{self._leases}/{self._name}", body)
        else:
            status, answer = self._ask("POST", self._leases, body)
        if status in (CONFLICT, NOT_FOUND):
            return False
        self._version = _version(self._expect(status, answer, OK, CREATED))
        return True

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        try:
            token = self._token()
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            return ask_json(self._server, path, method=method, body=body, headers=headers, context=self._context)
        except (HttpProblem, OSError) as error:
            raise ElectionUnavailable(str(error)) from error

    def _expect(self, status: int, answer: dict[str, Any], *expected: int) -> dict[str, Any]:
        if status not in expected:
            reason = str(answer.get("message") or "no reason")[:300]
            raise ElectionUnavailable(
                f"{self._server}: status {status} for lease {self._namespace}/{self._name}: {reason}"
            )
        return answer


def _version(found: dict[str, Any] | None) -> str:
    return str(found.get("metadata", {}).get("resourceVersion", "")) if found is not None else ""


def _now() -> str:
    """Return the time as Kubernetes writes a MicroTime; for people, no clock is compared with it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
