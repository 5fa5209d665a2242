"""Type checks of arguments from Python, which the command line has parsed already."""

from __future__ import annotations

# Numpy's scalars are registered as Integral and Real, but are not int or float.
from numbers import Integral, Real

from phalanx.errors import UserError, mistake


def require_whole(option: str, value: object) -> None:
    """Raise UserError unless the value is an integer.

    >>> require_whole("--vocab", 512)
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise _wrong_type(option, value, "a whole number")


def require_number(option: str, value: object) -> None:
    """Raise UserError unless the value is a number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _wrong_type(option, value, "a number")


def require_text(option: str, value: object) -> None:
    """Raise UserError unless the value is a text."""
    if not isinstance(value, str):
        raise _wrong_type(option, value, "a text")


def _wrong_type(option: str, value: object, noun: str) -> UserError:
    return mistake(option, f"{str(value)[:60]!r} is of type {type(value).__name__}, not {noun}")
