"""Screening of updates by loss: an update that raises the held-out loss is left out.

As in Covenant-72B's Gauntlet (arXiv:2603.08163).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from phalanx.peers.facts import Vector
from phalanx.train.engine import Engine
from phalanx.train.evaluate import HeldoutScorer
from phalanx.train.slow_links.outer_optimizer import OuterOptimizer
from phalanx.train.slow_links.peer_vector import VectorMap

SEQUENCES = 8  # held-out sequences that an update is scored on
RISE = 0.01  # largest relative rise of the loss; an update above it is useless


class LossScreen:
    """Scores updates of weights by the loss they cause; only to be used while training waits.

    It changes the engine's weights, and restores them.
    """

    def __init__(self, engine: Engine, outer: OuterOptimizer, folders: Sequence[Path]) -> None:
        self._engine, self._outer = engine, outer
        self._scorer = HeldoutScorer(folders, engine, sequences=SEQUENCES)

    @torch.no_grad()
    def complaint(self, vectors: VectorMap, places: Sequence[int], vector: Vector) -> str | None:
        """Return the reason to leave an update out, or None; `places` are the shards that its vector consists of."""
        shards = [self._engine.shards[place] for place in places]
        own = [shard.tensor.clone() for shard in shards]
        shared = [self._outer.weights[place] for place in places]
        try:
            before = self._loss_with(places, shared)
            moved = [weight - update.to(weight) for weight, update in zip(shared, vectors.spread(vector), strict=True)]
            after = self._loss_with(places, moved)
        finally:
            for shard, tensor in zip(shards, own, strict=True):
                shard.tensor.copy_(tensor)
            self._engine.publish()
        if before is None or after is None or after <= before * (1.0 + RISE):
            return None
        return f"it raises the loss on held-out text from {before:.3f} to {after:.3f}"

    def _loss_with(self, places: Sequence[int], weights: Sequence[torch.Tensor]) -> float | None:
        """Return the held-out loss with some shards replaced; None if nothing is held out."""
        for place, weight in zip(places, weights, strict=True):
            self._engine.shards[place].tensor.copy_(weight)
        self._engine.publish()
        score = self._scorer.score({})
        return score.loss if score is not None else None
