"""Simulate a step with one broken part of the fabric: a conventional fabric (PFC off) against recovery at the edge."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.errors import mistake
from phalanx.network.fabric.fabric_types import Fabric
from phalanx.network.fabric.failure_budget import (
    CONVERGE_S,
    EDGE_RECOVERY_S,
    FLAP_S,
    GIVE_UP_S,
    REMAP_S,
    SWITCH_BACK_S,
    T1_BACK_S,
    TRANSCEIVER_BACK_S,
    can_spray,
    stall_s,
)
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.sim.fabric_links import BrokenParts
from phalanx.sim.step.axis_paths import PathTransport
from phalanx.sim.step.step_report import SimulatedStep, step_report

PARTS = {
    "link": "a T0-T1 link",
    "t1": "a T1 switch",
    "t0": "a T0 switch",
    "nic": "a NIC port",
    "transceiver": "a NIC's transceiver",
    "grey": "a T0-T1 link that loses packets",
}
# Seconds until the part is back, by default; for links, those that come back by themselves. Grey: until an operator
# looks at it, our assumption.
OUTAGE_S = {
    "link": FLAP_S,
    "t1": T1_BACK_S,
    "t0": SWITCH_BACK_S,
    "nic": FLAP_S,
    "transceiver": TRANSCEIVER_BACK_S,
    "grey": 3600.0,
}
GREY_LOSS = 0.01  # of the packets, as the paper injects (section 5.2.7)
# Round trip between hosts under different T0s: twice 6.54 µs (arXiv:2605.04333 section 5.2.1).
ROUND_TRIP_S = 2 * 6.54e-6
PACKET_BITS = 4096 * 8
# A QP that loses the last packet of a burst gets no report and waits: 4.096 µs * 2^20 (NCCL's IbTimeout of 20).
ACK_TIMEOUT_S = 4.096e-6 * 2**20
MINUTE_S = 60.0
NEVER = float("inf")


@dataclass(frozen=True, kw_only=True, slots=True)
class Aftermath:
    """The effect of a failure with one kind of recovery. Infinite steps never end: the job restarts."""

    # "conventional", "edge", or "SHIELD", InfiniBand's substitute for recovery at the edge.
    recovery: str
    healthy_s: float
    during_s: float  # the step in which the part fails
    after_s: float  # later steps, until the part is repaired
    outage_s: float  # until the part is repaired
    # Time without traffic, until it uses other paths or the part is back.
    stall_s: float
    # Training done in the minute that begins with the failure, as a share of a healthy one.
    minute: float
    flows: int  # of all axes
    touched: int  # flows with a path over the failed part
    stalled: int  # flows without any remaining path
    share_before: float  # of the slowest flow, as a share of line rate
    # The slowest flow's share after the failure, from which the later steps are computed.
    share: float
    timeouts_s: float  # per later step: waits for acknowledgements that were lost
    # Lost when the job has to restart, with the work since the last checkpoint; 0 when it continues.
    restart_s: float


def failure_aftermath(
    plan: Plan,
    fabric: Fabric,
    kind: str,
    *,
    edge: bool,
    outage_s: float | None = None,
    healthy: SimulatedStep | None = None,
) -> Aftermath:
    """Simulate a failure of the first part of its kind; `healthy` is the step without it, if it is known."""
    senders = edge and can_spray(fabric)  # senders leave failed paths and ports
    lost = broken_parts(fabric, kind, edge=senders)
    healthy = healthy or step_report(plan, fabric, PathTransport(edge=edge))
    broken_step = step_report(plan, fabric, PathTransport(edge=edge, broken=lost, every_plane=kind == "transceiver"))
    touched = sum(path.touched for path in broken_step.paths)
    away_s = OUTAGE_S[kind] if outage_s is None else outage_s
    still_s = 0.0
    if touched:
        # Without another path, until the part is back and known to be.
        still_s = (
            (away_s + (REMAP_S if senders else CONVERGE_S))
            if broken_step.stalled
            else _bypass_s(fabric, kind, edge=edge)
        )
    stops = broken_step.stalled and still_s > GIVE_UP_S
    # A job that waits until the part is back continues as before.
    after_s = healthy.step_s if broken_step.stalled else broken_step.step_s
    timeouts_s = _timeouts_s(plan, broken_step) if kind == "grey" and not senders else 0.0
    after_s += timeouts_s
    slow_s = 0.0 if broken_step.stalled else max(0.0, min(away_s, MINUTE_S) - still_s)
    return Aftermath(
        recovery="edge" if senders else "SHIELD" if edge else "conventional",
        healthy_s=healthy.step_s,
        during_s=NEVER if stops else max(healthy.step_s, after_s) + still_s,
        after_s=NEVER if stops else after_s,
        outage_s=away_s,
        stall_s=NEVER if stops else still_s,
        minute=minute_share(plan.reliability.lost_s if stops else still_s, slow_s, pace=healthy.step_s / after_s),
        flows=sum(path.flows for path in broken_step.paths),
        touched=touched,
        stalled=sum(path.stalled for path in broken_step.paths),
        share_before=healthy.slowest_share,
        share=broken_step.slowest_share,
        timeouts_s=timeouts_s,
        restart_s=plan.reliability.lost_s if stops else 0.0,
    )


def minute_share(still_s: float, slow_s: float, *, pace: float) -> float:
    """Return the share of a minute's training that is done with some seconds stalled and some at a slower pace.

    >>> minute_share(15.0, 0.0, pace=1.0), minute_share(0.0, 60.0, pace=0.5)
    (0.75, 0.5)
    """
    moving_s = max(0.0, MINUTE_S - still_s)
    slow_s = min(slow_s, moving_s)
    return (moving_s - slow_s * (1.0 - pace)) / MINUTE_S


def broken_parts(fabric: Fabric, kind: str, *, edge: bool = True) -> BrokenParts:
    """Return the first part of a kind, in the first plane; raises UserError where the fabric has none."""
    if kind in ("link", "t1", "grey") and fabric.tiers < 2:
        raise mistake(
            "phalanx sim --break",
            f"the fabric {fabric.name} has T0 switches alone, and nothing like {PARTS[kind]}",
            fix="use --break nic or --break t0, or name a fabric of two tiers: --fabric clos2:32x400G/2p/16/4:1",
        )
    uplink = ((0, 0, 0),)
    return {
        "link": BrokenParts(uplinks=uplink),
        "t1": BrokenParts(t1=((0, 0),)),
        "t0": BrokenParts(t0=((0, 0),)),
        "nic": BrokenParts(nics=((0, 0),)),
        "transceiver": BrokenParts(nics=((0, 0),)),
        # A sender at the edge leaves a path at its first loss. A switch sees a link that is up, so its traffic stays
        # there.
        "grey": BrokenParts(uplinks=uplink, left=0.0 if edge else go_back_n(GREY_LOSS, fabric.port_gbps)),
    }[kind]


def go_back_n(loss: float, gbps: float) -> float:
    """Return the goodput of a QP that resends all packets in flight for each lost one: 1 / (1 + p W), W packets a trip.

    Timeouts are not included, and are the worse part (the paper calls RoCE unusable at 1 %).

    >>> round(go_back_n(0.01, 100), 2), round(go_back_n(0.01, 400), 2)
    (0.71, 0.39)
    """
    return 1.0 / (1.0 + loss * gbps * 1e9 * ROUND_TRIP_S / PACKET_BITS)


def _timeouts_s(plan: Plan, hit: SimulatedStep) -> float:
    """Return the expected wait per step for the acknowledgements of one lossy connection.

    It is a lower bound, as other connections may be affected too.
    """
    counts = (quiet_moments(plan.layout, hit.layers, path.axis) for path in hit.paths if path.touched)
    return GREY_LOSS * ACK_TIMEOUT_S * max(counts, default=0.0)


def quiet_moments(layout: Layout, layers: int, axis: str) -> float:
    """Return how often per step a connection of an axis goes idle; then no later packet reveals a lost one."""
    passes = layers / layout.pipeline * layout.accumulation
    if axis == "pipeline":
        return 2 * layout.virtual_pipeline * layout.accumulation
    if axis == "context":
        return 3 * (layout.context - 1) * passes
    if axis in ("tensor", "expert"):
        return 4 * passes
    return 3 * passes if layout.zero == 3 and layout.pipeline == 1 else 2


def _bypass_s(fabric: Fabric, kind: str, *, edge: bool) -> float:
    """Return the seconds until traffic uses other paths."""
    if kind == "grey" and not (edge and can_spray(fabric)):
        # The switches do not notice the loss.
        return 0.0
    if not edge:
        return CONVERGE_S
    return REMAP_S if kind in ("nic", "t0") else stall_s(fabric, EDGE_RECOVERY_S)
