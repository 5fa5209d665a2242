"""Model replicas of a layout: sets of ranks that each hold one whole copy of the model, and what losing one costs.

Ranks of one replica share weights, stages, heads and sequences with each other; between replicas only gradients are
summed. So when a rank is lost there are two ways on: rebuild everything, or leave out the replica that the rank belongs
to until it is whole again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from phalanx.job.run_sections import FaultSettings
from phalanx.plan.layout import Layout

if TYPE_CHECKING:
    from phalanx.hardware.types import Cluster  # numpy comes with it, which a coordinator need not wait for

# To agree on who is present and to connect the ranks that sum gradients anew, once without the lost replica and once
# with it: 0.04 s and 0.25 s (medians of 6 losses), 0.42 s and 0.30 s (of 5) with more work beside it; 3 x 2 ranks, gloo
# on two cores (benchmarks/2026-11-17-replica-loss.md). NCCL's communicators were not measured.
REGROUP_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelReplicas:
    """Which rank belongs to which replica of a layout, and which place it has in it.

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
        """As many replicas as the layout has: whole shard groups and whole context groups."""
        together = math.lcm(layout.shard if layout.zero else 1, layout.context)
        every = layout.data * layout.context
        return cls(layout=layout, count=every // together if every % together == 0 else 1)

    @property
    def size(self) -> int:
        """Ranks of one replica."""
        return self.layout.devices // self.count

    @property
    def inner(self) -> Layout:
        """The layout of one replica by itself."""
        return replace(self.layout, data=self.layout.data // self.count)

    @property
    def _block_ranks(self) -> int:
        """Ranks of one replica on one stage, which are neighbours."""
        return self.size // self.layout.pipeline

    def place(self, rank: int) -> tuple[int, int]:
        """(replica, rank within it) of a rank of the job."""
        stage, inside = divmod(rank, self._block_ranks * self.count)
        replica, near = divmod(inside, self._block_ranks)
        return replica, stage * self._block_ranks + near

    def rank(self, replica: int, position: int) -> int:
        """The reverse."""
        stage, near = divmod(position, self._block_ranks)
        return (stage * self.count + replica) * self._block_ranks + near

    def ranks(self, replica: int) -> tuple[int, ...]:
        """All ranks of a replica, by their place in it."""
        return tuple(self.rank(replica, position) for position in range(self.size))


@dataclass(frozen=True, kw_only=True, slots=True)
class LossCost:
    """What one lost rank costs, one way."""

    stall_s: float  # every rank stands still, or does work again
    slow_s: float  # the job trains on with a replica less
    lost_s: float  # of the job's own time: stall_s, and the missing replica's share of slow_s
    lost_tokens: float  # that would have been learnt from in that time


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaLoss:
    """Both ways of going on after a lost rank, where a layout has several model replicas."""

    replicas: int
    ranks: int  # of one replica
    rebuild: LossCost  # all ranks leave, and build everything anew
    leave_out: LossCost  # the others go on, the replica is built beside them and rejoins
    exchange_s: float  # that leaving out adds to every step: gradients are summed between replicas after backward
    break_even_per_day: float | None  # failures a day above which leaving out loses less; None where it never does


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
    """Both ways for one layout; None where there is one replica only.

    `state_bytes` and `gradient_bytes` are of the whole model; `redone_s` is the work that a restart does again. What is
    left out is priced as the trainer does it: the step in flight is repeated, the lost replica is built beside the
    others within `fault.restart_s`, and takes the state of another one through the network while all wait.
    """
    found = ModelReplicas.of(layout)
    if found.count < 2:
        return None
    speed = cluster.nic_bytes_per_s if cluster.domains > 1 else cluster.link_bytes_per_s
    transfer_s = state_bytes / found.size / speed if speed > 0 else 0.0
    exchange_s = 2 * (found.count - 1) / found.count * gradient_bytes / found.size / speed if speed > 0 else 0.0
    rebuild_s = fault.detect_s + fault.restart_s + redone_s
    stall_s = fault.detect_s + step_s / 2 + 2 * REGROUP_S + transfer_s
    left_out_s = stall_s + fault.restart_s / found.count
    saved_s = rebuild_s - left_out_s
    steps_per_day = 86400.0 / step_s
    return ReplicaLoss(
        replicas=found.count,
        ranks=found.size,
        rebuild=LossCost(stall_s=rebuild_s, slow_s=0.0, lost_s=rebuild_s, lost_tokens=rebuild_s * tokens_per_s),
        leave_out=LossCost(
            stall_s=stall_s, slow_s=fault.restart_s, lost_s=left_out_s, lost_tokens=left_out_s * tokens_per_s
        ),
        exchange_s=exchange_s,
        break_even_per_day=steps_per_day * exchange_s / saved_s if saved_s > 0 else None,
    )
