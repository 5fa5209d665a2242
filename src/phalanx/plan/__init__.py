"""The planner: (Job, Cluster) -> Plan.

`phalanx.plan` is both this package and the function of the public API. Importing a subpackage binds its name on the
parent, whatever the parent defined, so the package itself has to be callable.
"""

from __future__ import annotations

import sys
import types
from typing import Any


class _Planner(types.ModuleType):
    """This package, callable as `phalanx.plan(job, cluster)`."""

    def __call__(self, job: Any, cluster: Any = None, *, calibration: Any = None, hopeless: bool = False) -> Any:
        from phalanx.plan.make import plan

        return plan(job, cluster, calibration=calibration, hopeless=hopeless)


sys.modules[__name__].__class__ = _Planner
