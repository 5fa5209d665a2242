"""Bytes, seconds, FLOPs, money: parse user input, format numbers for output."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cache
from math import isqrt

KIB, MIB, GIB = 2**10, 2**20, 2**30
KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12
MINUTE_S, HOUR_S, DAY_S = 60.0, 3600.0, 86400.0

_SI = (("", 1.0), ("k", 1e3), ("M", 1e6), ("B", 1e9), ("T", 1e12), ("Q", 1e15))
_COUNT = re.compile(r"^\s*([+-]?\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([kKmMbBgGtT]?)\s*$")


def parse_count(text: str) -> float:
    """Parse a number with an optional k, M, B or T suffix.

    >>> parse_count("15T")
    15000000000000.0
    """
    match = _COUNT.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not a number such as 512, 8B or 15T")
    scale = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}[match.group(2).lower()]
    return float(match.group(1).replace("_", "")) * scale


@cache
def all_divisors(number: int) -> tuple[int, ...]:
    """Return the divisors in order; above 1e10 only those up to 1e5 and their cofactors.

    >>> all_divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [size for size in range(1, min(isqrt(number), 100_000) + 1) if number % size == 0]
    return tuple(sorted({*small, *(number // size for size in small)}))


def plural(count: float, noun: str) -> str:
    """Return a count with its noun in the right number.

    >>> plural(1, "fault"), plural(0, "rank"), plural(1200, "micro-batch"), plural(2, "copy"), plural(1.5, "day")
    ('1 fault', '0 ranks', '1,200 micro-batches', '2 copies', '1.5 days')
    >>> plural(3, "epoch"), plural(2, "process")
    ('3 epochs', '2 processes')
    """
    if count == 1:
        return f"1 {noun}"
    hisses = noun.endswith(("s", "sh", "x", "ch")) and not noun.endswith("och")  # an epoch takes a plain s
    many = f"{noun}es" if hisses else f"{noun}s"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        many = f"{noun[:-1]}ies"
    return f"{number_text(count, ',.12g')} {many}"  # a number of days may be fractional


def number_text(value: float, form: str = "g") -> str:
    """Format a number; one that exceeds the largest float is described by its number of digits.

    >>> number_text(0.5), number_text(10**400)
    ('0.5', 'a number of 401 digits')
    """
    try:
        return format(value, form)
    except OverflowError:
        return f"a number of {int(math.log10(abs(value))) + 1:,} digits"


def first_few(items: Sequence[object], most: int) -> str:
    """Return a list as text, with the first items and the number of the others.

    >>> first_few([3, 5], 2), first_few("abcde", 2)
    ('3, 5', 'a, b and 3 more')
    """
    others_text = f" and {len(items) - most:,} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + others_text


def format_count(value: float) -> str:
    """Format a number with three significant digits and a suffix.

    >>> format_count(8.03e9), format_count(0)
    ('8.03B', '0')
    """
    if not value:
        return "0"
    size = abs(value)
    for suffix, scale in reversed(_SI):
        if size >= scale and (scale > 1 or size >= 1):
            return f"{_three(value / scale)}{suffix}"
    return _three(value)


def format_bytes(value: float) -> str:
    """Format bytes with decimal prefixes, as memory vendors and published tables do.

    >>> format_bytes(80e9)
    '80.0 GB'
    """
    for suffix, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= scale:
            return f"{_three(value / scale)} {suffix}"
    return f"{value:.0f} B"


def format_energy(joules: float) -> str:
    """Format an energy in kilowatt hours, or in joules if it is small.

    >>> format_energy(7.2e6), format_energy(5400.0), format_energy(3.6e10)
    ('2.00 kWh', '5.40 kJ', '10.0 MWh')
    """
    if abs(joules) >= 3.6e9:
        return f"{format_count(joules / 3.6e9)} MWh"
    if abs(joules) >= 3.6e5:
        return f"{format_count(joules / 3.6e6)} kWh"
    return f"{joules / 1e3:.2f} kJ" if abs(joules) >= 1e3 else f"{joules:.0f} J"


def format_carbon(kilograms: float) -> str:
    """Format grams, kilograms or tonnes of CO2 equivalent.

    >>> format_carbon(0.0123), format_carbon(17.7), format_carbon(4200)
    ('12.3 g CO2e', '17.7 kg CO2e', '4.20 t CO2e')
    """
    for unit, scale in (("t", 1000.0), ("kg", 1.0)):
        if abs(kilograms) >= scale:
            return f"{format_count(kilograms / scale)} {unit} CO2e"
    grams = kilograms * 1000.0
    return f"{format_count(grams)} g CO2e" if abs(grams) >= 1.0 else f"{grams:.2g} g CO2e"


def format_flops(value: float) -> str:
    """Format a rate of arithmetic operations, with the prefixes that vendors use.

    >>> format_flops(989e12), format_flops(96e9)
    ('989 TFLOP/s', '96.0 GFLOP/s')
    """
    for suffix, scale in (("PFLOP/s", 1e15), ("TFLOP/s", 1e12), ("GFLOP/s", 1e9)):
        if abs(value) >= scale:
            return f"{_three(value / scale)} {suffix}"
    return f"{_three(value / 1e6)} MFLOP/s"


def format_seconds(value: float) -> str:
    """Format a duration in the largest unit that keeps it readable.

    >>> format_seconds(0.0042), format_seconds(5400), format_seconds(200000), format_seconds(7e-9), format_seconds(0)
    ('4.20 ms', '1.50 h', '2.31 days', '7.00 ns', '0 s')
    """
    size = abs(value)
    for suffix, scale, least in (
        ("years", 365.25 * DAY_S, 2 * 365.25 * DAY_S),
        ("days", DAY_S, 2 * DAY_S),
        ("h", HOUR_S, HOUR_S),
        ("min", MINUTE_S, 2 * MINUTE_S),
        ("s", 1.0, 1.0),
        ("ms", 1e-3, 1e-3),
        ("µs", 1e-6, 1e-6),
    ):
        if size >= least:
            return f"{_three(value / scale)} {suffix}"
    return f"{_three(value / 1e-9)} ns" if value else "0 s"


def format_money(usd: float) -> str:
    """Format US dollars; large sums are shortened.

    >>> format_money(61_234_000), format_money(12.5)
    ('$61.2M', '$12.50')
    """
    if abs(usd) >= 1e4:
        return f"${format_count(usd)}"
    return f"${usd:,.2f}" if abs(usd) < 1000 else f"${usd:,.0f}"


def _three(value: float) -> str:
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    digits = 0 if size >= 100 else 1 if size >= 10 else 2
    return f"{value:.{digits}f}"
