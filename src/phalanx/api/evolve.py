"""Quality-diversity search: `phalanx.evolve.plans("job.toml")`, printed by `phalanx evolve`."""

from __future__ import annotations

from phalanx.api.evolve_export import ExportedExamples, export
from phalanx.api.evolve_kernels import EvolvedKernels, kernels
from phalanx.api.evolve_plans import EvolvedPlans, plans
from phalanx.api.evolve_schedules import EvolvedSchedules, schedules

__all__ = [
    "EvolvedKernels",
    "EvolvedPlans",
    "EvolvedSchedules",
    "ExportedExamples",
    "export",
    "kernels",
    "plans",
    "schedules",
]
