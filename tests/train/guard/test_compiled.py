"""Wrong compiled code is found before anything is learnt from it; looking changes nothing, in any layout."""

from __future__ import annotations

import importlib
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.job.model import ModelShape
from phalanx.train.guard.compiled import CEILING, CompiledComparison, compiled_refusal, rounding_bound
from phalanx.train.verify.ranks import run_ranks

sys.path.insert(0, str(Path(__file__).parent))  # a task is named by its module, which the new process must find too
tasks = importlib.import_module("compiled_tasks")

SMALL = {"kind": "fp32", "micro_batch": 2, "steps": 2, "compile": True, "compile_backend": tasks.RIGHT}
SHAPE = ModelShape(name="llama", layers=1, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=64)
MOE = replace(
    SHAPE, name="moe", experts=4, experts_per_token=2, expert_ffn=32, router_score="softmax", balance="bias",
    router_bias=True,
)  # fmt: skip
OWN = replace(SHAPE, name="own", kv_heads=4, module=f"{tasks.__file__}:changing")
# Two ranks each: one process group serves them all.
LAYOUTS = {
    "int8": (SHAPE, {"data": 2, "compression": "int8"}),
    "zero3": (SHAPE, {"data": 2, "shard": 2, "zero": 3, "kind": "bf16"}),
    "tensor": (SHAPE, {"tensor": 2, "sequence_parallel": True}),
    "pipeline": (replace(SHAPE, layers=2), {"pipeline": 2, "micro_batch": 1}),
    "experts": (MOE, {"data": 2, "expert": 2, "shard": 2, "zero": 1}),
    "own": (OWN, {"data": 2, "allow_code": True}),
}


@pytest.mark.slow
def test_looking_leaves_no_trace_and_finds_wrong_gradients_in_every_layout(trial):
    made = {name: trial(shape, **{**SMALL, **changes}) for name, (shape, changes) in LAYOUTS.items()}
    for name in ("zero3", "pipeline"):
        shape, changes = LAYOUTS[name]
        made[f"{name}, wrong"] = trial(shape, **{**SMALL, **changes, "compile_backend": tasks.WRONG, "steps": 0})
    ranks = run_ranks(tasks.hold_against, 2, list(made.values()), limit_s=600.0)
    for index, name in enumerate(made):
        for one in (rank[index] for rank in ranks):
            found = one.found
            assert isinstance(found, CompiledComparison), name
            assert not found.unclear, (name, found)
            assert found.grad_norm == ranks[0][index].found.grad_norm > 0, (name, found)
            assert one.due == [True, True, False], name
            if "wrong" in name:
                assert not found.passes, (name, found)
                assert found.grad_norm < 0.9 * found.eager_grad_norm, name
                assert found.loss_difference <= found.bound, "forward was right"
            else:
                assert found.passes, (name, found)
                assert one.with_it == one.without, f"{name}: the comparison changed what came after"
                assert len(one.with_it) == 2


def test_what_a_person_is_told(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/cache/here")
    found = CompiledComparison(
        loss=5.962, eager_loss=5.962, grad_norm=2.370, eager_grad_norm=3.569, loss_difference=0.0,
        gradient_difference=0.41, bound=rounding_bound("bf16", 4), worst="x",
    )  # fmt: skip
    said = str(compiled_refusal(found, compute="bf16", where="train.compile"))
    for part in ("2.37 for 3.569", "5.962 for 5.962", "41.0%", "bf16", "train.compile = false", "/cache/here"):
        assert part in said, part
    assert "train.compile_check = false" in said


def test_the_bound_grows_with_depth_and_coarseness_and_stays_below_the_errors_we_met():
    kinds = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8")
    for layers in (1, 32, 126):
        bounds = [rounding_bound(kind, layers) for kind in kinds]
        assert bounds == sorted(bounds)
        assert bounds[-1] <= CEILING < 1 - 2.370 / 3.569
    assert rounding_bound("fp32", 126) < 1e-4
    lost = CompiledComparison(
        loss=1.0, eager_loss=1.0, grad_norm=1.0, eager_grad_norm=1.0, loss_difference=0.0, gradient_difference=0.01,
        bound=0.1, worst="", is_lost=True,
    )  # fmt: skip
    assert not lost.passes, "a small tensor without any gradient"
    assert "some tensor has no gradient at all" in str(compiled_refusal(lost, compute="bf16", where="train.compile"))
    assert not CompiledComparison(
        loss=1.0, eager_loss=1.0, grad_norm=math.nan, eager_grad_norm=1.0, loss_difference=0.0,
        gradient_difference=math.nan, bound=0.1, worst="",
    ).passes  # fmt: skip
