"""The shape of a decoder transformer as the job file gives it, numbers only, and the models known by name."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from phalanx.io.files import shipped_text

TOKENS_PER_PARAMETER = 20  # compute-optimal (Hoffmann et al. 2022): the meaning of data.tokens = "auto"
VOCAB = 8192  # default vocabulary of a tokenizer that `phalanx data build` trains


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """All properties of a model that parameters, FLOPs and memory depend on.

    Dense models leave `experts` at 0. Multi-head latent attention (MLA) is on when `kv_lora_rank` > 0.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # width of a dense MLP
    vocab: int
    gated: bool = True  # SwiGLU-style MLP with three matrices instead of two
    tied: bool = False  # input embedding and output head are one matrix
    norm: str = "rms"  # "rms" (scale) or "layer" (scale and shift)
    bias: bool = False  # biases on every linear of a block
    qkv_bias: bool = False  # biases on the q, k, v projections only (Qwen2)
    qk_norm: bool = False
    positions: str = "rope"  # "rope", "learned" or "alibi"
    max_positions: int = 0  # rows of a learned position table
    # Tokens that a token attends to, including itself; 0 is all before it. Recorded only, not modelled.
    sliding_window: int = 0
    embedding_norm: bool = False  # BLOOM: LayerNorm after the embedding
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_experts: int = 0  # each as wide as expert_ffn
    dense_layers: int = 0  # leading layers whose MLP stays dense in a mixture-of-experts model
    router_bias: bool = False  # DeepSeek-V3: per-expert balance bias
    router_score: str = "softmax"  # "softmax" over the experts or "sigmoid" of each
    renormalise: bool = True  # the weights of a token's chosen experts are made to sum to 1
    routed_scale: float = 1.0  # factor on what the routed experts add (DeepSeek)
    balance: str = "none"  # "aux": a loss per sequence; "bias": router_bias is moved after every step
    balance_rate: float = 0.001  # coefficient of the loss, or how far the bias moves
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_dim: int = 0
    qk_rope_dim: int = 0
    v_head_dim: int = 0
    activation: str = "silu"  # "silu", "gelu" or "gelu_tanh"
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: str = "none"  # "none", "linear", "llama3" or "yarn"
    rope_factor: float = 1.0  # how many times longer than rope_original_positions
    rope_low_factor: float = 1.0  # llama3: wavelengths above original / low are stretched in full
    rope_high_factor: float = 4.0  # llama3: wavelengths below original / high are left alone
    rope_original_positions: int = 0  # longest sequence before stretching
    module: str = ""  # code that builds a custom network: "file.py:build", "package.module:build" or an entry point
    arguments: str = ""  # arguments of build(), as a JSON object; a table in the job file

    @property
    def is_moe(self) -> bool:
        """True if any layer routes tokens to experts."""
        return self.experts > 0

    @property
    def is_mla(self) -> bool:
        """True if attention uses low-rank latents (DeepSeek)."""
        return self.kv_lora_rank > 0


# Models by name: their shapes, and their training settings where published (presets.toml).


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A known model: `shape` holds ModelShape keys, `train` the published sequence, global_tokens, tokens."""

    name: str
    source: str
    shape: Mapping[str, int | bool | str | float]
    train: Mapping[str, int]

    def model(self) -> ModelShape:
        """Return the shape as a value."""
        return ModelShape(name=self.name, **self.shape)  # type: ignore[arg-type]


@cache
def known_presets() -> Mapping[str, Preset]:
    """Return all presets by name, in the order of the file."""
    table = tomllib.loads(shipped_text(__file__, "presets.toml"))
    return {name: _make_preset(name, dict(entry)) for name, entry in table.items()}


def _make_preset(name: str, entry: dict[str, object]) -> Preset:
    train = entry.pop("train", {})
    source = entry.pop("source")
    return Preset(name=name, source=str(source), shape=entry, train=train)  # type: ignore[arg-type]
