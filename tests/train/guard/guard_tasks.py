"""What test_divergence runs on every rank: a few steps of a small model, with a bit flipped on one rank."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch

from phalanx.train.engine import Engine
from phalanx.train.guard.divergence import ReplicaGuard, digest_shards
from phalanx.train.guard.divergence_verdict import Divergence
from phalanx.train.step_result import MemoryChanged
from phalanx.train.verify.trial import Trial, make_batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Flip:
    """One bit of one tensor of one rank, after so many steps."""

    rank: int
    step: int
    name: str
    # High in the mantissa: a bit near its end may be rounded away by the next update, and whether it is differs between
    # processors (arm64 and x86-64 round a fused multiply-add differently).
    bit: int = 20
    is_published: bool = True  # to where the model reads its weights, where that is another place


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What one rank saw: the steps done when a guard spoke, and what it said."""

    divergence: Divergence | None
    last: dict[str, str]
    digests: list[str]


def train(rank: int, trial: Trial, every: int, flip: Flip | None) -> Seen:
    """Steps until a guard speaks or the trial ends; a bit flips between an update and its check."""
    engine, guard, digests = *build(trial, every), []
    found = None
    for done in range(1, trial.steps + 1):
        engine.step(*_mine(engine, trial, done), lr=trial.lr)
        if flip is not None and (rank, done) == (flip.rank, flip.step):
            _flip(engine, flip)
        digests.append(digest_shards(engine.weights()))
        found = guard.check(done)
        if found is not None:
            break
    return Seen(divergence=found, last=guard.last, digests=digests)


def at_rest(rank: int, trial: Trial, every: int, flip: Flip) -> Seen:
    """As `train`, but the bit flips after the check; the next step must not be taken by any rank."""
    engine, guard = build(trial, every)
    for done in range(1, flip.step + 1):
        engine.step(*_mine(engine, trial, done), lr=trial.lr)
        assert guard.check(done) is None
    if rank == flip.rank:
        _flip(engine, flip)
    before = digest_shards(engine.weights())
    try:
        engine.step(*_mine(engine, trial, flip.step + 1), lr=trial.lr)
        found = None
    except MemoryChanged:
        found = guard.name_changed(flip.step)
    return Seen(divergence=found, last=guard.last, digests=[before, digest_shards(engine.weights())])


def build(trial: Trial, every: int) -> tuple[Engine, ReplicaGuard]:
    """As a worker does."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    engine = Engine(trial.shape, trial.settings, trial.optim, device=torch.device("cpu"), state_dtype=trial.state_dtype)
    engine.initialise()
    guard = ReplicaGuard(engine.state, every=every, each_step=True, at_rest=engine.at_rest)
    engine.compare_memory = guard.compare_memory
    return engine, guard


@torch.no_grad()
def _flip(engine: Engine, flip: Flip) -> None:
    shard = next(shard for shard in engine.at_rest() if shard.name == flip.name)
    if shard.tensor.dtype == torch.float32:
        words = shard.tensor.view(-1)[:1].view(torch.int32)
        words ^= 1 << flip.bit
    else:
        raw = shard.tensor.detach().view(-1).view(torch.uint8)[:1]
        raw ^= 1 << (flip.bit % 8)
    if flip.is_published:
        engine.publish()


def _mine(engine: Engine, trial: Trial, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    whole = make_batch(step, sequences=trial.sequences, sequence=trial.settings.sequence, vocab=trial.shape.vocab)
    tokens, targets = (one.chunk(engine.dims.data)[engine.meshes.index("data")] for one in whole)
    return tokens, targets
