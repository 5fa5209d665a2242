"""The error of a checkpoint that is not what was written."""

from __future__ import annotations

from phalanx.errors import Problem, SystemFailure


class Damaged(SystemFailure):
    """A file of a checkpoint is missing, cut, changed or forged; an earlier checkpoint may be whole."""


def damaged(where: object, what: str, *, why: str = "", fix: str = "restore the checkpoint before it") -> Damaged:
    """A Damaged with one problem."""
    return Damaged(Problem(where=str(where), what=what, why=why, fix=fix))
