"""What would help: the same failures met with one thing changed at a time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx.plan.plan import Plan
from phalanx.sim.months.ledger import Outcome
from phalanx.sim.months.network import job_causes
from phalanx.sim.months.policy import Policy
from phalanx.sim.months.run import runs
from phalanx.sim.months.spread import Spread, spread
from phalanx.units import plural

# Seconds from a failure noticed to the next step that others reached: ByteRobust's warm spares on 16k GPUs
# (arXiv 2509.16293, table 7: in place 65 s).
QUICK_RESTART_S = 65.0
QUICK_DETECT_S = 10.0  # GPU lost or driver hung, by inspection (ByteRobust, table 3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lever:
    """One change, and what it adds to the effective training time, as a share with its confidence."""

    name: str
    gain: Spread


def changes(plan: Plan, policy: Policy) -> Iterator[tuple[str, Policy]]:
    """Changes that are not made yet, by name."""
    saving = policy.saving
    if policy.restart_s > QUICK_RESTART_S:
        yield f"restart in {QUICK_RESTART_S:g} s", dataclasses.replace(policy, restart_s=QUICK_RESTART_S)
    if policy.detect_s > QUICK_DETECT_S:
        yield f"notice in {QUICK_DETECT_S:g} s", dataclasses.replace(policy, detect_s=QUICK_DETECT_S)
    if not policy.network.edge and plan.reliability.hosts > 1:
        yield _edge(plan, policy)
    if not math.isfinite(saving.copy_every_s):
        copied = dataclasses.replace(saving, copy_every_s=plan.prediction.step_s)
        yield "a copy in memory every step, if it cost nothing", dataclasses.replace(policy, saving=copied)
    yield "twice the spare hosts (rent not counted)", dataclasses.replace(policy, spares=2 * policy.spares or 1)
    if policy.planned_per_day:
        yield "no planned restarts", dataclasses.replace(policy, planned_per_day=0.0)
    yield "half the failures", dataclasses.replace(policy, mtbf_s=2 * policy.mtbf_s)


def _edge(plan: Plan, policy: Policy) -> tuple[str, Policy]:
    network = dataclasses.replace(policy.network, edge=True)
    mix, mtbf_s = job_causes(plan, network)
    name = f"edge recovery, {plural(network.planes, 'plane')}"
    return name, dataclasses.replace(policy, mix=mix, mtbf_s=mtbf_s, network=network)


def levers(plan: Plan, policy: Policy, outcomes: Sequence[Outcome], *, days: float, seed: int) -> tuple[Lever, ...]:
    """Every change on its own against the runs there are, the largest gain first."""
    found = []
    for name, changed in changes(plan, policy):
        again = runs(changed, days=days, count=len(outcomes), seed=seed)
        gains = [new.effective - old.effective for new, old in zip(again, outcomes, strict=True)]
        found.append(Lever(name=name, gain=spread(gains, least=-1.0)))
    return tuple(sorted(found, key=lambda one: -one.gain.mean))
