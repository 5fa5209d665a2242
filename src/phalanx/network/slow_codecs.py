"""Bytes that values take on a slow link, by codec: what `peers.codecs` sends and what the planner prices.

    fp64, fp32, bf16   every value as it is, 8, 4 or 2 bytes
    int8               blocks of 1,024 values with one fp32 scale, 1 byte a value
    int4               blocks of 128 values with one fp32 scale, half a byte a value
    topk-2bit          chunks of 4,096 values: one fp32 scale, the largest share of the values, each as a 12-bit place
                       in its chunk and a 2-bit value (arXiv:2603.08163)

A vector is cut for sending only at multiples of `CUT_VALUES`, which every block divides: the pieces of a vector take
exactly the bytes of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence

CODECS = ("fp32", "bf16", "int8", "int4", "topk-2bit")  # what a job may name; fp64 is for float64 models and for tests
PLAIN_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2}
INT8_BLOCK, INT4_BLOCK, TOP_CHUNK = 1024, 128, 4096
SCALE_BYTES = 4
INDEX_BITS, VALUE_BITS = 12, 2
CUT_VALUES = TOP_CHUNK
TOP_SHARE = 0.03
FEEDBACK_CODECS = frozenset({"int4", "topk-2bit"})  # what they lose must be carried to the next round


def encoded_bytes(codec: str, values: int, top_share: float = TOP_SHARE) -> int:
    """Bytes of a vector of so many values.

    >>> [encoded_bytes(codec, 4096) for codec in ("fp32", "bf16", "int8", "int4", "topk-2bit")]
    [16384, 8192, 4112, 2176, 220]
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


def exchange_bytes(codec: str, values: int, share: float, members: int, top_share: float = TOP_SHARE) -> float:
    """Bytes a peer sends in one round, and as many it receives: P · (1 + (n - 2) · share), with P the encoded vector.

    It sends the other owners their shares of its own vector, P · (1 - share), and the sum of its own share to the n - 1
    others.

    >>> exchange_bytes("fp32", 1_000_000, 0.25, 4), exchange_bytes("fp32", 1_000_000, 0.0, 4)
    (6000000.0, 4000000.0)
    """
    if members < 2:
        return 0.0
    return encoded_bytes(codec, values, top_share) * (1.0 + (members - 2) * share)


def compression(codec: str, top_share: float = TOP_SHARE) -> float:
    """How many times fewer bytes than fp32 a large vector takes.

    >>> [round(compression(codec), 2) for codec in ("bf16", "int8", "int4", "topk-2bit")]
    [2.0, 3.98, 7.53, 74.47]
    """
    return encoded_bytes("fp32", TOP_CHUNK) / encoded_bytes(codec, TOP_CHUNK, top_share)


def cut_shares(values: int, shares: Sequence[float]) -> list[int]:
    """Where a vector is cut for its owners, in values: one more place than there are shares, from 0 to `values`.

    >>> cut_shares(100_000, [0.5, 0.0, 0.5]), cut_shares(100, [0.5, 0.5])
    ([0, 49152, 49152, 100000], [0, 0, 100])
    """
    cuts, total = [0], 0.0
    for share in shares:
        total += share
        cuts.append(min(values, round(total * values / CUT_VALUES) * CUT_VALUES))
    # Shares sum to 1 but for rounding: whoever has the last share that is not zero takes the rest.
    last = max((place for place, share in enumerate(shares) if share > 0.0), default=len(shares) - 1)
    return cuts[: last + 1] + [values] * (len(shares) - last)


def _top_bytes(chunk_values: int, top_share: float) -> int:
    count = top_values(chunk_values, top_share)
    return SCALE_BYTES + -(-count * INDEX_BITS // 8) + -(-count * VALUE_BITS // 8)
