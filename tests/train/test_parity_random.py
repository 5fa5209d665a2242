"""Random legal layouts of up to 8 ranks equal one process: combinations nobody thought of."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx.train.rank_settings import check_layout

DEGREES = [
    (tensor, context, pipeline, data)
    for tensor in (1, 2)
    for context in (1, 2)
    for pipeline in (1, 2, 4)
    for data in (1, 2, 4)
    if 2 <= tensor * context * pipeline * data <= 8
]


@st.composite
def layouts(draw):
    """(changes of the model, changes of the layout); most are legal."""
    tensor, context, pipeline, data = draw(st.sampled_from(DEGREES))
    moe = draw(st.booleans())
    stage = tensor * context * data
    zero = draw(st.sampled_from([0, 1, 2, 3]))
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble"]))
    two = pipeline == 2 and schedule in ("interleaved", "zero-bubble")
    shape = {"layers": 4 if pipeline * (2 if two else 1) > 2 else 2, "tied": draw(st.booleans())}
    if moe:
        shape |= {"experts": 4, "experts_per_token": 2, "expert_ffn": 16, "shared_experts": draw(st.integers(0, 1))}
    return shape, {
        "tensor": tensor,
        "context": context,
        "pipeline": pipeline,
        "data": data,
        "expert": draw(st.sampled_from([n for n in (1, 2, 4) if stage % n == 0])) if moe else 1,
        "zero": zero,
        "shard": draw(st.sampled_from([n for n in (1, 2, 4, 8) if data * context % n == 0])) if zero else 1,
        "schedule": schedule,
        "virtual_pipeline": 2 if two else 1,
        "sequence_parallel": tensor > 1 and draw(st.booleans()),
        "loss_parallel": draw(st.booleans()),
        "context_kind": draw(st.sampled_from(["ring", "ulysses", "allgather"])),
        "recompute": draw(st.sampled_from(["none", "full", "selective"])),
        "micro_batch": draw(st.sampled_from([1, 2])) if pipeline > 1 else 8 // data,
    }


# Processes are started for every example: few of them, always the same, so that a red test stays red.
@given(case=layouts())
@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
def test_random_layouts_equal_one_process(case, trial, prove, llama):
    shape, layout = case
    made = trial(replace(llama, **shape), **layout)
    if not check_layout(made.shape, made.settings):
        prove(made)
