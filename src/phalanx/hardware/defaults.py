"""What a cluster is taken to be where nobody said: links, latencies, memory; each with its source.

How often it fails: failures.py.
"""

from __future__ import annotations

import math

from phalanx.hardware.types import Accelerator, Cluster
from phalanx.units import GB

# Seconds per step of a ring, Simple protocol: NCCL 2.30 src/graph/tuning.cc (NVLink 3.4, PCI 5.7, NET 14 µs).
NVLINK_LATENCY_S = 3.4e-6
PCIE_LATENCY_S = 5.7e-6
NIC_LATENCY_S = 14e-6
# One ICI hop is about a microsecond: "How to Scale Your Model" (JAX scaling book, not re-read).
ICI_LATENCY_S = 1e-6
# gloo between two ranks of a busy 2-core cloud VM: the probe with torch 2.13 fitted 0.74 and 0.87 ms a step, 1.6 and
# 2.6 GB/s in two runs (a bare TCP ring: 24 and 26 µs, 3.3 and 2.4 GB/s); the trainer uses gloo.
LOOPBACK_LATENCY_S = 0.8e-3
LOOPBACK_BYTES_PER_S = 2.0 * GB

# Bytes/s, one direction, for devices whose catalogue row has no figure, by the start of the link's name.
LINK_BYTES_PER_S = {
    "NVLink": 300 * GB,  # A100's NVLink3
    "XGMI": 150 * GB,  # MI210's three links, the slowest bridge AMD sells
    "NeuronLink": 192 * GB,  # an assumption: Trainium1 has no public figure, Trainium2 has 640
    "PCIe5": 63 * GB,
    "PCIe4": 31 * GB,
    "PCIe3": 15.75 * GB,
    "loopback": LOOPBACK_BYTES_PER_S,
}
SLOWEST_LINK_BYTES_PER_S = 15.75 * GB  # PCIe 3.0 x16: any server since 2012 has it

# Bytes/s per device, one direction, where the catalogue has no typical NIC.
NIC_BYTES_PER_S = {
    "google": 50e9 / 8,  # data-centre network of v5p: 50 Gb/s per chip (Google Cloud TPU documentation)
    "generic": 10e9 / 8,  # a CPU server on 10 GbE
}
DEFAULT_NIC_BYTES_PER_S = 100e9 / 8 / 8  # one 100 Gb/s port shared by a host of eight cards

# Host memory per device, not re-read: DGX H100 2 TB/8, GB200 tray 960 GB/4, DGX A100 1 TB/8, DGX-1 512 GB/8 and
# Azure ND MI300X v5 1,850 GB/8. Read in the clouds' documentation: trn1 512 GiB/16; TPU v5e 512 GB/8, v6e 720/4,
# TPU7x 960/4.
HOST_MEMORY_BYTES_PER_DEVICE = {
    "volta": 64 * GB,
    "ampere": 128 * GB,
    "hopper": 256 * GB,
    "blackwell": 240 * GB,
    "cdna3": 231 * GB,
    "tpu-v5": 64 * GB,
    "tpu-v6": 180 * GB,
    "tpu-v7": 240 * GB,
    "trainium1": 32 * GB,
}
DEFAULT_HOST_MEMORY_BYTES_PER_DEVICE = 64 * GB

# 856 W per H100 at the wall of a whole server against 700 W TDP, pre-training: MLPerf training v4.0 power results.
SERVER_POWER_OVER_TDP = 856 / 700


def link_latency_s(accelerator: Accelerator) -> float:
    """Latency of one step inside the fast domain, by the kind of link."""
    if accelerator.link.startswith("PCIe"):
        return PCIE_LATENCY_S
    if accelerator.link == "ICI":
        return ICI_LATENCY_S
    return LOOPBACK_LATENCY_S if accelerator.link == "loopback" else NVLINK_LATENCY_S


def link_bytes_per_s(accelerator: Accelerator) -> float:
    """The catalogue's link speed, or the usual one of that kind of link."""
    if accelerator.link_bytes_per_s > 0:
        return accelerator.link_bytes_per_s
    for prefix, speed in LINK_BYTES_PER_S.items():
        if accelerator.link.startswith(prefix):
            return speed
    return SLOWEST_LINK_BYTES_PER_S


def nic_bytes_per_s(accelerator: Accelerator) -> float:
    """The catalogue's NIC speed per device, or what such hosts usually have."""
    return accelerator.nic_bytes_per_s or NIC_BYTES_PER_S.get(accelerator.vendor, DEFAULT_NIC_BYTES_PER_S)


def host_memory_bytes(accelerator: Accelerator, host_devices: int) -> float:
    """Memory of one host's CPUs."""
    if accelerator.family == "cpu":
        return accelerator.memory_bytes * host_devices
    per_device = HOST_MEMORY_BYTES_PER_DEVICE.get(accelerator.family, DEFAULT_HOST_MEMORY_BYTES_PER_DEVICE)
    return per_device * host_devices


def host_devices(accelerator: Accelerator, domain_devices: int) -> int:
    """Devices per host when a fast domain holds `domain_devices`: whole hosts per domain, or whole domains per host."""
    usual = accelerator.host_devices
    if domain_devices == accelerator.domain_devices and usual % domain_devices == 0:
        return usual
    return max(size for size in range(1, min(usual, domain_devices) + 1) if domain_devices % size == 0)


def power_w_per_device(cluster: Cluster) -> float:
    """Watts per device: as given, else TDP with the server around it (a CPU's alone); 0 where neither is known."""
    around = 1.0 if cluster.accelerator.family == "cpu" else SERVER_POWER_OVER_TDP
    power = cluster.power_w_per_device or cluster.accelerator.tdp_w * around
    return power if math.isfinite(power) else 0.0
