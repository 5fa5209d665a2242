"""What a rank hears from those who look after it, and how it answers; the loop knows nothing else of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from phalanx.elastic.heartbeat_board import Phase
from phalanx.elastic.rank_link import Interrupted
from phalanx.train.drill_hooks import DrillHooks
from phalanx.train.guard.divergence_verdict import Divergence
from phalanx.train.state.async_saver import HostCopies
from phalanx.train.state.in_memory import InMemoryCheckpointer

if TYPE_CHECKING:
    from phalanx.train.regroup import ReplicaRounds
    from phalanx.train.slow_links.peer_training import PeerTraining


@dataclass(frozen=True, kw_only=True, slots=True)
class RankControl:
    """Of one rank in one epoch. Without an agent (torchrun, srun) most of it is silent."""

    stop: Callable[[], bool]  # the run is to end after this step
    progress: Callable[[int, Phase], None]  # called after every step, and before and after everything that takes long
    epoch: int = 0
    went_s: float | None = None  # Unix time at which this launch began to train; None is now
    reform: Callable[[], bool] = lambda: False  # the membership is to be left after this step
    leaves_at: frozenset[int] = frozenset()  # steps after which it is left in any case: replays
    keeper: InMemoryCheckpointer | None = None  # copies in host memory
    case: Divergence | None = None  # copies that differed before this epoch, and which of them was wrong is not known
    copies: HostCopies = field(default_factory=HostCopies)  # host memory that saves copy into, from epoch to epoch
    compared: set[str] = field(default_factory=set)  # compiled code that was held against eager code in this process
    hooks: DrillHooks = field(default_factory=DrillHooks)
    fence: Callable[[], AbstractContextManager[None]] = nullcontext  # entered to commit a checkpoint
    over: Callable[[], bool] = lambda: False  # the membership has ended: others form the next one
    rounds: ReplicaRounds | None = None  # where model replicas come and go within the membership
    peers: PeerTraining | None = None  # where this is one of several peers on slow links

    def check(self) -> None:
        """Raise Interrupted when the membership has ended; called before a number is kept that ranks agreed on.

        Whoever waits in a collective of NCCL when it is aborted comes out of it as if all were well, with whatever the
        kernel had done by then. It is aborted only after `over` has become true.
        """
        if self.over():
            raise Interrupted


class UntrustedState(Exception):
    """The state is not to be trusted from some step on: every rank leaves, and the run goes on from before it."""

    def __init__(
        self,
        fault: str,
        *,
        step: int,
        sound: int,
        what: str,
        suspects: tuple[int, ...] = (),
        evidence: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(what)
        self.fault, self.step, self.sound, self.suspects, self.evidence = fault, step, sound, suspects, evidence
