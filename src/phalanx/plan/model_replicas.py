"""Model replicas of a layout, sets of ranks that each hold one whole copy of the model, and the cost of losing one.

Ranks of one replica share weights, stages, heads and sequences with each other; between replicas only gradients are
summed. So there are two ways to recover from a lost rank: rebuild everything, or leave out its replica until the
replica is complete again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from phalanx.job.run_sections import FaultSettings
from phalanx.plan.layout import Layout

if TYPE_CHECKING:
    # Imports numpy, which a coordinator would have to wait for.
    from phalanx.hardware.types import Cluster

# Seconds to agree on the present replicas and to reconnect the ranks that sum gradients, once without the lost replica
# and once with it: 0.04 s and 0.25 s (medians of 6 losses), 0.42 s and 0.30 s (of 5) with more load; 3 x 2 ranks, gloo
# on two cores (benchmarks/2026-11-17-replica-loss.md). NCCL's communicators were not measured.
REGROUP_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelReplicas:
    """The replica of each rank of a layout, and the rank's position in it.

    Ranks are numbered ((pipeline · data + d) · context + c) · tensor + t; a replica is a range of d on every stage.

    >>> hsdp = Layout(data=6, shard=2, tensor=1, context=1, pipeline=2, virtual_pipeline=1, expert=1, zero=2,
    ...               sequence_parallel=False, micro_batch=1, accumulation=1, recompute="none", precision="fp32",
    ...               schedule="1f1b", offload="none", compression="none")
    >>> found = ModelReplicas.of(hsdp)
    >>> found.count, found.size, found.ranks(1), found.place(9), found.inner.name
    (3, 4, (2, 3, 8, 9), (1, 3), 'TP1·CP1·PP2·DP2 (ZeRO-2, EP1) mbs1 no-recompute')
    """

    layout: Layout
    count: int

    @classmethod
    def of(cls, layout: Layout) -> ModelReplicas:
        """Return as many replicas as the layout has; each is made of whole shard groups and whole context groups."""
        unit_ranks = math.lcm(layout.shard if layout.zero else 1, layout.context)
        num_ranks = layout.data * layout.context
        return cls(layout=layout, count=num_ranks // unit_ranks if num_ranks % unit_ranks == 0 else 1)

    @property
    def size(self) -> int:
        """The number of ranks of one replica."""
        return self.layout.devices // self.count

    @property
    def inner(self) -> Layout:
        """The layout of one replica alone."""
        return replace(self.layout, data=self.layout.data // self.count)

    @property
    def _block_ranks(self) -> int:
        """The number of ranks of one replica on one stage; their numbers are consecutive."""
        return self.size // self.layout.pipeline

    def place(self, rank: int) -> tuple[int, int]:
        """Return the replica of a rank, and the rank's position within it."""
        stage, inside = divmod(rank, self._block_ranks * self.count)
        replica, position = divmod(inside, self._block_ranks)
        return replica, stage * self._block_ranks + position

    def rank(self, replica: int, position: int) -> int:
        """Return the rank at a position of a replica, the inverse of `place`."""
        stage, in_stage = divmod(position, self._block_ranks)
        return (stage * self.count + replica) * self._block_ranks + in_stage

    def ranks(self, replica: int) -> tuple[int, ...]:
        """Return all ranks of a replica, ordered by position."""
        return tuple(self.rank(replica, position) for position in range(self.size))


@dataclass(frozen=True, kw_only=True, slots=True)
class LossCost:
    """The cost of one lost rank for one way to recover."""

    stall_s: float  # all ranks wait, or repeat work
    slow_s: float  # the job trains with one replica less
    lost_s: float  # of the job's own time: stall_s, and the missing replica's share of slow_s
    lost_tokens: float  # that the job would have trained on in that time


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaLoss:
    """The cost of both ways to recover from a lost rank, for a layout with several model replicas."""

    replicas: int
    ranks: int  # of one replica
    rebuild: LossCost  # all ranks leave and rebuild everything
    leave_out: LossCost  # the other replicas continue, while the lost one is rebuilt and rejoins
    exchange_s: float  # added to every step by leaving out: gradients are summed between replicas after backward
    break_even_per_day: float | None  # failures per day above which leaving out loses less; None if it never does


def price_loss(
    layout: Layout,
    cluster: Cluster,
    fault: FaultSettings,
    *,
    step_s: float,
    tokens_per_s: float,
    state_bytes: float,
    gradient_bytes: float,
    redone_s: float,
) -> ReplicaLoss | None:
    """Return the cost of both ways to recover for one layout; None if it has only one replica.

    `state_bytes` and `gradient_bytes` are those of the whole model; `redone_s` is the work that a restart repeats.
    Leaving a replica out is priced as the trainer does it: the step in flight is repeated, the lost replica is rebuilt
    within `fault.restart_s` while the others train, and it receives the state of another replica over the network
    while all wait.
    """
    replicas = ModelReplicas.of(layout)
    if replicas.count < 2:
        return None
    speed = cluster.nic_bytes_per_s if cluster.domains > 1 else cluster.link_bytes_per_s
    transfer_s = state_bytes / replicas.size / speed if speed > 0 else 0.0
    exchange_s = (
        2 * (replicas.count - 1) / replicas.count * gradient_bytes / replicas.size / speed if speed > 0 else 0.0
    )
    rebuild_s = fault.detect_s + fault.restart_s + redone_s
    stall_s = fault.detect_s + step_s / 2 + 2 * REGROUP_S + transfer_s
    left_out_s = stall_s + fault.restart_s / replicas.count
    saved_s = rebuild_s - left_out_s
    steps_per_day = 86400.0 / step_s
    return ReplicaLoss(
        replicas=replicas.count,
        ranks=replicas.size,
        rebuild=LossCost(stall_s=rebuild_s, slow_s=0.0, lost_s=rebuild_s, lost_tokens=rebuild_s * tokens_per_s),
        leave_out=LossCost(
            stall_s=stall_s, slow_s=fault.restart_s, lost_s=left_out_s, lost_tokens=left_out_s * tokens_per_s
        ),
        exchange_s=exchange_s,
        break_even_per_day=steps_per_day * exchange_s / saved_s if saved_s > 0 else None,
    )
