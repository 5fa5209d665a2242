"""Requests to the API server: one connection kept open, bounded in rate and in retries; lists in pages, watches.

Objects are plain dicts, as the manifests are. Writes are server-side applies under a field manager: they can be sent
twice without harm, so a lost answer is asked for again.
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
REQUESTS_PER_S, BURST = 50.0, 100.0  # as kubectl's; API priority and fairness throttles far above it
PAGE = 500  # objects of one answer to a list
OK, CREATED, UNAUTHORIZED, NOT_FOUND, GONE, THROTTLED = 200, 201, 401, 404, 410, 429
AGAIN = (THROTTLED, 500, 502, 503, 504)  # what passes by itself
APPLY, MERGE = "application/apply-patch+yaml", "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"


class KubeRefusal(Exception):
    """An answer that is an error: the API's own Status object."""

    def __init__(self, status: int, body: Mapping[str, Any], asked: str) -> None:
        self.status, self.asked = status, asked
        self.reason = str(body.get("reason") or "")
        self.message = one_line(str(body.get("message") or f"status {status}"))[:500]
        details = body.get("details")
        self.details: Mapping[str, Any] = details if isinstance(details, dict) else {}
        super().__init__(self.message)


class WatchExpired(Exception):
    """The server no longer knows the version from which a watch began: list again."""


@dataclass(kw_only=True, slots=True)
class RequestRate:
    """A token bucket: `burst` requests at once, `per_s` over time."""

    per_s: float = REQUESTS_PER_S
    burst: float = BURST
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _left: float = field(default=-1.0, init=False)
    _seen: float = field(default=0.0, init=False)

    def take(self) -> None:
        """Wait for the next request's turn."""
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
    """What the launch system and the operator's verbs ask of a cluster."""

    def __init__(self, access: KubeAccess, *, rate: RequestRate | None = None) -> None:
        self._connection: http.client.HTTPConnection | None = None
        self.access = access
        self.rate = rate if rate is not None else RequestRate()

    # ---- objects -----------------------------------------------------------------------------------------------------

    def get(self, path: str) -> Document | None:
        """One object; None where there is none."""
        try:
            return self._ask("GET", path)
        except KubeRefusal as error:
            if error.status == NOT_FOUND:
                return None
            raise

    def list_objects(self, path: str, *, labels: str = "", fields: str = "") -> tuple[list[Document], str]:
        """All objects, page by page, and the version from which a watch goes on.

        A page that comes too late (410) begins the list again, once.
        """
        for attempt in range(2):
            found: list[Document] = []
            query = {"labelSelector": labels, "fieldSelector": fields, "limit": str(PAGE)}
            try:
                while True:
                    answer = self._ask("GET", path, query)
                    found += answer.get("items") or []
                    told = answer.get("metadata") or {}
                    query["continue"] = str(told.get("continue") or "")
                    if not query["continue"]:
                        return found, str(told.get("resourceVersion") or "")
            except KubeRefusal as error:
                if error.status != GONE or attempt:
                    raise
        raise AssertionError  # the second round returns or raises

    def apply(
        self, path: str, document: Document, *, manager: str, dry_run: bool = False, force: bool = False
    ) -> Document:
        """Server-side apply; 409 where another manager has set one of its fields to something else."""
        query = {"fieldManager": manager, "dryRun": "All" if dry_run else "", "force": "true" if force else ""}
        return self._ask("PATCH", path, query, body=document, kind=APPLY)

    def patch(self, path: str, document: Document, *, keep_lists: bool = False) -> Document:
        """Merge a few values into an object; a list is replaced.

        `keep_lists` merges lists of Kubernetes' own kinds by their key, such as a node's conditions by their type.
        """
        return self._ask("PATCH", path, body=document, kind=STRATEGIC if keep_lists else MERGE)

    def post(self, path: str, document: Document) -> Document:
        """A question with a body, such as an access review."""
        return self._ask("POST", path, body=document)

    def delete(self, path: str) -> bool:
        """Delete an object and what it owns; False where there is none."""
        options = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        try:
            self._ask("DELETE", path, body=options)
        except KubeRefusal as error:
            if error.status == NOT_FOUND:
                return False
            raise
        return True

    def text(self, path: str, query: Mapping[str, str]) -> str:
        """An answer that is no JSON, such as a log."""
        return self._answer("GET", path, query).decode(errors="replace")

    def watch(
        self, path: str, version: str, *, labels: str = "", fields: str = "", timeout_s: float = 300.0
    ) -> Iterator[tuple[str, Document]]:
        """Changes after `version` until the server ends it; raises WatchExpired when it must begin with a new list.

        A connection of its own: requests go on meanwhile.
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
        found = orjson.loads(self._answer(method, path, query or {}, body=body, kind=kind) or b"{}")
        return found if isinstance(found, dict) else {}

    def _answer(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        *,
        body: Document | None = None,
        kind: str = "application/json",
    ) -> bytes:
        """Send it until there is an answer that will not change by itself; raises KubeRefusal or SystemFailure."""
        data = None if body is None else orjson.dumps(body)
        wait_s, renewed = FIRST_WAIT_S, False
        for attempt in range(1, MOST_TRIES + 1):
            self.rate.take()
            last = attempt == MOST_TRIES
            try:
                if self._connection is None:
                    self._connection = self._connect(TIMEOUT_S)
                answer = self._send(self._connection, method, path, query, data, kind)
                read = answer.read(MOST_BYTES)
            except ssl.SSLCertVerificationError as error:
                raise unreachable(self.access, f"its certificate is not trusted ({error.verify_message})") from error
            except (OSError, http.client.HTTPException) as error:
                self.close()
                if last:
                    said = one_line(str(error) or type(error).__name__)[:200]
                    raise unreachable(self.access, f"{said} ({MOST_TRIES} attempts)") from error
                self.rate.sleep(wait_s)
                wait_s = min(2 * wait_s, MOST_WAIT_S)
                continue
            if answer.status == UNAUTHORIZED and not renewed and self.access.forget_token():
                renewed = True  # a rotated or expired token: read it, or ask the helper, once more
                continue
            if answer.status in AGAIN and not last and not _is_final(answer.status, read):
                self.rate.sleep(_asked_wait(answer.getheader("Retry-After"), wait_s))
                wait_s = min(2 * wait_s, MOST_WAIT_S)
                continue
            if answer.status not in (OK, CREATED, 202):
                raise _refusal(answer.status, read, f"{method} {path}")
            return read
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
        self.close()  # nobody has to remember it: a command makes one client and ends

    def close(self) -> None:
        """Close the connection; the next request opens one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class _NamedConnection(http.client.HTTPSConnection):
    """Where the certificate has another name than the address: `tls-server-name` of a kubeconfig."""

    def __init__(
        self, host: str, port: int | None, *, timeout: float, context: ssl.SSLContext, server_name: str
    ) -> None:
        super().__init__(host, port, timeout=timeout, context=context)
        self._tls, self._server_name = context, server_name

    def connect(self) -> None:
        """As HTTPSConnection does it, with the other name."""
        http.client.HTTPConnection.connect(self)
        self.sock = self._tls.wrap_socket(self.sock, server_hostname=self._server_name)


def _refusal(status: int, body: bytes, asked: str) -> KubeRefusal:
    try:
        found = json.loads(body)
    except ValueError:
        found = {"message": body[:300].decode(errors="replace")}
    return KubeRefusal(status, found if isinstance(found, dict) else {}, asked)


def _is_final(status: int, body: bytes) -> bool:
    """500 of an admission webhook says what is wrong: asking again says the same."""
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
    """Where the objects of a kind are: `batch/v1` and `jobs` in a namespace, or of the whole cluster."""
    root = f"/api/{api}" if "/" not in api else f"/apis/{api}"
    return f"{root}/namespaces/{quote(namespace, safe='')}/{plural}" if namespace else f"{root}/{plural}"


def object_path(document: Mapping[str, Any], namespace: str) -> str:
    """Where an object of a manifest is; `namespace` is empty for kinds of the whole cluster."""
    name = quote(str(document["metadata"]["name"]), safe="")
    return f"{kind_path(str(document['apiVersion']), plural_of(str(document['kind'])), namespace)}/{name}"


def plural_of(kind: str) -> str:
    """The API's name for many of a kind.

    >>> plural_of("JobSet"), plural_of("NetworkPolicy")
    ('jobsets', 'networkpolicies')
    """
    return PLURALS.get(kind, f"{kind.lower()}s")


def has_condition(document: Mapping[str, Any] | None, kind: str, status: str = "True") -> Mapping[str, Any] | None:
    """A condition of an object's status, when it has that value."""
    for one in conditions_of(document):
        if one.get("type") == kind and one.get("status") == status:
            return one
    return None


def conditions_of(document: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    """The conditions of an object's status."""
    status = (document or {}).get("status") or {}
    return [one for one in status.get("conditions") or () if isinstance(one, dict)]
