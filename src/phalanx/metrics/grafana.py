"""The Grafana dashboard that ships with the package; a test holds every query in it against `names.METRICS`."""

from __future__ import annotations

from importlib import resources


def dashboard() -> str:
    """Its JSON, as Grafana imports it (Dashboards, New, Import)."""
    return resources.files("phalanx.metrics").joinpath("grafana.json").read_text(encoding="utf-8")
