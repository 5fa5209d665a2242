"""What test_own_networks runs on every rank: several trials in one process group, which costs seconds to make."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from phalanx.train.engine import Engine
from phalanx.train.guard.divergence import ReplicaGuard
from phalanx.train.state.rank_state import seed_random_state
from phalanx.train.state.training_state import load_hf_weights
from phalanx.train.tracing.traced_step import forget_meshes
from phalanx.train.verify.trial import RankOutcome, Trial, rank_batch, run_trial_rank, save_trial_state


def run_all(rank: int, trials: Sequence[Trial]) -> list[RankOutcome]:
    """Each trial as `run_trial` would."""
    found = []
    for trial in trials:
        forget_meshes()  # DTensor takes a mesh of the last trial for one of this, and with it the groups of the last
        found.append(run_trial_rank(rank, trial))
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffers:
    """What one rank holds after a few steps, and what was said of it."""

    values: dict[str, list[float]]  # by name
    tokens: list[int]  # the last tokens this rank saw in each step
    first_rank: set[str]
    unsaved: list[str]
    quarrels: list[str]
    drawn: float  # the next random number


def step_guarded(rank: int, trial: Trial) -> Buffers:
    """Steps with a guard that looks at every one of them, as the loop does it."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    engine = Engine(trial.shape, trial.settings, trial.optim, device=torch.device("cpu"))
    engine.initialise()
    seed_random_state(trial.settings.seed, rank=rank, world=trial.settings.layout.devices)
    guard, found, tokens = ReplicaGuard(engine.state, every=1), [], []
    engine.compare_memory = guard.compare_memory  # raises MemoryChanged in the step where it says so
    for step in range(trial.steps):
        batch = rank_batch(engine, trial, step)
        tokens.append(int(batch[0][-1, -1]))
        engine.step(*batch, lr=trial.lr)
        found.append(guard.check(step + 1))
    buffers = engine.parts[0].model.named_buffers()
    return Buffers(
        values={name: buffer.double().flatten().tolist() for name, buffer in buffers},
        tokens=tokens,
        first_rank=engine.first_rank_buffers,
        unsaved=engine.changed_unsaved(),
        quarrels=[one.problem().render() for one in found if one is not None],
        drawn=float(torch.rand(())),
    )


def take_and_save(rank: int, trial: Trial, folder: str) -> None:
    """First values of a folder of safetensors, written as a checkpoint."""
    engine = Engine(trial.shape, trial.settings, trial.optim, device=torch.device("cpu"))
    engine.initialise()
    load_hf_weights(engine, Path(folder))
    save_trial_state(engine, Path(trial.save), step=1, rank=rank)
