"""Put a Cluster together from the few numbers that are known and documented defaults for the rest."""

from __future__ import annotations

from phalanx.hardware import defaults
from phalanx.hardware.failures import failures_per_host_day as usual_failures_per_host_day
from phalanx.hardware.prices import usd_per_device_hour
from phalanx.hardware.types import Accelerator, Cluster


def assemble(
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
    """A Cluster; 0 (None for failures, which may truly be 0) stands for "not said"."""
    per_host = host_devices or defaults.host_devices(accelerator, domain_devices)
    if failures_per_host_day is None:
        failures_per_host_day = usual_failures_per_host_day(accelerator, per_host)
    return Cluster(
        name=name,
        accelerator=accelerator,
        domain_devices=domain_devices,
        domains=domains,
        host_devices=per_host,
        link_bytes_per_s=link_bytes_per_s or defaults.link_bytes_per_s(accelerator),
        nic_bytes_per_s=nic_bytes_per_s or defaults.nic_bytes_per_s(accelerator),
        link_latency_s=link_latency_s or defaults.link_latency_s(accelerator),
        nic_latency_s=nic_latency_s or defaults.NIC_LATENCY_S,
        host_memory_bytes=host_memory_bytes or defaults.host_memory_bytes(accelerator, per_host),
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
