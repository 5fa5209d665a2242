"""The int8 and int4 codecs of slow links on a GPU: the same bytes as `peers/codecs.py`, without the host.

A vector of 4 bytes per value leaves the device as 1.02 or 0.53 bytes per value (the scales of all blocks, then the
numbers) instead of being copied to the host in full and encoded there. Encoding a block is a maximum and a division,
both computed as numpy does (rounded to nearest, ties to even; a block with NaN or infinity has that as its scale), so
that a peer with a GPU and one without agree bit by bit.

Error: half a step of the block's scale, 1/254 of its largest magnitude in int8 and 1/14 in int4.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from phalanx.network.slow_codecs import INT4_BLOCK, INT8_BLOCK, SCALE_BYTES, encoded_bytes
from phalanx.peers.codecs import BadBytes, decode, encode
from phalanx.train.kernels.kernel_op import (
    Inputs,
    KernelOp,
    KernelWork,
    Outputs,
    ResultFormat,
    Shape,
    register_kernel,
)
from phalanx.train.kernels.triton_support import can_launch, on_device

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without it
    triton = None

# Codec: values under one scale, and the largest code.
CODECS = {"int8": (INT8_BLOCK, 127), "int4": (INT4_BLOCK, 7)}
VALUES = 4096  # values per program

torch.library.define("phalanx::encode_blocks", "(Tensor values, str codec) -> Tensor")
torch.library.define("phalanx::decode_blocks", "(Tensor data, int count, str codec) -> (Tensor values, Tensor bad)")


def encode_blocks(codec: str, values: Tensor) -> Tensor:
    """Return the bytes of `peers.codecs.encode(codec, values)` as a uint8 tensor on the device of the values."""
    data: Tensor = torch.ops.phalanx.encode_blocks(values, codec)
    return data


def decode_blocks(codec: str, data: Tensor, count: int) -> Tensor:
    """Return the vector of `count` values; raise BadBytes for bytes that `encode_blocks` never writes."""
    if data.numel() != encoded_bytes(codec, count):
        raise BadBytes(f"{data.numel()} bytes for {count} values in {codec}, which take {encoded_bytes(codec, count)}")
    values, bad = torch.ops.phalanx.decode_blocks(data, count, codec)
    if bool(bad):
        raise BadBytes(f"{codec}: a scale below zero, or a number that stands for nothing")
    decoded: Tensor = values
    return decoded


@torch.library.impl("phalanx::encode_blocks", ("cpu", "cuda"))
def _encode(values: Tensor, codec: str) -> Tensor:
    count = values.numel()
    if not can_launch(values) or not count:
        encoded = np.frombuffer(encode(codec, values.detach().cpu().float().numpy()), dtype=np.uint8)
        return torch.from_numpy(encoded.copy()).to(values.device)
    values = values.float().contiguous().view(-1)
    block, largest_code = CODECS[codec]
    blocks = -(-count // block)
    data = torch.empty(encoded_bytes(codec, count), dtype=torch.uint8, device=values.device)
    with on_device(values):
        _encode_tile[(triton.cdiv(count, VALUES),)](
            values, data[: blocks * SCALE_BYTES].view(torch.float32), data[blocks * SCALE_BYTES :], count, blocks,
            BLOCK=block, HELD=VALUES // block, MOST=largest_code, PACKS=codec == "int4", num_warps=4,
        )  # fmt: skip
    return data


@torch.library.impl("phalanx::decode_blocks", ("cpu", "cuda"))
def _decode(data: Tensor, count: int, codec: str) -> tuple[Tensor, Tensor]:
    bad = torch.zeros(1, dtype=torch.int32, device=data.device)
    if not can_launch(data) or not count:
        try:
            decoded = decode(codec, data.cpu().numpy().tobytes(), count)
        except BadBytes:
            return torch.zeros(count, device=data.device), bad + 1
        return torch.from_numpy(np.asarray(decoded, dtype=np.float32)).to(data.device), bad
    block, _ = CODECS[codec]
    blocks = -(-count // block)
    data = data.contiguous()
    values = torch.empty(count, dtype=torch.float32, device=data.device)
    with on_device(data):
        _decode_tile[(triton.cdiv(count, VALUES),)](
            data[: blocks * SCALE_BYTES].view(torch.float32), data[blocks * SCALE_BYTES :], values, bad, count, blocks,
            BLOCK=block, HELD=VALUES // block, PACKS=codec == "int4", num_warps=4,
        )  # fmt: skip
    return values, bad


@torch.library.register_fake("phalanx::encode_blocks")  # type: ignore[untyped-decorator]
def _encoded_shape(values: Tensor, codec: str) -> Tensor:
    return values.new_empty(encoded_bytes(codec, values.numel()), dtype=torch.uint8)


@torch.library.register_fake("phalanx::decode_blocks")  # type: ignore[untyped-decorator]
def _decoded_shapes(data: Tensor, count: int, codec: str) -> tuple[Tensor, Tensor]:
    del codec
    return data.new_empty(count, dtype=torch.float32), data.new_empty(1, dtype=torch.int32)


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _whole_numbers(value, usable, MOST: tl.constexpr):  # type: ignore[no-untyped-def]
        """Round to nearest, ties to even, by adding 1.5 · 2²³; values that are not finite become zero."""
        quotient = tl.div_rn(value, usable + tl.zeros_like(value))
        finite = tl.abs(quotient) < float("inf")
        clamped = tl.where(finite, tl.minimum(tl.maximum(quotient, -MOST * 1.0), MOST * 1.0), 0.0)
        return ((clamped + 12582912.0) - 12582912.0).to(tl.int32)

    @triton.jit  # type: ignore[untyped-decorator]
    def _encode_tile(values, scales, out, count, blocks, BLOCK: tl.constexpr,  # type: ignore[no-untyped-def]
                     HELD: tl.constexpr, MOST: tl.constexpr, PACKS: tl.constexpr):  # fmt: skip
        row = tl.program_id(0).to(tl.int64) * HELD + tl.arange(0, HELD)
        place = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        value = tl.load(values + place, mask=place < count, other=0.0)
        bits = tl.max(tl.abs(value).to(tl.int32, bitcast=True), axis=1)
        # The bits of magnitudes compare as integers in the same order, and NaN lies above infinity.
        most = bits.to(tl.float32, bitcast=True)
        scale = tl.div_rn(most, tl.zeros_like(most) + MOST * 1.0)
        # The quotient of a NaN has other bits on a GPU than on a host: keep the NaN itself.
        scale = tl.where(most == most, scale, most)
        tl.store(scales + row, scale, mask=row < blocks)
        usable = tl.where((scale < float("inf")) & (scale > 0), scale, 1.0)[:, None]
        codes = _whole_numbers(value, usable, MOST)
        if PACKS:
            half = tl.where(place < count, codes + 8, 0)  # an unused half byte is zero
            first, second = tl.split(tl.reshape(half, (HELD, BLOCK // 2, 2)))
            pair = row[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
            tl.store(out + pair, (first | (second << 4)).to(tl.uint8), mask=pair * 2 < count)
        else:
            tl.store(out + place, codes.to(tl.int8).to(tl.uint8, bitcast=True), mask=place < count)

    @triton.jit  # type: ignore[untyped-decorator]
    def _decode_tile(scales, packed, values, bad, count, blocks, BLOCK: tl.constexpr,  # type: ignore[no-untyped-def]
                     HELD: tl.constexpr, PACKS: tl.constexpr):  # fmt: skip
        row = tl.program_id(0).to(tl.int64) * HELD + tl.arange(0, HELD)
        scale = tl.load(scales + row, mask=row < blocks, other=0.0)
        wrong = tl.max((scale < 0).to(tl.int32), axis=0)
        if PACKS:
            pair = row[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
            byte = tl.load(packed + pair, mask=pair * 2 < count, other=0).to(tl.int32)
            half = tl.reshape(tl.join(byte & 15, byte >> 4), (HELD, BLOCK))
            place = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            # A half byte of a value is never zero, and the unused one after an odd count always is.
            lost = (half == 0) == (place < count)
            wrong = tl.maximum(wrong, tl.max(tl.max((lost & (place <= count)).to(tl.int32), axis=1), axis=0))
            tl.store(values + place, (half - 8).to(tl.float32) * scale[:, None], mask=place < count)
        else:
            place = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            byte = tl.load(packed + place, mask=place < count, other=0).to(tl.int8, bitcast=True).to(tl.int32)
            wrong = tl.maximum(wrong, tl.max(tl.max((byte == -128).to(tl.int32), axis=1), axis=0))
            tl.store(values + place, byte.to(tl.float32) * scale[:, None], mask=place < count)
        tl.atomic_max(bad, wrong, mask=wrong > 0)


# For the catalogue. ---------------------------------------------------------------------------------------------------


def encode_int8(values: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and numbers, in plain operations."""
    return _scaled_blocks(values, INT8_BLOCK, 127)


def encode_int4(values: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and pairs of half bytes, the first number in the low one, in plain operations."""
    scales, whole = _scaled_blocks(values, INT4_BLOCK, 7)
    halves = torch.nn.functional.pad(whole + 8, (0, values.numel() % 2)).to(torch.uint8).view(-1, 2)
    return scales, halves[:, 0] | halves[:, 1] << 4


def _scaled_blocks(values: Tensor, block: int, most: int) -> tuple[Tensor, Tensor]:
    table = torch.nn.functional.pad(values.float(), (0, -values.numel() % block)).view(-1, block)
    scale = table.abs().amax(dim=1, keepdim=True) / most
    whole = (table / torch.where(scale > 0, scale, 1.0)).round().clamp(-most, most).to(torch.int8)
    return scale.view(-1), whole.view(-1)[: values.numel()]


def _decode_results(codec: str, results: Outputs, inputs: Inputs) -> Outputs:
    """Return the numbers that scales and codes represent, in blocks; NaN for codes that `encode` never writes."""
    scales, codes = results
    count, (block, _) = inputs[0].numel(), CODECS[codec]
    if codec == "int4":
        halves = torch.stack((codes & 15, codes >> 4), dim=-1).view(-1)
        numbers = torch.where(halves > 0, halves.double() - 8.0, torch.nan)[:count]
        # The unused half byte must be zero.
        numbers[-1:] += torch.where(halves[count:] == 0, 0.0, torch.nan).sum()
    else:
        numbers = torch.where(codes != -128, codes.double(), torch.nan)
    wide = torch.where(scales >= 0, scales.double(), torch.nan)
    return (torch.nn.functional.pad(numbers, (0, -count % block)).view(-1, block) * wide[:, None],)


def _encode_by_kernel(codec: str, values: Tensor) -> Outputs:
    """Encode and return scales and codes as separate tensors, like the plain operations."""
    data = encode_blocks(codec, values)
    scale_bytes = -(-values.numel() // CODECS[codec][0]) * SCALE_BYTES
    codes = data[scale_bytes:]
    return data[:scale_bytes].view(torch.float32), codes.view(torch.int8) if codec == "int8" else codes


def _make_values(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    return (torch.randn(shape["values"], generator=generator, device=device).to(dtype),)


def _make_uneven(block: int, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """Draw blocks from 1e-12 to 1e12, some of them zero, with a mean that differs from block to block."""
    (values,) = _make_values(shape, dtype, device, seed)
    generator = torch.Generator(device).manual_seed(seed + 1)
    blocks = -(-shape["values"] // block)
    powers = torch.randint(-40, 41, (blocks, 1), generator=generator, device=device)
    scale = torch.exp2(powers.float()) * (torch.rand((blocks, 1), generator=generator, device=device) > 0.1)
    mean = 2.0 * torch.randn((blocks, 1), generator=generator, device=device)
    table = torch.nn.functional.pad(values.float(), (0, -shape["values"] % block)).view(blocks, block)
    return (((table + mean) * scale).view(-1)[: shape["values"]].to(dtype),)


def _register(codec: str, plain: Callable[[Tensor], Outputs]) -> KernelOp:
    block, largest_code = CODECS[codec]

    def in_blocks(values: Tensor) -> Outputs:
        return (torch.nn.functional.pad(values, (0, -values.numel() % block)).view(-1, block),)

    def count_work(shape: Shape, dtype: torch.dtype) -> KernelWork:
        del dtype
        values = shape["values"]
        return KernelWork(read_bytes=4 * values, written_bytes=encoded_bytes(codec, values), flops=3 * values)

    return register_kernel(
        KernelOp(
            name=f"{codec}-blocks",
            summary=f"{codec} codec of slow links: a scale for every {block} values, and the values as whole numbers",
            reference=in_blocks,
            variants={"builtin": plain, "triton": partial(_encode_by_kernel, codec)},
            make_inputs=_make_values,
            shapes=[{"values": size} for size in (
                2**16, 2**18, 2**20, 2**22, 2**23, 2**24, 2**25, 58_720_256, 65_536_000, 2**27, 262_668_288, 525_336_576
            )],
            odd_shapes=[{"values": size} for size in (1, 129, 4097, 100_003)],
            count_work=count_work,
            error_bound=lambda dtype: 0.5001 / largest_code,
            reduction_length=lambda shape: 1,
            structured_inputs={"uneven blocks": partial(_make_uneven, block)},
            dtypes=(torch.float32,),
            format=ResultFormat(encode=plain, decode=partial(_decode_results, codec)),
        )
    )  # fmt: skip


INT8_BLOCKS, INT4_BLOCKS = _register("int8", encode_int8), _register("int4", encode_int4)
