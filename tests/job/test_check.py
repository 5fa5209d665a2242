"""Mistakes that need two keys to see: each says both values and a size that works."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.job.cross_checks import use_nearest
from phalanx.job.load import load, round_batch
from phalanx.units import all_divisors

Write = Callable[[str], Path]
Complaints = Callable[..., str]

JOB = """\
[model]
preset = "{preset}"
[data]
sequence = 4096
[batch]
global_sequences = 1024
[parallel]
{line}
"""


@pytest.mark.parametrize(
    ("preset", "line", "expected"),
    [
        (
            "llama-3-8b",
            "tensor = 6",
            "parallel.tensor = 6 does not divide the model's 32 attention heads\n"
            "  each tensor rank must hold whole heads\n  use 4 or 8",
        ),
        (
            "llama-3-8b",
            "pipeline = 33",
            "parallel.pipeline = 33 is more than the model's 32 layers\n"
            "  every stage must hold at least one layer\n  use 32 or fewer",
        ),
        (
            "llama-3-8b",
            "pipeline = 8\nvirtual_pipeline = 5",
            "parallel.virtual_pipeline = 5 cuts 8 stages into 40 chunks, more than the model's 32 layers\n"
            "  every chunk must hold at least one layer\n  use 4 or fewer",
        ),
        (
            "mixtral-8x7b",
            "expert = 6",
            "parallel.expert = 6 does not divide the model's 8 experts\n"
            "  each expert rank must hold whole experts\n  use 4 or 8",
        ),
        (
            "llama-3-8b",
            "expert = 8",
            "parallel.expert = 8, but llama-3-8b is a dense model\n"
            "  there are no experts to split\n  use 1 or leave it out",
        ),
        (
            "llama-3-8b",
            "context = 3",
            "parallel.context = 3 does not divide data.sequence = 4096\n"
            "  each context rank must hold an equal slice of every sequence\n  use 2 or 4",
        ),
        (
            "llama-3-8b",
            "data = 96",
            "parallel.data = 96 does not divide the global batch of 1,024 sequences\n"
            "  every replica takes the same number of micro-batches\n  parallel.data: use 64 or 128",
        ),
        (
            "llama-3-8b",
            "data = 64\nshard = 24",
            "parallel.shard = 24 does not divide parallel.data = 64\n"
            "  replicas form equal shard groups\n  use 16 or 32",
        ),
        (
            "llama-3-8b",
            "pipeline = 1\nvirtual_pipeline = 2",
            "parallel.virtual_pipeline = 2 with parallel.pipeline = 1\n"
            "  only a pipeline of two or more stages can be interleaved\n"
            "  use virtual_pipeline = 1, or pipeline = 2 or more",
        ),
        (
            "llama-3-8b",
            'schedule = "1f1b"\nvirtual_pipeline = 2',
            'parallel.schedule = "1f1b" runs one chunk per stage, not parallel.virtual_pipeline = 2\n'
            '  use schedule = "interleaved", or virtual_pipeline = 1',
        ),
        (
            "llama-3-8b",
            'schedule = "interleaved"\nvirtual_pipeline = 1',
            'parallel.schedule = "interleaved" with parallel.virtual_pipeline = 1\n'
            '  there is nothing to interleave\n  use schedule = "1f1b", or virtual_pipeline = 2 or more',
        ),
    ],
)
def test_layouts_that_cannot_be(complaints: Complaints, preset: str, line: str, expected: str) -> None:
    text = JOB.format(preset=preset, line=line)
    at = 8 + line.count("\n") if "shard" in line or "virtual_pipeline =" in line.partition("\n")[2] else 8
    if "schedule" in line:
        at = 8
    assert complaints(text) == f"job.toml:{at}: {expected}"


def test_key_value_heads(complaints: Complaints, write: Write) -> None:
    heads = "model = {{ preset = 'llama-3-8b', heads = 24, kv_heads = {kv} }}\nbatch.global_sequences = 8\n"
    rendered = complaints(heads.format(kv=6) + "parallel.tensor = 4\n")
    assert "parallel.tensor = 4 neither divides nor is a multiple of the model's 6 key-value heads" in rendered
    assert "use 3 or 6" in rendered
    assert "model.kv_heads = 5 does not divide the model's 24 attention heads" in complaints(heads.format(kv=5))
    assert (
        load(write(heads.format(kv=6) + "parallel.tensor = 12\n")).job.parallel.tensor == 12
    )  # two ranks share a head


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("data.sequence = 2048", "data.sequence = 2048 is longer than the model's 1024 learned positions"),
        ("batch.micro = 3", "batch.micro = 3 does not divide the global batch of 512 sequences"),
        ("model.experts = 8", "model.experts_per_token = 0 with model.experts = 8"),
        ("model.expert_ffn = 8", "model.expert_ffn = 8, but model.experts = 0"),
        (
            "model = { dense_layers = 99, experts = 2, experts_per_token = 1, expert_ffn = 8 }",
            "more than the model's 12 layers",
        ),
        ("model.kv_lora_rank = 64", "model.kv_lora_rank = 64 without qk_nope_dim, qk_rope_dim, v_head_dim"),
        ("parallel = { tensor = 12, sequence_parallel = true }", "cuts data.sequence = 1024 into 12 slices"),
        (
            "batch.ramp = [{ until_tokens = 9, global_tokens = 1024 }, { until_tokens = 9, global_tokens = 1000 }]",
            "batch.ramp[1].until_tokens = 9 does not come after 9",
        ),
    ],
)
def test_model_and_batch_contradictions(complaints: Complaints, line: str, message: str) -> None:
    assert message in complaints("", "model.preset=gpt2", *_sets(line))


def _sets(line: str) -> list[str]:
    key, _, value = line.partition(" = ")
    return [f"{key}={value}"]


def test_settings_without_effect_are_said_to_have_none(write: Write) -> None:
    line = "tensor = 1\nsequence_parallel = true\nzero = 0\nshard = 8"
    warnings = [item.render() for item in load(write(JOB.format(preset="llama-3-8b", line=line))).warnings]
    assert warnings == [
        "job.toml:9: parallel.sequence_parallel has no effect with parallel.tensor = 1",
        "job.toml:11: parallel.shard = 8 has no effect with parallel.zero = 0",
    ]


def test_a_loss_scale_outside_fp16_has_no_effect(write: Write) -> None:
    line = "tensor = 1\n[precision]\ncompute = '{}'\nloss_scale = 1024"
    found = load(write(JOB.format(preset="llama-3-8b", line=line.format("bf16")))).warnings
    assert [item.render() for item in found] == [
        'job.toml:11: precision.loss_scale = 1024 has no effect with compute = "bf16"'
    ]
    assert not load(write(JOB.format(preset="llama-3-8b", line=line.format("fp16")))).warnings


@given(st.integers(1, 10**6))
def test_divisors_divide(number: int) -> None:
    found = all_divisors(number)
    assert found == tuple(sorted(found))
    assert found[0] == 1
    assert found[-1] == number
    assert all(number % size == 0 for size in found)


def test_nearest_at_the_ends() -> None:
    assert use_nearest([1, 2, 4], 9) == "use 4"
    assert use_nearest([2, 4], 1) == "use 2"
    assert all_divisors(10**18)[-1] == 10**18  # answers at once


@given(st.floats(1, 1e9))
def test_round_batches_stay_close(wanted: float) -> None:
    assert abs(round_batch(wanted) - wanted) <= max(0.5, 0.05 * wanted)
