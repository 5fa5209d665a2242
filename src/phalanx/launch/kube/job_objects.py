"""The Kubernetes objects of one job, as its run folder stores them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import orjson
import yaml

from phalanx.io.files import read_text
from phalanx.launch.kube.client import Document, kind_path, plural_of
from phalanx.record.run import Run

MANIFEST = "kubernetes.yaml"  # in the run folder, with the key
MAIN_KINDS = ("JobSet", "TrainJob", "Job")
RUN_ENDS = ("done", "failed", "stopped")  # states of a run that has ended
CANCELLED_BY_USER = "cancelled"


def read_manifest(run: Path) -> list[Document]:
    """Return the objects in a run folder."""
    documents = yaml.safe_load_all(read_text(run / MANIFEST, noun="manifest"))
    return [
        document for document in documents if isinstance(document, dict) and isinstance(document.get("metadata"), dict)
    ]


def main_document(documents: Sequence[Document]) -> Document:
    """Return the object that creates pods: the last of MAIN_KINDS, as a TrainingRuntime precedes its TrainJob."""
    return next(document for document in reversed(documents) if document["kind"] in MAIN_KINDS)


def job_shape(documents: Sequence[Document], namespace: str) -> bytes:
    """Return the part of a job's objects that is equal for jobs that differ only in name and key."""
    name = str(main_document(documents)["metadata"]["name"]).encode()
    return namespace.encode() + orjson.dumps(
        [document for document in documents if document["kind"] != "Secret"]
    ).replace(name, b"")


def main_path(kind: str, namespace: str) -> str:
    apis = {"JobSet": "jobset.x-k8s.io/v1alpha2", "TrainJob": "trainer.kubeflow.org/v1alpha1", "Job": "batch/v1"}
    return kind_path(apis[kind], plural_of(kind), namespace)


def grace_s(document: Document) -> float:
    """Return the longest grace period of the pods that a document describes."""
    value = document.get("terminationGracePeriodSeconds")
    children = [child for child in document.values() if isinstance(child, dict)]
    children += [
        child
        for list_value in document.values()
        if isinstance(list_value, list)
        for child in list_value
        if isinstance(child, dict)
    ]
    return max([float(value) if isinstance(value, int | float) else 0.0, *(grace_s(child) for child in children)])


@contextmanager
def said_to_be_cancelled(run: Run) -> Iterator[None]:
    """Mark a run as cancelled before its objects are deleted, so that `launch --wait` finds it cancelled and not lost.

    If the cancellation fails, the run gets its previous state back.
    """
    before = run.status()
    if not run.path.is_dir() or before.get("state") in RUN_ENDS:
        yield
        return
    run.set_status("stopped", message=CANCELLED_BY_USER, exit_code=130)
    try:
        yield
    except BaseException:
        if run.status().get("message") == CANCELLED_BY_USER:
            run.set_status(str(before.get("state") or "created"))
        raise
    if run.status().get("state") not in RUN_ENDS:  # its agents had written a status once more
        run.set_status("stopped", message=CANCELLED_BY_USER, exit_code=130)
