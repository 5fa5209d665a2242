"""A step on a number of ranks that does not divide the batch is the same step: float64 against one process."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from phalanx.train.verify.compare import Tolerances, compare_outcomes
from phalanx.train.verify.ranks import run_ranks
from phalanx.train.verify.trial import Trial, TrialOutcome, join_rank_outcomes

sys.path.insert(0, str(Path(__file__).parent))  # a task is named by its module, which the new process must find too
tasks = importlib.import_module("dealt_trial")

THREE = {"data": 3, "micro_batch": 1}
FSDP = THREE | {"shard": 3, "zero": 3}
MOE = {"layers": 2, "experts": 4, "experts_per_token": 2, "expert_ffn": 16}

CASES = {
    "replicated": THREE,
    "fsdp": FSDP,
    "zero1": FSDP | {"zero": 1},
    "micro-batches of 2, one rank idle": FSDP | {"micro_batch": 2},
    "hsdp": {"data": 6, "shard": 3, "zero": 3, "micro_batch": 1},
    "more ranks than sequences": {"data": 4, "micro_batch": 1, "sequences": 3},
    "pp2": THREE | {"pipeline": 2},
    "pp2 fsdp": FSDP | {"pipeline": 2},
    "pp2 interleaved": THREE | {"pipeline": 2, "virtual_pipeline": 2, "schedule": "interleaved"},
    "tp2 sp fsdp": FSDP | {"tensor": 2, "sequence_parallel": True},
    "cp2": THREE | {"context": 2},
    "recompute": FSDP | {"recompute": "full"},
}


@cache
def run_dealt(trial: Trial) -> TrialOutcome:
    return join_rank_outcomes(run_ranks(tasks.on_rank, trial.settings.layout.devices, trial))


def prove(trial: Trial) -> None:
    layout = trial.settings.layout
    one = replace(
        layout, data=1, shard=1, tensor=1, context=1, pipeline=1, virtual_pipeline=1, expert=1, zero=0,
        sequence_parallel=False, recompute="none", schedule="1f1b", micro_batch=1, accumulation=trial.sequences,
    )  # fmt: skip
    wanted = run_dealt(replace(trial, settings=replace(trial.settings, layout=one)))
    found = run_dealt(trial)
    assert found.tokens == wanted.tokens == [trial.sequences * trial.settings.sequence] * trial.steps
    difference = compare_outcomes(found, wanted, Tolerances()).first
    assert difference is None, difference.render()


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name, trial):
    prove(trial(steps=3, **CASES[name]))


def test_experts_without_balance(trial, llama):
    prove(trial(replace(llama, **MOE), steps=3, **FSDP))


def test_same_bits_in_a_tree_that_is_filled_up(trial):
    """6 sequences make 8 leaves on 1 and on 2 ranks; the two that are empty stand in the same place."""
    layouts = [{"data": data, "micro_batch": 1, "sequences": 6} for data in (1, 2)]
    one, two = (run_dealt(trial(kind="fp32", steps=3, reproducible=True, **layout)) for layout in layouts)
    assert one.digest == two.digest


BIAS = MOE | {"balance": "bias", "router_bias": True, "balance_rate": 0.05, "router_score": "sigmoid"}
AUX = MOE | {"balance": "aux", "balance_rate": 0.1}
BALANCED = {
    "bias, micro-batches of 2": (BIAS, THREE | {"micro_batch": 2}),
    "bias pp2": (BIAS, THREE | {"pipeline": 2}),
    "bias V": (
        BIAS | {"layers": 4}, THREE | {"pipeline": 2, "virtual_pipeline": 2, "schedule": "zero-bubble", "sequences": 10}
    ),
    "bias recompute": (BIAS, FSDP | {"recompute": "full"}),
    "bias ep2": (BIAS, {"data": 2, "expert": 2, "micro_batch": 2, "sequences": 5}),
    "bias cp2": (BIAS, THREE | {"context": 2}),
    "aux": (AUX, THREE),
    "aux pp2": (AUX, THREE | {"pipeline": 2}),
    "aux recompute": (AUX, FSDP | {"recompute": "full", "micro_batch": 2}),
    "aux pp2 recompute": (AUX, THREE | {"pipeline": 2, "recompute": "full"}),
    "aux cp2": (AUX, THREE | {"context": 2}),
    "aux tp2 sp": (AUX, THREE | {"tensor": 2, "sequence_parallel": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", BALANCED)
def test_experts_are_balanced_by_what_is_learned_from(name, trial, llama):
    """Sequences that fill up visit experts too, and must not count."""
    shape, layout = BALANCED[name]
    prove(trial(replace(llama, **shape), steps=4, **layout))
