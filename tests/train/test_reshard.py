"""A checkpoint of any layout goes on in any other, as if nothing had happened."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from phalanx.job.schema import Optim
from phalanx.train.verify.compare import compare_outcomes
from phalanx.train.verify.trial import run_trial

SP = {"tensor": 2, "sequence_parallel": True, "micro_batch": 4}
FSDP = {"data": 2, "shard": 2, "zero": 3}
MOE = {"experts": 4, "experts_per_token": 2, "expert_ffn": 16, "balance": "bias", "router_bias": True}

PAIRS = {
    "one process → fsdp4": ({}, {"data": 4, "shard": 4, "zero": 3}),
    "fsdp4 → one process": ({"data": 4, "shard": 4, "zero": 3}, {}),
    "pp2 → fsdp2": ({"pipeline": 2}, FSDP),
    "tp2 → cp2": (SP, {"context": 2}),
    "zero1 → dp4": (FSDP | {"zero": 1}, {"data": 4}),
    "hsdp → pp2 V": (
        {"data": 4, "shard": 2, "zero": 3}, {"pipeline": 2, "virtual_pipeline": 2, "schedule": "zero-bubble"}
    ),
    "pp2×fsdp2×tp2 → pp2": ({"pipeline": 2} | FSDP | SP | {"micro_batch": 2}, {"pipeline": 2}),
    "dp2 → pp2×tp2": ({"data": 2}, {"pipeline": 2} | SP),
}  # fmt: skip


def resumed(trial, shape, before, after, folder, **changes):
    """Two steps under one layout, a checkpoint, two more under another."""
    first = run_trial(trial(shape, steps=2, save=str(folder), **before, **changes))
    second = run_trial(trial(shape, steps=2, resume=str(folder), **after, **changes))
    return first, second


@pytest.mark.parametrize("name", PAIRS)
def test_goes_on_in_another_layout(name, trial, once, llama, tmp_path):
    before, after = PAIRS[name]
    shape = replace(llama, layers=2 if "tensor" in before | after else 4)
    first, second = resumed(trial, shape, before, after, tmp_path)
    whole = once(trial(shape, steps=4))
    assert max(abs(a - b) for a, b in zip(first.losses + second.losses, whole.losses, strict=True)) < 1e-10
    difference = compare_outcomes(second, second_half(whole, second)).first
    assert difference is None, difference.render()


def second_half(whole, resumed):
    """Of an uninterrupted run; what a resumed one evaluates first has no counterpart in it."""
    names = ("losses", "norms", "skipped", "tokens", "grads", "params")
    kept = {name: getattr(whole, name)[-len(resumed.losses) :] for name in names}
    return replace(whole, evaluations=[resumed.evaluations[0], whole.evaluations[-1]], **kept)


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_table_is_stored_once(tied, trial, once, llama, tmp_path):
    shape = replace(llama, tied=tied)
    first, second = resumed(trial, shape, {"pipeline": 2}, {"data": 2}, tmp_path)
    whole = once(trial(shape, steps=4))
    assert max(abs(a - b) for a, b in zip(first.losses + second.losses, whole.losses, strict=True)) < 1e-10


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"data": 2, "expert": 2}, {"data": 2}),
        ({"data": 2}, {"data": 4, "expert": 2, "shard": 4, "zero": 3, "micro_batch": 1}),
        ({"pipeline": 2, "data": 2, "expert": 2}, {"context": 2}),
    ],
    ids=["ep2 → dp2", "dp2 → ep2×fsdp2", "pp2×ep2 → cp2"],
)
def test_experts_and_their_balance_go_along(before, after, trial, once, llama, tmp_path):
    shape = replace(llama, layers=2, **MOE)
    first, second = resumed(trial, shape, before, after, tmp_path)
    whole = once(trial(shape, steps=4))
    assert max(abs(a - b) for a, b in zip(first.losses + second.losses, whole.losses, strict=True)) < 1e-10


@pytest.mark.parametrize(
    "layout", [{"data": 2}, FSDP, {"pipeline": 2}, {"context": 2}], ids=["dp2", "fsdp2", "pp2", "cp2"]
)
def test_the_same_layout_goes_on_bit_for_bit(layout, trial, tmp_path, llama):
    """float32 on a CPU: not close, equal."""
    whole = run_trial(trial(kind="fp32", steps=4, **layout))
    first, second = resumed(trial, llama, layout, layout, tmp_path, kind="fp32")
    assert first.losses + second.losses == whole.losses
    assert first.norms + second.norms == whole.norms
    assert second.digest == whole.digest


@pytest.mark.parametrize("name", ["adafactor", "adamw8bit", "muon"])
def test_other_optimizers_go_on_bit_for_bit(name, trial, tmp_path, llama):
    optim = Optim(name=name)
    whole = run_trial(trial(kind="fp32", steps=4, optim=optim, **FSDP))
    first, second = resumed(trial, llama, FSDP, FSDP, tmp_path, kind="fp32", optim=optim)
    assert first.losses + second.losses == whole.losses
    assert second.digest == whole.digest


@pytest.mark.parametrize(
    "layout",
    [
        {"data": 2, "compression": "int8"},
        {"data": 2, "compression": "powersgd"},
        {"data": 2, "shard": 2, "zero": 3, "compression": "int8"},
    ],
)
def test_what_compression_carries_over_goes_on_bit_for_bit(layout, trial, once, llama, tmp_path):
    """Without the carried errors the third step is another one."""
    _, second = resumed(trial, llama, layout, layout, tmp_path, kind="fp32")
    whole = once(trial(llama, steps=4, kind="fp32", **layout))
    assert second.losses == whole.losses[2:]
    for mine, theirs in zip(second.params, whole.params[2:], strict=True):
        assert all(np.array_equal(mine[name], theirs[name]) for name in theirs)
