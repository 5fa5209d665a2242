"""Comparison of objects with a live cluster: which are new, changed or unchanged; and applying them."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from phalanx.launch.kube.client import Document, KubeClient, KubeRefusal, object_path
from phalanx.launch.kube.refusals import explain_refusal

MANAGER = "phalanx-cluster-init"
NEW, CHANGED, SAME, MISSING_API = "new", "changed", "unchanged", "left out"
NOISE = ("managedFields", "resourceVersion", "generation", "creationTimestamp", "uid", "selfLink")


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectChange:
    """One object, and the change it needs."""

    kind: str
    name: str
    namespace: str
    change: str  # new, changed, unchanged, left out
    diff: str = ""  # a unified diff; empty unless the object changed
    note: str = ""


def compare_objects(client: KubeClient, documents: Sequence[Document], *, apply: bool) -> list[ObjectChange]:
    """Compare each object, as a dry run of the server would store it, with the existing one; apply them if asked.

    A dry run in a namespace that does not exist yet is impossible, so objects in it count as new. Raises UserError for
    objects that the cluster refuses. With `apply`, all dry runs come first: a mistake changes nothing, but may leave
    an empty namespace.
    """
    changes = [_compare_object(client, document, _new_spaces(client, documents)) for document in documents]
    if apply:
        pending = [
            document for document, change in zip(documents, changes, strict=True) if change.change in (NEW, CHANGED)
        ]
        spaces = [document for document in pending if document["kind"] == "Namespace"]
        for document in spaces:
            _apply(client, document)
        new_names = {document["metadata"]["name"] for document in spaces}
        # Objects that could not be tried before their namespace existed.
        for document in pending:
            if document["metadata"].get("namespace") in new_names:
                _apply(client, document, dry_run=True)
        for document in pending:
            if document["kind"] != "Namespace":
                _apply(client, document)
    return changes


def _new_spaces(client: KubeClient, documents: Sequence[Document]) -> set[str]:
    names = {document["metadata"]["name"] for document in documents if document["kind"] == "Namespace"}
    return {name for name in names if _get(client, {"kind": "Namespace"}, f"/api/v1/namespaces/{name}") is None}


def _compare_object(client: KubeClient, document: Document, new_spaces: set[str]) -> ObjectChange:
    kind, metadata = str(document["kind"]), document["metadata"]
    space = str(metadata.get("namespace") or "")
    path = object_path(document, space)
    existing = _get(client, document, path)
    change, diff, note = SAME, "", ""
    if existing is None and not _is_known(client, str(document["apiVersion"]), kind):
        change, note = MISSING_API, f"the cluster has no {document['apiVersion']} {kind}"
    elif existing is None:
        change = NEW
        if space not in new_spaces:
            _apply(client, document, dry_run=True)
    else:
        applied = _apply(client, document, dry_run=True)
        lines = difflib.unified_diff(
            _text(existing),
            _text(applied),
            f"{kind} {metadata['name']} now",
            f"{kind} {metadata['name']} then",
            lineterm="",
            n=2,
        )
        diff = "\n".join(lines)
        change = CHANGED if diff else SAME
    return ObjectChange(kind=kind, name=metadata["name"], namespace=space, change=change, diff=diff, note=note)


def _get(client: KubeClient, document: Document, path: str) -> Document | None:
    try:
        return client.get(path)
    except KubeRefusal as error:
        raise explain_refusal(error, client.access, what=f"{document['kind']} {path.rpartition('/')[2]}") from error


def _is_known(client: KubeClient, api: str, kind: str) -> bool:
    if "/" not in api:
        return True
    api_resources = _get(client, {"kind": kind}, f"/apis/{api}")
    return api_resources is not None and any(
        resource.get("kind", kind) == kind for resource in api_resources.get("resources") or ()
    )


def _apply(client: KubeClient, document: Document, *, dry_run: bool = False) -> Document:
    space = str(document["metadata"].get("namespace") or "")
    try:
        return client.apply(object_path(document, space), document, manager=MANAGER, dry_run=dry_run, force=True)
    except KubeRefusal as error:
        what = f"{document['kind']} {document['metadata']['name']}"
        raise explain_refusal(error, client.access, what=what) from error


def _text(document: Document) -> list[str]:
    metadata = {key: value for key, value in document["metadata"].items() if key not in NOISE}
    fields: dict[str, Any] = {key: value for key, value in document.items() if key not in ("metadata", "status")}
    return yaml.safe_dump({**fields, "metadata": metadata}, sort_keys=True, width=120).splitlines()
