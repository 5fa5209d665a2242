"""Keys of [model] the trainer reads: what follows from what, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.errors import UserError
from phalanx.io.codec import from_json_values, json_values
from phalanx.job.hf_config import family_of, to_config
from phalanx.job.load import load
from phalanx.job.model import ModelShape, known_presets
from phalanx.job.model_section import shape_of_config

Write = Callable[[str], Path]
Complaints = Callable[..., str]

HAND = "[model]\nlayers = 2\nhidden = 16\nheads = 2\nffn = 32\nvocab = 64\n{keys}\n[batch]\nglobal_sequences = 8\n"
EXPERTS = "experts = 4\nexperts_per_token = 2\nexpert_ffn = 8\n"


def test_experts_are_balanced_unless_told_otherwise(write: Write) -> None:
    resolved = load(write(HAND.format(keys=EXPERTS)))
    assert (resolved.job.model.balance, resolved.job.model.router_bias) == ("aux", False)
    assert resolved.origins["model.balance"].where == "model.experts"
    biased = load(write(HAND.format(keys=EXPERTS + 'balance = "bias"'))).job.model
    assert biased.router_bias
    assert load(write(HAND.format(keys=EXPERTS + "router_bias = true"))).job.model.balance == "bias"
    assert load(write(HAND.format(keys=EXPERTS + 'balance = "none"'))).job.model.balance == "none"
    assert load(write(HAND.format(keys=""))).job.model.balance == "none"


def test_a_plain_mlp_takes_gelu(write: Write) -> None:
    assert load(write(HAND.format(keys="gated = false"))).job.model.activation == "gelu_tanh"
    assert load(write(HAND.format(keys='gated = false\nactivation = "silu"'))).job.model.activation == "silu"
    assert load(write(HAND.format(keys=""))).job.model.activation == "silu"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ('activation = "gelu_tan"', 'did you mean "gelu_tanh"?'),
        ("rope_theta = 1", "model.rope_theta = 1 is not above 1"),
        ("norm_eps = 0", "model.norm_eps = 0 is not above 0"),
        ("norm_eps = true", "is true/false, not a number"),
        ('rope_scaling = "llama3"', 'model.rope_scaling = "llama3" without rope_original_positions'),
        (
            'rope_scaling = "llama3"\nrope_original_positions = 8\nrope_high_factor = 1',
            "model.rope_high_factor = 1 is not above model.rope_low_factor = 1",
        ),
        ('module = "a b"', 'model.module = "a b" has the wrong form'),
        ('module = "my_model.py"', 'model.module = "my_model.py" has the wrong form'),
        ('module = "a.py:b c"', "has the wrong form"),
        ("arguments = { a = 1 }", "model.arguments without model.module"),
        ('module = "a:b"\narguments = { a = nan }', "holds what JSON cannot"),
        ('module = "a:b"\narguments = { a = 2026-01-01 }', "holds what JSON cannot"),
        ('module = "a:b"\narguments = [1]', "model.arguments = [1] is a list of 1, not a table"),
        ('module = "a:b"\narguments = "x"', "holds what JSON cannot"),
    ],
)
def test_refused(complaints: Complaints, keys: str, message: str) -> None:
    assert message in complaints(HAND.format(keys=keys))


def test_shapes_survive_the_plan_file(write: Write) -> None:
    keys = 'module = "m.py:build"\narguments = { width = 3, names = ["a"] }\nnorm_eps = 1e-6\nrope_theta = 5e5'
    own = load(write(HAND.format(keys=keys))).job.model
    for shape in [own, *(preset.model() for preset in known_presets().values())]:
        assert from_json_values(ModelShape, json.loads(json.dumps(json_values(shape)))) == shape


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("gpt2", "gpt2"),
        ("llama-3-8b", "llama"),
        ("llama-3.1-405b", "llama"),
        ("mistral-7b", "llama"),
        ("mixtral-8x7b", "mixtral"),
        ("qwen3-8b", "qwen3"),
        ("qwen3-30b-a3b", "qwen3_moe"),
        ("phalanx-tiny", "llama"),
    ],
)
def test_a_written_config_reads_back(name: str, family: str, tmp_path: Path) -> None:
    shape = known_presets()[name].model()
    assert family_of(shape) == family
    path = tmp_path / "config.json"
    path.write_text(json.dumps(to_config(shape)))
    # A window is not written: what we train has full attention.
    assert replace(shape_of_config(path), name=name) == replace(shape, sliding_window=0)


def test_models_no_family_computes() -> None:
    for name, key in (("deepseek-v3", "kv_lora_rank = 512"), ("bloom-176b", "embedding_norm = True")):
        with pytest.raises(UserError) as caught:
            family_of(known_presets()[name].model())
        assert key in str(caught.value)


def test_a_bad_config_alone_is_refused_with_all_its_mistakes(tmp_path: Path) -> None:
    config = to_config(known_presets()["llama-3-8b"].model()) | {"hidden_act": "relu", "num_hidden_layers": 0}
    config["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as caught:
        shape_of_config(tmp_path / "config.json")
    text = str(caught.value)
    assert 'model.activation = "relu" is not a choice' in text
    assert 'model.rope_scaling = "dynamic" is not a choice' in text
    assert "model.layers = 0 is below 1" in text
