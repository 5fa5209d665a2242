"""A law without a fit: `from made_law import made_law, write_law`, Chinchilla's surface with the ranges it is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from phalanx.io.codec import json_text
from phalanx.scale.fit_result import DataNote, Diagnostics, FitEstimate, ScalingFit
from phalanx.scale.laws import FORMULAS

VALUES = {"E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.34, "beta": 0.28}


def made_law(
    values: dict[str, float] | None = None,
    *,
    method: str = "vpnls",
    flops: tuple[float, float] = (1e18, 1e20),
    noise: float = 0.002,
    **more: Any,
) -> ScalingFit:
    """The law with two draws, of runs of these budgets."""
    found = values or VALUES
    return ScalingFit(
        method=method,
        formula=FORMULAS.get(method, ""),
        parameters={name: FitEstimate(value=value) for name, value in found.items()},
        derived={},
        data=DataNote(
            source="made",
            sha256="0" * 64,
            rows=15,
            params_counted="total",
            flops_counted="6nd",
            params_range=(2e7, 4e9),
            tokens_range=(4e8, 7e10),
            flops_range=flops,
            loss_range=(2.3, 3.5),
        ),
        diagnostics=Diagnostics(objective=0.0, residual_sd=noise),
        draws=(tuple(found.values()), tuple(found.values())),
        **more,
    )


def write_law(path: Path, law: ScalingFit) -> Path:
    """As `phalanx scale fit --out` does."""
    path.write_text(json_text(law))
    return path
