"""The order in which a pipeline stage works: forward and backward passes of micro-batches and model chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Task:
    """A pass of one micro-batch through one chunk of a stage."""

    kind: Literal["F", "B"]
    micro: int
    chunk: int = 0


def order(schedule: str, stage: int, *, stages: int, chunks: int, micros: int) -> list[Task]:
    """What a stage does, first to last. Zero-bubble has the order of 1F1B; weight gradients fill its gaps.

    >>> [f"{task.kind}{task.micro}" for task in order("1f1b", 1, stages=3, chunks=1, micros=4)]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'F3', 'B2', 'B3']
    """
    forward = _units("F", stages=stages, chunks=chunks, micros=micros)
    backward = _units("B", stages=stages, chunks=chunks, micros=micros)
    if schedule == "gpipe":
        return forward + backward
    return _one_forward_one_backward(forward, backward, _warm_up(stage, stages, chunks, len(forward)))


def _units(kind: Literal["F", "B"], *, stages: int, chunks: int, micros: int) -> list[Task]:
    """Micro-batches in groups of the pipeline's depth, each group through one chunk after the other."""
    made = []
    for first in range(0, micros, stages):
        group = range(first, min(first + stages, micros))
        for chunk in range(chunks) if kind == "F" else reversed(range(chunks)):
            made += [Task(kind, micro, chunk) for micro in group]
    return made


def _warm_up(stage: int, stages: int, chunks: int, total: int) -> int:
    """Forward passes before the first backward (Narayanan et al., arXiv:2104.04473, section 2.2)."""
    behind = stages - stage - 1
    return min(total, behind if chunks == 1 else 2 * behind + (chunks - 1) * stages)


def _one_forward_one_backward(forward: list[Task], backward: list[Task], warm: int) -> list[Task]:
    made = forward[:warm]
    for one, other in zip(forward[warm:], backward, strict=False):
        made += [one, other]
    return made + backward[len(forward) - warm :]
