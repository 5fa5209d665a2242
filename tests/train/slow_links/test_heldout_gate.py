"""The held-out gate evaluates the shared weights once: what a round left is what the next one begins with."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from phalanx.job.sync_section import SyncSettings
from phalanx.peers.harm_votes import RoundTrial
from phalanx.train.slow_links import heldout_gate
from phalanx.train.slow_links.heldout_gate import HeldoutGate
from phalanx.train.slow_links.outer_optimizer import OuterOptimizer

WEIGHTS = {"a": 6.0, "b": 6.0, "c": 6.0}


@dataclass
class Vectors:
    """One shard: the vector is its values."""

    def spread(self, vector: np.ndarray) -> list[torch.Tensor]:
        return [torch.from_numpy(vector.copy())]


@dataclass
class Scorer:
    """The loss of a sequence is the squared distance of the weights from zero, and a little more for each sequence."""

    shard: SimpleNamespace
    seen: list[list[float]] = field(default_factory=list)

    def sequence_losses(self) -> np.ndarray:
        self.seen.append(self.shard.tensor.tolist())
        return float((self.shard.tensor**2).sum()) + np.linspace(0.0, 0.01, 8)


@dataclass
class Scene:
    gate: HeldoutGate
    outer: OuterOptimizer
    scorer: Scorer

    def judge(self, mean: np.ndarray):
        trial = RoundTrial(round_number=1, weights=WEIGHTS, mean=mean)
        return self.gate.judge(Vectors(), [0], trial)

    def apply(self, mean: np.ndarray) -> None:
        self.outer.step({0: torch.from_numpy(mean.copy())})
        self.gate.settle()

    def evaluations(self) -> int:
        count = len(self.scorer.seen)
        self.scorer.seen.clear()
        return count


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    shard = SimpleNamespace(name="w", tensor=torch.tensor([1.0, 2.0]))
    engine = SimpleNamespace(shards=[shard], publish=lambda: None)
    outer = OuterOptimizer([shard], learning_rate=0.7, momentum=0.9)  # type: ignore[list-item]
    scorer = Scorer(shard)
    monkeypatch.setattr(heldout_gate, "HeldoutScorer", lambda *_, **__: scorer)
    gate = HeldoutGate(engine, outer, [], sync=SyncSettings(mode="diloco"), seed=0)  # type: ignore[arg-type]
    return Scene(gate, outer, scorer)


def vector(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def test_the_result_of_a_committed_round_is_not_evaluated_again(scene: Scene) -> None:
    assert scene.judge(vector(0.1, 0.2)).harms is False
    assert scene.evaluations() == 2
    scene.apply(vector(0.1, 0.2))
    assert scene.judge(vector(-0.5, -0.5)).harms is True
    assert scene.evaluations() == 1
    fresh = scene.outer.weights[0].tolist()
    assert scene.judge(vector(0.1, 0.2)).harms is False  # the repeated round: nothing was applied in between
    assert scene.evaluations() == 1
    assert scene.outer.weights[0].tolist() == fresh


@pytest.mark.parametrize("applied", [(0.1, 0.3), (0.1, float("nan"))])
def test_another_result_than_the_judged_one_is_evaluated(scene: Scene, applied: tuple[float, float]) -> None:
    scene.judge(vector(0.1, 0.2))
    scene.apply(vector(*applied))
    scene.evaluations()
    scene.judge(vector(0.1, 0.2))
    assert scene.evaluations() == 2


def test_a_round_that_was_not_judged_and_a_state_of_others_are_evaluated(scene: Scene) -> None:
    scene.judge(vector(0.1, 0.2))
    scene.apply(vector(0.1, 0.2))
    scene.apply(vector(0.1, 0.2))
    scene.evaluations()
    scene.judge(vector(0.1, 0.2))
    assert scene.evaluations() == 2
    scene.apply(vector(0.1, 0.2))
    scene.gate.forget()
    scene.judge(vector(0.1, 0.2))
    assert scene.evaluations() == 2


def test_training_goes_on_from_its_own_weights(scene: Scene) -> None:
    own = scene.scorer.shard.tensor
    own.copy_(torch.tensor([5.0, 6.0]))
    scene.judge(vector(0.1, 0.2))
    assert own.tolist() == [5.0, 6.0]
