"""One flipped bit in a real job is found within K steps, and the rank it happened on is named."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.train.guard.divergence_verdict import settle_divergence
from phalanx.train.models.decoder import TIED
from phalanx.train.verify.ranks import run_ranks

sys.path.insert(0, str(Path(__file__).parent))  # a task is named by its module, which the new process must find too
tasks = importlib.import_module("guard_tasks")

WEIGHT, MOMENT, NORM = "layers.1.mlp.up.weight", "layers.1.mlp.up.weight#exp_avg_sq", "layers.2.mlp_norm.weight"
SMALL = {"kind": "fp32", "micro_batch": 1, "steps": 6}
REPLICATED = SMALL | {"data": 4}
HSDP = SMALL | {"data": 4, "shard": 2, "zero": 3}
FSDP = SMALL | {"data": 4, "shard": 4, "zero": 3}


def run(trial, every=2, flip=None, task="train"):
    return run_ranks(getattr(tasks, task), trial.settings.layout.devices, trial, every, flip)


@pytest.mark.parametrize("name", [WEIGHT, MOMENT, NORM])
def test_a_copy_that_differs_from_three_is_named(name, trial):
    seen = run(trial(**REPLICATED), flip=tasks.Flip(rank=2, step=3, name=name))
    first = seen[0].divergence
    assert all(one.divergence == first for one in seen), "every rank comes to the same"
    assert (first.step, first.kind, first.suspects, first.certain) == (4, "copies", (2,), True)
    assert set(first.digests) == {0, 1, 2, 3}
    assert name in first.tensors


def test_nothing_is_found_where_nothing_is_wrong(trial):
    for layout in (REPLICATED, HSDP, SMALL | {"pipeline": 2, "data": 2}):
        seen = run(trial(**layout))
        assert [one.divergence for one in seen] == [None] * 4


def test_two_holders_are_settled_by_doing_it_again(trial):
    """Groups of two shards, twice: ranks 1 and 3 hold the same shard."""
    hurt = run(trial(**HSDP), flip=tasks.Flip(rank=3, step=4, name=WEIGHT))
    found = hurt[0].divergence
    assert all(one.divergence == found for one in hurt)
    assert (found.step, found.suspects, found.certain, found.tensors) == (4, (1, 3), False, (WEIGHT,))
    again = run(trial(**HSDP | {"steps": 4}))
    assert settle_divergence(found.digests, again[0].last[found.boxes]) == 3


def test_stages_and_tensor_ranks_compare_with_their_own(trial):
    """The norm has four copies and speaks for certain, where a split matrix has two."""
    layout = SMALL | {"data": 2, "tensor": 2, "sequence_parallel": True}
    found = run(trial(**layout), flip=tasks.Flip(rank=1, step=1, name=NORM))[0].divergence
    assert (found.step, found.suspects, found.certain, found.tensors) == (2, (1,), True, (NORM,))
    layout = SMALL | {"data": 2, "pipeline": 2}
    found = run(trial(**layout), flip=tasks.Flip(rank=2, step=2, name="layers.3.mlp.up.weight"))
    assert found[0].divergence == found[3].divergence
    assert (found[0].divergence.suspects, found[0].divergence.tensors) == ((2, 3), ("layers.3.mlp.up.weight",))


def test_both_copies_of_a_tied_table_are_compared(trial, llama):
    """The first and the last stage hold it; with one data rank nothing else has a copy."""
    made = trial(replace(llama, tied=True), **SMALL | {"pipeline": 2})
    table = TIED[0]
    found = run(made, flip=tasks.Flip(rank=1, step=2, name=table))[0].divergence
    assert (found.suspects, found.certain) == ((0, 1), False)
    assert table in found.tensors


@pytest.mark.parametrize("every", [1, 100])
@pytest.mark.parametrize("name", [WEIGHT, MOMENT])
def test_memory_that_changes_between_updates_is_named_by_every_rank(name, every, trial):
    """At steps whose digests are compared and at those between, and no rank takes the step."""
    seen = run(trial(**FSDP), every=every, flip=tasks.Flip(rank=2, step=3, name=name, bit=30), task="at_rest")
    found = seen[0].divergence
    assert all(one.divergence == found for one in seen)
    assert (found.kind, found.suspects, found.certain, found.step) == ("rest", (2,), True, 3)
    assert (found.tensors, list(found.digests)) == ((name,), [2])
    assert all(one.digests[0] == one.digests[1] for one in seen)


def test_the_copy_that_the_model_reads_is_compared_too(trial):
    """bf16 beside fp32 of the optimizer: wrong for one step only, since the next update writes it anew."""
    layout = REPLICATED | {"kind": "bf16", "data": 2}
    flip = tasks.Flip(rank=1, step=2, name=f"{WEIGHT}#model", is_published=False)
    seen = run(trial(**layout), every=100, flip=flip, task="at_rest")
    assert [one.divergence.problem().what for one in seen] == [
        f"weights or optimizer state of rank 1 changed between two updates ({WEIGHT}#model)"
    ] * 2


def test_digests_of_a_step_are_those_of_its_weights(trial):
    """Replicas have the same digest, another step another, the same job again the same."""
    first, second = run(trial(**REPLICATED)), run(trial(**REPLICATED))
    assert [one.digests for one in first] == [one.digests for one in second] == [first[0].digests] * 4
    assert len(set(first[0].digests)) == 6
    sharded = run(trial(**FSDP))
    assert len({one.digests[-1] for one in sharded}) == 4, "a digest is of what the rank holds"
