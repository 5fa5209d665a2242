"""What a peer's node is told once: addresses, limits, and whom to call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from phalanx.peers.allowlist import AllowList
from phalanx.peers.facts import Address, Bandwidth, PeerEvent, Vector
from phalanx.peers.harm_votes import Judgement, RoundTrial

MOST_VALUES = 2**36  # of a vector, where nobody has said how long those of the run are
MOST_STATE_BYTES = 2**40  # of a state whose tensors nobody has named


@dataclass(kw_only=True, slots=True)
class ModelLimits:
    """What the run's model allows: no plan or state of another peer is taken to be larger."""

    values: int = MOST_VALUES
    tensors: Mapping[str, int] | None = None  # bytes at most, by name


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSettings:
    """The arguments of `PeerGroup`, which explains them."""

    listen: Address
    advertise: Address | None
    bandwidth: Bandwidth | None
    client_only: bool
    events: Callable[[PeerEvent], None]
    screen: Callable[[str, Vector], str | None] | None
    norm_limit: float
    heartbeat_s: float
    dead_after_s: float
    samples_per_s: float | None
    judge: Callable[[RoundTrial], Judgement] | None = None
    keep_allowed: Callable[[AllowList], None] = lambda allowed: None
    routes: Mapping[str, Address] = field(default_factory=dict)
    aggregation: str = "mean"
    excluded: Mapping[str, str] = field(default_factory=dict)
    limits: ModelLimits = field(default_factory=ModelLimits)

    @property
    def reconnect_s(self) -> float:
        """How long a peer may be without a connection before it counts as gone."""
        return min(self.dead_after_s, max(2 * self.heartbeat_s, 0.5))
