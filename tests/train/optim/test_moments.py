from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from phalanx.train.optim.moments import (
    BLOCK,
    Block8Moment,
    MomentFormat,
    high_bits,
    low_bits,
    moment_format,
    readable_moment,
    rounding_bits,
    to_bf16,
)
from phalanx.train.parallel.tensor_shard import TensorShard

FORMATS = [(kind, signed) for kind in ("fp32", "bf16", "int8") for signed in (True, False)]


def shard(tensor: torch.Tensor, *, shape: tuple[int, ...] = (), start: tuple[int, ...] = ()) -> TensorShard:
    return TensorShard(
        name="w",
        tensor=tensor,
        shape=shape or tuple(tensor.shape),
        start=start or (0,) * tensor.ndim,
        replicas=1,
        owner=True,
        groups={},
    )


def die(count: int, step: int = 1) -> torch.Tensor:
    return low_bits(rounding_bits(shard(torch.zeros(count)), step))


def again(form: MomentFormat, value: torch.Tensor, step: int = 1) -> torch.Tensor:
    """The value as it comes back from being kept."""
    return form.decode(form.encode(value, die(len(value), step)), torch.float32)


def spread_values(count: int, *, octaves: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    size = torch.exp2(-octaves * torch.rand(count, generator=generator))
    return size * torch.randn(count, generator=generator).sign()


def block_largest(value: torch.Tensor) -> torch.Tensor:
    return torch.cat([block.abs().max().expand(len(block)) for block in value.split(BLOCK)])


def test_the_dice_are_the_same_for_an_element_in_any_box() -> None:
    whole = rounding_bits(shard(torch.zeros(37, 11, 4)), 3).view(37, 11, 4)
    for start, size in (
        ((8, 6, 1), (5, 3, 2)),
        ((8, 0, 0), (5, 11, 4)),
        ((0, 0, 3), (37, 11, 1)),
        ((36, 2, 0), (1, 9, 4)),
    ):
        part = rounding_bits(shard(torch.zeros(size), shape=(37, 11, 4), start=start), 3).view(size)
        box = tuple(slice(first, first + length) for first, length in zip(start, size, strict=True))
        assert torch.equal(part, whole[box])
    assert len(set(whole.reshape(-1).tolist())) == 37 * 11 * 4
    assert rounding_bits(shard(torch.zeros(0, 3), shape=(37, 11), start=(37, 0)), 3).shape == (0,)
    assert rounding_bits(shard(torch.zeros(())), 3).shape == (1,)


def test_places_beyond_32_bits_wrap_alike_in_a_run_and_in_a_box() -> None:
    shape, start = (2**20, 2**13), (2**19 + 5, 0)
    run = shard(torch.zeros(2, 2**13), shape=shape, start=start)
    box = shard(torch.zeros(2, 3), shape=shape, start=(start[0], 7))
    assert torch.equal(rounding_bits(run, 1).view(2, -1)[:, 7:10], rounding_bits(box, 1).view(2, 3))


def test_the_dice_are_fair_and_independent() -> None:
    many = [replace(shard(torch.zeros(200, 100)), name=name) for name in "wv"]
    rolls = [side(rounding_bits(one, step)) for step in (1, 2) for one in many for side in (low_bits, high_bits)]
    flat = torch.stack([*rolls, *(roll.roll(1) for roll in rolls), *(roll.roll(100) for roll in rolls)]) / 65536.0
    assert float(flat.min()) >= 0.0
    assert float(flat.max()) < 1.0
    assert torch.allclose(flat.mean(1), torch.tensor(0.5), atol=0.008)  # 3.5 sigma of 20,000 rolls is 0.0072
    assert torch.allclose(flat.std(1), torch.tensor(12.0**-0.5), atol=0.01)
    counts = torch.stack([torch.histc(roll, 16, 0.0, 1.0) for roll in flat])
    assert float((counts - 1250).abs().max()) < 170  # 5 sigma of a bin of 1,250
    correlation = torch.corrcoef(flat) - torch.eye(len(flat))
    assert float(correlation.abs().max()) < 0.035  # 5 sigma


def test_bf16_rounds_to_a_neighbour_and_is_right_on_average() -> None:
    value = torch.full((100_000,), 1.0 + 2.0**-7 * 0.3)
    rounded = to_bf16(value, die(100_000)).float()
    assert set(rounded.tolist()) == {1.0, 1.0 + 2.0**-7}
    assert float(rounded.mean() - value[0]) == pytest.approx(0.0, abs=2.0**-7 * 0.01)
    most = torch.full((4,), 65535, dtype=torch.int32)
    assert to_bf16(torch.tensor([0.0, -1.5, float("inf"), -float("inf")]), most).tolist() == [
        0.0,
        -1.5,
        float("inf"),
        -float("inf"),
    ]
    assert to_bf16(torch.tensor([float("nan")]), most[:1]).isnan().all()


@pytest.mark.parametrize("signed", [True, False])
def test_eight_bits_keep_their_stated_bound(signed: bool) -> None:
    form = Block8Moment(signed=signed)
    value = spread_values(10 * BLOCK + 17, octaves=form.octaves + 6)
    value = value if signed else value.abs()
    off = (again(form, value) - value).abs()
    floor = block_largest(value) * 2.0**-form.octaves
    assert torch.all(off <= torch.where(value.abs() < floor, floor, 0.0923 * value.abs()) * 1.0001)
    assert float((off / value.abs()).median()) > 0.01  # the bound is of the right size


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("share", [0.37, 0.011, 2.0**-14 * 1.03])
def test_eight_bits_are_right_on_average(signed: bool, share: float) -> None:
    value = torch.full((BLOCK * 400,), share)
    value[::BLOCK] = 1.0
    assert float(again(Block8Moment(signed=signed), value)[value < 1].mean()) == pytest.approx(share, rel=1e-3)


def test_a_first_moment_below_the_codes_is_right_on_average_too() -> None:
    value = torch.full((BLOCK * 400,), 2.0**-18)
    value[::BLOCK] = 1.0
    assert float(again(Block8Moment(signed=True), value)[value < 1].mean()) == pytest.approx(2.0**-18, rel=0.03)


def test_a_second_moment_is_never_rounded_to_zero() -> None:
    value = torch.full((BLOCK,), 1e-20)
    value[0], value[5] = 1.0, 0.0
    found = again(Block8Moment(signed=False), value)
    assert float(found[5]) == 0.0
    assert float(found[value > 0].min()) == pytest.approx(2.0**-32, rel=1e-4)


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_a_compact_moment_still_decays(kind: str) -> None:
    """Rounded to the nearest, it would never move: 0.1 % is less than half a step of either format."""
    form, value = moment_format(kind, signed=False), torch.ones(BLOCK * 8)
    others = torch.arange(BLOCK * 8) % BLOCK != 0  # the first of each block holds the scale where it is
    for step in range(1, 501):
        value = again(form, torch.where(others, value * 0.999, 1.0), step)
    assert float(value[others].mean()) == pytest.approx(0.999**500, rel=0.02)


@pytest.mark.parametrize(("kind", "signed"), FORMATS)
def test_what_was_decoded_is_encoded_back_bit_by_bit(kind: str, signed: bool) -> None:
    form, value = moment_format(kind, signed=signed), spread_values(5 * BLOCK + 3, octaves=40.0)
    first = again(form, value if signed else value.abs())
    found = first
    for step in range(2, 12):
        found = again(form, found, step)
    assert torch.equal(found, first)


@pytest.mark.parametrize(("kind", "signed"), FORMATS)
def test_parts_are_views_of_the_whole(kind: str, signed: bool) -> None:
    form, value = moment_format(kind, signed=signed), spread_values(5 * BLOCK + 3, octaves=10.0).abs()
    kept = form.encode(value, die(len(value)))
    parts = [form.part(kept, start, min(start + 2 * BLOCK, len(value))) for start in range(0, len(value), 2 * BLOCK)]
    decoded = torch.cat([form.decode(part, torch.float32) for part in parts])
    assert torch.equal(decoded, form.decode(kept, torch.float32))
    assert parts[1][0].data_ptr() == kept[0][2 * BLOCK :].data_ptr()


def test_bytes_per_element() -> None:
    many = torch.zeros(BLOCK * 100)
    kinds = {kind: moment_format(kind, signed=True).zeros(len(many), many) for kind in ("fp32", "bf16", "int8")}
    size = {kind: sum(t.numel() * t.element_size() for t in kept) / len(many) for kind, kept in kinds.items()}
    assert size == {"fp32": 4.0, "bf16": 2.0, "int8": 1.0 + 4 / BLOCK}


@pytest.mark.parametrize(("kind", "signed"), FORMATS)
def test_zeros_and_nothing_are_kept_too(kind: str, signed: bool) -> None:
    form = moment_format(kind, signed=signed)
    assert torch.equal(again(form, torch.zeros(300)), torch.zeros(300))
    empty = torch.zeros(0, 5)
    assert readable_moment(form, form.zeros(0, empty), empty).shape == (0, 5)
