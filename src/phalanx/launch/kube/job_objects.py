"""The objects of one job, as its run folder keeps them."""

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
RUN_ENDS = ("done", "failed", "stopped")  # states of a run that say how it ended
CANCELLED_BY_USER = "cancelled"


def read_manifest(run: Path) -> list[Document]:
    """The objects in a run folder."""
    found = yaml.safe_load_all(read_text(run / MANIFEST, noun="manifest"))
    return [one for one in found if isinstance(one, dict) and isinstance(one.get("metadata"), dict)]


def main_document(documents: Sequence[Document]) -> Document:
    """The object that makes pods; it is the last of its kinds, since a TrainingRuntime comes before its TrainJob."""
    return next(one for one in reversed(documents) if one["kind"] in MAIN_KINDS)


def job_shape(documents: Sequence[Document], namespace: str) -> bytes:
    """What two jobs have in common when they differ in name and key alone."""
    name = str(main_document(documents)["metadata"]["name"]).encode()
    return namespace.encode() + orjson.dumps([one for one in documents if one["kind"] != "Secret"]).replace(name, b"")


def main_path(kind: str, namespace: str) -> str:
    apis = {"JobSet": "jobset.x-k8s.io/v1alpha2", "TrainJob": "trainer.kubeflow.org/v1alpha1", "Job": "batch/v1"}
    return kind_path(apis[kind], plural_of(kind), namespace)


def grace_s(document: Document) -> float:
    """The longest grace period of the pods that a document describes."""
    value = document.get("terminationGracePeriodSeconds")
    inner = [one for one in document.values() if isinstance(one, dict)]
    inner += [
        one for listed in document.values() if isinstance(listed, list) for one in listed if isinstance(one, dict)
    ]
    return max([float(value) if isinstance(value, int | float) else 0.0, *(grace_s(one) for one in inner)])


@contextmanager
def said_to_be_cancelled(run: Run) -> Iterator[None]:
    """The run says it before its objects go, so that whoever looks then (`launch --wait`) finds it cancelled, not lost.

    What cannot be cancelled is as it was.
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
    if run.status().get("state") not in RUN_ENDS:  # its agents had written once more
        run.set_status("stopped", message=CANCELLED_BY_USER, exit_code=130)
