"""Shared parts of both compiled loops: compilation, random numbers, fair order, and cache keys.

Numba keys compiled code on the date and size of the file with the function, and inlines what that took from other
files: after a change there it would use the old code. It also keys on closure variables, so each loop has a checksum
of all its files as one.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from phalanx.sim.fair_rates import compile_loop, has_numba
from phalanx.sim.packets.engine_state import RANDOM, Ints


def stamp_of(*files: str | None) -> int:
    """Return a checksum of files; files that do not exist count as empty, as numba stores no cache for them either."""
    stamp = 0
    for file in files:
        path = Path(file or "")
        stamp = zlib.crc32(path.read_bytes() if path.is_file() else b"", stamp)
    return stamp


def part(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function that only the loop calls: without an entry from Python, half of the compile time."""
    if not has_numba():
        return compile_loop(function)
    compiled: Callable[..., Any] = import_module("numba").njit(
        nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True
    )(function)
    return compiled


@part
def draw(totals: Ints) -> float:
    """Return a random number in [0, 1): xorshift64."""
    x = totals[RANDOM]
    x ^= x << 13
    x ^= (x >> 7) & 0x1FFFFFFFFFFFFFF
    x ^= x << 17
    totals[RANDOM] = x
    return float(((x >> 11) & 0xFFFFFFFFFFFFF) / 4503599627370496.0)


@part
def shuffled(slot: int) -> int:
    """Return a word of 31 well-mixed bits for a slot, which decides the order in it without favouring any member."""
    x = (slot * 0x1E3779B97F4A7C15) & 0x7FFFFFFFFFFFFFF
    x ^= x >> 29
    x = (x * 0x1CE4E5B9BF58476D) & 0x7FFFFFFFFFFFFFF
    x ^= x >> 32
    return x & 0x7FFFFFFF


@part
def power_of_two_for(number: int) -> int:
    """Return the least power of two that is at least `number`; flipping bits keeps numbers below it."""
    room = 1
    while room < number:
        room *= 2
    return room


@part
def nth(place: int, word: int, room: int) -> int:
    """Return the member at a position in the order of a word of `shuffled`: a rotation, then some bits flipped.

    Of any two members, each is before the other for half of all words. After a rotation alone, the first of two
    neighbours that compete would be before the other in all but 1 of n slots, and take the room in a full queue (80 %
    of it with n 8).
    """
    return ((place + (word >> 15)) & (room - 1)) ^ (word & (room - 1))
