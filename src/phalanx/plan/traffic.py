"""Seconds of communication per axis: which group carries it, how much, how much of it shows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.network import collectives as net
from phalanx.plan.cases import Cases, Floats
from phalanx.plan.compute import element_bytes, routed_tokens
from phalanx.plan.physics import Physics, Profile
from phalanx.plan.weights import RankWeights

# Share of ring-attention traffic that stays visible behind the attention it feeds.
CONTEXT_VISIBLE = 0.1
COMPRESSED_SHARE = np.array([1.0, 0.5, 0.25, 0.25, 0.02])  # of fp32 bytes, by cases.COMPRESSION


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """Communicators of every axis. Ranks fill domains in the order tensor, context, data, pipeline."""

    tensor: net.Group
    context: net.Group
    data: net.Group  # data and context ranks together: they share gradients
    expert: net.Group
    expert_data: net.Group
    pipeline: net.Group


def groups(c: Cases, k: Physics, f: Profile) -> Groups:
    """Where each axis runs."""

    def place(ranks: Floats, stride: Floats) -> net.Group:
        return net.place(
            ranks,
            stride,
            domain=c.domain,
            link_bytes_per_s=c.link_bytes_per_s * k.link,
            nic_bytes_per_s=c.nic_bytes_per_s * k.nic,
            link_latency_s=c.link_latency_s * k.link_latency,
            nic_latency_s=c.nic_latency_s * k.nic_latency,
            pacing=k.pacing,
            loss=f.fabric_loss,
        )

    replicas = np.maximum(c.dp * c.cp * c.tp / np.maximum(c.ep, 1.0), 1.0)
    return Groups(
        tensor=place(c.tp, np.ones_like(c.tp)),
        context=place(c.cp, c.tp),
        data=place(c.dp * c.cp, c.tp),
        expert=place(c.ep, np.ones_like(c.tp)),
        expert_data=place(replicas, c.ep),
        pipeline=place(c.pp, c.tp * c.cp * c.dp),
    )


def tensor_seconds(c: Cases, g: Groups, f: Profile) -> Floats:
    """Forward (and again backward): two all-reduces per layer, or the same bytes as gathers and scatters."""
    message = c.tokens * c.hidden * element_bytes(c)
    reduce = net.all_reduce(g.tensor, message, switch=np.zeros_like(c.tp))
    both = np.where(c.sp > 0, 2.0 * net.all_gather(g.tensor, message), reduce)
    return 2.0 * c.layers * both * f.tensor_exposed


def context_seconds(c: Cases, g: Groups, attention_forward: Floats) -> Floats:
    """Forward: keys and values travel the ring once, behind the attention of the block before."""
    kv_width = np.maximum(c.kv_heads / c.tp, 1.0) * (c.qk_dim + c.v_dim)
    ring = c.layers * (c.cp - 1.0) * net.send(g.context, c.tokens * kv_width * element_bytes(c))
    return np.maximum(0.0, (1.0 - CONTEXT_VISIBLE) * (ring - attention_forward)) + CONTEXT_VISIBLE * ring


def expert_seconds(c: Cases, g: Groups, f: Profile) -> Floats:
    """Forward: dispatch and combine of routed tokens; a token travels once to each domain that wants it."""
    domains = g.expert.domains
    distinct = domains * (1.0 - (1.0 - 1.0 / domains) ** c.topk)
    copies = np.where(domains > 1, distinct / np.maximum(c.topk, 1.0), 1.0)
    once = net.all_to_all(g.expert, routed_tokens(c) * c.hidden * element_bytes(c), network_copies=copies)
    return np.where(c.moe_layers > 0, 2.0 * c.moe_layers * once * f.expert_exposed, 0.0)


def send_seconds(c: Cases, g: Groups) -> Floats:
    """One activation between neighbouring stages."""
    spread = np.where(c.sp > 0, c.tp, 1.0)
    return net.send(g.pipeline, c.tokens * c.hidden * element_bytes(c) / spread)


def gradient_seconds(c: Cases, g: Groups, w: RankWeights, f: Profile) -> Floats:
    """Once per step below ZeRO-3: reduce gradients and, when the optimizer is sharded, gather parameters."""
    width = f.gradient_bytes * COMPRESSED_SHARE[c.compression.astype(int)]
    size = element_bytes(c)

    def sync(group: net.Group, weights: Floats) -> Floats:
        whole = net.all_reduce(group, weights * width, switch=np.zeros_like(c.tp))
        sharded = net.all_gather(group, weights * width) + net.all_gather(group, weights * size)
        return np.where(c.zero == 0, whole, sharded)

    experts = np.where(c.moe_layers > 0, sync(g.expert_data, w.experts), 0.0)
    return np.where(c.zero == 3, 0.0, sync(g.data, w.dense) + experts)


def shard_seconds(c: Cases, g: Groups, w: RankWeights, f: Profile) -> Floats:
    """Per micro-batch under ZeRO-3: gather parameters twice, scatter gradients once, layer by layer."""
    size = element_bytes(c)

    def once(group: net.Group, weights: Floats) -> Floats:
        return 2.0 * net.all_gather(group, weights * size) + net.all_gather(group, weights * f.gradient_bytes)

    calls = 3.0 * (c.layers / c.pp - 1.0)
    total = once(g.data, w.dense) + calls * net.ring_latency(g.data)
    total = total + np.where(c.moe_layers > 0, once(g.expert_data, w.experts), 0.0)
    return np.where(c.zero == 3, total * f.shard_traffic, 0.0)
