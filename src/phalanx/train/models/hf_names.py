"""Mapping between Hugging Face tensor names and Phalanx's, per model family, with the conversion of values.

Q, K and V rows have the same layout on both sides: rotary pairs are (i, i + H/2).
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
    """Phalanx tensors and the Hugging Face tensors with the same numbers, and the conversions between them."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    to_ours: Turn
    to_theirs: Turn


def match_tensors(shape: ModelShape) -> list[Match]:
    """Return the matches of all tensors of the model; the head is included only if it is not tied."""
    family = family_of(shape)
    return list(_gpt2_matches(shape) if family == "gpt2" else _llama_like(shape, family))


def _llama_like(shape: ModelShape, family: str) -> Iterator[Match]:
    yield _same_tensor("embed.tokens.weight", "model.embed_tokens.weight")
    for layer in range(shape.layers):
        prefix, hf_prefix = f"layers.{layer}", f"model.layers.{layer}"
        yield _same_tensor(f"{prefix}.attn_norm.weight", f"{hf_prefix}.input_layernorm.weight")
        yield _same_tensor(f"{prefix}.mlp_norm.weight", f"{hf_prefix}.post_attention_layernorm.weight")
        for letter in "qkvo":
            yield _same_tensor(f"{prefix}.attn.w{letter}.weight", f"{hf_prefix}.self_attn.{letter}_proj.weight")
            if shape.bias or (shape.qkv_bias and letter != "o"):
                yield _same_tensor(f"{prefix}.attn.w{letter}.bias", f"{hf_prefix}.self_attn.{letter}_proj.bias")
        if shape.qk_norm:
            yield _same_tensor(f"{prefix}.attn.q_norm.weight", f"{hf_prefix}.self_attn.q_norm.weight")
            yield _same_tensor(f"{prefix}.attn.k_norm.weight", f"{hf_prefix}.self_attn.k_norm.weight")
        if shape.is_moe and layer >= shape.dense_layers:
            yield from _expert_matches(shape, family, prefix, hf_prefix)
            continue
        for name in ("gate", "up", "down"):
            yield _same_tensor(f"{prefix}.mlp.{name}.weight", f"{hf_prefix}.mlp.{name}_proj.weight")
            if shape.bias:
                yield _same_tensor(f"{prefix}.mlp.{name}.bias", f"{hf_prefix}.mlp.{name}_proj.bias")
    yield _same_tensor("norm.weight", "model.norm.weight")
    if not shape.tied:
        yield _same_tensor("head.weight", "lm_head.weight")


def _expert_matches(shape: ModelShape, family: str, ours: str, theirs: str) -> Iterator[Match]:
    """Yield matches for a layer with experts: one tensor per expert in the file, one stacked tensor in Phalanx."""
    moe_prefix = f"{theirs}.block_sparse_moe" if family == "mixtral" else f"{theirs}.mlp"
    names = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    yield _same_tensor(f"{ours}.mlp.router.weight", f"{moe_prefix}.gate.weight")
    for name, hf_name in zip(("gate", "up", "down"), names, strict=True):
        yield Match(
            ours=(f"{ours}.mlp.experts.{name}",),
            theirs=tuple(f"{moe_prefix}.experts.{expert}.{hf_name}.weight" for expert in range(shape.experts)),
            to_ours=lambda tensors: [torch.stack(list(tensors))],
            to_theirs=lambda tensors: list(tensors[0].unbind(0)),
        )


def _gpt2_matches(shape: ModelShape) -> Iterator[Match]:
    """Yield GPT-2's matches: it stores linear layers transposed (Conv1D), and q, k, v in one tensor."""
    yield _same_tensor("embed.tokens.weight", "transformer.wte.weight")
    yield _same_tensor("embed.positions.weight", "transformer.wpe.weight")
    for layer in range(shape.layers):
        prefix, hf_prefix = f"layers.{layer}", f"transformer.h.{layer}"
        yield from _weight_and_bias(f"{prefix}.attn_norm", f"{hf_prefix}.ln_1")
        yield from _weight_and_bias(f"{prefix}.mlp_norm", f"{hf_prefix}.ln_2")
        for kind in ("weight", "bias"):
            qkv_names = tuple(f"{prefix}.attn.{name}.{kind}" for name in ("wq", "wk", "wv"))
            yield Match(
                ours=qkv_names, theirs=(f"{hf_prefix}.attn.c_attn.{kind}",), to_ours=_split_qkv, to_theirs=_join_qkv
            )
        yield from _transposed_linear(f"{prefix}.attn.wo", f"{hf_prefix}.attn.c_proj")
        yield from _transposed_linear(f"{prefix}.mlp.up", f"{hf_prefix}.mlp.c_fc")
        yield from _transposed_linear(f"{prefix}.mlp.down", f"{hf_prefix}.mlp.c_proj")
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
    qkv = tensors[0].mT if tensors[0].dim() == 2 else tensors[0]
    return list(qkv.chunk(3, dim=0))


def _join_qkv(tensors: Sequence[Tensor]) -> list[Tensor]:
    qkv = torch.cat(list(tensors))
    return [qkv.mT if qkv.dim() == 2 else qkv]
