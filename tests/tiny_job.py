"""The smallest job that launches are tested with: `from tiny_job import tiny_job`."""

from __future__ import annotations

import json
from typing import Any

TABLES: dict[str, dict[str, Any]] = {
    "model": {"layers": 1, "hidden": 32, "heads": 4, "ffn": 64, "vocab": 320},
    "data": {"path": "data", "sequence": 32},
    "batch": {"global_tokens": 256},
    "precision": {"compute": "fp32"},
}
ENDLESS = {"tokens": 256_000_000}  # a million steps: it runs until somebody ends it
ON_KUBERNETES = {"on": "k8s", "image": "registry.example/phalanx:0.7", "claim": "runs"}


def tiny_job(**tables: dict[str, Any]) -> str:
    """The text of a job file: the tables above, with values added or replaced.

    >>> tiny_job(cluster={"spec": "local-cpu:2"}).splitlines()[-2:]
    ['[cluster]', 'spec = "local-cpu:2"']
    """
    lines = ['name = "tiny"']
    for name in [*TABLES, *(one for one in tables if one not in TABLES)]:
        values = TABLES.get(name, {}) | tables.get(name, {})
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"
