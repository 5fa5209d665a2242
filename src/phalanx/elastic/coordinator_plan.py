"""The part of a plan that the coordinator needs.

Reading a whole plan imports the planner's types, and with them numpy: most of a coordinator's start-up time, during
which all hosts wait after a coordinator was lost. The launcher of the run has read and checked the whole plan.
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
    """The job and layout of a plan, and how many of its hosts fail together."""

    job: Job
    layout: Layout
    # Hosts that fail together: an NVL72 rack is a domain of 18 hosts that share power, cooling and switches; 1
    # where a domain is one host.
    rack_hosts: int = 1

    @classmethod
    def from_json(cls, text: str, *, where: str = "plan") -> CoordinatorPlan:
        """Read plan.json; raises UserError for any other text."""
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
