"""Rejection of models that the planner can count but the trainer cannot train yet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from phalanx.errors import Problem, UserError
from phalanx.job.model import ModelShape
from phalanx.plan.trainable import model_problems


def refuse_untrainable(shape: ModelShape) -> None:
    """Raise UserError with everything in this shape that the trainer does not support."""
    problems = list(_shape_problems(shape))
    if problems:
        raise UserError(problems)


def _shape_problems(shape: ModelShape) -> Iterator[Problem]:
    if shape.module:
        yield Problem(
            where=f"model {shape.name}",
            what=f'module = "{shape.module}" is a network of your own, which cannot be built here as our decoder',
            why="the keys of the shape only tell the planner its size",
        )
    yield from model_problems(replace(shape, module=""))
