"""A small API server on the loopback for tests: real sockets, the API's Status objects, faults on demand.

It keeps objects by path and knows just enough: server-side apply with conflicts between managers, lists in pages with
label selectors, access reviews, discovery, deletion by owner, watches. It is no Kubernetes: no schema, no controller.
"""

from __future__ import annotations

import io
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKEN = "good-token"
APIS = {
    "/apis/jobset.x-k8s.io/v1alpha2": ["jobsets"],
    "/apis/kueue.x-k8s.io/v1beta2": ["localqueues", "clusterqueues", "workloads", "topologies", "resourceflavors"],
}


@dataclass
class Fault:
    """An answer in place of the real one, `times` times."""

    method: str
    path: str  # regular expression
    status: int = 0  # 0: the connection is closed without an answer
    reason: str = ""
    message: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    times: int = 1
    query: str = ""
    without: str = ""  # in the query
    after: bool = False  # it is done, and the answer is lost


class KubeServer:
    """Objects, faults, and what was asked."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.apis = dict(APIS)
        self.faults: list[Fault] = []
        self.denied: set[tuple[str, str]] = set()  # verb, resource
        self.requests: list[str] = []
        self.watches: list[list[dict[str, Any]]] = []  # events of each watch to come
        self.version = 100
        self.lock = threading.RLock()
        self.put("/api/v1/namespaces/default", {"kind": "Namespace"})
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # else every answer waits 40 ms for a delayed ACK

            def log_message(self, *args: object) -> None:
                pass

            def handle_any(self) -> None:
                owner.handle(self)

            do_GET = do_POST = do_PATCH = do_DELETE = handle_any

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def put(self, path: str, document: dict[str, Any]) -> dict[str, Any]:
        """Keep an object as a controller would."""
        with self.lock:
            self.version += 1
            metadata = document.setdefault("metadata", {})
            metadata.setdefault("name", path.rpartition("/")[2])
            metadata.setdefault("uid", f"uid-{self.version}")
            metadata["resourceVersion"] = str(self.version)
            self.objects[path] = document
        return document

    def paths(self, part: str = "") -> list[str]:
        return [path for path in self.objects if part in path]

    def kubeconfig(self, path: Path, *, token: str = TOKEN, namespace: str = "default", **user: Any) -> Path:
        """A file for KUBECONFIG."""
        table = {
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "c", "user": "u", "namespace": namespace}}],
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": user or {"token": token}}],
        }
        path.write_text(json.dumps(table))  # JSON is YAML
        return path

    # ---- one request -------------------------------------------------------------------------------------------------

    def handle(self, ask: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(ask.path)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        size = int(ask.headers.get("Content-Length") or 0)
        body = json.loads(ask.rfile.read(size)) if size else {}
        with self.lock:
            self.requests.append(f"{ask.command} {ask.path}")
            for fault in self.faults:
                if fault.times and fault.method == ask.command and re.search(fault.path, parts.path):
                    if fault.query not in parts.query or (fault.without and fault.without in parts.query):
                        continue
                    fault.times -= 1
                    if fault.after:
                        self.on_patch(LostAnswer(ask), parts.path, query, body)
                    if not fault.status:
                        ask.close_connection = True
                        return
                    self.refuse(ask, fault.status, fault.reason, fault.message, fault.headers)
                    return
            if ask.headers.get("Authorization") != f"Bearer {TOKEN}":
                self.refuse(ask, 401, "Unauthorized", "Unauthorized")
                return
            if query.get("watch"):
                events = self.watches.pop(0) if self.watches else []
                self.answer(ask, 200, b"".join(json.dumps(one).encode() + b"\n" for one in events))
                return
            getattr(self, f"on_{ask.command.lower()}")(ask, parts.path, query, body)

    def answer(
        self, ask: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str] | None = None
    ) -> None:
        ask.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            ask.send_header(name, value)
        ask.end_headers()
        ask.wfile.write(body)

    def tell(self, ask: BaseHTTPRequestHandler, document: dict[str, Any], status: int = 200) -> None:
        self.answer(ask, status, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def refuse(
        self,
        ask: BaseHTTPRequestHandler,
        status: int,
        reason: str,
        message: str,
        headers: dict[str, str] | None = None,
    ) -> None:
        told = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status}
        body = json.dumps({**told, "reason": reason, "message": message}).encode()
        self.answer(ask, status, body, headers)

    def on_get(self, ask: Any, path: str, query: dict[str, str], body: dict[str, Any]) -> None:
        if path in self.apis:
            self.tell(ask, {"kind": "APIResourceList", "resources": [{"name": one} for one in self.apis[path]]})
        elif path.endswith("/log"):
            self.answer(ask, 200, f"log of {path.split('/')[-2]}\n".encode())
        elif path in self.objects:
            self.tell(ask, self.objects[path])
        elif self.is_collection(path):
            name, _, value = query.get("labelSelector", "").partition("=")
            found = []
            for key, one in sorted(self.objects.items()):
                labels = one["metadata"].get("labels") or {}
                if key.rpartition("/")[0] == path and (not name or (name in labels and value in ("", labels[name]))):
                    found.append(one)
            limit, start = int(query.get("limit") or 500), int(query.get("continue") or 0)
            after = str(start + limit) if start + limit < len(found) else ""
            metadata = {"resourceVersion": str(self.version), "continue": after}
            self.tell(ask, {"kind": "List", "metadata": metadata, "items": found[start : start + limit]})
        else:
            self.refuse(ask, 404, "NotFound", f"{path.rpartition('/')[2]} not found")

    def is_collection(self, path: str) -> bool:
        words = path.strip("/").split("/")
        inner = words[2:] if words[0] == "api" else words[3:]
        return len(inner) == 1 or (len(inner) == 3 and inner[0] == "namespaces")

    def on_post(self, ask: Any, path: str, query: dict[str, str], body: dict[str, Any]) -> None:
        asked = body["spec"]["resourceAttributes"]
        allowed = (asked["verb"], asked["resource"]) not in self.denied
        self.tell(ask, {**body, "status": {"allowed": allowed}}, status=201)

    def on_patch(self, ask: Any, path: str, query: dict[str, str], body: dict[str, Any]) -> None:
        here = self.objects.get(path)
        kind = ask.headers["Content-Type"]
        if kind in ("application/merge-patch+json", "application/strategic-merge-patch+json"):
            merge(self.objects[path], body, keep_lists="strategic" in kind)
            self.tell(ask, self.objects[path])
            return
        manager = query["fieldManager"]
        if here is not None and here.get("manager", manager) != manager and query.get("force") != "true":
            said = f'Apply failed with 1 conflict: conflict with "{here["manager"]}": .metadata.annotations'
            self.refuse(ask, 409, "Conflict", said)
            return
        made = {**(here or {}), **body, "manager": manager}
        made["metadata"] = {**((here or {}).get("metadata") or {}), **body["metadata"]}
        if query.get("dryRun") != "All":
            made = self.put(path, made)
        self.tell(ask, made, status=200 if here else 201)

    def on_delete(self, ask: Any, path: str, query: dict[str, str], body: dict[str, Any]) -> None:
        gone = self.objects.pop(path, None)
        if gone is None:
            self.refuse(ask, 404, "NotFound", "not found")
            return
        uid, name = gone["metadata"].get("uid"), gone["metadata"]["name"]
        for key, one in list(self.objects.items()):  # what the garbage collector and the JobSet controller would do
            owners = [owner.get("uid") for owner in one["metadata"].get("ownerReferences") or ()]
            label = (one["metadata"].get("labels") or {}).get("phalanx.run")
            if uid in owners or ("/pods/" in key and label == name and "/jobsets/" in path):
                del self.objects[key]
        self.tell(ask, {"kind": "Status", "status": "Success"})


class LostAnswer:
    """Takes an answer and drops it."""

    def __init__(self, ask: BaseHTTPRequestHandler) -> None:
        self.headers, self.wfile = ask.headers, io.BytesIO()

    def send_response(self, status: int) -> None: ...

    def send_header(self, name: str, value: str) -> None: ...

    def end_headers(self) -> None: ...


def merge(target: dict[str, Any], changes: dict[str, Any], *, keep_lists: bool) -> None:
    """As the API does it: a list is replaced, or, in a strategic merge, joined by the key `type` of conditions."""
    for name, value in changes.items():
        if isinstance(value, dict) and isinstance(target.get(name), dict):
            merge(target[name], value, keep_lists=keep_lists)
        elif keep_lists and name == "conditions":
            kinds = [one["type"] for one in value]
            target[name] = [one for one in target.get(name) or () if one["type"] not in kinds] + value
        elif value is None:
            target.pop(name, None)
        else:
            target[name] = value


@contextmanager
def running_server() -> Iterator[KubeServer]:
    made = KubeServer()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.server.shutdown()
        made.server.server_close()
        thread.join()
