"""Message sizes as text: parsing and formatting in binary units, as nccl-tests and NCCL count."""

from __future__ import annotations

import math
import re

from phalanx.errors import mistake

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B)?\s*$", re.IGNORECASE)
_POWER = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
MOST_BYTES = 2.0**50  # a pebibyte: above any message
FORMS = "write it as 64MiB, 1GiB, 65536, or a range as 1MiB..16GiB"


def parse_size(text: str, where: str) -> float:
    """Return the bytes of `64MiB`, `64M` (binary, as nccl-tests writes it), `64MB` (decimal) or `65536`.

    >>> parse_size("64M", "--bytes") == parse_size("64 MiB", "--bytes") == 2.0**26
    True
    """
    match = _SIZE.match(text)
    unit = 1000.0 if match and (match[3] or "").upper() == "B" else 1024.0
    nbytes = float(match[1]) * unit ** _POWER[match[2].upper()] if match else 0.0
    if not 1 <= nbytes <= MOST_BYTES:
        problem = (
            f"{text.strip()[:40]!r} is no size of a message" if match is None else f"a message of {nbytes:g} bytes"
        )
        raise mistake(where, problem, why="1 byte to 1 PiB", fix=FORMS)
    return nbytes


def parse_sizes(text: str, where: str) -> tuple[float, ...]:
    """Return one size, or for a range such as `1MiB..16GiB` its ends and the powers of two between them.

    >>> [size / 2**20 for size in parse_sizes("1MiB..6MiB", "--bytes")]
    [1.0, 2.0, 4.0, 6.0]
    """
    first, dots, last = text.partition("..")
    low = parse_size(first, where)
    if not dots:
        return (low,)
    high = parse_size(last, where)
    if high <= low:
        raise mistake(where, f"{text.strip()[:60]} ends before it begins", fix=FORMS)
    between = range(math.floor(math.log2(low)) + 1, math.ceil(math.log2(high)))
    return (low, *(2.0**power for power in between), high)


def format_size(nbytes: float) -> str:
    """Format bytes with three digits in binary units.

    >>> format_size(2**26), format_size(1536), format_size(100)
    ('64 MiB', '1.5 KiB', '100 B')
    """
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 2**power:
            return f"{nbytes / 2**power:.3g} {unit}" if nbytes < 1000 * 2**power else f"{nbytes / 2**power:,.0f} {unit}"
    return f"{nbytes:g} B"
