"""The same step on real ranks of this machine, heard by the same recorder: what a dry trace must equal."""

from __future__ import annotations

from phalanx.train.tracing.log import RankTrace
from phalanx.train.tracing.world import Step
from phalanx.train.verify.ranks import LIMIT_S, run_ranks


def record_ranks(step: Step, *, limit_s: float = LIMIT_S) -> list[RankTrace]:
    """The step of every rank over gloo; experts take tokens in turn, as in a dry trace."""
    return run_ranks(_record, step.settings.layout.devices, step, limit_s=limit_s)


def _record(_: int, step: Step) -> RankTrace:
    from phalanx.train.tracing.dry import record_step, traceable

    return record_step(step.shape, traceable(step.settings), step.optim, state_dtype=step.state_dtype, fakes=None)
