"""What test_own_networks runs on every rank: several trials in one process group, which costs seconds to make."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.train.verify.trial import RankOutcome, Trial, on_rank


def run_all(rank: int, trials: Sequence[Trial]) -> list[RankOutcome]:
    """Each trial as `run_trial` would."""
    return [on_rank(rank, trial) for trial in trials]
