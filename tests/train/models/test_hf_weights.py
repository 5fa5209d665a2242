"""Weights of every family against transformers itself: the same logits, both ways."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from phalanx.errors import UserError
from phalanx.job.model import ModelShape
from phalanx.job.model_section import shape_of_config
from phalanx.train.models.decoder import Decoder
from phalanx.train.models.hf_weights import INDEX, SINGLE, load_hf, read_hf, save_hf

BASE = ModelShape(name="t", layers=2, hidden=48, heads=6, kv_heads=2, head_dim=8, ffn=80, vocab=101)
MOE = replace(BASE, experts=6, experts_per_token=2, expert_ffn=40, balance="aux")
SHAPES: dict[str, ModelShape] = {
    "llama": BASE,
    "llama-tied-3.1": replace(
        BASE,
        tied=True,
        head_dim=16,
        norm_eps=1e-6,
        rope_theta=500_000.0,
        rope_scaling="llama3",
        rope_factor=8.0,
        rope_original_positions=16,
    ),
    "llama-biases": replace(BASE, bias=True),
    "llama-linear": replace(BASE, rope_scaling="linear", rope_factor=4.0, activation="gelu_tanh"),
    "llama-yarn": replace(BASE, rope_scaling="yarn", rope_factor=4.0, rope_original_positions=32),
    "qwen2": replace(BASE, qkv_bias=True),
    "qwen3": replace(BASE, qk_norm=True),
    "mixtral": replace(MOE, rope_theta=1e6, ffn=40),
    "qwen3-moe": replace(MOE, qk_norm=True, renormalise=False, dense_layers=1),
    "qwen3-moe-renormalised": replace(MOE, qk_norm=True, tied=True, head_dim=12),
    "gpt2": ModelShape(
        name="g",
        layers=2,
        hidden=48,
        heads=6,
        kv_heads=6,
        head_dim=8,
        ffn=192,
        vocab=101,
        gated=False,
        tied=True,
        norm="layer",
        bias=True,
        positions="learned",
        max_positions=64,
        activation="gelu_tanh",
    ),
}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def random_state(shape: ModelShape, seed: int = 0) -> dict[str, torch.Tensor]:
    """Every tensor far from its first value, also norms and biases, so that none may be forgotten."""
    model = Decoder(shape)
    generator = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(value.shape, generator=generator) * 0.2 for name, value in model.state_dict().items()}
    return {name: value + 1.0 if "norm.weight" in name else value for name, value in state.items()}


def tokens() -> torch.Tensor:
    return torch.randint(0, 101, (2, 40), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def our_logits(shape: ModelShape, state: dict[str, torch.Tensor]) -> torch.Tensor:
    model = Decoder(shape)
    model.load_state_dict(state)
    logits: torch.Tensor = model(tokens())
    return logits


@torch.no_grad()
def their_logits(folder: Path) -> torch.Tensor:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    logits: torch.Tensor = model.eval()(tokens()).logits
    return logits


@pytest.mark.parametrize("name", SHAPES)
def test_export_gives_the_same_logits_in_transformers(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    state = random_state(shape)
    save_hf(state, shape, tmp_path, positions=128)
    ours, theirs = our_logits(shape, state), their_logits(tmp_path)
    assert ours.std() > 0.5
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", SHAPES)
def test_import_of_what_transformers_saves(name: str, tmp_path: Path) -> None:
    """Their own code draws the weights, writes the files and the config.json."""
    save_hf(random_state(SHAPES[name]), SHAPES[name], tmp_path / "config", positions=128)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "config")
    torch.manual_seed(0)
    theirs: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    shape = shape_of_config(tmp_path / "theirs" / "config.json")
    model = Decoder(shape)
    load_hf(tmp_path / "theirs", model)
    assert replace(shape, name=SHAPES[name].name) == SHAPES[name]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens()), their_logits(tmp_path / "theirs"), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shard_bytes", [10**9, 30_000])
def test_round_trip_is_exact(shard_bytes: int, tmp_path: Path) -> None:
    shape = SHAPES["mixtral"]
    state = random_state(shape)
    files = save_hf(state, shape, tmp_path, shard_bytes=shard_bytes)
    assert (INDEX in {path.name for path in files}) == (shard_bytes == 30_000)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in files}
    read = dict(read_hf(tmp_path, shape, wanted=state))
    assert read.keys() == state.keys()
    assert all(torch.equal(read[name], state[name]) for name in state)


def test_a_second_export_leaves_nothing_of_the_first(tmp_path: Path) -> None:
    shape = SHAPES["llama"]
    save_hf(random_state(shape), shape, tmp_path, shard_bytes=30_000)
    save_hf(random_state(shape, seed=1), shape, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", SINGLE}
    assert torch.equal(
        dict(read_hf(tmp_path, shape, wanted=["norm.weight"]))["norm.weight"], random_state(shape, 1)["norm.weight"]
    )


def test_a_tied_last_stage_gets_the_embedding_as_its_head(tmp_path: Path) -> None:
    shape = SHAPES["gpt2"]
    state = random_state(shape)
    save_hf(state, shape, tmp_path)
    stage = Decoder(shape, layers=range(1, 2), first=False)
    load_hf(tmp_path, stage)
    assert torch.equal(stage.state_dict()["head.weight"], state["embed.tokens.weight"])
    assert torch.equal(stage.state_dict()["layers.1.mlp.up.weight"], state["layers.1.mlp.up.weight"])


def test_files_of_the_first_gpt2_have_no_prefix_and_carry_masks(tmp_path: Path) -> None:
    shape = SHAPES["gpt2"]
    state = random_state(shape)
    save_hf(state, shape, tmp_path)
    old = {name.removeprefix("transformer."): value for name, value in load_file(tmp_path / SINGLE).items()}
    save_file(old | {"h.0.attn.bias": torch.ones(1, 1, 64, 64)}, tmp_path / SINGLE)
    read = dict(read_hf(tmp_path, shape, wanted=state))
    assert all(torch.equal(read[name], state[name]) for name in state)


def complaint(folder: Path, shape: ModelShape) -> str:
    with pytest.raises(UserError) as caught:
        load_hf(folder, Decoder(shape))
    return str(caught.value).replace(str(folder), "FOLDER")


def test_every_tensor_that_does_not_fit_is_named_at_once(tmp_path: Path) -> None:
    shape = SHAPES["llama"]
    save_hf(random_state(shape), shape, tmp_path)
    held = load_file(tmp_path / SINGLE)
    held["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 4)
    held["model.layers.1.self_attn.o_proj.bias"] = torch.zeros(48)
    held["model.norm.weight"] = torch.zeros(48, dtype=torch.int8)
    del held["model.layers.1.input_layernorm.weight"]
    save_file(held, tmp_path / SINGLE)
    assert complaint(tmp_path, shape).splitlines() == [
        "FOLDER: lacks model.layers.1.input_layernorm.weight",
        "FOLDER: has tensors this model does not: model.layers.1.self_attn.o_proj.bias",
        "FOLDER: has tensors of another size: model.layers.0.mlp.up_proj.weight [3, 4] instead of [80, 48]",
        "FOLDER: has tensors that are not floating point: model.norm.weight (I8)",
    ]


def test_an_index_may_not_leave_its_folder(tmp_path: Path) -> None:
    shape = SHAPES["llama"]
    save_hf(random_state(shape), shape, tmp_path / "other")
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("../other/model.safetensors", str(tmp_path / "other" / SINGLE), "..\\x.safetensors", 3):
        (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        assert "only files in the same folder are read" in complaint(folder, shape)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": "gone.safetensors"}}))
    assert f"FOLDER/{INDEX}: names files that are not there: gone.safetensors" == complaint(folder, shape)
    (folder / INDEX).write_text("[]")
    assert "is not an index" in complaint(folder, shape)


def test_damaged_and_absent_files(tmp_path: Path) -> None:
    shape = SHAPES["llama"]
    assert complaint(tmp_path, shape).startswith(f"FOLDER: has neither {SINGLE} nor {INDEX}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    assert "pytorch_model.bin is a pickle, which can run code" in complaint(tmp_path, shape)
    save_hf(random_state(shape), shape, tmp_path)
    whole = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(whole[:-100])
    assert f"FOLDER/{SINGLE}: is not a safetensors file" in complaint(tmp_path, shape)


def test_what_has_no_family_is_not_exported(tmp_path: Path) -> None:
    shape = replace(MOE, shared_experts=1, router_score="sigmoid")
    with pytest.raises(UserError) as caught:
        save_hf(random_state(shape), shape, tmp_path / "out")
    assert "shared_experts = 1 has no place in a Hugging Face mixtral model, which has 0" in str(caught.value)
    assert "router_score = 'sigmoid'" in str(caught.value)
    assert not (tmp_path / "out").exists()
    state = random_state(BASE)
    state["extra"] = state.pop("norm.weight")
    with pytest.raises(UserError) as caught:
        save_hf(state, BASE, tmp_path / "out")
    assert str(caught.value).splitlines() == [
        "the model: lacks norm.weight",
        "the model: has tensors its shape does not: extra",
    ]
