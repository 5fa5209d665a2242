"""The loss scale of fp16: as large as the gradients' exponents allow, found by trying."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Micikevicius et al. 2018, "Mixed precision training", and torch.amp.GradScaler, which takes the same four numbers.
FIRST = 2.0**16
GROWTH = 2.0
BACKOFF = 0.5
PATIENCE = 2000  # finite steps before the scale is tried one size larger
LEAST, MOST = 2.0**-14, 2.0**24  # a power of two stays exact; above 2^24 a mean loss of 1 has no fp16 gradient left


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScale:
    """A value: every rank makes the same next one, because every rank sees the same global gradient norm.

    The loop multiplies the loss by `scale`, divides gradients by it, and skips the update when the norm is not finite.

    >>> scale = LossScale()
    >>> scale.after(finite=False).scale, LossScale.load(scale.state()) == scale
    (32768.0, True)
    >>> LossScale(scale=1024.0, fixed=True).after(finite=False).scale
    1024.0
    """

    scale: float = FIRST
    finite_steps: int = 0  # since the scale last changed
    fixed: bool = False  # as the job file says it: never changed

    def after(self, *, finite: bool) -> LossScale:
        """The scale for the next step."""
        if self.fixed:
            return self
        if not finite:
            return LossScale(scale=max(LEAST, self.scale * BACKOFF))
        if self.finite_steps + 1 < PATIENCE:
            return LossScale(scale=self.scale, finite_steps=self.finite_steps + 1)
        return LossScale(scale=min(MOST, self.scale * GROWTH))

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"scale": self.scale, "finite_steps": self.finite_steps}

    @classmethod
    def of(cls, scale: float | None) -> LossScale:
        """A scale that the job fixes, or one to be found."""
        return cls() if scale is None else cls(scale=scale, fixed=True)

    @classmethod
    def load(cls, state: Mapping[str, float]) -> LossScale:
        """The scale of a checkpoint."""
        return cls(scale=float(state["scale"]), finite_steps=int(state["finite_steps"]))
