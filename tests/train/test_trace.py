"""A dry trace of a rank equals what that rank does over gloo: operations in sequence, FLOPs, peak memory within 5 %."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from phalanx.job.model import ModelShape
from phalanx.job.schema import Optim
from phalanx.plan.layout import Layout
from phalanx.train.rank_settings import Settings
from phalanx.train.step_result import StepRequest
from phalanx.train.telemetry.noise import NUMBERS
from phalanx.train.tracing import traced_ranks
from phalanx.train.tracing.hang_check import find_hang
from phalanx.train.tracing.traced_ranks import TracedStep, stage_ranks, trace_ranks
from phalanx.train.tracing.traced_step import record_ranks, trace_rank

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
    return TracedStep(shape=shape, settings=settings, optim=Optim(), state_dtype="fp32")


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


def test_a_broken_rank_is_reported_as_the_hang_it_would_be():
    """The second stage expects a micro-batch more than the first sends."""
    good = step(LLAMA, {"pipeline": 2})
    more = replace(good, settings=replace(good.settings, layout=replace(good.settings.layout, accumulation=3)))
    assert find_hang([dry(good, 0), dry(good, 1)]) is None
    hang = find_hang([dry(good, 0), dry(more, 1)])
    assert hang is not None
    assert hang.render() == (
        "rank 1 waits for rank 0 in receive of 16.4 kB from rank 0 on axis pipeline (backward), operation 4\n"
        f"  rank 0 waits in all-reduce of {8 * (3 + len(StepRequest) + NUMBERS)} B float64 on axis world "
        "(2 ranks from 0, optimizer), operation 4"
    )


def test_thousands_of_ranks_cost_no_more_than_one():
    """A rank of 4,096: its groups and their strides, and its share of the weights."""
    changes = {"data": 128, "shard": 128, "zero": 3, "pipeline": 2, "tensor": 16, "sequence_parallel": True}
    shape = replace(LLAMA, heads=16, kv_heads=16, head_dim=4)
    found = dry(step(shape, changes), 4095)
    groups = {one.group.axis: one.group for one in found.operations}
    assert found.place == {"pipeline": (1, 2), "data": (127, 128), "context": (0, 1), "tensor": (15, 16)}
    assert groups["tensor"].ranks == tuple(range(4080, 4096))
    assert (len(groups["data"].ranks), groups["data"].stride) == (128, 16)
    assert groups["pipeline"].ranks == (2047, 4095)
    assert found.rss_bytes < 2e9


def test_memory_by_category():
    """Two data ranks that hold everything whole: bytes per parameter are known."""
    found = dry(step(LLAMA, {"data": 2}), 0)
    parts = found.peak.parts_bytes
    parameters = parts["parameters"] // 2  # bf16
    assert parts["gradients"] == 4 * parameters
    assert parts["optimizer"] == 12 * parameters  # fp32 weights and two moments
    assert parts["logits"] >= 2 * 64 * 512 * 2
    assert parts["activations"] > 0
    assert found.peak.rest_bytes < found.peak.nbytes


def test_offloaded_state_is_on_the_host():
    found = dry(step(LLAMA, {"data": 2, "shard": 2, "zero": 2, "offload": "optimizer"}), 0)
    assert "optimizer" not in found.peak.parts_bytes
    assert found.peak.host_bytes > 0


def test_full_recompute_repeats_the_forward_but_not_its_last_matrix():
    plain, again = (dry(step(LLAMA, {"recompute": kind}), 0) for kind in ("none", "full"))
    tokens, layers = 2 * 2 * 64, LLAMA.layers
    down, head = 2 * LLAMA.hidden * LLAMA.ffn * layers, 2 * LLAMA.hidden * LLAMA.vocab
    assert again.flops["recompute"]["linear"] == plain.flops["forward"]["linear"] - tokens * (down + head)
    assert again.flops["forward"] == plain.flops["forward"]
    assert again.peak.nbytes < plain.peak.nbytes


def test_several_ranks_in_their_own_processes():
    one = step(LLAMA, {"pipeline": 2})
    found = trace_ranks(one, [1, 0], workers=2)
    assert [trace.rank for trace in found] == [1, 0]
    assert found[1].operations == dry(one, 0).operations


def test_one_rank_that_takes_long_is_spoken_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is traced in this process, where nobody else waits for it."""
    told = threading.Event()
    monkeypatch.setattr(traced_ranks, "STILL_S", 0.001)
    monkeypatch.setattr(traced_ranks, "_trace_rank", lambda step, rank: told.wait(30.0) and rank)
    said: list[tuple[int, ...]] = []

    def still(ranks: Sequence[int], seconds: float) -> None:
        said.append(tuple(ranks))
        told.set()

    assert trace_ranks(None, [3], still=still) == [3]
    assert said[0] == (3,)
