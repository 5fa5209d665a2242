"""Telemetry and heartbeats in Megatron Core's settings."""

from __future__ import annotations

from phalanx.rules.foreign.conversion import Conversion

# nvidia-resiliency-ext, fault_tolerance/config.py: workload_check_interval, the interval between checks of
# heartbeats.
NVRX_HEARTBEAT_S = 5.0


def read_telemetry(config: Conversion) -> None:
    """Read the series that flags add to the telemetry, and the heartbeat of `--enable-ft-package`."""
    all_series = ["steps"]
    for name, series in (
        ("log_throughput", "utilization"),
        ("log_memory_to_tensorboard", "memory"),
        ("log_energy", "energy"),
    ):
        if config.read_flag(name):
            all_series.append(series)
            config.mark_used(name, by="practice: telemetry")
    if config.has_leaf("log_memory_interval") and "memory" not in all_series:
        all_series.append("memory")
        config.mark_used("log_memory_interval", by="practice: telemetry")
    if len(all_series) > 1:
        config.practice["telemetry"] = tuple(all_series)
    if config.read_flag("enable_ft_package"):
        config.practice["heartbeat_s"] = NVRX_HEARTBEAT_S
        config.mark_used("enable_ft_package", by="practice: heartbeat_s")
