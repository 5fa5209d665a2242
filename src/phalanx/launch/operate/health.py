"""Which nodes to take out of service: those that signals blame, and never so many that the cluster is half gone.

The brake is OpenAI's lesson of 2018: a full etcd made every node look unhealthy, and the autoscaler removed them all.
When more than half would be out, one cause is more likely than many, and nothing is done until a person has looked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.units import plural

MOST_SHARE = 0.5
PREFIX = "phalanx: "  # of every reason that we write
MOST_REASON = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeHealth:
    """A node as its system knows it."""

    name: str
    is_out: bool  # cordoned, drained, or down
    blamed: tuple[str, ...] = ()
    reason: str = ""  # for which it is out


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthDecision:
    """Nodes to take out, each with its reason; or the brake."""

    total: int
    out: int  # already
    take_out: tuple[tuple[str, str], ...]
    braked: str = ""  # why nothing is done


def decide_health(nodes: Sequence[NodeHealth]) -> HealthDecision:
    """Which nodes to take out now.

    >>> nodes = [NodeHealth(name=f"n{i}", is_out=False, blamed=("XID 79",) if i < 2 else ()) for i in range(4)]
    >>> [name for name, _ in decide_health(nodes).take_out]
    ['n0', 'n1']
    >>> decide_health(nodes[:3]).braked
    '2 of 3 nodes would be out of service, more than half'
    """
    out = sum(one.is_out for one in nodes)
    wanted = [one for one in nodes if one.blamed and not one.is_out]
    if wanted and out + len(wanted) > MOST_SHARE * len(nodes):
        many = f"{out + len(wanted)} of {plural(len(nodes), 'node')} would be out of service, more than half"
        return HealthDecision(total=len(nodes), out=out, take_out=(), braked=many)
    chosen = tuple((one.name, (PREFIX + "; ".join(one.blamed))[:MOST_REASON]) for one in wanted)
    return HealthDecision(total=len(nodes), out=out, take_out=chosen)
