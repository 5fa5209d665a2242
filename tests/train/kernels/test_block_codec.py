"""Blocks of slow links on a device: byte for byte what the host makes of them, and no byte that it would refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.network.slow_codecs import encoded_bytes
from phalanx.peers.codecs import BadBytes, decode, encode
from phalanx.train.kernels.block_codec import decode_blocks, encode_blocks

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def vectors() -> list[np.ndarray]:
    drawn = np.random.default_rng(0)
    odd = drawn.normal(size=5000).astype(np.float32)
    odd[[0, 1300, 2600, 4999]] = np.nan, np.inf, -np.inf, 1e-42
    ties = np.arange(-127, 128, dtype=np.float32) / 2
    sizes = (1, 2, 127, 1025, 12_345)
    wide = [(drawn.normal(size=n) * 10 ** drawn.normal(size=n, scale=4)).astype(np.float32) for n in sizes]
    return [np.zeros(130, dtype=np.float32), odd, ties, *wide]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_the_same_bytes_as_the_host(codec: str, device: str) -> None:
    for values in vectors():
        data = encode_blocks(codec, torch.from_numpy(values).to(device))
        expected = encode(codec, values)
        assert data.cpu().numpy().tobytes() == expected
        with np.errstate(invalid="ignore"):
            back = decode(codec, expected, values.size)
        np.testing.assert_array_equal(decode_blocks(codec, data, values.size).cpu().numpy(), back)


@pytest.mark.parametrize("device", DEVICES)
def test_bytes_that_stand_for_nothing_are_refused(device: str) -> None:
    values = torch.ones(129, device=device)
    for codec, place, byte in (("int8", -1, 128), ("int4", -1, 0x19), ("int4", -2, 0x0F), ("int8", 3, 0xBF)):
        data = encode_blocks(codec, values)
        data[place] = byte
        with pytest.raises(BadBytes):
            decode_blocks(codec, data, 129)
    with pytest.raises(BadBytes, match="bytes for 128 values"):
        decode_blocks("int8", encode_blocks("int8", values), 128)


def test_sizes_without_data_and_under_compile() -> None:
    with FakeTensorMode():
        data = encode_blocks("int4", torch.empty(1001))
        assert (data.shape, data.dtype) == ((encoded_bytes("int4", 1001),), torch.uint8)
    values = torch.randn(300)
    compiled = torch.compile(lambda one: encode_blocks("int8", one * 2), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(values), encode_blocks("int8", values * 2))
