"""The training loop's only interface to its agent: stop requests, progress reports, fences, in-memory copies."""

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
    """The callbacks and values that connect one rank's training loop to its agent, in one generation.

    Without an agent (torchrun, srun) most fields keep their defaults, which do nothing.
    """

    stop: Callable[[], bool]  # returns True when the run is to end after this step
    # Reports (steps done, phase): called after every step, and before and after everything that takes long.
    progress: Callable[[int, Phase], None]
    generation: int = 0
    # Unix time at which this launch began to train; None: now.
    went_s: float | None = None
    # Returns True when the membership is to be left after this step.
    reform: Callable[[], bool] = lambda: False
    leaves_at: frozenset[int] = frozenset()  # steps after which it is left in any case, in replays
    keeper: InMemoryCheckpointer | None = None  # copies in host memory
    # Copies of the state that differed before this generation, where it is not known which of them was wrong.
    case: Divergence | None = None
    # Host memory that saves copy into, reused from generation to generation.
    copies: HostCopies = field(default_factory=HostCopies)
    # Compiled code that this process has compared with eager code, by `guard.compiled.code_key`.
    compared: set[str] = field(default_factory=set)
    hooks: DrillHooks = field(default_factory=DrillHooks)
    # The context in which a checkpoint is committed.
    fence: Callable[[], AbstractContextManager[None]] = nullcontext
    # Returns True once the membership has ended and the next is being formed.
    over: Callable[[], bool] = lambda: False
    rounds: ReplicaRounds | None = None  # set where model replicas come and go within the membership
    peers: PeerTraining | None = None  # set where this rank belongs to one of several peers on slow links

    def check(self) -> None:
        """Raise Interrupted if the membership has ended.

        Called before a number that ranks agreed on is used. A rank that waits in a collective of NCCL when it is
        aborted returns from it without an error, with whatever the kernel had computed by then; the abort comes only
        after `over` has become true.
        """
        if self.over():
            raise Interrupted


class UntrustedState(Exception):
    """The state is damaged from some step on: every rank leaves, and the run continues from a step before it."""

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
