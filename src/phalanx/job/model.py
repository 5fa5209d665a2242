"""The shape of a decoder transformer, as the job file gives it: numbers only, no arithmetic."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Everything about a model that parameters, FLOPs and memory depend on.

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
    embedding_norm: bool = False  # BLOOM: LayerNorm after the embedding
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_experts: int = 0  # each as wide as expert_ffn
    dense_layers: int = 0  # leading layers whose MLP stays dense in a mixture-of-experts model
    router_bias: bool = False  # DeepSeek-V3: per-expert balance bias
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_dim: int = 0
    qk_rope_dim: int = 0
    v_head_dim: int = 0

    @property
    def is_moe(self) -> bool:
        """Whether any layer routes tokens to experts."""
        return self.experts > 0

    @property
    def is_mla(self) -> bool:
        """Whether attention goes through low-rank latents (DeepSeek)."""
        return self.kv_lora_rank > 0
