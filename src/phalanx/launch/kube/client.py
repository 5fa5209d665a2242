"""Requests to the API server: one open connection, a limited rate and number of retries, paged lists, watches.

Objects are plain dicts, like the manifests. Writes are server-side applies under a field manager: they can be sent
twice without harm, so a request is repeated if its answer was lost.
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import orjson

from phalanx.io.visible import one_line
from phalanx.launch.kube.access import KubeAccess, unreachable

Document = dict[str, Any]
TIMEOUT_S = 30.0
MOST_BYTES = 256 << 20  # of an answer: 7,500 nodes are about 60 MiB
MOST_TRIES = 6  # of one request: with the waits below about half a minute
FIRST_WAIT_S, MOST_WAIT_S = 0.5, 15.0
REQUESTS_PER_S, BURST = 50.0, 100.0  # as in kubectl; API priority and fairness throttles only far above it
PAGE = 500  # objects per page of a list
OK, CREATED, UNAUTHORIZED, NOT_FOUND, GONE, THROTTLED = 200, 201, 401, 404, 410, 429
AGAIN = (THROTTLED, 500, 502, 503, 504)  # statuses that pass without action
APPLY, MERGE = "application/apply-patch+yaml", "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"


class KubeRefusal(Exception):
    """Raised for an answer that is an error; it has the fields of the API's Status object."""

    def __init__(self, status: int, body: Mapping[str, Any], asked: str) -> None:
        self.status, self.asked = status, asked
        self.reason = str(body.get("reason") or "")
        self.message = one_line(str(body.get("message") or f"status {status}"))[:500]
        details = body.get("details")
        self.details: Mapping[str, Any] = details if isinstance(details, dict) else {}
        super().__init__(self.message)


class WatchExpired(Exception):
    """Raised when the server no longer has the version a watch started from: list again."""


@dataclass(kw_only=True, slots=True)
class RequestRate:
    """A token bucket: `burst` requests at a time, `per_s` over time."""

    per_s: float = REQUESTS_PER_S
    burst: float = BURST
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _left: float = field(default=-1.0, init=False)
    _seen: float = field(default=0.0, init=False)

    def take(self) -> None:
        """Wait until the next request may be sent."""
        now = self.clock()
        if self._left < 0.0:
            self._left, self._seen = self.burst, now
        self._left = min(self.burst, self._left + (now - self._seen) * self.per_s)
        self._seen = now
        if self._left < 1.0:
            self.sleep((1.0 - self._left) / self.per_s)
            self._seen += (1.0 - self._left) / self.per_s
            self._left = 1.0
        self._left -= 1.0


class KubeClient:
    """The requests of the launch system and of the operator's commands to a cluster."""

    def __init__(self, access: KubeAccess, *, rate: RequestRate | None = None) -> None:
        self._connection: http.client.HTTPConnection | None = None
        self.access = access
        self.rate = rate if rate is not None else RequestRate()

    # ---- objects -----------------------------------------------------------------------------------------------------

    def get(self, path: str) -> Document | None:
        """Return one object; None if there is none."""
        try:
            return self._ask("GET", path)
        except KubeRefusal as error:
            if error.status == NOT_FOUND:
                return None
            raise

    def list_objects(self, path: str, *, labels: str = "", fields: str = "") -> tuple[list[Document], str]:
        """Return all objects, page by page, and the version from which a watch can continue.

        If a page is requested too late (410), the list starts again, once.
        """
        for attempt in range(2):
            objects: list[Document] = []
            query = {"labelSelector": labels, "fieldSelector": fields, "limit": str(PAGE)}
            try:
                while True:
                    answer = self._ask("GET", path, query)
                    objects += answer.get("items") or []
                    metadata = answer.get("metadata") or {}
                    query["continue"] = str(metadata.get("continue") or "")
                    if not query["continue"]:
                        return objects, str(metadata.get("resourceVersion") or "")
            except KubeRefusal as error:
                if error.status != GONE or attempt:
                    raise
        raise AssertionError  # the second round returns or raises

    def apply(
        self, path: str, document: Document, *, manager: str, dry_run: bool = False, force: bool = False
    ) -> Document:
        """Apply an object server-side; the API refuses (409) if another manager set a field to a different value."""
        query = {"fieldManager": manager, "dryRun": "All" if dry_run else "", "force": "true" if force else ""}
        return self._ask("PATCH", path, query, body=document, kind=APPLY)

    def patch(self, path: str, document: Document, *, keep_lists: bool = False) -> Document:
        """Merge a few values into an object; lists are replaced.

        `keep_lists` merges lists of Kubernetes' own kinds by their key, such as a node's conditions by their type.
        """
        return self._ask("PATCH", path, body=document, kind=STRATEGIC if keep_lists else MERGE)

    def post(self, path: str, document: Document) -> Document:
        """Send a request with a body, such as an access review."""
        return self._ask("POST", path, body=document)

    def delete(self, path: str) -> bool:
        """Delete an object and the objects it owns; return False if there is none."""
        options = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        try:
            self._ask("DELETE", path, body=options)
        except KubeRefusal as error:
            if error.status == NOT_FOUND:
                return False
            raise
        return True

    def text(self, path: str, query: Mapping[str, str]) -> str:
        """Return an answer that is not JSON, such as a log."""
        return self._answer("GET", path, query).decode(errors="replace")

    def watch(
        self, path: str, version: str, *, labels: str = "", fields: str = "", timeout_s: float = 300.0
    ) -> Iterator[tuple[str, Document]]:
        """Yield changes after `version` until the server ends the watch; raises WatchExpired if a new list is needed.

        A watch has a separate connection, so that requests can be sent meanwhile.
        """
        query = {
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "labelSelector": labels,
            "fieldSelector": fields,
            "timeoutSeconds": str(max(1, int(timeout_s))),
        }
        connection = self._connect(timeout_s + TIMEOUT_S)
        try:
            self.rate.take()
            answer = self._send(connection, "GET", path, query)
            if answer.status != OK:
                raise _refusal(answer.status, answer.read(MOST_BYTES), f"GET {path}")
            while line := answer.readline():
                event = orjson.loads(line)
                kind, item = str(event.get("type")), event.get("object") or {}
                if kind == "ERROR":
                    raise KubeRefusal(int(item.get("code") or 500), item, f"WATCH {path}")
                yield kind, item
        except KubeRefusal as error:
            if error.status == GONE:
                raise WatchExpired from error
            raise
        except (OSError, http.client.HTTPException, orjson.JSONDecodeError) as error:
            raise unreachable(self.access, f"a watch ended: {one_line(str(error))[:200]}") from error
        finally:
            connection.close()

    # ---- how ---------------------------------------------------------------------------------------------------------

    def _ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        *,
        body: Document | None = None,
        kind: str = "application/json",
    ) -> Document:
        answer_object = orjson.loads(self._answer(method, path, query or {}, body=body, kind=kind) or b"{}")
        return answer_object if isinstance(answer_object, dict) else {}

    def _answer(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        *,
        body: Document | None = None,
        kind: str = "application/json",
    ) -> bytes:
        """Send a request until its answer is final; raises KubeRefusal or SystemFailure."""
        data = None if body is None else orjson.dumps(body)
        wait_s, renewed = FIRST_WAIT_S, False
        for attempt in range(1, MOST_TRIES + 1):
            self.rate.take()
            is_last = attempt == MOST_TRIES
            try:
                if self._connection is None:
                    self._connection = self._connect(TIMEOUT_S)
                answer = self._send(self._connection, method, path, query, data, kind)
                body_read = answer.read(MOST_BYTES)
            except ssl.SSLCertVerificationError as error:
                raise unreachable(self.access, f"its certificate is not trusted ({error.verify_message})") from error
            except (OSError, http.client.HTTPException) as error:
                self.close()
                if is_last:
                    message = one_line(str(error) or type(error).__name__)[:200]
                    raise unreachable(self.access, f"{message} ({MOST_TRIES} attempts)") from error
                self.rate.sleep(wait_s)
                wait_s = min(2 * wait_s, MOST_WAIT_S)
                continue
            if answer.status == UNAUTHORIZED and not renewed and self.access.forget_token():
                # A rotated or expired token: read it, or call the helper, once more.
                renewed = True
                continue
            if answer.status in AGAIN and not is_last and not _is_final(answer.status, body_read):
                self.rate.sleep(_asked_wait(answer.getheader("Retry-After"), wait_s))
                wait_s = min(2 * wait_s, MOST_WAIT_S)
                continue
            if answer.status not in (OK, CREATED, 202):
                raise _refusal(answer.status, body_read, f"{method} {path}")
            return body_read
        raise AssertionError  # the last attempt returns or raises

    def _send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        query: Mapping[str, str],
        data: bytes | None = None,
        kind: str = "application/json",
    ) -> http.client.HTTPResponse:
        words = urlencode({name: value for name, value in query.items() if value})
        headers = {"Accept": "application/json, */*", "User-Agent": "phalanx", **self.access.headers()}
        if data is not None:
            headers["Content-Type"] = kind
        # The server's URL may have a path, for example behind a proxy.
        base = urlsplit(self.access.server).path.rstrip("/")
        connection.request(method, f"{base}{path}?{words}" if words else base + path, body=data, headers=headers)
        return connection.getresponse()

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        parts = urlsplit(self.access.server)
        host = parts.hostname or ""
        if self.access.tls is None:
            return http.client.HTTPConnection(host, parts.port, timeout=timeout_s)
        if self.access.server_name:
            return _NamedConnection(
                host, parts.port, timeout=timeout_s, context=self.access.tls, server_name=self.access.server_name
            )
        return http.client.HTTPSConnection(host, parts.port, timeout=timeout_s, context=self.access.tls)

    def __del__(self) -> None:
        self.close()  # a command creates one client and ends, so no caller closes it

    def close(self) -> None:
        """Close the connection; the next request opens a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class _NamedConnection(http.client.HTTPSConnection):
    """A connection whose certificate has another name than the address: `tls-server-name` of a kubeconfig."""

    def __init__(
        self, host: str, port: int | None, *, timeout: float, context: ssl.SSLContext, server_name: str
    ) -> None:
        super().__init__(host, port, timeout=timeout, context=context)
        self._tls, self._server_name = context, server_name

    def connect(self) -> None:
        """Connect as HTTPSConnection does, but with the other name."""
        http.client.HTTPConnection.connect(self)
        self.sock = self._tls.wrap_socket(self.sock, server_hostname=self._server_name)


def _refusal(status: int, body: bytes, asked: str) -> KubeRefusal:
    try:
        status_object = json.loads(body)
    except ValueError:
        status_object = {"message": body[:300].decode(errors="replace")}
    return KubeRefusal(status, status_object if isinstance(status_object, dict) else {}, asked)


def _is_final(status: int, body: bytes) -> bool:
    """Return whether a 500 comes from an admission webhook, which would answer the same again."""
    return status == 500 and b"admission webhook" in body and b"denied the request" in body


def _asked_wait(header: str | None, usual_s: float) -> float:
    return min(MOST_WAIT_S, float(header)) if header is not None and header.isdecimal() else usual_s


# ---- paths -----------------------------------------------------------------------------------------------------------

PLURALS = {
    "NetworkPolicy": "networkpolicies",
    "PriorityClass": "priorityclasses",
    "WorkloadPriorityClass": "workloadpriorityclasses",
    "Topology": "topologies",
}


def kind_path(api: str, plural: str, namespace: str = "") -> str:
    """Return the path of the objects of a kind: `batch/v1` and `jobs` in a namespace, or of the whole cluster."""
    root = f"/api/{api}" if "/" not in api else f"/apis/{api}"
    return f"{root}/namespaces/{quote(namespace, safe='')}/{plural}" if namespace else f"{root}/{plural}"


def object_path(document: Mapping[str, Any], namespace: str) -> str:
    """Return the path of a manifest's object; `namespace` is empty for cluster-wide kinds."""
    name = quote(str(document["metadata"]["name"]), safe="")
    return f"{kind_path(str(document['apiVersion']), plural_of(str(document['kind'])), namespace)}/{name}"


def plural_of(kind: str) -> str:
    """Return the API's plural of a kind.

    >>> plural_of("JobSet"), plural_of("NetworkPolicy")
    ('jobsets', 'networkpolicies')
    """
    return PLURALS.get(kind, f"{kind.lower()}s")


def has_condition(document: Mapping[str, Any] | None, kind: str, status: str = "True") -> Mapping[str, Any] | None:
    """Return a condition of an object's status if it has this value; else None."""
    for condition in conditions_of(document):
        if condition.get("type") == kind and condition.get("status") == status:
            return condition
    return None


def conditions_of(document: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    """Return the conditions of an object's status."""
    status = (document or {}).get("status") or {}
    return [condition for condition in status.get("conditions") or () if isinstance(condition, dict)]
