"""Phalanx: one job file from a laptop to a hundred thousand GPUs.

>>> import phalanx
>>> job = phalanx.load("examples/llama-3-8b-64xH100.toml")   # doctest: +SKIP
>>> phalanx.plan(job, phalanx.cluster("8xH100:8")).layout    # doctest: +SKIP

`load` reads a job file, `cluster` makes a Cluster of a spec or a file, `plan` finds the layout.
"""

from __future__ import annotations

TYPE_CHECKING = False  # read by type checkers; importing typing for it would leave more time for an unguarded Ctrl-C
if TYPE_CHECKING:
    from typing import Any

    from phalanx.hardware.cluster import resolve as cluster
    from phalanx.job.load import load
    from phalanx.plan.make import plan

__all__ = ["cluster", "load", "plan"]

# Imported on first use: `phalanx --help` must not pay for numpy.
_LAZY = {"cluster": ("phalanx.hardware.cluster", "resolve"), "load": ("phalanx.job.load", "load")}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "plan":
        return import_module("phalanx.plan")
    if name in _LAZY:
        module, attribute = _LAZY[name]
        return getattr(import_module(module), attribute)
    raise AttributeError(f"module 'phalanx' has no attribute {name!r}; the public names are {', '.join(__all__)}")
