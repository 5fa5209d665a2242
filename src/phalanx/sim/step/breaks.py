"""The same step with one part of the fabric broken: a conventional fabric against recovery at the edge."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.errors import mistake
from phalanx.network.fabric.budget import EDGE_RECOVERY_S
from phalanx.network.fabric.types import Fabric
from phalanx.plan.plan import Plan
from phalanx.sim.broken import Broken
from phalanx.sim.step.paths import Transport
from phalanx.sim.step.report import step_report

# "Seconds or even tens of seconds" until a conventional fabric routes around (openai.com/index/mrc-supercomputer-
# networking): the middle of 1 to 100. NCCL waits 30 s before it gives up, so the job lives.
CONVERGE_S = 10.0
# All QPs of a NIC move off a dead port in "a few seconds" (arXiv:2605.04333 section 3); a dead T0 is that for each of
# its NICs.
REMAP_S = 3.0
PARTS = {
    "link": "a T0-T1 link",
    "t1": "a T1 switch",
    "t0": "a T0 switch",
    "nic": "a NIC port",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Aftermath:
    """What a failure does under one way of recovering. Infinite steps never end: the job restarts."""

    recovery: str  # "conventional" or "edge"
    healthy_s: float
    during_s: float  # the step in which it breaks
    after_s: float  # later steps, until it is mended
    flows: int  # of all axes
    touched: int  # of them, those that ran over what broke
    stalled: int  # of them, those that are left without any path
    share: float  # of line rate, slowest flow afterwards
    restart_s: float  # lost when the job has to restart, beside the work since the last checkpoint; 0 when it goes on


def aftermath(plan: Plan, fabric: Fabric, kind: str, *, edge: bool) -> Aftermath:
    """One failure of the first part of its kind."""
    healthy = step_report(plan, fabric, Transport(edge=edge))
    hit = step_report(plan, fabric, Transport(edge=edge, broken=broken(fabric, kind)))
    touched = sum(path.touched for path in hit.paths)
    stall_s = _stall_s(kind, edge=edge) if touched else 0.0
    never = float("inf")
    return Aftermath(
        recovery="edge" if edge else "conventional",
        healthy_s=healthy.step_s,
        during_s=never if hit.stalled else max(healthy.step_s, hit.step_s) + stall_s,
        after_s=never if hit.stalled else hit.step_s,
        flows=sum(path.flows for path in hit.paths),
        touched=touched,
        stalled=sum(path.stalled for path in hit.paths),
        share=hit.slowest_share,
        restart_s=plan.reliability.lost_s if hit.stalled else 0.0,
    )


def broken(fabric: Fabric, kind: str) -> Broken:
    """The first part of a kind, in the first plane; raises UserError where the fabric has none."""
    if kind in ("link", "t1") and fabric.tiers < 2:
        raise mistake(
            "phalanx sim --break",
            f"{fabric.name} has one tier, and {PARTS[kind]} belongs to two or more",
            fix="use --break nic or --break t0, or name a --fabric of two tiers",
        )
    return {
        "link": Broken(uplinks=((0, 0, 0),)),
        "t1": Broken(t1=((0, 0),)),
        "t0": Broken(t0=((0, 0),)),
        "nic": Broken(nics=((0, 0),)),
    }[kind]


def _stall_s(kind: str, *, edge: bool) -> float:
    if not edge:
        return CONVERGE_S
    return REMAP_S if kind in ("nic", "t0") else EDGE_RECOVERY_S
