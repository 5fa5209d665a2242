"""Build the columns of the cost model from a model, a cluster and layouts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from phalanx.hardware.catalog import matmul_flops
from phalanx.hardware.types import Cluster
from phalanx.job.model import ModelShape
from phalanx.network.nccl_cluster import nccl_family
from phalanx.network.nccl_tables import FAMILIES
from phalanx.plan.cases import COMPRESSION, OFFLOAD, PRECISION, RECOMPUTE, SCHEDULES, Cases, Floats
from phalanx.plan.layout import Layout
from phalanx.plan.request import PlanRequest

PRECISION_INDEX = {name: index for index, name in enumerate(PRECISION)}
# Streaming multiprocessors, compute units or matrix units per device, from the vendors' datasheets, by name prefix.
UNITS = {
    "V100": 80, "A100": 108, "A800": 108, "H100": 132, "H800": 132, "H200": 132, "GH200": 132, "H20": 78,
    "B200": 148, "GB200": 148, "B300": 148, "GB300": 148, "MI250": 208, "MI300": 304, "MI325": 304, "MI350": 256,
    "MI355": 256, "L40": 142, "L4": 58, "A10": 72, "A40": 84, "T4": 40, "P100": 56,
    "TPU": 8, "CPU": 1,
}  # fmt: skip
UNITS_DEFAULT = 128
# Server GPUs whose matrix units outgrew their power budget: published bf16 matmuls reach 51 to 80 % of peak there,
# 87 % on Ampere (catalog.MATMUL_FRACTION), and fused attention lags further behind.
DENSE_POWER = ("hopper", "blackwell", "cdna3", "cdna4")
SWITCH_REDUCES = ("hopper", "blackwell")  # NVLink SHARP came with NVSwitch 3
# Device to host memory, one direction: PCIe 4.0/5.0 x16 reaches about 25 GB/s with pinned buffers.
HOST_LINK_BYTES_PER_S = 25e9
# Host memory, read and written together: measured on 16 cores with one H200 while they updated weights (torch's AdamW
# alone 122 GB/s, with gradients and weights in transfer 115 to 128: benchmarks/2026-11-18-offload.md) ...
HOST_MEMORY_OF_ONE_BYTES_PER_S = 120e9
# ... and of a whole host, shared by its devices: two thirds of two sockets with eight channels of DDR5-4800, which is
# an assumption.
HOST_MEMORY_BYTES_PER_S = 400e9


def build_cases(request: PlanRequest, columns: Mapping[str, Floats], *, global_sequences: int = 0) -> Cases:
    """Return a table of cases with one row per entry of the layout columns."""
    batch = {"seq": request.sequence, "global_batch": global_sequences or request.global_sequences}
    scalar_values = {
        **model_columns(request.model),
        **machine_columns(request.cluster),
        **batch,
        "flash": request.fused_attention,
    }
    scalars = {name: np.asarray(float(value)) for name, value in scalar_values.items()}
    precision = np.asarray(float(PRECISION_INDEX[request.precision]))
    return Cases(**{**scalars, "precision": precision, **columns})


def layout_columns(layouts: list[Layout]) -> dict[str, Floats]:
    """Return the layout columns of a list of layouts."""

    def column(values: list[float]) -> Floats:
        return np.asarray(values, dtype=np.float64)

    return {
        "micro_batch": column([layout.micro_batch for layout in layouts]),
        "tp": column([layout.tensor for layout in layouts]),
        "pp": column([layout.pipeline for layout in layouts]),
        "vpp": column([layout.virtual_pipeline for layout in layouts]),
        "cp": column([layout.context for layout in layouts]),
        "ep": column([layout.expert for layout in layouts]),
        "dp": column([layout.data for layout in layouts]),
        "shard": column([layout.shard for layout in layouts]),
        "zero": column([layout.zero for layout in layouts]),
        "sp": column([layout.sequence_parallel for layout in layouts]),
        "recompute": column([RECOMPUTE.index(layout.recompute) for layout in layouts]),
        "schedule": column([SCHEDULES.index(layout.schedule) for layout in layouts]),
        "offload": column([OFFLOAD.index(layout.offload) for layout in layouts]),
        "compression": column([COMPRESSION.index(layout.compression) for layout in layouts]),
    }


def model_columns(m: ModelShape) -> dict[str, float]:
    """Return the model's columns, as scalars."""
    return {
        "layers": m.layers,
        "hidden": m.hidden,
        "heads": m.heads,
        "kv_heads": m.kv_heads,
        "qk_dim": m.qk_nope_dim + m.qk_rope_dim if m.is_mla else m.head_dim,
        "v_dim": m.v_head_dim if m.is_mla else m.head_dim,
        "q_rank": m.q_lora_rank,
        "kv_rank": m.kv_lora_rank,
        "rope_dim": m.qk_rope_dim,
        "ffn": m.ffn,
        "gated": m.gated,
        "vocab": m.vocab,
        "tied": m.tied,
        "moe_layers": m.layers - m.dense_layers if m.is_moe else 0,
        "experts": m.experts,
        "topk": m.experts_per_token,
        "expert_ffn": m.expert_ffn,
        "shared_ffn": m.shared_experts * m.expert_ffn,
    }


def machine_columns(cluster: Cluster) -> dict[str, float]:
    """Return the cluster's columns, as scalars; a probe's matmul rate replaces the catalogue's."""
    device = cluster.accelerator
    rates = {name: matmul_flops(device, name) for name in ("bf16", "fp8", "fp4", "fp32")}
    if cluster.matmul_flops > 0:
        # A probe measures bf16 on GPUs and fp32 on CPUs; a CPU without matrix units computes both at the same rate.
        names = ("bf16", "fp32") if device.family == "cpu" else ("bf16",)
        rates |= dict.fromkeys(names, cluster.matmul_flops)
    return {
        "matmul_flops": rates["bf16"],
        "matmul_fp8_flops": rates["fp8"],  # 0 without fp8 units
        "matmul_fp4_flops": rates["fp4"],
        "matmul_fp32_flops": rates["fp32"] or rates["bf16"],
        "units": matmul_units(device.name, device.family),
        "memory_bytes": device.memory_bytes,
        "memory_bytes_per_s": device.memory_bytes_per_s,
        "link_bytes_per_s": cluster.link_bytes_per_s,
        "nic_bytes_per_s": cluster.nic_bytes_per_s,
        "link_latency_s": cluster.link_latency_s,
        "nic_latency_s": cluster.nic_latency_s,
        "domain": cluster.domain_devices,
        "host_link_bytes_per_s": HOST_LINK_BYTES_PER_S,
        "host_memory_bytes_per_s": min(
            HOST_MEMORY_OF_ONE_BYTES_PER_S, HOST_MEMORY_BYTES_PER_S / min(cluster.host_devices, cluster.devices)
        ),
        "dense_power": float(device.family in DENSE_POWER),
        "switch_reduces": float(device.family in SWITCH_REDUCES and device.link.startswith("NVLink")),
        "nccl_family": float(FAMILIES.index(nccl_family(device.family))),
    }


def matmul_units(name: str, family: str) -> int:
    """Return the number of matmul units of a device, by the longest matching name prefix.

    >>> matmul_units("H100-80GB-SXM", "hopper"), matmul_units("L40S", "ada"), matmul_units("Intel Xeon", "cpu")
    (132, 142, 1)
    """
    if family == "cpu":
        return 1
    matching_prefixes = [prefix for prefix in UNITS if name.startswith(prefix)]
    return UNITS[max(matching_prefixes, key=len)] if matching_prefixes else UNITS_DEFAULT
