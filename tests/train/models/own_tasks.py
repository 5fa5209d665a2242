"""What test_own_networks runs on every rank: several trials in one process group, which costs seconds to make."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.train.tracing.dry import _forget_meshes
from phalanx.train.verify.trial import RankOutcome, Trial, on_rank


def run_all(rank: int, trials: Sequence[Trial]) -> list[RankOutcome]:
    """Each trial as `run_trial` would."""
    found = []
    for trial in trials:
        _forget_meshes()  # DTensor takes a mesh of the last trial for one of this, and with it the groups of the last
        found.append(on_rank(rank, trial))
    return found
