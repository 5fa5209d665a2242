"""Trials of small models: `trial(**changes)` makes one, `prove` runs it and compares it with one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache

import pytest

from phalanx.job.model import ModelShape
from phalanx.plan.layout import Layout
from phalanx.train.rank_settings import Settings
from phalanx.train.verify.compare import OutcomeComparison, Tolerances, compare_outcomes
from phalanx.train.verify.trial import Trial, TrialOutcome, run_trial

ONE = Layout(
    data=1, shard=1, tensor=1, context=1, pipeline=1, virtual_pipeline=1, expert=1, zero=0, sequence_parallel=False,
    micro_batch=2, accumulation=4, recompute="none", precision="fp32", schedule="1f1b", offload="none",
    compression="none",
)  # fmt: skip
LLAMA = ModelShape(name="llama", layers=4, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=64)
SEQUENCE, SEQUENCES = 16, 8
UNSAID = next(field.default for field in fields(Trial) if field.name == "steps")  # by whoever makes a trial
PROVEN = 3  # steps then: the first gradients, the first with moments, and one that begins with what those two left

LAYOUT = {field.name for field in fields(Layout)}
SETTINGS = {field.name for field in fields(Settings)} - {"layout"}


def make(shape: ModelShape = LLAMA, kind: str = "fp64", **changes: object) -> Trial:
    """A trial; `changes` are of the layout, of the settings (context_kind, …) or of the trial (steps, …)."""
    layout = replace(ONE, **{name: value for name, value in changes.items() if name in LAYOUT})
    wide = "fp64" if kind == "fp64" else "fp32"
    settings = {"sequence": SEQUENCE, "compute": kind, "reduce": wide, "master": wide}
    settings |= {name: value for name, value in changes.items() if name in SETTINGS}
    rest = {name: value for name, value in changes.items() if name not in LAYOUT | SETTINGS}
    sequences = int(rest.pop("sequences", SEQUENCES))
    layout = replace(layout, accumulation=sequences // (layout.data * layout.micro_batch))
    return Trial(shape=shape, settings=Settings(layout=layout, **settings), sequences=sequences, **rest)


@cache
def run_once(trial: Trial) -> TrialOutcome:
    """A trial that several tests want."""
    return run_trial(trial)


def alone(trial: Trial) -> Trial:
    """The same on one process, with nothing split."""
    layout = replace(ONE, micro_batch=2, accumulation=trial.sequences // 2)
    kept = replace(
        trial.settings, layout=layout, reproducible=False, compile=False, context_kind="ring", loss_parallel=True
    )
    return replace(trial, settings=kept, save="", broken_rank=-1)


@pytest.fixture(scope="session")
def trial() -> Callable[..., Trial]:
    return make


@pytest.fixture(scope="session")
def once() -> Callable[[Trial], TrialOutcome]:
    return run_once


@pytest.fixture(scope="session")
def llama() -> ModelShape:
    return LLAMA


@pytest.fixture(scope="session")
def prove() -> Callable[..., OutcomeComparison]:
    def run(trial: Trial, bounds: Tolerances | None = None) -> OutcomeComparison:
        trial = replace(trial, steps=PROVEN) if trial.steps == UNSAID else trial
        found = compare_outcomes(run_trial(trial, limit_s=600.0), run_once(alone(trial)), bounds or Tolerances())
        assert found.first is None, found.first.render()
        return found

    return run
