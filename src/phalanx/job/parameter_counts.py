"""The number of parameters of a decoder transformer, counted exactly from its shape."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.job.model import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCount:
    """The parameters by part of the model; `active` are those that one token uses."""

    embedding: int
    head: int
    final_norm: int
    attention_per_layer: int
    dense_mlp_per_layer: int
    expert: int  # one routed expert
    moe_fixed_per_layer: int  # router and shared experts of one mixture-of-experts layer
    norms_per_layer: int
    total: int
    active: int


def attention_parameters(m: ModelShape) -> int:
    """Return the parameters of one layer's attention: q, k, v and output projections, with biases and head norms."""
    if m.is_mla:
        query_dim = m.qk_nope_dim + m.qk_rope_dim
        query = (
            m.hidden * m.q_lora_rank + m.q_lora_rank + m.q_lora_rank * m.heads * query_dim
            if m.q_lora_rank
            else m.hidden * m.heads * query_dim
        )
        latent = m.hidden * (m.kv_lora_rank + m.qk_rope_dim) + m.kv_lora_rank
        expand = m.kv_lora_rank * m.heads * (m.qk_nope_dim + m.v_head_dim)
        return query + latent + expand + m.heads * m.v_head_dim * m.hidden
    query_width, kv_width = m.heads * m.head_dim, m.kv_heads * m.head_dim
    weights = m.hidden * (query_width + 2 * kv_width) + query_width * m.hidden
    biases = (query_width + 2 * kv_width) * (m.bias or m.qkv_bias) + m.hidden * m.bias
    return weights + biases + 2 * m.head_dim * m.qk_norm


def mlp_parameters(hidden: int, ffn: int, *, gated: bool, bias: bool) -> int:
    """Return the parameters of one MLP: two matrices, three when gated."""
    matrices = 3 if gated else 2
    return matrices * hidden * ffn + ((matrices - 1) * ffn + hidden) * bias


def count_parameters(m: ModelShape) -> ParameterCount:
    """Return the exact number of parameters of a model, by part.

    >>> llama = ModelShape(name="llama-3-8b", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128,
    ...                    ffn=14336, vocab=128256)
    >>> count_parameters(llama).total
    8030261248
    """
    norm = m.hidden * (2 if m.norm == "layer" else 1)
    embedding = m.vocab * m.hidden + (m.max_positions * m.hidden if m.positions == "learned" else 0)
    embedding += norm * m.embedding_norm
    head = 0 if m.tied else m.vocab * m.hidden
    attention = attention_parameters(m)
    dense = mlp_parameters(m.hidden, m.ffn, gated=m.gated, bias=m.bias)
    expert = mlp_parameters(m.hidden, m.expert_ffn, gated=m.gated, bias=m.bias) if m.is_moe else 0
    fixed = 0
    if m.is_moe:
        fixed = m.hidden * m.experts + m.experts * m.router_bias + m.shared_experts * expert
    moe_layers = m.layers - m.dense_layers if m.is_moe else 0
    dense_layers = m.layers - moe_layers
    shared_by_all = embedding + head + norm + m.layers * (attention + 2 * norm) + dense_layers * dense
    total = shared_by_all + moe_layers * (fixed + m.experts * expert)
    active = shared_by_all + moe_layers * (fixed + m.experts_per_token * expert)
    return ParameterCount(
        embedding=embedding,
        head=head,
        final_norm=norm,
        attention_per_layer=attention,
        dense_mlp_per_layer=dense,
        expert=expert,
        moe_fixed_per_layer=fixed,
        norms_per_layer=2 * norm,
        total=total,
        active=active,
    )
