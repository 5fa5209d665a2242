"""Networks for training: `phalanx.fabric.design(gpus=131072)`, and what `phalanx fabric` prints."""

from __future__ import annotations

from phalanx.api.fabric_collective import CollectiveTimes, collective
from phalanx.api.fabric_design import (
    FabricCatalogue,
    FabricDecisions,
    FabricDesigns,
    FabricPage,
    catalogue,
    decisions,
    design,
    show,
)
from phalanx.api.fabric_traffic import HtsimFiles, TrafficSimulation, export, simulate

__all__ = [
    "CollectiveTimes",
    "FabricCatalogue",
    "FabricDecisions",
    "FabricDesigns",
    "FabricPage",
    "HtsimFiles",
    "TrafficSimulation",
    "catalogue",
    "collective",
    "decisions",
    "design",
    "export",
    "show",
    "simulate",
]
