"""Which Hugging Face tensors are which of ours, per family, and how one becomes the other.

Q, K, V rows are laid out alike on both sides: rotary pairs are (i, i + H/2) here and there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.job.hf_config import family_of
from phalanx.job.model import ModelShape

Turn = Callable[[Sequence[Tensor]], list[Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """Some of our tensors and the tensors of the file that hold the same numbers."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    to_ours: Turn
    to_theirs: Turn


def match_tensors(shape: ModelShape) -> list[Match]:
    """Every tensor of the model, matched; the head only where it is a tensor of its own."""
    family = family_of(shape)
    return list(_gpt2_matches(shape) if family == "gpt2" else _llama_like(shape, family))


def _llama_like(shape: ModelShape, family: str) -> Iterator[Match]:
    yield _same_tensor("embed.tokens.weight", "model.embed_tokens.weight")
    for layer in range(shape.layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        yield _same_tensor(f"{ours}.attn_norm.weight", f"{theirs}.input_layernorm.weight")
        yield _same_tensor(f"{ours}.mlp_norm.weight", f"{theirs}.post_attention_layernorm.weight")
        for letter in "qkvo":
            yield _same_tensor(f"{ours}.attn.w{letter}.weight", f"{theirs}.self_attn.{letter}_proj.weight")
            if shape.bias or (shape.qkv_bias and letter != "o"):
                yield _same_tensor(f"{ours}.attn.w{letter}.bias", f"{theirs}.self_attn.{letter}_proj.bias")
        if shape.qk_norm:
            yield _same_tensor(f"{ours}.attn.q_norm.weight", f"{theirs}.self_attn.q_norm.weight")
            yield _same_tensor(f"{ours}.attn.k_norm.weight", f"{theirs}.self_attn.k_norm.weight")
        if shape.is_moe and layer >= shape.dense_layers:
            yield from _expert_matches(shape, family, ours, theirs)
            continue
        for name in ("gate", "up", "down"):
            yield _same_tensor(f"{ours}.mlp.{name}.weight", f"{theirs}.mlp.{name}_proj.weight")
            if shape.bias:
                yield _same_tensor(f"{ours}.mlp.{name}.bias", f"{theirs}.mlp.{name}_proj.bias")
    yield _same_tensor("norm.weight", "model.norm.weight")
    if not shape.tied:
        yield _same_tensor("head.weight", "lm_head.weight")


def _expert_matches(shape: ModelShape, family: str, ours: str, theirs: str) -> Iterator[Match]:
    """One tensor per expert in the file, one for all of them here."""
    inside = f"{theirs}.block_sparse_moe" if family == "mixtral" else f"{theirs}.mlp"
    names = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    yield _same_tensor(f"{ours}.mlp.router.weight", f"{inside}.gate.weight")
    for name, their_name in zip(("gate", "up", "down"), names, strict=True):
        yield Match(
            ours=(f"{ours}.mlp.experts.{name}",),
            theirs=tuple(f"{inside}.experts.{expert}.{their_name}.weight" for expert in range(shape.experts)),
            to_ours=lambda tensors: [torch.stack(list(tensors))],
            to_theirs=lambda tensors: list(tensors[0].unbind(0)),
        )


def _gpt2_matches(shape: ModelShape) -> Iterator[Match]:
    """GPT-2 keeps its linears transposed (Conv1D), and q, k, v in one."""
    yield _same_tensor("embed.tokens.weight", "transformer.wte.weight")
    yield _same_tensor("embed.positions.weight", "transformer.wpe.weight")
    for layer in range(shape.layers):
        ours, theirs = f"layers.{layer}", f"transformer.h.{layer}"
        yield from _weight_and_bias(f"{ours}.attn_norm", f"{theirs}.ln_1")
        yield from _weight_and_bias(f"{ours}.mlp_norm", f"{theirs}.ln_2")
        for kind in ("weight", "bias"):
            parts = tuple(f"{ours}.attn.{name}.{kind}" for name in ("wq", "wk", "wv"))
            yield Match(ours=parts, theirs=(f"{theirs}.attn.c_attn.{kind}",), to_ours=_split_qkv, to_theirs=_join_qkv)
        yield from _transposed_linear(f"{ours}.attn.wo", f"{theirs}.attn.c_proj")
        yield from _transposed_linear(f"{ours}.mlp.up", f"{theirs}.mlp.c_fc")
        yield from _transposed_linear(f"{ours}.mlp.down", f"{theirs}.mlp.c_proj")
    yield from _weight_and_bias("norm", "transformer.ln_f")
    if not shape.tied:
        yield _same_tensor("head.weight", "lm_head.weight")


def _same_tensor(ours: str, theirs: str) -> Match:
    return Match(ours=(ours,), theirs=(theirs,), to_ours=list, to_theirs=list)


def _weight_and_bias(ours: str, theirs: str) -> Iterator[Match]:
    yield _same_tensor(f"{ours}.weight", f"{theirs}.weight")
    yield _same_tensor(f"{ours}.bias", f"{theirs}.bias")


def _transposed_linear(ours: str, theirs: str) -> Iterator[Match]:
    yield Match(
        ours=(f"{ours}.weight",), theirs=(f"{theirs}.weight",), to_ours=_transpose_one, to_theirs=_transpose_one
    )
    yield _same_tensor(f"{ours}.bias", f"{theirs}.bias")


def _transpose_one(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensors[0].mT]


def _split_qkv(tensors: Sequence[Tensor]) -> list[Tensor]:
    whole = tensors[0].mT if tensors[0].dim() == 2 else tensors[0]
    return list(whole.chunk(3, dim=0))


def _join_qkv(tensors: Sequence[Tensor]) -> list[Tensor]:
    whole = torch.cat(list(tensors))
    return [whole.mT if whole.dim() == 2 else whole]
