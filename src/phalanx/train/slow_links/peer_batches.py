"""A peer's rows of every step: its part of the global batch, dealt to the data ranks inside the peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from phalanx.plan.shrink_layout import BatchDeal
from phalanx.train.data.batches import IGNORED, Samples
from phalanx.train.data.sampler import Sampler
from phalanx.train.data.token_samples import Tokens
from phalanx.train.slow_links.sample_deal import Ranges


class PeerBatches:
    """A `Batches` for samples that are known only when a step begins; nothing is read ahead."""

    def __init__(
        self,
        dataset: Samples,
        sampler: Sampler,
        *,
        sequence: int,
        deal: BatchDeal,
        data_rank: int,
        digest: str,
        share_of: Callable[[int], Ranges],
        position: Callable[[int], Any] = lambda step: None,
        restore: Callable[[Any], None] = lambda position: None,
    ) -> None:
        self._dataset, self._sampler, self._sequence = dataset, sampler, sequence
        self._deal, self._rank, self.digest, self._share_of = deal, data_rank, digest, share_of
        # Rounds and members, from which the deal follows.
        self.position, self.restore_position = position, restore

    def get(self, step: int) -> tuple[Tokens, Tokens]:
        """Return (tokens, targets) of this rank in a step."""
        return self.read(self._share_of(step))

    def read(self, samples: Ranges) -> tuple[Tokens, Tokens]:
        """Return (tokens, targets) of this rank's part of some samples; filler rows have only ignored targets."""
        sample_numbers = self._sample_numbers(samples)
        own_rows = self._deal.real(self._rank, len(sample_numbers))
        numbers = sample_numbers[own_rows.start : own_rows.stop]
        filling = self._deal.rows(len(sample_numbers)) - len(numbers)
        if filling:  # repeat a real sample, with the lengths and words of real text
            filler = sample_numbers[-1:] if len(sample_numbers) else self._sampler.indices(0, 1)
            numbers = np.concatenate([numbers, np.repeat(filler, filling)])
        rows = np.ascontiguousarray(self._dataset.samples(numbers, self._sequence))
        tokens, targets = rows[:, :-1], rows[:, 1:].copy()
        targets[len(own_rows) :] = IGNORED
        return tokens, targets

    def _sample_numbers(self, samples: Ranges) -> Tokens:
        blocks = [self._sampler.indices(positions.start, len(positions)) for positions in samples]
        return np.concatenate(blocks) if blocks else np.empty(0, dtype=np.int64)

    def indices(self, step: int) -> Tokens:
        """Return the numbers of the samples that this rank learns from in a step."""
        sample_numbers = self._sample_numbers(self._share_of(step))
        own_rows = self._deal.real(self._rank, len(sample_numbers))
        return sample_numbers[own_rows.start : own_rows.stop]

    def close(self) -> None:
        """Do nothing: there is no background work to stop."""
