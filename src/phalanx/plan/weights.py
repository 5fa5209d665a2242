"""Parameters per rank under a layout, and the groups that share them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.plan.cases import Cases, Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWeights:
    """Parameters held by a rank of the fullest pipeline stage before any ZeRO sharding."""

    dense: Floats  # all parameters that data ranks replicate: attention, dense MLPs, norms, embeddings
    experts: Floats  # routed experts, replicated over `expert_replicas` ranks
    expert_replicas: Floats
    embedding: Floats  # the part of `dense` that is the input embedding or the head
    layer: Floats  # the widest layer, tensor-parallel share: what ZeRO-3 gathers at once


def attention_weights(c: Cases) -> Floats:
    """Return the size of one layer's attention matrices (biases and norms are below a thousandth and left out)."""
    standard = c.hidden * (c.heads * c.qk_dim + c.kv_heads * (c.qk_dim + c.v_dim)) + c.heads * c.v_dim * c.hidden
    queries = np.where(c.q_rank > 0, c.q_rank * (c.hidden + c.heads * c.qk_dim), c.hidden * c.heads * c.qk_dim)
    keys = c.hidden * (c.kv_rank + c.rope_dim) + c.kv_rank * c.heads * (c.qk_dim - c.rope_dim + c.v_dim)
    return np.where(c.kv_rank > 0, queries + keys + c.heads * c.v_dim * c.hidden, standard)


def mlp_weights(c: Cases, ffn: Floats) -> Floats:
    """Return the number of parameters of one MLP of the given width."""
    return (2.0 + c.gated) * c.hidden * ffn


def expert_split(c: Cases) -> Floats:
    """Return the number of ranks over which one copy of the routed experts is split.

    Expert parallelism splits by expert and keeps each expert whole (expert tensor parallelism 1, what published
    mixture-of-experts runs use); without it every expert is split by tensor parallelism like a dense MLP.
    """
    return np.where(c.ep > 1, c.ep, c.tp)


def expert_sharers(c: Cases, replicas: Floats) -> Floats:
    """Return the copies of an expert that share its sharded state: all of them, or those in the shard group (HSDP)."""
    return np.clip(c.shard * c.tp / expert_split(c), 1.0, replicas)


def layer_weights(c: Cases) -> tuple[Floats, Floats]:
    """Return the parameters of all layers: (replicated, routed experts)."""
    dense_layers = c.layers - c.moe_layers
    moe_dense = mlp_weights(c, c.shared_ffn) + c.hidden * c.experts
    dense = c.layers * attention_weights(c) + dense_layers * mlp_weights(c, c.ffn) + c.moe_layers * moe_dense
    return dense, c.moe_layers * c.experts * mlp_weights(c, c.expert_ffn)


def total_weights(c: Cases) -> Floats:
    """Return the number of parameters of the whole model."""
    dense, experts = layer_weights(c)
    return dense + experts + c.vocab * c.hidden * (2.0 - c.tied)


def active_weights(c: Cases) -> Floats:
    """Return the number of parameters that one token uses."""
    dense, experts = layer_weights(c)
    routed = experts * c.topk / np.maximum(c.experts, 1.0)
    return dense + routed + c.vocab * c.hidden * (2.0 - c.tied)


def rank_weights(c: Cases, *, stage_layers: Floats) -> RankWeights:
    """Return the parameters of one rank whose stage has `stage_layers` layers and one of the two embedding matrices."""
    dense, experts = layer_weights(c)
    share = stage_layers / c.layers
    table = c.vocab * c.hidden
    # With a pipeline the input embedding and the head are on different stages (a tied table is kept twice).
    embedding = np.where(c.pp > 1, table, table * (2.0 - c.tied)) / c.tp
    replicas = np.maximum(c.dp * c.cp * c.tp / expert_split(c), 1.0)
    widest = attention_weights(c) + np.where(c.moe_layers < c.layers, mlp_weights(c, c.ffn), 0.0)
    expert_layer = c.experts * mlp_weights(c, c.expert_ffn) / expert_split(c)
    return RankWeights(
        dense=dense * share / c.tp + embedding,
        experts=experts * share / expert_split(c),
        expert_replicas=replicas,
        embedding=embedding,
        layer=widest / c.tp + np.where(c.moe_layers > 0, expert_layer, 0.0),
    )
