"""Settings of a peer's node, fixed when it starts: addresses, limits, and callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from phalanx.peers.allowlist import AllowList
from phalanx.peers.facts import Address, Bandwidth, PeerEvent, Vector
from phalanx.peers.harm_votes import Judgement, RoundTrial

MOST_VALUES = 2**36  # of a vector, until `PeerGroup.expect_values` sets the run's own limit
MOST_STATE_BYTES = 2**40  # of a state, where the sizes of its tensors are not known


@dataclass(kw_only=True, slots=True)
class ModelLimits:
    """Limits that follow from the run's model: larger plans and states of other peers are refused."""

    values: int = MOST_VALUES
    tensors: Mapping[str, int] | None = None  # largest size in bytes, by name


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSettings:
    """The arguments of `PeerGroup`, documented there."""

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
        """Seconds without a connection after which a peer counts as gone."""
        return min(self.dead_after_s, max(2 * self.heartbeat_s, 0.5))
