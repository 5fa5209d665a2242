"""Default values of a cluster's links, latencies, memory, power and price, each with its source.

Default failure rates are in failures.py.
"""

from __future__ import annotations

import csv
import functools
import io
import math
import statistics

from phalanx.hardware.catalog import data_text
from phalanx.hardware.failures import failures_per_host_day as usual_failures_per_host_day
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

# Bytes/s, one direction, for devices whose catalogue row has no value, by the start of the link's name.
LINK_BYTES_PER_S = {
    "NVLink": 300 * GB,  # A100's NVLink3
    "XGMI": 150 * GB,  # MI210's three links, the slowest bridge AMD sells
    "NeuronLink": 192 * GB,  # an assumption: Trainium1 has no public figure, Trainium2 has 640
    "PCIe5": 63 * GB,
    "PCIe4": 31 * GB,
    "PCIe3": 15.75 * GB,
    "loopback": LOOPBACK_BYTES_PER_S,
}
SLOWEST_LINK_BYTES_PER_S = 15.75 * GB  # PCIe 3.0 x16, which every server since 2012 has

# Bytes/s per device, one direction, where the catalogue has no typical NIC.
NIC_BYTES_PER_S = {
    # Data-centre network of v5p: 50 Gb/s per chip (Google Cloud TPU documentation).
    "google": 50e9 / 8,
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

# A whole H100 server takes 856 W per GPU at the wall, against 700 W TDP, in pre-training: MLPerf training v4.0 power
# results.
SERVER_POWER_OVER_TDP = 856 / 700


def usual_link_latency_s(accelerator: Accelerator) -> float:
    """Return the latency of one step inside the fast domain, by the kind of link."""
    if accelerator.link.startswith("PCIe"):
        return PCIE_LATENCY_S
    if accelerator.link == "ICI":
        return ICI_LATENCY_S
    return LOOPBACK_LATENCY_S if accelerator.link == "loopback" else NVLINK_LATENCY_S


def usual_link_bytes_per_s(accelerator: Accelerator) -> float:
    """Return the catalogue's link speed, or the usual one of that kind of link."""
    if accelerator.link_bytes_per_s > 0:
        return accelerator.link_bytes_per_s
    for prefix, speed in LINK_BYTES_PER_S.items():
        if accelerator.link.startswith(prefix):
            return speed
    return SLOWEST_LINK_BYTES_PER_S


def usual_nic_bytes_per_s(accelerator: Accelerator) -> float:
    """Return the catalogue's NIC speed per device, or the usual one of such hosts."""
    return accelerator.nic_bytes_per_s or NIC_BYTES_PER_S.get(accelerator.vendor, DEFAULT_NIC_BYTES_PER_S)


def usual_host_memory_bytes(accelerator: Accelerator, host_devices: int) -> float:
    """Return the memory of one host's CPUs."""
    if accelerator.family == "cpu":
        return accelerator.memory_bytes * host_devices
    per_device = HOST_MEMORY_BYTES_PER_DEVICE.get(accelerator.family, DEFAULT_HOST_MEMORY_BYTES_PER_DEVICE)
    return per_device * host_devices


def usual_host_devices(accelerator: Accelerator, domain_devices: int) -> int:
    """Return the devices per host for a domain size: whole hosts per domain, or whole domains per host."""
    usual = accelerator.host_devices
    if domain_devices == accelerator.domain_devices and usual % domain_devices == 0:
        return usual
    return max(size for size in range(1, min(usual, domain_devices) + 1) if domain_devices % size == 0)


def usual_power_w_per_device(cluster: Cluster) -> float:
    """Return watts per device: the given value, else TDP scaled to the whole server; 0 if neither is known.

    A CPU's TDP is used without the rest of the server.
    """
    server_factor = 1.0 if cluster.accelerator.family == "cpu" else SERVER_POWER_OVER_TDP
    power = cluster.power_w_per_device or cluster.accelerator.tdp_w * server_factor
    return power if math.isfinite(power) else 0.0


# Rental prices per accelerator-hour, from the shipped table of cloud prices.


def usd_per_device_hour(price_item: str) -> tuple[float, float, float] | None:
    """Return the lowest, middle and highest on-demand price of an item; None if it is not in the table.

    `A|B` pools two items.

    >>> usd_per_device_hour("tpu-v6e-8")
    (2.7, 2.7, 2.7)
    """
    offers = [offer for item in price_item.split("|") for offer in _cloud_offers().get(item, ())]
    if not offers:
        return None
    typical = [usual for _, usual in offers]
    return min(lowest for lowest, _ in offers), statistics.median(typical), max(typical)


@functools.cache
def _cloud_offers() -> dict[str, list[tuple[float, float]]]:
    """Return each provider's cheapest and median on-demand price by item, without spot offers, which can be revoked."""
    offers: dict[str, list[tuple[float, float]]] = {}
    for row in csv.DictReader(io.StringIO(data_text("price_power.csv"))):
        if row["kind"] == "price_usd_per_accel_hour":
            pair = float(row["value_min_or_mean"]), float(row["value_median_or_pue"])
            offers.setdefault(row["item"], []).append(pair)
    return offers


# Assemble a Cluster from the values that are known and documented defaults for the rest.


def assemble_cluster(
    *,
    name: str,
    accelerator: Accelerator,
    domain_devices: int,
    domains: int,
    source: str,
    host_devices: int = 0,
    link_bytes_per_s: float = 0.0,
    nic_bytes_per_s: float = 0.0,
    link_latency_s: float = 0.0,
    nic_latency_s: float = 0.0,
    host_memory_bytes: float = 0.0,
    failures_per_host_day: float | None = None,
    power_w_per_device: float = 0.0,
    pue: float = 0.0,
    grid_gco2_per_kwh: float = 0.0,
    disk_bytes_per_s: float = 0.0,
    matmul_flops: float = 0.0,
    launch_s: float = 0.0,
) -> Cluster:
    """Return a Cluster with defaults for what is not given: 0, or None for failures, which may really be 0."""
    per_host = host_devices or usual_host_devices(accelerator, domain_devices)
    if failures_per_host_day is None:
        failures_per_host_day = usual_failures_per_host_day(accelerator, per_host)
    return Cluster(
        name=name,
        accelerator=accelerator,
        domain_devices=domain_devices,
        domains=domains,
        host_devices=per_host,
        link_bytes_per_s=link_bytes_per_s or usual_link_bytes_per_s(accelerator),
        nic_bytes_per_s=nic_bytes_per_s or usual_nic_bytes_per_s(accelerator),
        link_latency_s=link_latency_s or usual_link_latency_s(accelerator),
        nic_latency_s=nic_latency_s or NIC_LATENCY_S,
        host_memory_bytes=host_memory_bytes or usual_host_memory_bytes(accelerator, per_host),
        failures_per_host_day=failures_per_host_day,
        price_usd_per_device_hour=usd_per_device_hour(accelerator.price_item),
        power_w_per_device=power_w_per_device,
        pue=pue,
        grid_gco2_per_kwh=grid_gco2_per_kwh,
        disk_bytes_per_s=disk_bytes_per_s,
        matmul_flops=matmul_flops,
        launch_s=launch_s,
        source=source,
    )
