"""What runs of Megatron Core report, and how their ranks show that they live."""

from __future__ import annotations

from phalanx.rules.foreign.conversion import Conversion

# nvidia-resiliency-ext, fault_tolerance/config.py: workload_check_interval, how often it looks for heartbeats.
NVRX_HEARTBEAT_S = 5.0


def read_telemetry(config: Conversion) -> None:
    """Series that a flag adds, and the heartbeat of `--enable-ft-package`."""
    written = ["steps"]
    for name, series in (
        ("log_throughput", "utilization"),
        ("log_memory_to_tensorboard", "memory"),
        ("log_energy", "energy"),
    ):
        if config.read_flag(name):
            written.append(series)
            config.mark_used(name, by="practice: telemetry")
    if config.has_leaf("log_memory_interval") and "memory" not in written:
        written.append("memory")
        config.mark_used("log_memory_interval", by="practice: telemetry")
    if len(written) > 1:
        config.practice["telemetry"] = tuple(written)
    if config.read_flag("enable_ft_package"):
        config.practice["heartbeat_s"] = NVRX_HEARTBEAT_S
        config.mark_used("enable_ft_package", by="practice: heartbeat_s")
