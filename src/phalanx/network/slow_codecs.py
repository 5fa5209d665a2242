"""Encoded size of a vector on a slow link, by codec, as `peers.codecs` sends it and the planner prices it.

    fp64, fp32, bf16   every value unchanged, 8, 4 or 2 bytes
    int8               blocks of 256 values with one fp32 scale, 1 byte a value
    int4               blocks of 128 values with one fp32 scale, half a byte a value
    topk-2bit          chunks of 4,096 values: one fp32 scale and the largest 3 % of the values, each as its position
                       in the chunk (7 bits at 3 %, Elias-Fano) and a 2-bit value (arXiv:2508.15706)

A vector is split for sending only at multiples of `CUT_VALUES`, which every block divides: the pieces of a vector
take exactly as many bytes as the whole vector.
"""

from __future__ import annotations

from collections.abc import Sequence

# Codecs that a job may use; fp64 is for float64 models and for tests.
CODECS = ("fp32", "bf16", "int8", "int4", "topk-2bit")
PLAIN_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2}
INT8_BLOCK, INT4_BLOCK, TOP_CHUNK = 256, 128, 4096
SCALE_BYTES = 4
VALUE_BITS = 2
CUT_VALUES = TOP_CHUNK
TOP_SHARE = 0.03
FEEDBACK_CODECS = frozenset({"int4", "topk-2bit"})  # their errors must be carried to the next round
# Every member receives the updates of all others and averages them itself. The mean of n sparse updates has up to n
# times as many values: choosing the largest of them again would delay most of them to later rounds.
GATHERED_CODECS = frozenset({"topk-2bit"})


def encoded_bytes(codec: str, values: int, top_share: float = TOP_SHARE) -> int:
    """Return the encoded size in bytes of a vector of `values` values.

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
        chunks, remainder = divmod(values, TOP_CHUNK)
        return chunks * _top_bytes(TOP_CHUNK, top_share) + (_top_bytes(remainder, top_share) if remainder else 0)
    raise ValueError(f"{codec!r} is not a codec; there are fp64, {', '.join(CODECS)}")


def top_values(chunk_values: int, top_share: float = TOP_SHARE) -> int:
    """Return the number of values of a chunk that are sent: at least one.

    >>> top_values(4096), top_values(10), top_values(4096, 1.0)
    (123, 1, 4096)
    """
    if not 0.0 < top_share <= 1.0:
        raise ValueError(f"top_share = {top_share:g} is not a share above 0 and at most 1")
    return min(chunk_values, max(1, round(top_share * chunk_values)))


def place_bits(count: int, chunk_values: int) -> tuple[int, int]:
    """Return the bits of `count` sorted positions in a chunk in Elias-Fano code: low bits of each, and bits of the row.

    The row has a one for each position, at the index of its high bits plus its number. It takes at most 2 bits a
    position more than any code of sorted positions needs, and its size is always the same.

    >>> place_bits(123, 4096), place_bits(4096, 4096), place_bits(1, 1)
    ((5, 250), (0, 8191), (0, 1))
    """
    low = (chunk_values // count).bit_length() - 1
    return low, ((chunk_values - 1) >> low) + count


def exchange_bytes(codec: str, values: int, share: float, members: int, top_share: float = TOP_SHARE) -> float:
    """Return the bytes that a peer sends in one round: P · (1 + (n - 2) · share), with P the encoded vector.

    It receives as many. It sends the other owners their shares of its own vector, P · (1 - share), and the mean of
    its own share to the other n-1 peers. With a gathered codec, it sends each peer, in place of the mean, the updates
    of its share from the n-1 others, which makes P · (1 + n · (n - 2) · share); it receives (n - 1) · P.

    >>> exchange_bytes("fp32", 1_000_000, 0.25, 4), exchange_bytes("fp32", 1_000_000, 0.0, 4)
    (6000000.0, 4000000.0)
    >>> exchange_bytes("topk-2bit", 4096, 0.25, 4) / encoded_bytes("topk-2bit", 4096)
    3.0
    """
    if members < 2:
        return 0.0
    return encoded_bytes(codec, values, top_share) * (1.0 + copies_per_share(codec, members) * share)


def copies_per_share(codec: str, members: int) -> int:
    """Return how often an owner sends its share, less the one copy of its own vector that it keeps."""
    return (members - 2) * (members if codec in GATHERED_CODECS else 1)


def compression(codec: str, top_share: float = TOP_SHARE) -> float:
    """Return the ratio of a large vector's fp32 bytes to its encoded bytes.

    >>> [round(compression(codec), 2) for codec in ("bf16", "int8", "int4", "topk-2bit")]
    [2.0, 3.94, 7.53, 113.78]
    """
    return encoded_bytes("fp32", TOP_CHUNK) / encoded_bytes(codec, TOP_CHUNK, top_share)


def cut_shares(values: int, shares: Sequence[float]) -> list[int]:
    """Return the indices at which a vector is split for its owners: one more than there are shares, from 0 to `values`.

    >>> cut_shares(100_000, [0.5, 0.0, 0.5]), cut_shares(100, [0.5, 0.5])
    ([0, 49152, 49152, 100000], [0, 0, 100])
    >>> cut_shares(300_000, [0.999, 0.0, 0.001])
    [0, 300000, 300000, 300000]
    """
    cuts, total = [0], 0.0
    for share in shares:
        total += share
        cuts.append(min(values, round(total * values / CUT_VALUES) * CUT_VALUES))
    # Shares sum to 1 except for rounding: the last non-zero share takes the remainder. A share smaller than one cut
    # takes it only where no share is larger, as all other peers would have to send it a piece and wait for its sum.
    nonzero = [owner for owner, share in enumerate(shares) if share > 0.0]
    last = max(
        (owner for owner in nonzero if cuts[owner] < cuts[owner + 1]), default=max(nonzero, default=len(shares) - 1)
    )
    return cuts[: last + 1] + [values] * (len(shares) - last)


def _top_bytes(chunk_values: int, top_share: float) -> int:
    count = top_values(chunk_values, top_share)
    low, row = place_bits(count, chunk_values)
    return SCALE_BYTES + sum(-(-bits // 8) for bits in (count * low, row, count * VALUE_BITS))
