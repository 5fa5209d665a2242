"""What a layout asks of a model, checked before a process is started: `check_layout` lists everything that is wrong."""

from __future__ import annotations

from phalanx.errors import Problem, UserError
from phalanx.job.model import ModelShape
from phalanx.plan.trainable import Demand, layout_problems
from phalanx.train.settings import Settings


def check_layout(shape: ModelShape, settings: Settings) -> list[Problem]:
    """Every reason why the trainer cannot run this layout of this model; none when it can."""
    demand = Demand(
        layout=settings.layout,
        sequence=settings.sequence,
        compute=settings.compute,
        context_kind=settings.context_kind,
        reproducible=settings.reproducible,
    )
    return layout_problems(shape, demand)


def refuse_layout(shape: ModelShape, settings: Settings) -> None:
    """Raise UserError with everything `check_layout` finds."""
    if problems := check_layout(shape, settings):
        raise UserError(problems)
