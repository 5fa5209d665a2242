"""The decision which nodes to take out of service: those that signals blame, but never more than half of the cluster.

The limit is OpenAI's lesson of 2018: a full etcd made every node look unhealthy, and the autoscaler removed them all.
When more than half would be out, a common cause is more likely, and nothing is done until an operator has looked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.units import plural

MOST_SHARE = 0.5
PREFIX = "phalanx: "  # of every reason that Phalanx writes
MOST_REASON = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeHealth:
    """A node as its system reports it."""

    name: str
    is_out: bool  # cordoned, drained, or down
    blamed: tuple[str, ...] = ()
    reason: str = ""  # the reason it is out


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthDecision:
    """The nodes to take out, each with its reason; or the reason why none is."""

    total: int
    out: int  # already out
    take_out: tuple[tuple[str, str], ...]
    braked: str = ""  # why nothing is done


def decide_health(nodes: Sequence[NodeHealth]) -> HealthDecision:
    """Return which nodes to take out now.

    >>> nodes = [NodeHealth(name=f"n{i}", is_out=False, blamed=("XID 79",) if i < 2 else ()) for i in range(4)]
    >>> [name for name, _ in decide_health(nodes).take_out]
    ['n0', 'n1']
    >>> decide_health(nodes[:3]).braked
    '2 of 3 nodes would be out of service, more than half'
    """
    out = sum(node.is_out for node in nodes)
    blamed_nodes = [node for node in nodes if node.blamed and not node.is_out]
    if blamed_nodes and out + len(blamed_nodes) > MOST_SHARE * len(nodes):
        message = f"{out + len(blamed_nodes)} of {plural(len(nodes), 'node')} would be out of service, more than half"
        return HealthDecision(total=len(nodes), out=out, take_out=(), braked=message)
    chosen = tuple((node.name, (PREFIX + "; ".join(node.blamed))[:MOST_REASON]) for node in blamed_nodes)
    return HealthDecision(total=len(nodes), out=out, take_out=chosen)
