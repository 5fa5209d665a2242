"""Bytes that values take on a slow link, by codec: what `peers.codecs` sends and what the planner prices.

    fp64, fp32, bf16   every value as it is, 8, 4 or 2 bytes
    int8               blocks of 256 values with one fp32 scale, 1 byte a value
    int4               blocks of 128 values with one fp32 scale, half a byte a value
    topk-2bit          chunks of 4,096 values: one fp32 scale, the largest share of the values, each as its place in the
                       chunk (7 bits at 3 %, Elias-Fano) and a 2-bit value (arXiv:2508.15706)

A vector is cut for sending only at multiples of `CUT_VALUES`, which every block divides: the pieces of a vector take
exactly the bytes of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence

CODECS = ("fp32", "bf16", "int8", "int4", "topk-2bit")  # what a job may name; fp64 is for float64 models and for tests
PLAIN_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2}
INT8_BLOCK, INT4_BLOCK, TOP_CHUNK = 256, 128, 4096
SCALE_BYTES = 4
VALUE_BITS = 2
CUT_VALUES = TOP_CHUNK
TOP_SHARE = 0.03
FEEDBACK_CODECS = frozenset({"int4", "topk-2bit"})  # what they lose must be carried to the next round
# Every member gets what every other sent, and averages it itself. The mean of n sparse updates has up to n times as
# many values: choosing the largest of them once more would hold most of them back for later rounds.
GATHERED_CODECS = frozenset({"topk-2bit"})


def encoded_bytes(codec: str, values: int, top_share: float = TOP_SHARE) -> int:
    """Bytes of a vector of so many values.

    >>> [encoded_bytes(codec, 4096) for codec in ("fp32", "bf16", "int8", "int4", "topk-2bit")]
    [16384, 8192, 4160, 2176, 144]
    """
    if values < 0:
        raise ValueError(f"{values} values")
    if codec in PLAIN_BYTES:
        return PLAIN_BYTES[codec] * values
    if codec == "int8":
        return values + SCALE_BYTES * -(-values // INT8_BLOCK)
    if codec == "int4":
        return -(-values // 2) + SCALE_BYTES * -(-values // INT4_BLOCK)
    if codec == "topk-2bit":
        chunks, rest = divmod(values, TOP_CHUNK)
        return chunks * _top_bytes(TOP_CHUNK, top_share) + (_top_bytes(rest, top_share) if rest else 0)
    raise ValueError(f"{codec!r} is not a codec; there are fp64, {', '.join(CODECS)}")


def top_values(chunk_values: int, top_share: float = TOP_SHARE) -> int:
    """Values of a chunk that are sent: at least one.

    >>> top_values(4096), top_values(10), top_values(4096, 1.0)
    (123, 1, 4096)
    """
    if not 0.0 < top_share <= 1.0:
        raise ValueError(f"top_share = {top_share:g} is not a share above 0 and at most 1")
    return min(chunk_values, max(1, round(top_share * chunk_values)))


def place_bits(count: int, chunk_values: int) -> tuple[int, int]:
    """Bits of `count` places in order in a chunk, as Elias and Fano wrote sorted numbers: low bits of each, and a row.

    The row has a one for each place, as far along as its high bits and its number together: at most 2 bits a place more
    than any code of sorted places needs, and always the same size.

    >>> place_bits(123, 4096), place_bits(4096, 4096), place_bits(1, 1)
    ((5, 250), (0, 8191), (0, 1))
    """
    low = (chunk_values // count).bit_length() - 1
    return low, ((chunk_values - 1) >> low) + count


def exchange_bytes(codec: str, values: int, share: float, members: int, top_share: float = TOP_SHARE) -> float:
    """Bytes a peer sends in one round: P · (1 + (n - 2) · share), with P the encoded vector; it receives as many.

    It sends the other owners their shares of its own vector, P · (1 - share), and the mean of its own share to the
    n - 1 others. Of a gathered codec, it sends each of them what the n - 1 others wrote of its share in place of the
    mean, which makes P · (1 + n · (n - 2) · share); it receives (n - 1) · P.

    >>> exchange_bytes("fp32", 1_000_000, 0.25, 4), exchange_bytes("fp32", 1_000_000, 0.0, 4)
    (6000000.0, 4000000.0)
    >>> exchange_bytes("topk-2bit", 4096, 0.25, 4) / encoded_bytes("topk-2bit", 4096)
    3.0
    """
    if members < 2:
        return 0.0
    return encoded_bytes(codec, values, top_share) * (1.0 + copies_per_share(codec, members) * share)


def copies_per_share(codec: str, members: int) -> int:
    """How often an owner of a share sends it, less the once that it keeps for itself of its own vector."""
    return (members - 2) * (members if codec in GATHERED_CODECS else 1)


def compression(codec: str, top_share: float = TOP_SHARE) -> float:
    """How many times fewer bytes than fp32 a large vector takes.

    >>> [round(compression(codec), 2) for codec in ("bf16", "int8", "int4", "topk-2bit")]
    [2.0, 3.94, 7.53, 113.78]
    """
    return encoded_bytes("fp32", TOP_CHUNK) / encoded_bytes(codec, TOP_CHUNK, top_share)


def cut_shares(values: int, shares: Sequence[float]) -> list[int]:
    """Where a vector is cut for its owners, in values: one more place than there are shares, from 0 to `values`.

    >>> cut_shares(100_000, [0.5, 0.0, 0.5]), cut_shares(100, [0.5, 0.5])
    ([0, 49152, 49152, 100000], [0, 0, 100])
    >>> cut_shares(300_000, [0.999, 0.0, 0.001])
    [0, 300000, 300000, 300000]
    """
    cuts, total = [0], 0.0
    for share in shares:
        total += share
        cuts.append(min(values, round(total * values / CUT_VALUES) * CUT_VALUES))
    # Shares sum to 1 but for rounding: whoever has the last share that is not zero takes the rest. One that has less
    # than can be cut takes it only where nobody has more: all others would send it a piece, and wait for its sum.
    given = [place for place, share in enumerate(shares) if share > 0.0]
    last = max((place for place in given if cuts[place] < cuts[place + 1]), default=max(given, default=len(shares) - 1))
    return cuts[: last + 1] + [values] * (len(shares) - last)


def _top_bytes(chunk_values: int, top_share: float) -> int:
    count = top_values(chunk_values, top_share)
    low, row = place_bits(count, chunk_values)
    return SCALE_BYTES + sum(-(-bits // 8) for bits in (count * low, row, count * VALUE_BITS))
