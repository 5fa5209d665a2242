"""Telemetry of a rank during training: step timelines, device sensors, latency to other ranks, gradient noise."""
