"""The small copy splits as the large one does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import UserError
from phalanx.job.model import ModelShape
from phalanx.job.schema import SECTIONS, Batch, Data, Job, Optim
from phalanx.plan.layout import Layout
from phalanx.train.rank_settings import Settings, check_layout
from phalanx.train.verify.small_trial import features_left_out, make_small_trial, reference_trial, size_changes
from phalanx.train.verify.terms import Terms, refuse_ranks

LARGE = ModelShape(name="large", layers=126, hidden=16384, heads=128, kv_heads=8, head_dim=128, ffn=53248, vocab=128256)
EXPERTS = replace(LARGE, experts=64, experts_per_token=8, expert_ffn=2048, shared_experts=2, dense_layers=3)
BASE = Layout(
    data=64, shard=128, tensor=8, context=2, pipeline=16, virtual_pipeline=4, expert=1, zero=1, sequence_parallel=True,
    micro_batch=1, accumulation=32, recompute="full", precision="bf16", schedule="interleaved", offload="none",
    compression="none",
)  # fmt: skip


def job(shape: ModelShape = LARGE, **changes) -> Job:
    sections = {name: made() for name, made in SECTIONS.items()}
    sections |= {"data": Data(sequence=8192), "batch": Batch(global_sequences=2048)}
    return Job(name="big", model=shape, **(sections | changes))


def test_every_axis_stays_in_use():
    small = make_small_trial(job(), BASE, steps=5).settings.layout
    assert (small.tensor, small.context, small.pipeline, small.data, small.virtual_pipeline) == (2, 2, 2, 2, 2)
    assert (small.shard, small.zero, small.recompute, small.schedule) == (4, 1, "full", "interleaved")


def test_what_does_not_divide_still_does_not():
    """126 layers over 64 stages, 128,256 words over 8 × 128 parts: both leave a remainder."""
    made = make_small_trial(job(), BASE, steps=5)
    assert made.shape.layers % 4
    assert made.shape.vocab % 8
    assert made.shape.hidden % 8 == 0


def test_groups_inside_groups_stay_so():
    hsdp = replace(BASE, tensor=1, context=1, pipeline=1, virtual_pipeline=1, shard=8, sequence_parallel=False)
    small = make_small_trial(job(), hsdp, steps=5).settings.layout
    assert (small.data, small.shard) == (4, 2)


@pytest.mark.parametrize(
    ("expert", "tensor", "found"),
    [(8, 1, (4, 2)), (64, 1, (2, 2)), (16, 8, (4, 4)), (8, 8, (2, 2)), (4, 8, (2, 2))],
)
def test_expert_groups(expert, tensor, found):
    """(data, expert) ranks of the copy: experts of one tensor group, of several, of the whole stage."""
    layout = replace(BASE, expert=expert, tensor=tensor, context=1, pipeline=1, virtual_pipeline=1, zero=0)
    if expert == 64:
        layout = replace(layout, data=64)
    small = make_small_trial(job(EXPERTS), layout, steps=5).settings.layout
    assert (small.data, small.expert) == found


def test_a_small_job_is_left_alone():
    layout = replace(BASE, data=2, shard=2, tensor=1, context=1, pipeline=1, virtual_pipeline=1, accumulation=2, zero=3)
    assert make_small_trial(job(), layout, steps=5).settings.layout == replace(layout, precision="fp32")


def test_one_process_has_nothing_split():
    one = reference_trial(make_small_trial(job(), BASE, steps=5))
    assert (one.settings.layout.devices, one.settings.layout.recompute) == (1, "none")
    assert one.sequences == one.settings.layout.accumulation


def test_it_says_what_became_smaller_and_what_is_left_out():
    made = make_small_trial(job(), BASE, steps=5)
    told = {change.name: (change.real, change.small) for change in size_changes(job(), BASE, made)}
    assert told["layers"] == (126, 5)
    assert told["micro-batches"] == (32, 4)
    compact = job(optim=Optim(name="adamw8bit"))
    notes = features_left_out(compact, replace(BASE, compression="int8"), made, compiled=True, on_gpu=True)
    assert [note.split(" (")[0] for note in notes] == [
        "tensor 8",
        "NCCL and the kernels of GPUs",
        "bf16 arithmetic",
        "int8 gradients",
        "the compact optimizer state",
        "compiled blocks",
    ]
    assert notes[0] == (
        "tensor 8 (2 here), pipeline 16 (2 here), virtual_pipeline 4 (2 here), data 64 (2 here), shard 128 (4 here)"
    )
    assert make_small_trial(compact, BASE, steps=5).optim.name == "adamw"
    as_trained = Terms(device="cuda", precision="bf16", compile=True)
    made = make_small_trial(job(), BASE, steps=5, terms=as_trained)
    assert features_left_out(job(), BASE, made, compiled=True, on_gpu=True) == notes[:1]
    assert (made.settings.compute, made.settings.reduce, made.settings.master) == ("bf16", "fp32", "fp32")
    assert (made.settings.compile, made.device, reference_trial(made).settings.compile) == (True, "cuda", True)


def test_degrees_are_kept_while_there_are_ranks():
    """A ring of 2 has no rank that passes on, so context comes first; experts keep their proportions."""
    ring = replace(BASE, context=4, tensor=1, pipeline=1, virtual_pipeline=1, data=2, shard=8, sequence_parallel=False)
    assert make_small_trial(job(), ring, steps=5).settings.layout == replace(ring, precision="fp32", accumulation=2)
    small = make_small_trial(job(), replace(ring, data=64, shard=256), steps=5).settings.layout
    assert (small.context, small.data, small.shard) == (4, 2, 8)
    many = make_small_trial(job(), BASE, steps=5, terms=Terms(device="cuda", ranks=64)).settings.layout
    assert (many.context, many.tensor, many.pipeline, many.data) == (2, 8, 2, 2)
    expert = replace(BASE, expert=8, context=1, pipeline=1, virtual_pipeline=1, zero=0)
    small = make_small_trial(job(EXPERTS), expert, steps=5, terms=Terms(ranks=64)).settings.layout
    assert (small.tensor, small.expert) == (2, 2)


def test_full_size_makes_nothing_smaller():
    layout = replace(BASE, data=1, shard=2, tensor=2, pipeline=1, virtual_pipeline=1, accumulation=4)
    made = make_small_trial(job(), layout, steps=2, terms=Terms(device="cuda", precision="bf16", full_size=True))
    assert (made.shape, made.settings.layout, made.settings.sequence) == (LARGE, layout, 8192)
    assert size_changes(job(), layout, made) == []
    assert "single tensors" in features_left_out(job(), layout, made, compiled=False, on_gpu=True)[-1]


def test_what_is_not_compiled_in_training_is_not_compiled_here():
    bubbles = replace(BASE, schedule="zero-bubble")
    assert not make_small_trial(job(), bubbles, steps=5, terms=Terms(compile=True)).settings.compile
    full = make_small_trial(job(), BASE, steps=5, terms=Terms(compile=True))
    assert reference_trial(full).settings.layout.recompute == "full"  # the same kernels on both sides


def test_a_users_own_network_is_refused():
    with pytest.raises(UserError, match="can only be scaled down by its author"):
        make_small_trial(job(replace(LARGE, module="net.py:build")), BASE, steps=5)


@st.composite
def legal(draw) -> tuple[ModelShape, Layout, str]:
    """A model and a layout that the trainer would run at full size."""
    power = st.sampled_from([1, 2, 4, 8])
    tensor, context, data, pipeline = draw(power), draw(power), draw(power), draw(power)
    moe = draw(st.booleans())
    stage = tensor * context * data
    expert = draw(st.sampled_from([n for n in (1, 2, 4, 8, 16) if stage % n == 0])) if moe else 1
    zero = draw(st.sampled_from([0, 1, 2, 3]))
    shard = draw(st.sampled_from([n for n in (1, 2, 4, 8, 16, 32, 64) if data * context % n == 0])) if zero else 1
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble"]))
    chunks = draw(st.sampled_from([1, 2, 4])) if pipeline > 1 and schedule in ("interleaved", "zero-bubble") else 1
    layout = replace(
        BASE, tensor=tensor, context=context, data=data, pipeline=pipeline, expert=expert, zero=zero, shard=shard,
        schedule=schedule, virtual_pipeline=chunks, accumulation=draw(st.sampled_from([1, 2, 8, 32])),
        micro_batch=draw(st.sampled_from([1, 4])), sequence_parallel=draw(st.booleans()) and tensor > 1,
    )  # fmt: skip
    shape = replace(
        EXPERTS if moe else LARGE,
        layers=draw(st.sampled_from([32, 61, 126])),
        vocab=draw(st.sampled_from([50257, 128256])),
    )
    return shape, layout, draw(st.sampled_from(["ring", "ulysses", "allgather"]))


@given(legal())
@settings(max_examples=300, deadline=None)
def test_what_is_legal_stays_legal(case):
    shape, layout, kind = case
    asked = job(shape)
    asked = replace(asked, parallel=replace(asked.parallel, context_kind=kind))
    if check_layout(shape, Settings.of(asked, layout, on_gpu=False)):
        return
    made = make_small_trial(asked, layout, steps=5)
    small = made.settings.layout
    assert check_layout(made.shape, made.settings) == []
    assert check_layout(reference_trial(made).shape, reference_trial(made).settings) == []
    assert small.devices <= 32
    for axis in ("tensor", "context", "pipeline", "data", "virtual_pipeline", "expert", "micro_batch"):
        real = getattr(layout, axis)
        assert min(real, 2) <= getattr(small, axis) <= real, axis


def test_ranks_that_no_gpu_is_left_for():
    with pytest.raises(UserError) as caught:
        refuse_ranks(Terms(device="cuda", ranks=1), ranks=4, gpus=1)
    assert str(caught.value) == (
        "--device cuda: the proof needs 4 ranks, but this machine has 1 GPU\n"
        "  every axis that the layout uses needs 2 ranks at least; ranks share a GPU only where you say so\n"
        "  allow it with --ranks-per-gpu 4, which needs NCCL 2.30, or use --device cpu"
    )
    refuse_ranks(Terms(device="cuda", ranks=4), ranks=4, gpus=1)
    with pytest.raises(UserError, match="this machine has 2 GPUs, 2 ranks on each"):
        refuse_ranks(Terms(device="cuda", ranks=4), ranks=8, gpus=2)
