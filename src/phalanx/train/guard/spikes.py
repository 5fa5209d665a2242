"""Detects spikes: steps whose gradient norm is many times the recent median; every rank skips such a step.

PaLM's loss spiked about 20 times, and skipping 200 to 500 batches around each spike helped (Chowdhery et al. 2022,
section 5.1). The decision depends only on norms that all ranks have agreed on, so it needs no message.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

WINDOW = 128  # recent norms in the median
FIRST = 16  # norms needed for a decision: they fall fast at the start of a run


class SpikeDetector:
    """Keeps the gradient norms of recent steps; `factor` 0 detects nothing."""

    def __init__(self, factor: float, *, window: int = WINDOW) -> None:
        self._factor = factor
        self._norms: deque[float] = deque(maxlen=window)

    def is_spike(self, grad_norm: float) -> bool:
        """Return True if the step with this norm is to be skipped; call it once per step.

        The norm of a spike is not kept, since it would raise the median. A norm that is not finite is not a spike:
        that step is skipped anyway.
        """
        if not self._factor or not math.isfinite(grad_norm):
            return False
        if len(self._norms) >= FIRST and grad_norm > self._factor * median(self._norms) > 0:
            return True
        self._norms.append(grad_norm)
        return False

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: a resumed run must decide like an uninterrupted one."""
        return {"norms": list(self._norms)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._norms.clear()
        self._norms.extend(float(norm) for norm in state["norms"])
