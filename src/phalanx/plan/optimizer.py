"""The cost of an optimizer: bytes kept and moved per parameter, and for Muon the matrix products."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from phalanx.network import collectives as net
from phalanx.plan.cases import Cases, Floats
from phalanx.plan.compute import element_bytes, matmul_rates
from phalanx.plan.memory_profile import OFFLOAD_PARAMETERS
from phalanx.plan.physics import Physics, Profile
from phalanx.plan.traffic import Groups
from phalanx.plan.weights import RankWeights, expert_sharers, expert_split, mlp_weights

# Moments per parameter: two for Adam, one for Muon, row and column means (about none) for Adafactor.
MOMENTS = {"adamw": 2, "adamw8bit": 2, "muon": 1, "adafactor": 0}
STATE_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0 + 4.0 / 256}  # int8: a fp32 scale for every 256 codes
NEWTON_SCHULZ = 5  # iterations of the trainer's Muon
# Kernels that Muon launches per weight matrix (optim/muon.py): three an iteration, and about 13 for momentum, norm and
# update. Small matrices take less time than their launches.
NEWTON_SCHULZ_LAUNCHES = 3 * NEWTON_SCHULZ + 13

# Memory traffic per parameter that explains the time of the trainer's optimizers on an H200 with torch 2.11: 2.0 ms
# for torch's fused AdamW, 4.3, 10.6, 10.8 and 39.2 ms for the others (22.5 of Muon's are Newton-Schulz), over 243
# million parameters in 32 tensors, 2026-11-15. A framework's own value for AdamW is moved by the difference.
MOVED_BYTES = {"fp32": 32.0, "bf16": 68.0, "int8": 168.0, "adafactor": 171.0, "muon": 264.0}
HOST_ADAM_BYTES = 28.0  # per parameter: read gradient, weight and two moments in fp32, write the last three
# Per parameter, for the transfers meanwhile: the gradient is written, the new weight read.
HOST_TRANSFER_BYTES = 8.0
FETCHED_ADAM_BYTES_PER_S = 40e9  # where FSDP2 holds the parameters in host memory: an assumption
HOST_MATMUL_FLOPS = 1e12  # a device's share of the host's cores, in fp32: an assumption
HOST_LINK_BYTES = 4.0  # offloaded states, each way: fp32 gradients out, fp32 weights back


def state_format(name: str, optimizer_state: str) -> str:
    """Return the format of the moments; the name of an 8-bit optimizer takes precedence over the precision setting."""
    return "int8" if name == "adamw8bit" else optimizer_state


def packed_bytes(name: str, optimizer_state: str) -> float:
    """Return the bytes per parameter that a checkpoint adds: it stores 8-bit moments as fp32, for any layout."""
    kind = state_format(name, optimizer_state)
    return MOMENTS[name] * (STATE_BYTES["fp32"] - STATE_BYTES["int8"]) if kind == "int8" else 0.0


def update_profile(profile: Profile, name: str, optimizer_state: str) -> Profile:
    """Return a framework's profile with the update of another optimizer than AdamW in fp32."""
    kind = state_format(name, optimizer_state) if name in ("adamw", "adamw8bit") else name
    extra = MOVED_BYTES[kind] - MOVED_BYTES["fp32"]
    return replace(
        profile,
        optimizer_bytes=profile.optimizer_bytes + extra,
        newton_schulz=float(NEWTON_SCHULZ) if name == "muon" else 0.0,
    )


def owned_weights(c: Cases, w: RankWeights) -> Floats:
    """Return the number of parameters that this rank updates."""
    owned = w.dense / np.where(c.zero >= 1, c.shard, 1.0)
    expert_shards = np.where(c.zero >= 1, expert_sharers(c, w.expert_replicas), 1.0)
    return owned + np.where(c.moe_layers > 0, w.experts / expert_shards, 0.0)


def update_seconds(c: Cases, k: Physics, f: Profile, w: RankWeights, g: Groups) -> Floats:
    """Return the seconds of one step's update, on the device or in host memory."""
    owned = owned_weights(c, w)
    device_s = owned * f.optimizer_bytes / (c.memory_bytes_per_s * k.memory)
    host_s = owned * HOST_ADAM_BYTES / FETCHED_ADAM_BYTES_PER_S
    # Offloaded states: gradients out and parameters back over the host link, AdamW at host memory speed meanwhile.
    update_s = owned * (HOST_ADAM_BYTES + HOST_TRANSFER_BYTES) / c.host_memory_bytes_per_s
    offloaded_s = np.maximum(owned * HOST_LINK_BYTES / c.host_link_bytes_per_s, update_s)
    # With the parameters in host memory the transfer was counted when they were fetched.
    seconds = np.where(c.offload == 1, offloaded_s, np.where(c.offload == OFFLOAD_PARAMETERS, host_s, device_s))
    if not np.any(np.asarray(f.newton_schulz) > 0):
        return seconds
    on_host = (c.offload == 1) | (c.offload == OFFLOAD_PARAMETERS)
    rate = np.where(on_host, HOST_MATMUL_FLOPS, matmul_rates(c, k, f)[1])
    products_s = newton_schulz_flops(c) * f.newton_schulz / rate
    matrices = (c.layers * (4.0 + 2.0 + c.gated) + c.moe_layers * 2.0) / c.pp / np.where(c.zero >= 1, c.shard, 1.0)
    launch_s = np.where(np.asarray(f.newton_schulz) > 0, matrices * NEWTON_SCHULZ_LAUNCHES * f.launch_s, 0.0)
    # All-to-all to the ranks that work on whole matrices, and back, over the shard group and the tensor group.
    message = owned * element_bytes(c)
    shard_exchange_s = np.where(c.zero >= 1, net.all_to_all(g.shard, message), 0.0)
    exchange_seconds = 2.0 * (shard_exchange_s + net.all_to_all(g.tensor, message))
    return seconds + np.maximum(products_s, launch_s) + exchange_seconds


def newton_schulz_flops(c: Cases) -> Floats:
    """Return the FLOPs of one iteration over this rank's share of the matrices of its stage.

    n <= m: X Xᵀ takes 2 n² m, its square 2 n³, the product with X 2 n² m; counted as 6 n² m.
    """
    query, value, key_value = c.heads * c.qk_dim, c.heads * c.v_dim, c.kv_heads * (c.qk_dim + c.v_dim)
    attention = c.hidden * (query * np.minimum(c.hidden, query) + value * np.minimum(c.hidden, value))
    attention = attention + c.hidden * key_value * np.minimum(c.hidden, key_value / 2.0)

    def mlp(ffn: Floats) -> Floats:
        return mlp_weights(c, ffn) * np.minimum(c.hidden, ffn)

    dense = c.layers * attention + (c.layers - c.moe_layers) * mlp(c.ffn) + c.moe_layers * mlp(c.shared_ffn)
    experts = c.moe_layers * c.experts * mlp(c.expert_ffn)
    shard_ranks = np.where(c.zero >= 1, c.shard, 1.0)
    replicas = np.maximum(c.dp * c.cp * c.tp / expert_split(c), 1.0)
    expert_shards = np.where(c.zero >= 1, expert_sharers(c, replicas), 1.0)
    return 6.0 / c.pp * (dense / (c.tp * shard_ranks) + experts / (expert_split(c) * expert_shards))
