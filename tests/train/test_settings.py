"""Layouts that the trainer cannot run are refused before a process starts, with the number that would do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.errors import UserError
from phalanx.train.rank_settings import check_layout, refuse_layout

MOE = {"experts": 6, "experts_per_token": 2, "expert_ffn": 18}

WRONG = {
    "heads": (
        {"heads": 6, "kv_heads": 6, "ffn": 48},
        {"tensor": 4},
        "parallel.tensor: 4 tensor ranks do not divide the model's 6 attention heads\n"
        "  each tensor rank must hold whole heads\n"
        "  use 3",
    ),
    "kv heads": (
        {},
        {"tensor": 4},
        "parallel.tensor: 4 tensor ranks do not divide the model's 2 key/value heads\n"
        "  each tensor rank must hold whole heads; the trainer does not copy them\n"
        "  use 2",
    ),
    "mlp": (
        {"ffn": 49},
        {"tensor": 2},
        "parallel.tensor: 2 tensor ranks do not divide the model's 49 columns of the MLP\n"
        "  each tensor rank holds as many columns\n"
        "  use 1",
    ),
    "context": (
        {},
        {"context": 2, "sequence": 18},
        "parallel.context: a sequence of 18 tokens does not divide into 2 × 2 slices\n"
        "  each context rank takes an early and a late slice, so that causal work is even\n"
        "  use 1 context ranks, or data.sequence = 20",
    ),
    "sequence parallel": (
        {},
        {"tensor": 2, "context": 2, "sequence": 20, "sequence_parallel": True, "kind": "fp32"},
        None,
    ),
    "sequence parallel odd": (
        {},
        {"tensor": 2, "sequence": 15, "sequence_parallel": True},
        "parallel.sequence_parallel: 15 tokens per context rank do not divide over 2 tensor ranks\n"
        "  sequence parallelism splits the tokens between the tensor ranks\n"
        "  use data.sequence = 16, or sequence_parallel = false",
    ),
    "ulysses": (
        {},
        {"context": 8, "context_kind": "ulysses"},
        "parallel.context: 8 context ranks do not divide the 4 query heads of each tensor rank\n"
        "  Ulysses gives every context rank whole heads\n"
        '  use 4, or context_kind = "ring" or "allgather", which split no heads',
    ),
    "positions": (
        {"positions": "learned", "max_positions": 8},
        {},
        "data.sequence: 16 tokens are longer than the 8 positions of llama\n"
        "  a learned table has no row for the rest\n"
        "  use data.sequence = 8 or fewer",
    ),
    "stages": (
        {},
        {"pipeline": 4, "virtual_pipeline": 2, "schedule": "interleaved"},
        "parallel.pipeline: 4 × 2 stages cannot share 4 layers\n"
        "  each stage holds at least one layer\n"
        "  use at most 4 stages (pipeline × virtual_pipeline)",
    ),
    "chunks without a pipeline": (
        {},
        {"virtual_pipeline": 2},
        "parallel.virtual_pipeline: 2 chunks per stage without a pipeline\n"
        "  use virtual_pipeline = 1, or pipeline = 2 or more",
    ),
    "chunks of 1f1b": (
        {},
        {"pipeline": 2, "virtual_pipeline": 2},
        'parallel.schedule: "1f1b" runs one chunk of layers per rank, virtual_pipeline is 2\n'
        '  use schedule = "interleaved" or "zero-bubble", or virtual_pipeline = 1',
    ),
    "zero-bubble with zero 3": (
        {},
        {"pipeline": 2, "schedule": "zero-bubble", "data": 2, "shard": 2, "zero": 3},
        'parallel.schedule: "zero-bubble" loses gradients with zero = 3\n'
        "  it computes weight gradients after ZeRO-3 has given the weights back\n"
        '  use zero = 1 or 2, or schedule = "interleaved" or "1f1b"',
    ),
    "zero-bubble with selective recompute": (
        {},
        {"pipeline": 2, "schedule": "zero-bubble", "recompute": "selective"},
        'parallel.recompute: "selective" does not go with the "zero-bubble" schedule\n'
        "  it splits backward in two, and what selective recompute keeps can be used once\n"
        '  use recompute = "none" or "full", or schedule = "interleaved" or "1f1b"',
    ),
    "rounds": (
        {},
        {"pipeline": 2, "virtual_pipeline": 2, "schedule": "interleaved", "micro_batch": 1, "sequences": 5},
        "batch.micro: 5 micro-batches do not make whole rounds of 2 pipeline ranks\n"
        '  the "interleaved" schedule works in rounds\n'
        "  use 4 or 6 micro-batches per step: change batch.global_sequences, batch.micro or the number of data ranks",
    ),
    "no experts": (
        {},
        {"data": 2, "expert": 2},
        "parallel.expert: llama has no experts to split\n  use expert = 1",
    ),
    "experts": (
        MOE,
        {"data": 4, "expert": 4},
        "parallel.expert: 4 expert ranks do not divide the model's 6 experts\n"
        "  each expert rank must hold whole experts\n"
        "  use 3",
    ),
    "expert ranks": (
        MOE,
        {"data": 2, "expert": 3},
        "parallel.expert: 3 expert ranks do not divide the 2 ranks of a stage (data × context × tensor)\n"
        "  experts are shared out among the ranks that see the tokens\n"
        "  use 2",
    ),
    "expert width": (
        MOE | {"heads": 4, "kv_heads": 4},
        {"tensor": 4},
        "parallel.tensor: 4 tensor ranks do not divide the experts' width of 18\n"
        "  without expert ranks the tensor group splits every expert along its width\n"
        "  use 3, or expert ranks",
    ),
    "shard": (
        {},
        {"data": 4, "shard": 3, "zero": 3},
        "parallel.shard: groups of 3 do not divide the 4 data × context ranks\n"
        "  each group shares one sharded copy\n"
        "  use 2",
    ),
    "offload": (
        {},
        {"offload": "parameters"},
        'parallel.offload: "parameters" needs sharded parameters, and ZeRO is off\n'
        "  weights that every rank holds whole would travel to the device for every use\n"
        "  use zero = 3",
    ),
    "reproducible": (
        {},
        {"tensor": 2, "zero": 1, "reproducible": True},
        "numerics.reproducible: the same bits on any number of ranks are not possible with tensor = 2, zero = 1\n"
        "  only sums over micro-batches have an order that no number of ranks changes\n"
        '  set them to 1 (zero = 0), or parallel.mode = "fixed", which leaves them so',
    ),
    "reproducible sum": (
        {},
        {"data": 3, "sequences": 9, "micro_batch": 1, "reproducible": True},
        "numerics.reproducible: 3 data ranks are no power of two\n"
        "  every rank must hold a whole subtree of the sum\n"
        "  choose batch.global_sequences, batch.micro and data ranks so that it is 1, 2, 4, 8, …",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused_with_a_way_out(name, trial, llama):
    shape, changes, text = WRONG[name]
    made = trial(replace(llama, **shape), **changes)
    found = [problem.render() for problem in check_layout(made.shape, made.settings)]
    assert (text in found) if text else found == []


def test_all_problems_at_once(trial, llama):
    made = trial(llama, tensor=3, context=3, pipeline=8, micro_batch=8)
    with pytest.raises(UserError) as caught:
        refuse_layout(made.shape, made.settings)
    places = [problem.where for problem in caught.value.problems]
    assert places == [*["parallel.tensor"] * 2, "parallel.context", "parallel.pipeline"]


def test_what_divides_passes(trial, llama):
    made = trial(llama, tensor=2, context=2, pipeline=2, data=2, shard=4, zero=3, sequence_parallel=True)
    assert check_layout(made.shape, made.settings) == []
