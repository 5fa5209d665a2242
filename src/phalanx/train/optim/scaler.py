"""The loss scale of fp16: as large as the gradients' exponents allow, adjusted by trial."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Micikevicius et al. 2018, "Mixed precision training", and torch.amp.GradScaler, which takes the same four numbers.
FIRST = 2.0**16
GROWTH = 2.0
BACKOFF = 0.5
PATIENCE = 2000  # finite steps before the scale is doubled
# A power of two stays exact; above 2^24 the gradient of a mean loss of 1 exceeds fp16.
LEAST, MOST = 2.0**-14, 2.0**24


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScale:
    """An immutable loss scale; every rank computes the same next one from the same global gradient norm.

    The loop multiplies the loss by `scale`, divides gradients by it, and skips the update if the norm is not finite.

    >>> scale = LossScale()
    >>> scale.after(finite=False).scale, LossScale.load(scale.state()) == scale
    (32768.0, True)
    >>> LossScale(scale=1024.0, fixed=True).after(finite=False).scale
    1024.0
    """

    scale: float = FIRST
    finite_steps: int = 0  # since the scale last changed
    fixed: bool = False  # set by the job file, and never changed

    def after(self, *, finite: bool) -> LossScale:
        """Return the scale for the next step."""
        if self.fixed:
            return self
        if not finite:
            return LossScale(scale=max(LEAST, self.scale * BACKOFF))
        if self.finite_steps + 1 < PATIENCE:
            return LossScale(scale=self.scale, finite_steps=self.finite_steps + 1)
        return LossScale(scale=min(MOST, self.scale * GROWTH))

    def state(self) -> dict[str, float]:
        """Return the values for a checkpoint."""
        return {"scale": self.scale, "finite_steps": self.finite_steps}

    @classmethod
    def of(cls, scale: float | None) -> LossScale:
        """Return a scale that the job fixes, or an adaptive one if `scale` is None."""
        return cls() if scale is None else cls(scale=scale, fixed=True)

    @classmethod
    def load(cls, state: Mapping[str, float]) -> LossScale:
        """Return the scale of a checkpoint."""
        return cls(scale=float(state["scale"]), finite_steps=int(state["finite_steps"]))
