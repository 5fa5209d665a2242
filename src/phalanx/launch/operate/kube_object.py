"""Helpers for the operator's Kubernetes objects."""

from __future__ import annotations

from typing import Any

from phalanx.launch.kube.client import Document


def made(api: str, kind: str, name: str, *, namespace: str = "", **body: Any) -> Document:
    """Return an object with the label that marks it as managed by Phalanx."""
    metadata: dict[str, Any] = {"name": name, "labels": {"app.kubernetes.io/managed-by": "phalanx"}}
    if namespace:
        metadata["namespace"] = namespace
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **body}


def quantity(value: float) -> str:
    """Return a number in Kubernetes' canonical form: whole, or in thousandths.

    >>> quantity(256.0), quantity(0.5)
    ('256', '500m')
    """
    return str(int(value)) if value == int(value) else f"{round(value * 1000)}m"
