"""Pipeline memory: the same however many micro-batches a step has, and nothing left over between steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.job.model import ModelShape
from phalanx.job.schema import Optim
from phalanx.plan.layout import Layout
from phalanx.train.rank_settings import Settings
from phalanx.train.tracing.traced_ranks import TracedStep, trace_ranks
from phalanx.train.tracing.traced_step import record_ranks

SHAPE = ModelShape(name="tiny", layers=4, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=256)
PIPELINE = Layout(
    data=1, shard=1, tensor=1, context=1, pipeline=2, virtual_pipeline=1, expert=1, zero=0, sequence_parallel=False,
    micro_batch=1, accumulation=8, recompute="none", precision="bf16", schedule="1f1b", offload="none",
    compression="none",
)  # fmt: skip
BOUNDARY_BYTES = 64 * 64 * 4  # what one micro-batch sends between two stages
SCHEDULES = {
    "1f1b": {"schedule": "1f1b"},
    "interleaved": {"schedule": "interleaved", "virtual_pipeline": 2},
    "zero-bubble": {"schedule": "zero-bubble"},
    "zero-bubble V": {"schedule": "zero-bubble", "virtual_pipeline": 2},
}


def step(**changes):
    settings = Settings(layout=replace(PIPELINE, **changes), sequence=64, compute="fp32")
    return TracedStep(shape=SHAPE, settings=settings, optim=Optim(), state_dtype="fp32")


@pytest.mark.parametrize("name", SCHEDULES)
def test_more_micro_batches_take_no_more_memory(name):
    """Beyond a whole batch of tokens: 24 more of them are less than one message."""
    few, many = (
        [trace_ranks(step(accumulation=count, **SCHEDULES[name]), [rank])[0].peak for rank in (0, 1)]
        for count in (8, 32)
    )
    for less, more in zip(few, many, strict=True):
        tokens = 2 * 24 * 64 * 8  # the batch itself, int64, and its targets
        assert more.nbytes - less.nbytes <= tokens + BOUNDARY_BYTES, (less, more)
        assert more.rest_bytes - less.rest_bytes <= tokens


@pytest.mark.parametrize("name", ["gpipe", "interleaved"])
def test_real_ranks_hold_what_the_dry_trace_says(name):
    """gloo holds what it sends until it is asked: bounded messages, however many there are."""
    changes = SCHEDULES.get(name, {"schedule": name})
    made = step(accumulation=24, **changes)
    for real in record_ranks(made):
        dry = trace_ranks(made, [real.rank])[0]
        assert abs(real.peak.nbytes - dry.peak.nbytes) <= 12 * BOUNDARY_BYTES


def test_an_order_of_ones_own_is_what_runs():
    """All forwards first hold more than 1F1B, whose name stands beside the order; an order for others is left alone."""

    def peak(*order):
        made = step(accumulation=8)
        made = replace(made, settings=replace(made.settings, order=order))
        return trace_ranks(made, [1])[0].peak.nbytes

    plain = peak()
    assert peak("F" * 8 + "B" * 8, "F" * 8 + "B" * 8) > plain + 4 * BOUNDARY_BYTES
    assert peak("F" * 4 + "B" * 4, "F" * 4 + "B" * 4) == plain
