"""Seconds of communication per axis: the group that carries it, its bytes, and the exposed share."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from phalanx.network import collectives as net
from phalanx.plan.cases import Cases, Floats
from phalanx.plan.compute import element_bytes, routed_tokens
from phalanx.plan.physics import Physics, Profile
from phalanx.plan.weights import RankWeights, expert_split

# Share of ring-attention traffic that stays exposed behind the attention it feeds: an assumption, between the 0.1 of
# long sequences (torchtitan's 128k rows fit it) and none hidden.
CONTEXT_VISIBLE = 0.3
# Kernels that each step of the ring adds: send, receive, attention, and three to merge outputs and log-sum-exps.
CONTEXT_LAUNCHES = 6.0
# Bytes per gradient on the wire, by cases.COMPRESSION; top-k sends 1 % of the values with 32-bit indices.
COMPRESSED_BYTES = np.array([np.inf, 2.0, 1.0, 1.0, 0.08, np.inf])
POWERSGD = 5  # index in cases.COMPRESSION
# PowerSGD sends factors of rank 4 in fp32: 4 · 4 (n + m) bytes for n m gradients, at most 32 / n each for n <= m.
POWERSGD_BYTES = 32.0
# Memory traffic per gradient, in fp32: gradient and error are read and summed (12), twice multiplied by a thin factor
# (8), the approximation is written, subtracted and copied (20). Orthogonalising thin factors is left out.
POWERSGD_PASSES_BYTES = 40.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """The communicators of every axis. Ranks fill domains in the order tensor, context, data, pipeline."""

    tensor: net.Group
    context: net.Group
    data: net.Group  # data and context ranks together: they share gradients
    shard: net.Group  # those of them that share one copy of the sharded state
    replica: net.Group  # and the copies of one shard (HSDP); a single rank when the sharding is full
    expert: net.Group
    expert_data: net.Group
    pipeline: net.Group


def axis_groups(c: Cases, k: Physics, f: Profile) -> Groups:
    """Return the group of ranks of each axis, placed on the fast domains."""

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

    expert_replicas = np.maximum(c.dp * c.cp * c.tp / expert_split(c), 1.0)
    num_ranks = c.dp * c.cp
    shard_ranks = np.where(c.zero >= 1, np.clip(c.shard, 1.0, num_ranks), num_ranks)
    return Groups(
        tensor=place(c.tp, np.ones_like(c.tp)),
        context=place(c.cp, c.tp),
        data=place(num_ranks, c.tp),
        shard=place(shard_ranks, c.tp),
        replica=place(np.maximum(num_ranks / shard_ranks, 1.0), c.tp * shard_ranks),
        expert=place(c.ep, np.ones_like(c.tp)),
        expert_data=place(expert_replicas, expert_split(c)),
        pipeline=place(c.pp, c.tp * c.cp * c.dp),
    )


def tensor_seconds(c: Cases, g: Groups, f: Profile) -> Floats:
    """Return forward's seconds of tensor traffic: two all-reduces per layer, or equal gathers and scatters."""
    message = c.tokens * c.hidden * element_bytes(c)
    reduce_s = np.where(c.sp > 0, 2.0 * net.all_gather(g.tensor, message), net.all_reduce(g.tensor, message))
    # Whole experts (expert parallelism) leave a mixture-of-experts layer only attention, and shared experts, to
    # reduce.
    without_mlp = np.where((c.ep > 1) & (c.shared_ffn <= 0), c.moe_layers, 0.0)
    return (2.0 * c.layers - without_mlp) * reduce_s * f.tensor_exposed


def context_seconds(c: Cases, k: Physics, g: Groups, attention_forward: Floats) -> Floats:
    """Return forward's exposed seconds: keys and values travel the ring while the previous block's attention runs."""
    kv_width = np.maximum(c.kv_heads / c.tp, 1.0) * (c.qk_dim + c.v_dim)
    hop = net.ring_hop(g.context, c.tokens * kv_width * element_bytes(c))
    block_s = attention_forward / c.layers / c.cp
    steps = c.layers * (c.cp - 1.0)
    exposed_s = steps * np.maximum(0.0, hop - block_s) + CONTEXT_VISIBLE * steps * np.minimum(hop, block_s)
    return exposed_s + steps * CONTEXT_LAUNCHES * k.start_s


def expert_seconds(c: Cases, g: Groups, f: Profile) -> Floats:
    """Return the seconds of forward's dispatch and combine; a token travels once to each domain that needs it."""
    domains = g.expert.domains
    distinct = domains * (1.0 - (1.0 - 1.0 / domains) ** c.topk)
    copies = np.where(domains > 1, distinct / np.maximum(c.topk, 1.0), 1.0)
    exchange_s = net.all_to_all(g.expert, routed_tokens(c) * c.hidden * element_bytes(c), network_copies=copies)
    return np.where(c.moe_layers > 0, 2.0 * c.moe_layers * exchange_s * f.expert_exposed, 0.0)


def send_seconds(c: Cases, g: Groups) -> Floats:
    """Return the seconds of one activation between neighbouring stages."""
    split_ranks = np.where(c.sp > 0, c.tp, 1.0)
    return net.message_seconds(g.pipeline, c.tokens * c.hidden * element_bytes(c) / split_ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientTraffic:
    """Seconds below ZeRO-3: reducing gradients once, and gathering updated parameters (ZeRO-1, 2)."""

    reduce: Floats
    gather: Floats
    # The part of `reduce` that ZeRO-2 repeats after every micro-batch; copies of a shard (HSDP) are summed once.
    again: Floats


def gradient_width(c: Cases, f: Profile) -> Floats:
    """Return the bytes per gradient on the wire."""
    width: Floats = np.minimum(f.gradient_bytes, COMPRESSED_BYTES[c.compression.astype(int)])
    return np.where(c.compression == POWERSGD, np.minimum(width, POWERSGD_BYTES / c.hidden), width)


def factoring_seconds(c: Cases, k: Physics, w: RankWeights) -> Floats:
    """Return the seconds per step to compute PowerSGD's factors; other formats are converted within a copy."""
    moved_bytes = (w.dense + w.experts) * POWERSGD_PASSES_BYTES
    is_used = (c.compression == POWERSGD) & (c.dp * c.cp > 1)
    return np.where(is_used, moved_bytes / (c.memory_bytes_per_s * k.memory), 0.0)


def gradient_traffic(c: Cases, g: Groups, w: RankWeights, f: Profile) -> GradientTraffic:
    """Return the traffic that keeps the data ranks equal."""
    width = gradient_width(c, f)
    size = element_bytes(c)

    def reduce(data: net.Group, shard: net.Group, replica: net.Group, weights: Floats) -> Floats:
        full_s = net.all_reduce(data, weights * width)
        replica_s = net.all_reduce(replica, weights * width / np.maximum(shard.ranks, 1.0))
        return np.where(c.zero == 0, full_s, net.reduce_scatter(shard, weights * width) + replica_s)

    def gather(shard: net.Group, weights: Floats) -> Floats:
        return np.where(c.zero == 0, 0.0, net.all_gather(shard, weights * size))

    reduce_s = reduce(g.data, g.shard, g.replica, w.dense)
    gather_s = gather(g.shard, w.dense)
    if np.any(c.moe_layers > 0):
        single_rank = replace(g.expert_data, ranks=np.ones_like(c.tp), per_domain=np.ones_like(c.tp))
        has_experts = c.moe_layers > 0
        reduce_s = reduce_s + np.where(has_experts, reduce(g.expert_data, g.expert_data, single_rank, w.experts), 0.0)
        gather_s = gather_s + np.where(has_experts, gather(g.expert_data, w.experts), 0.0)
    owned_elsewhere = (c.zero == 3) & (c.pp <= 1)
    # Under ZeRO-3 only the copies of a shard still have to be summed once per step (HSDP).
    replica_s = net.all_reduce(g.replica, w.dense * width / np.maximum(g.shard.ranks, 1.0))
    return GradientTraffic(
        reduce=np.where(owned_elsewhere, replica_s, reduce_s),
        gather=np.where(owned_elsewhere, 0.0, gather_s),
        again=np.maximum(reduce_s - replica_s, 0.0),
    )


def shard_seconds(c: Cases, g: Groups, w: RankWeights, f: Profile) -> Floats:
    """Return the seconds per micro-batch under ZeRO-3: parameters gathered twice, gradients scattered once.

    In a pipeline the gathered weights stay for the whole step (memory_profile.py), so there is only once-per-step
    traffic.
    """
    size = element_bytes(c)

    def layer_traffic(group: net.Group, weights: Floats) -> Floats:
        return 2.0 * net.all_gather(group, weights * size) + net.reduce_scatter(group, weights * f.gradient_bytes)

    num_calls = 3.0 * (c.layers / c.pp - 1.0)
    total = layer_traffic(g.shard, w.dense) + num_calls * net.ring_latency(g.shard)
    total = total + np.where(c.moe_layers > 0, layer_traffic(g.expert_data, w.experts), 0.0)
    return np.where((c.zero == 3) & (c.pp <= 1), total * f.shard_traffic, 0.0)
