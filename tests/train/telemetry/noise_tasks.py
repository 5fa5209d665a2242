"""What test_noise and test_timeline run on every rank."""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.train.engine import Engine
from phalanx.train.step_result import StepResult
from phalanx.train.telemetry.timeline import TimelineSampler
from phalanx.train.verify.trial import Trial, rank_batch


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a rank saw of a trial."""

    steps: list[StepResult]
    weights: str  # a digest


def steps(rank: int, trial: Trial, hearing: bool = True) -> Seen:
    """Every step of a trial, with or without an ear for noise."""
    engine = _engine(trial)
    if engine.listener is not None:
        engine.listener.norms.enabled, engine.listener.norms.every = hearing, 1
    results = [engine.step(*rank_batch(engine, trial, step), lr=trial.lr) for step in range(trial.steps)]
    digest = hashlib.sha256(b"".join(shard.tensor.numpy().tobytes() for shard in engine.shards)).hexdigest()
    return Seen(steps=results, weights=digest)


def sampled(rank: int, trial: Trial) -> dict[str, Any]:
    """The fields of a timeline of the second step, and the rank's remarks."""
    engine = _engine(trial)
    told: list[str] = []
    device = torch.device("cpu")
    sampler = TimelineSampler(engine.meshes, device, every=1, compiled=False, tell=told.append)
    for step in range(2):
        with sampler.step(step) as samples:
            result = engine.step(*rank_batch(engine, trial, step), lr=trial.lr)
    engine.step(*rank_batch(engine, trial, 2), lr=trial.lr)  # everything is as it was
    (sample,) = samples
    fields = sample.fields(result.phases, data_s=0.5, before_s=0.75)
    return fields | {"told": told, "seconds": sample.collective_s, "nbytes": sample.collective_bytes}


def _engine(trial: Trial) -> Engine:
    torch.manual_seed(0)
    # FSDP2 warns of views that nobody changes in place: the embedding's output under tensor parallelism is one.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    engine = Engine(trial.shape, trial.settings, trial.optim, device=torch.device("cpu"))
    engine.initialise()
    return engine
