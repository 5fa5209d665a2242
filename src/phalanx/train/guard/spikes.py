"""Spikes: a step whose gradient is many times as large as lately is skipped, by every rank alike.

PaLM's loss rose in about 20 places, and leaving out 200 to 500 batches around each was what helped (Chowdhery et al.
2022, section 5.1). The verdict depends only on norms that all ranks have agreed on, so it needs no message.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

WINDOW = 128  # norms that are looked back on
FIRST = 16  # norms before the first verdict: they fall fast at the start of a run


class SpikeDetector:
    """Remembers the gradient norms of the steps that were taken."""

    def __init__(self, factor: float, *, window: int = WINDOW) -> None:
        self._factor = factor
        self._norms: deque[float] = deque(maxlen=window)

    def is_spike(self, grad_norm: float) -> bool:
        """Whether the step with this norm is to be skipped; call it once for every step.

        A spike is not remembered: it would make the next one look usual. One that is not finite is none: it is skipped
        anyway.
        """
        if not self._factor or not math.isfinite(grad_norm):
            return False
        if len(self._norms) >= FIRST and grad_norm > self._factor * median(self._norms) > 0:
            return True
        self._norms.append(grad_norm)
        return False

    def state(self) -> dict[str, Any]:
        """For a checkpoint: a run that goes on must judge as the one that was not interrupted."""
        return {"norms": list(self._norms)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` gave."""
        self._norms.clear()
        self._norms.extend(float(norm) for norm in state["norms"])
