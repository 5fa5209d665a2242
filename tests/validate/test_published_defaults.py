"""What published rows leave out: each rule on rows a person would write."""

import pytest

from phalanx.job.model import known_presets
from phalanx.job.parameter_counts import count_parameters
from phalanx.validate import throughput_table

SMALL = {"layers": "24", "hidden": "2048"}


def shape(**cells):
    return throughput_table.model_shape({name: str(value) for name, value in cells.items()})


def test_a_preset_supplies_what_the_columns_cannot_say():
    model = shape(model_name="DeepSeek-V3", layers=61, hidden=7168)
    assert model.is_mla
    assert model.experts == 256
    assert model == known_presets()["deepseek-v3"].model()


@pytest.mark.parametrize("name", ["llama-3-8b", "Llama3 8B", "LLAMA-3_8b"])
def test_preset_names_are_spelt_many_ways(name):
    assert shape(model_name=name, layers=32, hidden=4096).kv_heads == 8


def test_the_same_name_with_another_size_is_another_model():
    assert shape(model_name="llama-3-8b", layers=16, hidden=4096).layers == 16


def test_a_stated_vocabulary_beats_the_preset():
    assert shape(model_name="llama-3-8b", layers=32, hidden=4096, vocab=32000).vocab == 32000


def test_usual_choices_where_nothing_is_said():
    model = shape(layers=24, hidden=2048)
    assert (model.heads, model.kv_heads, model.head_dim, model.ffn, model.vocab) == (16, 16, 128, 8192, 51200)
    assert not model.is_moe


def test_stated_columns_are_taken():
    model = shape(layers=24, hidden=2048, heads=32, kv_heads=4, ffn=5632, vocab=32000)
    assert (model.heads, model.kv_heads, model.head_dim, model.ffn, model.vocab) == (32, 4, 64, 5632, 32000)


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "heads", "ffn", "vocab", "params_b", "gated", "tied"),
    [
        # published sizes of each model; the columns alone do not say gate or tying
        ("llama-13b-like", 40, 5120, 40, 13824, 32000, 13.0, True, False),
        ("gpt-1.3b", 24, 2048, 16, 8192, 50257, 1.31, False, True),
        ("mpt-30b", 48, 7168, 56, 28672, 50368, 29.98, False, True),
        ("qwen-like", 24, 2048, 16, 5504, 151936, 1.54, True, True),
        ("gpt-gated", 32, 4096, 32, 11008, 32000, 6.74, True, False),  # a count that far off overrules the name
    ],
)
def test_gate_and_tying_follow_the_parameter_count(name, layers, hidden, heads, ffn, vocab, params_b, gated, tied):
    columns = {"layers": layers, "hidden": hidden, "heads": heads, "ffn": ffn, "vocab": vocab}
    model = shape(model_name=name, params_b=params_b, **columns)
    assert (model.gated, model.tied) == (gated, tied)
    assert count_parameters(model).total / 1e9 == pytest.approx(params_b, rel=0.02)


@pytest.mark.parametrize(("name", "gated", "tied"), [("llama-x", True, True), ("gpt-x", False, False)])
def test_the_name_settles_what_the_count_cannot(name, gated, tied):
    """16 layers x one more matrix of 8,192 is exactly one more table of 131,072 words."""
    model = shape(model_name=name, layers=16, hidden=2048, heads=16, ffn=8192, vocab=131072, params_b=1.3422)
    assert (model.gated, model.tied) == (gated, tied)


def test_without_a_parameter_count_the_family_decides():
    assert shape(model_name="llama-odd", layers=10, hidden=1024).gated
    assert not shape(model_name="gpt-odd", layers=10, hidden=1024).gated
    assert shape(model_name="", layers=10, hidden=1024, ffn=2816).gated  # 2.75 x hidden: the 8/3 of a gated MLP
    assert not shape(model_name="", layers=10, hidden=1024, ffn=4096).gated


def test_experts_have_a_width_and_two_are_active_unless_said():
    model = shape(layers=32, hidden=4096, ffn=14336, experts=8)
    assert (model.experts_per_token, model.expert_ffn) == (2, 14336)
    stated = shape(layers=32, hidden=4096, ffn=14336, experts=64, topk=6, moe_ffn=1408)
    assert (stated.experts_per_token, stated.expert_ffn) == (6, 1408)


@pytest.mark.parametrize(
    ("row", "fused"),
    [
        ({"attention": "flash"}, True),
        ({"attention": "standard"}, False),
        ({"attention": "Standard", "date": "2025"}, False),
        ({"attention": "", "date": "2021-04"}, False),
        ({"attention": "", "date": "2023-2024"}, True),
        ({"date": "24.07"}, True),
        ({}, True),
    ],
)
def test_fused_attention_by_word_or_year(row, fused):
    assert throughput_table.attention_is_fused(row) is fused


@pytest.mark.parametrize(
    ("row", "stage"),
    [
        ({"zero_stage": "2"}, 2),
        ({"zero_stage": "0", "framework": "fsdp"}, 0),
        ({"zero_stage": "9"}, 3),
        ({"zero_stage": "", "framework": "PyTorch FSDP"}, 3),
        ({"zero_stage": "?", "framework": "maxtext"}, 3),
        ({"framework": "megatron-core"}, 1),
    ],
)
def test_zero_stage(row, stage):
    assert throughput_table.zero_stage(row) == stage


@pytest.mark.parametrize(
    ("row", "answer"),
    [({"seq_parallel": "yes"}, True), ({"seq_parallel": "no", "tp": "8"}, False), ({"tp": "8"}, True), ({}, False)],
)
def test_sequence_parallelism(row, answer):
    assert throughput_table.sequence_parallel(row) is answer


@pytest.mark.parametrize(
    ("row", "ranks", "sizes"),
    [
        ({"micro_batch": "3", "global_batch": "64"}, 8, [3]),
        ({"global_batch": "64"}, 8, [1, 2, 4, 8]),
        ({"global_batch": "64"}, 64, [1]),
        ({"global_batch": "48"}, 8, [1, 2]),  # six per rank: four does not divide it
        ({"global_batch": "4"}, 8, [1]),
    ],
)
def test_unstated_micro_batches_are_those_that_divide_the_share(row, ranks, sizes):
    assert throughput_table.micro_batches(row, ranks) == sizes


@pytest.mark.parametrize(
    ("stated", "kinds"),
    [
        ("full", ["full"]),
        ("Selective", ["selective"]),
        ("", ["none", "selective", "full"]),
        ("?", ["none", "selective", "full"]),
    ],
)
def test_unstated_recompute_may_be_any(stated, kinds):
    assert throughput_table.recomputes({"recompute": stated}) == kinds


@pytest.mark.parametrize(
    ("stated", "format_"),
    [("bf16", "bf16"), ("", "bf16"), ("BF16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"), ("tf32", "fp32"),
     ("fp8", "fp8"), ("FP8-CS", "fp8"), ("mxfp8", "fp8"), ("nvfp4", "fp4"), ("amp", "bf16")],
)  # fmt: skip
def test_precision_by_the_names_tables_use(stated, format_):
    assert throughput_table.precision({"precision": stated}) == format_
