"""What both compiled loops use: how a part is compiled, random numbers, who is first, and the key of their caches.

Numba keeps compiled code by the date and size of the file that holds the function, and bakes in what that took from
other files: with a constant changed there it would go on with the old one. It also keys on the variables around a
function, so each loop has there a checksum of every file it is made of.
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
    """A checksum of files; 0 for those that are not there, where numba keeps nothing either."""
    stamp = 0
    for file in files:
        path = Path(file or "")
        stamp = zlib.crc32(path.read_bytes() if path.is_file() else b"", stamp)
    return stamp


def part(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that only the loop calls: without the entry from Python, which takes half of the compile time."""
    if not has_numba():
        return compile_loop(function)
    made: Callable[..., Any] = import_module("numba").njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)(
        function
    )
    return made


@part
def draw(totals: Ints) -> float:
    """A random number in [0, 1): xorshift64."""
    x = totals[RANDOM]
    x ^= x << 13
    x ^= (x >> 7) & 0x1FFFFFFFFFFFFFF
    x ^= x << 17
    totals[RANDOM] = x
    return float(((x >> 11) & 0xFFFFFFFFFFFFF) / 4503599627370496.0)


@part
def shuffled(slot: int) -> int:
    """A word of 31 well-mixed bits for a slot: who comes first in it, without a period that favours anyone."""
    x = (slot * 0x1E3779B97F4A7C15) & 0x7FFFFFFFFFFFFFF
    x ^= x >> 29
    x = (x * 0x1CE4E5B9BF58476D) & 0x7FFFFFFFFFFFFFF
    x ^= x >> 32
    return x & 0x7FFFFFFF


@part
def power_of_two_for(number: int) -> int:
    """The power of two that holds so many: numbers below it stay below it when their bits are flipped."""
    room = 1
    while room < number:
        room *= 2
    return room


@part
def nth(place: int, word: int, room: int) -> int:
    """Who is at a place in the order that a word of `shuffled` gives: a rotation, then some bits flipped.

    Of any two, each is before the other in half of all words. After a rotation alone, the first of two neighbours that
    compete would be before the other in all but 1 of n slots, and take the room in a full queue (80 % of it with n 8).
    """
    return ((place + (word >> 15)) & (room - 1)) ^ (word & (room - 1))
