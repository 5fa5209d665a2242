"""What the coordinator needs of a plan.

The whole plan knows types of the planner, and with them numpy: most of the time in which a coordinator starts, and
after a lost one all hosts wait for the next. Whoever launches the run has read and checked the whole.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from phalanx.errors import mistake
from phalanx.io.codec import from_json_values
from phalanx.job.schema import Job
from phalanx.plan.layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorPlan:
    """Job and layout of a plan, and how many of its hosts fail together."""

    job: Job
    layout: Layout
    # An NVL72 rack is a domain of 18 hosts that share power, cooling and switches; of one host it is itself.
    rack_hosts: int = 1

    @classmethod
    def from_json(cls, text: str, *, where: str = "plan") -> CoordinatorPlan:
        """From plan.json; raises UserError when it is none."""
        try:
            body = json.loads(text)
            job, layout, cluster = (dict(body[key]) for key in ("job", "layout", "cluster"))
            rack_hosts = max(1, int(cluster["domain_devices"]) // max(1, int(cluster["host_devices"])))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise mistake(where, f"is not a plan: {error}", fix="write it with phalanx plan JOB --out") from None
        return cls(
            job=from_json_values(Job, job, f"{where}.job"),
            layout=from_json_values(Layout, layout, f"{where}.layout"),
            rack_hosts=rack_hosts,
        )
