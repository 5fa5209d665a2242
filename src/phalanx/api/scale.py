"""Scaling laws: `phalanx.scale.fit("runs.csv")` and others, printed by `phalanx scale`."""

from __future__ import annotations

from phalanx.api.scale_allocate import SizedRun, allocate
from phalanx.api.scale_fit import FittedLaw, fit
from phalanx.api.scale_predict import ForecastComparison, predict
from phalanx.api.scale_sweep import Sweep, sweep

__all__ = ["FittedLaw", "ForecastComparison", "SizedRun", "Sweep", "allocate", "fit", "predict", "sweep"]
