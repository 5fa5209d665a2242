"""This peer's vote on a round before it is committed, by the held-out loss (`peers.harm_votes`)."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from phalanx.job.sync_section import SyncSettings
from phalanx.peers.facts import Vector
from phalanx.peers.harm_causes import Losses, find_causes, rises
from phalanx.peers.harm_votes import ABSTAINED, Judgement, RoundTrial
from phalanx.train.engine import Engine
from phalanx.train.evaluate import HeldoutScorer
from phalanx.train.slow_links.outer_optimizer import OuterOptimizer
from phalanx.train.slow_links.peer_vector import VectorMap
from phalanx.units import plural


class HeldoutGate:
    """Judges rounds of weights on held-out sequences that the run's seed chooses, the same on every peer.

    To be used only while training waits: evaluation changes the engine's weights, and restores them.
    """

    def __init__(
        self, engine: Engine, outer: OuterOptimizer, folders: Sequence[Path], *, sync: SyncSettings, seed: int
    ) -> None:
        self._engine, self._outer, self._sync = engine, outer, sync
        self._scorer = HeldoutScorer(folders, engine, sequences=sync.gate_sequences, seed=seed)
        self.seconds = 0.0
        self.rounds = 0
        self._began_s = math.inf
        # The newest judged round's result, by place of the shard, and its losses; not yet applied.
        self._judged: tuple[dict[int, torch.Tensor], Losses] | None = None
        # Losses of the present shared weights, if they were evaluated already: for the last round, or for an earlier
        # attempt at this one (decision 0071).
        self._shared_losses: Losses | None = None

    @property
    def cost(self) -> str:
        """The time that evaluation took, in total and per round, as text for the record."""
        elapsed_s = time.monotonic() - self._began_s
        each, share = self.seconds / max(1, self.rounds), self.seconds / max(elapsed_s, 1e-9)
        return (
            f"held-out evaluation before commits took {self.seconds:.1f} s, {each:.2f} s of each of "
            f"{plural(self.rounds, 'round')} ({share:.1%} of the time since the first)"
        )

    @torch.no_grad()
    def judge(self, vectors: VectorMap, places: Sequence[int], trial: RoundTrial) -> Judgement:
        """Return this peer's vote on a round of the fragment whose shards are at `places`."""
        began_s = time.monotonic()
        self._began_s = min(self._began_s, began_s)
        own = [shard.tensor.clone() for shard in self._engine.shards]
        try:
            judgement = self._judge(vectors, places, trial)
        finally:
            self._publish(own)
        seconds = time.monotonic() - began_s
        self.seconds += seconds
        self.rounds += 1
        return Judgement(harms=judgement.harms, accused=judgement.accused, seconds=seconds)

    def settle(self) -> None:
        """Reuse the losses of an applied round for the next one, if the weights have the same bits."""
        result, losses = self._judged or ({}, None)
        is_same = all(torch.equal(self._outer.weights[place], weight) for place, weight in result.items())
        self._shared_losses = losses if is_same else None
        self._judged = None

    def forget(self) -> None:
        """Discard known losses after the shared weights were replaced."""
        self._judged = self._shared_losses = None

    def _judge(self, vectors: VectorMap, places: Sequence[int], trial: RoundTrial) -> Judgement:
        """Compare the losses before and after the round, and with contributions find the updates that cause a rise."""

        def result_of(mean: Vector, removed: Collection[str]) -> dict[int, torch.Tensor]:
            scale = self._sync.update_scale(sum(peer not in removed for peer in trial.weights))
            means = dict(zip(places, vectors.spread(mean), strict=True))
            return self._outer.preview(means, scale=scale)

        def loss_without(removed: Collection[str]) -> Losses:
            return self._losses({**shared, **result_of(trial.mean_without(removed), removed)})

        def loss_alone(vector: Vector) -> Losses:
            updates = dict(zip(places, vectors.spread(vector), strict=True))
            return self._losses(
                {**shared, **{at: shared[at] - update.to(shared[at]) for at, update in updates.items()}}
            )

        shared = dict(enumerate(self._outer.weights))
        before = self._shared_losses if self._shared_losses is not None else self._losses(shared)
        if not len(before) or not trial.weights:
            return ABSTAINED
        self._shared_losses = before
        result = result_of(trial.mean, ())
        after = self._losses({**shared, **result})
        self._judged = (result, after)
        accused: dict[str, str] = {}
        if len(trial.contributions) > 2:
            alone = {peer: loss_alone(vector) for peer, vector in trial.contributions.items()}
            accused = find_causes(before, loss_without(()), alone, loss_without)
        return Judgement(harms=rises(before, after), accused=accused)

    def _losses(self, weights: dict[int, torch.Tensor]) -> Losses:
        self._publish([weights[place] for place in range(len(weights))])
        return self._scorer.sequence_losses()

    def _publish(self, weights: Sequence[torch.Tensor]) -> None:
        for shard, weight in zip(self._engine.shards, weights, strict=True):
            shard.tensor.copy_(weight)
        self._engine.publish()
