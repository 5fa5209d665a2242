"""Traffic of `phalanx fabric simulate` from a job: what the collectives of its plan send in a step."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from phalanx.cli.output import note
from phalanx.errors import mistake
from phalanx.units import format_bytes, plural

if TYPE_CHECKING:
    from phalanx.network.fabric.fabric_types import Fabric
    from phalanx.sim.traffic_matrix import Flows

_JOB = re.compile(r"^(?P<file>.+\.toml)(?::(?P<axis>[a-z_-]+))?$", re.IGNORECASE)


def plan_flows(text: str, fabric: Fabric) -> Flows:
    """The flows of one axis, or of all that leave a fast domain, taken as starting together."""
    from phalanx.job.load import load
    from phalanx.plan.make import plan as make_plan
    from phalanx.sim.plan_flows import plan_collectives
    from phalanx.sim.traffic_matrix import flows

    match = _JOB.match(text.strip())
    assert match is not None, "says_bytes() said so"
    plan = make_plan(load(match["file"]), hopeless=True)
    if plan.layout.devices > fabric.hosts:
        what = f"the plan runs on {plural(plan.layout.devices, 'device')}, {fabric.name} joins {fabric.hosts:,}"
        raise mistake("--traffic", what, fix=f"use a fabric of at least {plan.layout.devices:,} NICs")
    sent = {
        one.axis.replace(" ", "-"): (one.operation, one.flows)
        for one in plan_collectives(plan)
        if one.flows is not None
    }
    if not sent:
        raise mistake(
            "--traffic", f"nothing of {match['file']} leaves a fast domain", fix="use a plan of several hosts"
        )
    if match["axis"] and match["axis"].lower() not in sent:
        what = f"the axis {match['axis'][:20]} sends nothing between hosts"
        raise mistake("--traffic", what, fix="use " + " or ".join(f"{match['file']}:{axis}" for axis in sent))
    wanted = match["axis"].lower() if match["axis"] else None
    picked = {axis: one for axis, one in sent.items() if wanted in (None, axis)}
    for axis, (operation, one) in picked.items():
        note(f"{axis}: {operation}, {plural(len(one), 'flow')}, {format_bytes(float(one.nbytes.sum()))} in a step")
    every = [one for _, one in picked.values()]
    return flows(
        np.concatenate([one.source for one in every]),
        np.concatenate([one.target for one in every]),
        np.concatenate([one.nbytes for one in every]),
    )
