"""Networks for training: `phalanx.fabric.design(gpus=131072)` and others, printed by `phalanx fabric`.

>>> import phalanx
>>> phalanx.fabric.show("clos2:64x400G/2p/16").fabric.planes
2
"""

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
from phalanx.api.fabric_inputs import HtsimFiles, export
from phalanx.api.fabric_traffic import TrafficSimulation, simulate

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


def __dir__() -> list[str]:
    return sorted([*__all__, "__all__", "__doc__", "__file__"])
