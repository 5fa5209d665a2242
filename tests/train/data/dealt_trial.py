"""A trial whose batches are dealt as the training loop deals them; what test_batches_fewer runs on every rank."""

from __future__ import annotations

import numpy as np
import torch

from phalanx.job.schema import Batch
from phalanx.plan.shrink_layout import BatchDeal
from phalanx.train.data.batches import Batches, BatchPlan
from phalanx.train.data.sampler import GlobalSampler
from phalanx.train.data.token_samples import Tokens
from phalanx.train.engine import Engine
from phalanx.train.verify import trial as trials
from phalanx.train.verify.trial import RankOutcome, Trial


class Drawn:
    """A dataset whose samples are drawn by their number."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab

    def samples(self, indices: Tokens, length: int) -> Tokens:
        """Rows [count, length + 1]."""
        rows = [np.random.default_rng(int(index)).integers(0, self.vocab, length + 1) for index in indices]
        return np.stack(rows)


def batches_of(trial: Trial, data_rank: int) -> Batches:
    """As the loop makes them."""
    dealing = BatchDeal.of(trial.settings.layout, reproducible=trial.settings.reproducible)
    sequence, sequences = trial.settings.sequence, trial.sequences
    return Batches(
        Drawn(trial.shape.vocab),
        GlobalSampler(10**6, seed=3),
        BatchPlan.of(Batch(global_sequences=sequences), sequence=sequence, tokens=10**9),
        sequence=sequence,
        data_rank=data_rank,
        data_ranks=dealing.data_ranks,
        micro=dealing.micro,
        rounds=dealing.rounds,
        powers=dealing.powers,
    )


def dealt(engine: Engine, trial: Trial, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This data rank's rows of a step."""
    batches = batches_of(trial, engine.meshes.index("data"))
    try:
        tokens, targets = (torch.from_numpy(rows) for rows in batches.get(step))
        return tokens, targets
    finally:
        batches.close()


def on_rank(rank: int, trial: Trial) -> RankOutcome:
    """A trial's rank with the loop's batches; the process is this task's own, so nothing is put back."""
    trials.rank_batch = dealt
    return trials.run_trial_rank(rank, trial)
