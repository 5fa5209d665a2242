"""A dry trace of a rank equals what that rank does over gloo: operations in sequence, FLOPs, peak memory within 5 %."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.job.model import ModelShape
from phalanx.job.schema import Optim
from phalanx.plan.layout import Layout
from phalanx.train.settings import Settings
from phalanx.train.tracing.compare import find_hang
from phalanx.train.tracing.dry import trace_rank
from phalanx.train.tracing.real import record_ranks
from phalanx.train.tracing.world import Step, stage_ranks, trace_ranks

ONE = Layout(
    data=1, shard=1, tensor=1, context=1, pipeline=1, virtual_pipeline=1, expert=1, zero=0, sequence_parallel=False,
    micro_batch=2, accumulation=2, recompute="none", precision="bf16", schedule="1f1b", offload="none",
    compression="none",
)  # fmt: skip
# Large enough that tensors, not torch's small change, fill the memory.
LLAMA = ModelShape(name="llama", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=160, vocab=512)
MOE = replace(LLAMA, name="moe", experts=4, experts_per_token=2, expert_ffn=96, ffn=0)
SP = {"tensor": 2, "sequence_parallel": True}
FSDP = {"data": 2, "shard": 2, "zero": 3}

CASES = {
    "pp2×fsdp2×tp2": (LLAMA, {"pipeline": 2, "data": 2, "shard": 2, "zero": 2} | SP),
    "tp2×cp2×dp2": (LLAMA, {"context": 2, "data": 2} | SP),
    "zero1": (LLAMA, {"data": 2, "shard": 2, "zero": 1}),
    "hsdp 2×2, full recompute": (LLAMA, {"data": 4, "shard": 2, "zero": 3, "recompute": "full"}),
    "pp2 zero-bubble V": (
        replace(LLAMA, layers=4),
        {"pipeline": 2, "virtual_pipeline": 2, "schedule": "zero-bubble"},
    ),
    "ep2×fsdp2": (MOE, FSDP | {"expert": 2}),
}


def step(shape, changes):
    layout = replace(ONE, **changes)
    settings = Settings(layout=layout, sequence=64, compute="bf16", reduce="fp32", master="fp32")
    return Step(shape=shape, settings=settings, optim=Optim(), state_dtype="fp32")


def dry(one, rank):
    return trace_rank(one.shape, one.settings, one.optim, rank=rank)


@pytest.mark.parametrize("name", CASES)
def test_dry_equals_real(name):
    one = step(*CASES[name])
    real = record_ranks(one)
    assert find_hang(real) is None
    for rank in stage_ranks(one.settings.layout):
        found = dry(one, rank)
        assert found.operations == real[rank].operations
        assert found.flops == real[rank].flops
        assert found.peak.nbytes == pytest.approx(real[rank].peak.nbytes, rel=0.05)
        assert sum(found.peak.parts_bytes.values()) == found.peak.nbytes
        assert found.peak.rest_bytes == pytest.approx(real[rank].peak.rest_bytes, rel=0.05)
