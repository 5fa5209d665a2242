"""Seconds of communication per axis: which group carries it, how much, how much of it shows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from phalanx.network import collectives as net
from phalanx.plan.cases import Cases, Floats
from phalanx.plan.compute import element_bytes, routed_tokens
from phalanx.plan.physics import Physics, Profile
from phalanx.plan.weights import RankWeights, expert_split

# Share of ring-attention traffic that stays visible behind the attention it feeds: an assumption, between the 0.1 of
# long sequences (torchtitan's 128k rows fit it) and none hidden.
CONTEXT_VISIBLE = 0.3
# Kernels each step of the ring adds: send, receive, attention, and three to merge outputs and log-sum-exps.
CONTEXT_LAUNCHES = 6.0
# Bytes per gradient on the wire, by cases.COMPRESSION; top-k sends 1 % of the values with 32-bit indices.
COMPRESSED_BYTES = np.array([np.inf, 2.0, 1.0, 1.0, 0.08, np.inf])
POWERSGD = 5  # index in cases.COMPRESSION
# PowerSGD sends factors of rank 4 in fp32: 4 · 4 (n + m) bytes of n m gradients, at most 32 / n each for n <= m.
POWERSGD_BYTES = 32.0
# Memory it moves per gradient, in fp32: gradient and error are read and summed (12), twice multiplied by a thin factor
# (8), the approximation is written, subtracted and copied (20). Orthogonalising thin factors is left out.
POWERSGD_PASSES_BYTES = 40.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """Communicators of every axis. Ranks fill domains in the order tensor, context, data, pipeline."""

    tensor: net.Group
    context: net.Group
    data: net.Group  # data and context ranks together: they share gradients
    shard: net.Group  # those of them that share one copy of the sharded state
    replica: net.Group  # and the copies of one shard (HSDP); a single rank when the sharding is full
    expert: net.Group
    expert_data: net.Group
    pipeline: net.Group


def axis_groups(c: Cases, k: Physics, f: Profile) -> Groups:
    """Where each axis runs."""

    def place(ranks: Floats, stride: Floats) -> net.Group:
        return net.place_group(
            ranks,
            stride,
            domain=c.domain,
            devices=c.devices,
            link_bytes_per_s=c.link_bytes_per_s * k.link,
            nic_bytes_per_s=c.nic_bytes_per_s * k.nic,
            link_latency_s=c.link_latency_s * k.link_latency,
            nic_latency_s=c.nic_latency_s * k.nic_latency,
            pacing=k.pacing,
            loss=f.fabric_loss,
            switch=c.switch_reduces,
            family=c.nccl_family,
        )

    replicas = np.maximum(c.dp * c.cp * c.tp / expert_split(c), 1.0)
    everyone = c.dp * c.cp
    sharers = np.where(c.zero >= 1, np.clip(c.shard, 1.0, everyone), everyone)
    return Groups(
        tensor=place(c.tp, np.ones_like(c.tp)),
        context=place(c.cp, c.tp),
        data=place(everyone, c.tp),
        shard=place(sharers, c.tp),
        replica=place(np.maximum(everyone / sharers, 1.0), c.tp * sharers),
        expert=place(c.ep, np.ones_like(c.tp)),
        expert_data=place(replicas, expert_split(c)),
        pipeline=place(c.pp, c.tp * c.cp * c.dp),
    )


def tensor_seconds(c: Cases, g: Groups, f: Profile) -> Floats:
    """Forward (and again backward): two all-reduces per layer, or the same bytes as gathers and scatters."""
    message = c.tokens * c.hidden * element_bytes(c)
    both = np.where(c.sp > 0, 2.0 * net.all_gather(g.tensor, message), net.all_reduce(g.tensor, message))
    # Whole experts (expert parallelism) leave a mixture-of-experts layer only attention, and shared experts, to reduce.
    bare = np.where((c.ep > 1) & (c.shared_ffn <= 0), c.moe_layers, 0.0)
    return (2.0 * c.layers - bare) * both * f.tensor_exposed


def context_seconds(c: Cases, k: Physics, g: Groups, attention_forward: Floats) -> Floats:
    """Forward: keys and values travel the ring once, behind the attention of the block before."""
    kv_width = np.maximum(c.kv_heads / c.tp, 1.0) * (c.qk_dim + c.v_dim)
    hop = net.ring_hop(g.context, c.tokens * kv_width * element_bytes(c))
    behind = attention_forward / c.layers / c.cp
    steps = c.layers * (c.cp - 1.0)
    waits = steps * np.maximum(0.0, hop - behind) + CONTEXT_VISIBLE * steps * np.minimum(hop, behind)
    return waits + steps * CONTEXT_LAUNCHES * k.start_s


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
    return net.message_seconds(g.pipeline, c.tokens * c.hidden * element_bytes(c) / spread)


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientTraffic:
    """Seconds below ZeRO-3: reducing gradients once, and gathering updated parameters (ZeRO-1, 2)."""

    reduce: Floats
    gather: Floats
    again: Floats  # the part of `reduce` ZeRO-2 does after every micro-batch: copies of a shard (HSDP) agree once


def gradient_width(c: Cases, f: Profile) -> Floats:
    """Bytes per gradient on the wire."""
    width: Floats = np.minimum(f.gradient_bytes, COMPRESSED_BYTES[c.compression.astype(int)])
    return np.where(c.compression == POWERSGD, np.minimum(width, POWERSGD_BYTES / c.hidden), width)


def factoring_seconds(c: Cases, k: Physics, w: RankWeights) -> Floats:
    """Making and multiplying out PowerSGD's factors, once per step; other formats are converted within a copy."""
    moved = (w.dense + w.experts) * POWERSGD_PASSES_BYTES
    used = (c.compression == POWERSGD) & (c.dp * c.cp > 1)
    return np.where(used, moved / (c.memory_bytes_per_s * k.memory), 0.0)


def gradient_traffic(c: Cases, g: Groups, w: RankWeights, f: Profile) -> GradientTraffic:
    """What keeps the data ranks equal."""
    width = gradient_width(c, f)
    size = element_bytes(c)

    def reduce(data: net.Group, shard: net.Group, replica: net.Group, weights: Floats) -> Floats:
        whole = net.all_reduce(data, weights * width)
        between = net.all_reduce(replica, weights * width / np.maximum(shard.ranks, 1.0))
        return np.where(c.zero == 0, whole, net.reduce_scatter(shard, weights * width) + between)

    def gather(shard: net.Group, weights: Floats) -> Floats:
        return np.where(c.zero == 0, 0.0, net.all_gather(shard, weights * size))

    reduced = reduce(g.data, g.shard, g.replica, w.dense)
    gathered = gather(g.shard, w.dense)
    if np.any(c.moe_layers > 0):
        alone = replace(g.expert_data, ranks=np.ones_like(c.tp), per_domain=np.ones_like(c.tp))
        has_experts = c.moe_layers > 0
        reduced = reduced + np.where(has_experts, reduce(g.expert_data, g.expert_data, alone, w.experts), 0.0)
        gathered = gathered + np.where(has_experts, gather(g.expert_data, w.experts), 0.0)
    owned_elsewhere = (c.zero == 3) & (c.pp <= 1)
    # Under ZeRO-3 only the copies of a shard still have to agree once per step (HSDP).
    between = net.all_reduce(g.replica, w.dense * width / np.maximum(g.shard.ranks, 1.0))
    return GradientTraffic(
        reduce=np.where(owned_elsewhere, between, reduced),
        gather=np.where(owned_elsewhere, 0.0, gathered),
        again=np.maximum(reduced - between, 0.0),
    )


def shard_seconds(c: Cases, g: Groups, w: RankWeights, f: Profile) -> Floats:
    """Per micro-batch under ZeRO-3: gather parameters twice, scatter gradients once, layer by layer.

    In a pipeline the gathered weights stay for the whole step (memory_profile.py): once-per-step traffic there.
    """
    size = element_bytes(c)

    def once(group: net.Group, weights: Floats) -> Floats:
        return 2.0 * net.all_gather(group, weights * size) + net.reduce_scatter(group, weights * f.gradient_bytes)

    calls = 3.0 * (c.layers / c.pp - 1.0)
    total = once(g.shard, w.dense) + calls * net.ring_latency(g.shard)
    total = total + np.where(c.moe_layers > 0, once(g.expert_data, w.experts), 0.0)
    return np.where((c.zero == 3) & (c.pp <= 1), total * f.shard_traffic, 0.0)
