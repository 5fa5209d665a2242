"""A training's own code: callbacks, loss, optimizer, data, model and metrics, carried from the caller to the ranks."""

from __future__ import annotations

from typing import Any

from phalanx.errors import mistake
from phalanx.plan.plan import Plan


def attach(plan: Plan, **plugins: Any) -> Plan:
    """The plan with the caller's own code in it."""
    names = ", ".join(plugins)
    raise mistake("phalanx.train", f"{names}: this version has no place for code of your own but model.module")
