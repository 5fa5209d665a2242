"""The table of cases that the cost model computes on: one NumPy array per quantity, one element per layout.

The same arithmetic serves the search (a million layouts of one model), the backtest (thousands of rows, each with its
own model and machine) and a single plan (one element). Every field broadcasts against every other.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

RECOMPUTE = ("none", "selective", "full")
PRECISION = ("fp32", "bf16", "fp8", "fp4", "fp16")
FP32, BF16, FP8, FP4, FP16 = range(5)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE = range(4)  # their indices
OFFLOAD = ("none", "optimizer", "activations", "parameters")
COMPRESSION = ("none", "bf16", "fp8", "int8", "topk", "powersgd")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cases:
    """The columns of the cost model. Flags are 0 or 1; named choices are indices into the tuples above."""

    # model
    layers: Floats
    hidden: Floats
    heads: Floats
    kv_heads: Floats
    qk_dim: Floats  # width of one query or key head
    v_dim: Floats  # width of one value head
    q_rank: Floats  # 0 without low-rank queries
    kv_rank: Floats  # 0 without latent attention
    rope_dim: Floats  # width of the shared rotary key of latent attention
    ffn: Floats
    gated: Floats
    vocab: Floats
    tied: Floats
    moe_layers: Floats
    experts: Floats
    topk: Floats
    expert_ffn: Floats
    shared_ffn: Floats
    flash: Floats  # 1: attention scores never reach memory
    # batch
    seq: Floats
    global_batch: Floats  # sequences
    micro_batch: Floats  # sequences
    # layout
    tp: Floats
    pp: Floats
    vpp: Floats
    cp: Floats
    ep: Floats
    dp: Floats
    shard: Floats  # ranks of data (times context) parallelism that share one copy of the sharded state
    zero: Floats
    sp: Floats
    recompute: Floats
    precision: Floats
    schedule: Floats
    offload: Floats
    compression: Floats
    # machine
    matmul_flops: Floats  # best measured 16-bit matmul
    matmul_fp8_flops: Floats
    matmul_fp4_flops: Floats
    matmul_fp32_flops: Floats
    units: Floats  # independent matmul units (SMs, CUs, MXUs) that a matmul has to fill
    memory_bytes: Floats
    memory_bytes_per_s: Floats
    link_bytes_per_s: Floats
    nic_bytes_per_s: Floats
    link_latency_s: Floats
    nic_latency_s: Floats
    domain: Floats  # devices reached at link speed
    host_link_bytes_per_s: Floats  # device to host memory, for offload
    host_memory_bytes_per_s: Floats  # of host memory, a device's share
    dense_power: Floats  # 1 where power, not issue rate, bounds long matmuls (Hopper, CDNA3 and later)
    switch_reduces: Floats  # 1 where the switch of the fast domain can sum (NVLS)
    nccl_family: Floats  # index in nccl_tables.FAMILIES: whose limits of a channel hold

    @property
    def devices(self) -> Floats:
        """The number of devices the layout occupies."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def accumulation(self) -> Floats:
        """The number of micro-batches per step on each data rank."""
        return np.maximum(1.0, np.ceil(self.global_batch / (self.dp * self.micro_batch) - 1e-9))

    @property
    def tokens(self) -> Floats:
        """The number of tokens of one micro-batch on one rank."""
        return self.micro_batch * self.seq / self.cp

    def take(self, index: NDArray[np.intp] | NDArray[np.bool_] | slice) -> Cases:
        """Return the table restricted to some rows; scalars stay scalars."""
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: value[index] for name, value in columns.items() if np.ndim(value) > 0})

    def at_places(self, places: NDArray[np.intp]) -> Cases:
        """Return the table restricted to some indices of its last axis."""
        return Cases(**{f.name: at_places(getattr(self, f.name), places) for f in fields(self)})


def at_places(values: Floats, places: NDArray[np.intp]) -> Floats:
    """Return the values at some indices of the last axis; values that are constant along it stay unchanged."""
    if not np.ndim(values) or values.shape[-1] in (1, places.size):
        return values
    return values.take(places, axis=-1)
