"""Election in a Kubernetes Lease (coordination.k8s.io/v1), as the controllers of Kubernetes elect theirs.

The API server takes a change only with the `resourceVersion` that was read: a compare-and-swap. Whoever wants the lease
of another watches its version with its own clock; the times in a Lease are for people. `leaseTransitions` grows with
every holder: it is the term.

The service account of the pods needs get, create and update on leases of their namespace.
"""

from __future__ import annotations

import os
import secrets
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from phalanx.elastic.election import LEASE_S, RENEW_S, Deposed, ElectionUnavailable
from phalanx.elastic.json_http import HttpProblem, ask_json

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
OK, CREATED, NOT_FOUND, CONFLICT = 200, 201, 404, 409


class KubernetesElection:
    """Terms as holders of a Lease."""

    def __init__(
        self,
        server: str,
        *,
        namespace: str,
        name: str,
        token: Callable[[], str] = lambda: "",
        context: ssl.SSLContext | None = None,
        lease_s: float = LEASE_S,
        renew_s: float = RENEW_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.term = 0
        self._server, self._namespace, self._name = server, namespace, name
        self._leases = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._token, self._context = token, context
        self._lease_s, self._renew_s, self._clock, self._sleep = lease_s, renew_s, clock, sleep
        self._identity = f"{os.uname().nodename}_{secrets.token_hex(8)}"
        self._version = ""  # as we wrote it last
        self._acquired, self._renewed_s, self._tried_s = "", -1e9, -1e9

    @classmethod
    def in_cluster(cls, *, namespace: str, name: str, account: Path = ACCOUNT) -> KubernetesElection:
        """With what every pod is given: the server's address, its certificate, and a token that is replaced in time."""
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
        """Become the coordinator, unless another renews the lease."""
        while True:
            asked_s, found = self._clock(), self._get()
            spec = found.get("spec", {}) if found is not None else {}
            if found is not None and spec.get("holderIdentity") and self._is_renewed(found):
                return False
            term = int(spec.get("leaseTransitions") or 0) + 1
            version = _version(found)
            self._acquired = _now()
            if self._write(term, version=version):
                self.term, self._renewed_s, self._tried_s = term, asked_s, asked_s
                return True

    def _is_renewed(self, found: dict[str, Any]) -> bool:
        """Whether the holder renews within the lease that it has claimed, which is at least ours."""
        lease_s = max(self._lease_s, float(found["spec"].get("leaseDurationSeconds") or 0))
        seen, until_s = _version(found), self._clock() + lease_s
        while self._clock() < until_s:
            self._sleep(min(self._renew_s, max(0.0, until_s - self._clock())))
            again = self._get()
            if _version(again) != seen:
                return again is not None and bool(again["spec"].get("holderIdentity"))
        return False

    def renew(self) -> None:
        """Write anew that we hold it, at most once in `renew_s`; raises Deposed."""
        now = self._clock()
        if now - self._tried_s < self._renew_s:
            return
        self._tried_s = now
        try:
            if not self._write(self.term, version=self._version):
                self._adopt()
                if not self._write(self.term, version=self._version):
                    return  # somebody labels it at the same time: the next renewal is soon
            self._renewed_s = now
        except ElectionUnavailable:
            self._trust_lease()

    def _adopt(self) -> None:
        """Somebody has changed it: a person who labels it leaves its holder alone."""
        found = self._get()
        spec = found.get("spec", {}) if found is not None else {}
        if (spec.get("holderIdentity"), int(spec.get("leaseTransitions") or 0)) != (self._identity, self.term):
            raise Deposed(f"term {self.term} is over")
        self._version = _version(found)

    def check(self) -> None:
        """Raises Deposed when another holds it."""
        try:
            self._adopt()
        except ElectionUnavailable:
            self._trust_lease()

    def _trust_lease(self) -> None:
        """Out of reach: nobody else can have taken the term before our lease is over."""
        if self._clock() - self._renewed_s > self._lease_s:
            raise Deposed(f"term {self.term} could not be renewed for {self._lease_s:g} s")

    def release(self) -> None:
        """The next one need not wait."""
        with suppress(ElectionUnavailable):
            self._write(self.term, version=self._version, holder="")

    def is_held(self) -> bool:
        """Whether somebody holds it and renews it within 1.5 renewals."""
        found = self._get()
        if found is None or not found.get("spec", {}).get("holderIdentity"):
            return False
        self._sleep(1.5 * self._renew_s)
        return _version(self._get()) != _version(found)

    # ---- the API server --------------------------------------------------------------------------------------------

    def _get(self) -> dict[str, Any] | None:
        status, answer = self._ask("GET", f"{self._leases}/{self._name}")
        if status == NOT_FOUND:
            return None
        return self._expect(status, answer, OK)

    def _write(self, term: int, *, version: str, holder: str | None = None) -> bool:
        """Make it, or replace the version that was read; False when another one was quicker."""
        metadata = {"name": self._name, "namespace": self._namespace}
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata | ({"resourceVersion": version} if version else {}),
            "spec": {
                "holderIdentity": self._identity if holder is None else holder,
                "leaseDurationSeconds": max(1, round(self._lease_s)),
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
            said = str(answer.get("message") or "no reason")[:300]
            raise ElectionUnavailable(
                f"{self._server}: status {status} for lease {self._namespace}/{self._name}: {said}"
            )
        return answer


def _version(found: dict[str, Any] | None) -> str:
    return str(found.get("metadata", {}).get("resourceVersion", "")) if found is not None else ""


def _now() -> str:
    """As Kubernetes writes a MicroTime; for people, no clock is compared with it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
