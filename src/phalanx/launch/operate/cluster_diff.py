"""Objects held against a live cluster: what would be made, changed or left as it is; and applying them."""

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
    """One object, and what becomes of it."""

    kind: str
    name: str
    namespace: str
    change: str  # new, changed, unchanged, left out
    diff: str = ""  # unified; empty unless it changed
    note: str = ""


def compare_objects(client: KubeClient, documents: Sequence[Document], *, apply: bool) -> list[ObjectChange]:
    """Each object as the server would have it (a trial apply) beside the one that is there; applied where asked for.

    A namespace that is only about to be made cannot hold a trial: what is in it is new. Raises UserError for what the
    cluster refuses. With `apply`, all trials come first: a mistake changes nothing, but may leave an empty namespace.
    """
    changes = [_compare_object(client, one, _new_spaces(client, documents)) for one in documents]
    if apply:
        wanted = [one for one, change in zip(documents, changes, strict=True) if change.change in (NEW, CHANGED)]
        spaces = [one for one in wanted if one["kind"] == "Namespace"]
        for document in spaces:
            _apply(client, document)
        made = {one["metadata"]["name"] for one in spaces}
        for document in wanted:  # what could not be tried before its namespace was there
            if document["metadata"].get("namespace") in made:
                _apply(client, document, dry_run=True)
        for document in wanted:
            if document["kind"] != "Namespace":
                _apply(client, document)
    return changes


def _new_spaces(client: KubeClient, documents: Sequence[Document]) -> set[str]:
    names = {one["metadata"]["name"] for one in documents if one["kind"] == "Namespace"}
    return {name for name in names if _get(client, {"kind": "Namespace"}, f"/api/v1/namespaces/{name}") is None}


def _compare_object(client: KubeClient, document: Document, new_spaces: set[str]) -> ObjectChange:
    kind, metadata = str(document["kind"]), document["metadata"]
    space = str(metadata.get("namespace") or "")
    path = object_path(document, space)
    here = _get(client, document, path)
    change, diff, note = SAME, "", ""
    if here is None and not _is_known(client, str(document["apiVersion"]), kind):
        change, note = MISSING_API, f"the cluster has no {document['apiVersion']} {kind}"
    elif here is None:
        change = NEW
        if space not in new_spaces:
            _apply(client, document, dry_run=True)
    else:
        then = _apply(client, document, dry_run=True)
        lines = difflib.unified_diff(
            _text(here),
            _text(then),
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
    found = _get(client, {"kind": kind}, f"/apis/{api}")
    return found is not None and any(one.get("kind", kind) == kind for one in found.get("resources") or ())


def _apply(client: KubeClient, document: Document, *, dry_run: bool = False) -> Document:
    space = str(document["metadata"].get("namespace") or "")
    try:
        return client.apply(object_path(document, space), document, manager=MANAGER, dry_run=dry_run, force=True)
    except KubeRefusal as error:
        what = f"{document['kind']} {document['metadata']['name']}"
        raise explain_refusal(error, client.access, what=what) from error


def _text(document: Document) -> list[str]:
    metadata = {key: value for key, value in document["metadata"].items() if key not in NOISE}
    kept: dict[str, Any] = {key: value for key, value in document.items() if key not in ("metadata", "status")}
    return yaml.safe_dump({**kept, "metadata": metadata}, sort_keys=True, width=120).splitlines()
