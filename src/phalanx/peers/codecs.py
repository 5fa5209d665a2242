"""Encoding of vectors as bytes and decoding, in NumPy; `network.slow_codecs` computes the sizes.

Encoding is deterministic: equal values give equal bytes on every machine (little-endian, ties broken by position).
Bytes from the network are checked for their size before anything is allocated, and then for their content.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from phalanx.network.slow_codecs import (
    FEEDBACK_CODECS,
    INT4_BLOCK,
    INT8_BLOCK,
    SCALE_BYTES,
    TOP_CHUNK,
    TOP_SHARE,
    encoded_bytes,
    place_bits,
    top_values,
)
from phalanx.peers.facts import Vector

Float32 = npt.NDArray[np.float32]
# A 2-bit value is one of four multiples of its chunk's scale, which is the mean of the sent magnitudes: the lower and
# the upper half of a half-normal tail lie near 0.8 and 1.4 times its mean.
TWO_BIT_LEVELS = np.array([-1.4, -0.8, 0.8, 1.4], dtype=np.float32)
TWO_BIT_LIMIT = np.float32(1.1)


class BadBytes(ValueError):
    """Bytes that no codec of this module produces."""


def encode(codec: str, values: Vector, top_share: float = TOP_SHARE) -> bytes:
    """Encode a vector as bytes.

    Not-a-number and infinity survive in fp64, fp32 and bf16. In int8, int4 and topk-2bit they make the scale of their
    block not finite, so that a receiver detects them.
    """
    if codec == "fp64":
        return np.ascontiguousarray(values, dtype="<f8").tobytes()
    flat: Float32 = np.ascontiguousarray(values, dtype="<f4")
    if codec == "fp32":
        return flat.tobytes()
    if codec == "bf16":
        return _to_bf16(flat).tobytes()
    if codec == "int8":
        scales, quotients = _scaled(flat, INT8_BLOCK, 127)
        return scales.tobytes() + quotients.astype(np.int8).tobytes()
    if codec == "int4":
        scales, quotients = _scaled(flat, INT4_BLOCK, 7)
        nibbles = np.zeros(quotients.size + quotients.size % 2, dtype=np.uint8)
        nibbles[: quotients.size] = quotients + np.float32(8)  # 1 to 15; 0 is not a value
        # Pairs as 16-bit numbers, the first in the low byte: four times as fast as slicing with a stride of two.
        pairs: npt.NDArray[np.uint16] = nibbles.view("<u2")
        return scales.tobytes() + (pairs | (pairs >> 4)).astype(np.uint8).tobytes()
    if codec == "topk-2bit":
        chunks = flat.size // TOP_CHUNK
        body = _encode_top(flat[: chunks * TOP_CHUNK].reshape(chunks, TOP_CHUNK), top_share)
        return body + _encode_top(flat[None, chunks * TOP_CHUNK :], top_share)
    raise ValueError(f"{codec!r} is not a codec")


def decode(codec: str, data: bytes | bytearray | memoryview, values: int, top_share: float = TOP_SHARE) -> Vector:
    """Decode a vector of `values` values: float64 for fp64, float32 for all other codecs.

    Raises BadBytes for a wrong size and for bytes that `encode` never writes.
    """
    size = memoryview(data).nbytes
    if size != encoded_bytes(codec, values, top_share):
        expected = encoded_bytes(codec, values, top_share)
        raise BadBytes(f"{size} bytes for {values} values in {codec}, which take {expected}")
    if codec == "fp64":
        return np.frombuffer(data, dtype="<f8").copy()
    if codec == "fp32":
        return np.frombuffer(data, dtype="<f4").copy()
    if codec == "bf16":
        return (np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
    if codec == "int8":
        blocks = -(-values // INT8_BLOCK)
        quotients = np.frombuffer(data, dtype=np.int8, offset=blocks * SCALE_BYTES)
        if np.any(quotients == -128):
            raise BadBytes("int8: -128 stands for nothing")
        return _unscaled(_scales(data, blocks), quotients.astype(np.float32), INT8_BLOCK)
    if codec == "int4":
        blocks = -(-values // INT4_BLOCK)
        packed = np.frombuffer(data, dtype=np.uint8, offset=blocks * SCALE_BYTES)
        pairs = packed.astype("<u2")
        nibbles = ((pairs | (pairs << 4)) & 0x0F0F).astype("<u2").view(np.uint8)
        if not nibbles[:values].all() or nibbles[values:].any():
            raise BadBytes("int4: a half byte stands for nothing")
        return _unscaled(_scales(data, blocks), nibbles[:values].astype(np.float32) - 8, INT4_BLOCK)
    chunks, rest_length = divmod(values, TOP_CHUNK)
    at = encoded_bytes(codec, chunks * TOP_CHUNK, top_share)
    view = memoryview(data).cast("B")
    body = _decode_top(view[:at], chunks, TOP_CHUNK, top_share)
    return np.concatenate([body, _decode_top(view[at:], 1 if rest_length else 0, rest_length, top_share)])


class Sender:
    """A codec with error feedback: what int4 and topk-2bit lose of an update is added to the next one.

    `feedback` is the share of the loss that is carried from round to round. A loss is carried only once its round is
    committed (`settle`); a discarded round leaves the carried loss unchanged.
    """

    def __init__(self, codec: str, feedback: float = 0.95, top_share: float = TOP_SHARE) -> None:
        # Both calls raise ValueError for an invalid codec or share.
        encoded_bytes(codec, 0, top_share)
        top_values(1, top_share)
        if not 0.0 <= feedback <= 1.0:
            raise ValueError(f"feedback = {feedback:g} is not a share from 0 to 1")
        self.codec, self.feedback, self.top_share = codec, feedback, top_share
        self._lost: Vector | None = None  # loss of this peer's own updates
        # Loss of the means that this peer owned, which int4 encodes a second time.
        self._lost_sums: Vector | None = None

    @property
    def carries(self) -> bool:
        """True if the codec carries a loss from round to round."""
        return self.codec in FEEDBACK_CODECS and self.feedback > 0.0

    def outgoing(self, vector: Vector) -> Vector:
        """Return the vector to encode instead of `vector`: with the carried loss, if that has the same length."""
        if not self.carries or self._lost is None or self._lost.shape != vector.shape:
            return vector
        return np.asarray(vector + self.feedback * self._lost, dtype=vector.dtype)

    def outgoing_sum(self, start: int, mean: Vector, values: int) -> Vector:
        """Return the mean to encode instead of `mean`, the values from `start` on of a vector of `values` values."""
        if not self.carries or self._lost_sums is None or self._lost_sums.size != values:
            return mean
        return np.asarray(mean + self.feedback * self._lost_sums[start : start + mean.size], dtype=mean.dtype)

    def settle(self, lost: Vector, lost_sums: Vector) -> None:
        """Carry the losses of a committed round; both have the vector's length.

        `lost_sums` is zero where this peer owned nothing. The loss of sums that it no longer owns is forgotten:
        another owner sums there now.
        """
        if self.carries:
            self._lost, self._lost_sums = lost, lost_sums

    def state(self) -> dict[str, Vector]:
        """Return the carried losses for a checkpoint."""
        losses = {"lost": self._lost, "lost_sums": self._lost_sums}
        return {name: value.copy() for name, value in losses.items() if value is not None}

    def load_state(self, state: dict[str, Vector]) -> None:
        """Restore the carried losses from a checkpoint."""
        self._lost, self._lost_sums = state.get("lost"), state.get("lost_sums")


def _to_bf16(flat: Float32) -> npt.NDArray[np.uint16]:
    bits = flat.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16  # to nearest, ties to even
    # A NaN must not be rounded up to infinity or beyond.
    return np.where(np.isnan(flat), 0x7FC0, rounded).astype("<u2")


def _scaled(flat: Float32, block: int, most: int) -> tuple[Float32, Float32]:
    """Return one scale for each block, and the values divided by it as whole numbers from -most to most."""
    blocks = -(-flat.size // block)
    table = flat
    if flat.size % block:
        table = np.zeros(blocks * block, dtype=np.float32)
        table[: flat.size] = flat
    table = table.reshape(blocks, block)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        scales: Float32 = (np.abs(table).max(axis=1, initial=0) / np.float32(most)).astype("<f4")
        finite = np.isfinite(scales)
        usable: Float32 = np.where(finite & (scales > 0), scales, np.float32(1))
        quotients: Float32 = np.divide(table, usable[:, None], dtype=np.float32)
        # Quotients are finite where all scales are, and nan_to_num takes as long as all the rest.
        if not finite.all():
            np.nan_to_num(quotients, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
        np.rint(quotients, out=quotients)
        np.clip(quotients, -most, most, out=quotients)
    return scales, quotients.reshape(-1)[: flat.size]


def _scales(data: bytes | bytearray | memoryview, blocks: int) -> Float32:
    scales = np.frombuffer(data, dtype="<f4", count=blocks)
    if np.any(scales < 0):
        raise BadBytes("a scale below zero")
    return scales


def _unscaled(scales: Float32, whole: Float32, block: int) -> Float32:
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(whole * np.repeat(scales, block)[: whole.size], dtype=np.float32)


def _encode_top(table: Float32, top_share: float) -> bytes:
    """Encode chunks of equal length, one per row: the scale, then the places and the 2-bit values of each chunk."""
    rows, length = table.shape
    if not rows or not length:
        return b""
    count = top_values(length, top_share)
    places = _largest_places(table, count)
    sent = np.take_along_axis(table, places, axis=1)
    with np.errstate(invalid="ignore", over="ignore"):
        scales = np.abs(sent).mean(axis=1, dtype=np.float64).astype("<f4")
        levels = np.where(
            sent < 0, np.abs(sent) < TWO_BIT_LIMIT * scales[:, None], 2 + (sent >= TWO_BIT_LIMIT * scales[:, None])
        )
    low, row_bits = place_bits(count, length)
    row = np.zeros((rows, row_bits), dtype=np.uint8)
    np.put_along_axis(row, (places >> low) + np.arange(count), np.uint8(1), axis=1)
    low_bits = ((places[:, :, None] >> np.arange(low)) & 1).astype(np.uint8).reshape(rows, -1)
    value_bits = ((levels[:, :, None].astype(np.int64) >> np.arange(2)) & 1).astype(np.uint8).reshape(rows, -1)
    head = scales.view(np.uint8).reshape(rows, SCALE_BYTES)
    packed = [np.packbits(bits, axis=1, bitorder="little") for bits in (low_bits, row, value_bits)]
    return np.concatenate([head, *packed], axis=1).tobytes()


def _largest_places(table: Float32, count: int) -> npt.NDArray[np.int64]:
    """Return the places of the `count` largest magnitudes of each row, in ascending order; of equal ones the first.

    The bits of non-negative floats order as their values do. With the place in the bits below them the keys are
    unique, so that machines agree and a partition suffices, which takes a third of the time of a stable sort.
    """
    length = table.shape[1]
    place_size = max(1, (length - 1).bit_length())
    size = np.abs(np.nan_to_num(table, nan=np.inf)).astype(np.float32, copy=False)
    keys = size.view(np.uint32).astype(np.uint64) << np.uint64(place_size)
    keys |= np.arange(length - 1, -1, -1, dtype=np.uint64)
    best = np.partition(keys, length - count, axis=1)[:, length - count :]
    places = length - 1 - (best & np.uint64((1 << place_size) - 1)).astype(np.int64)
    return np.asarray(np.sort(places, axis=1), dtype=np.int64)


def _decode_top(data: memoryview, rows: int, length: int, top_share: float) -> Float32:
    """Decode chunks that `_encode_top` wrote, of `length` values each; raises BadBytes."""
    if not rows:
        return np.zeros(0, dtype=np.float32)
    count = top_values(length, top_share)
    table = np.frombuffer(data, dtype=np.uint8).reshape(rows, -1)
    scales = np.ascontiguousarray(table[:, :SCALE_BYTES]).view("<f4").reshape(rows)
    if np.any(scales < 0):
        raise BadBytes("a scale below zero")
    low, row_bits = place_bits(count, length)
    bits, at = [], SCALE_BYTES
    for bit_count in (count * low, row_bits, count * 2):
        end = at + -(-bit_count // 8)
        bits.append(np.unpackbits(table[:, at:end], axis=1, bitorder="little")[:, :bit_count])
        at = end
    if np.any(bits[1].sum(axis=1, dtype=np.int64) != count):
        raise BadBytes("topk-2bit: more or fewer places than values")
    high = np.nonzero(bits[1])[1].reshape(rows, count) - np.arange(count)
    places = (high << low) + bits[0].reshape(rows, count, low).astype(np.int64) @ (1 << np.arange(low, dtype=np.int64))
    if np.any(places >= length) or np.any(np.diff(places, axis=1) <= 0):
        raise BadBytes("topk-2bit: a place outside its chunk, or places out of order")
    pairs = bits[2].reshape(rows, count, 2)
    levels = TWO_BIT_LEVELS[pairs[:, :, 0] + 2 * pairs[:, :, 1]]
    decoded = np.zeros((rows, length), dtype=np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        np.put_along_axis(decoded, places, levels * scales[:, None], axis=1)
    return decoded.reshape(-1)
