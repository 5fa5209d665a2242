from __future__ import annotations

import pytest
import torch

from phalanx.train.optim.moments import BLOCK, CODE_RATIO, Bf16, Block8, store
from phalanx.train.optim.rounding import dice, to_bf16
from phalanx.train.parallel.pieces import Piece


def piece(tensor: torch.Tensor, *, shape: tuple[int, ...] = (), start: tuple[int, ...] = ()) -> Piece:
    return Piece(
        name="w",
        tensor=tensor,
        shape=shape or tuple(tensor.shape),
        start=start or (0,) * tensor.ndim,
        replicas=1,
        owner=True,
        groups={},
    )


def spread_values(count: int, *, octaves: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    size = torch.exp2(-octaves * torch.rand(count, generator=generator))
    return size * torch.randn(count, generator=generator).sign()


def block_largest(value: torch.Tensor) -> torch.Tensor:
    return torch.cat([block.abs().max().expand(len(block)) for block in value.split(BLOCK)])


def test_the_dice_are_the_same_for_an_element_in_any_box() -> None:
    whole = dice(piece(torch.zeros(37, 11)), step=4, salt="m")
    part = dice(piece(torch.zeros(5, 3), shape=(37, 11), start=(8, 6)), step=4, salt="m")
    assert torch.equal(part, whole[8:13, 6:9])
    assert dice(piece(torch.zeros(0, 3), shape=(37, 11), start=(37, 0)), step=4, salt="m").shape == (0, 3)


def test_the_dice_are_fair_and_independent() -> None:
    rolls = torch.stack([dice(piece(torch.zeros(200, 100)), step=step, salt=s) for step in (1, 2) for s in "mv"])
    assert float(rolls.min()) >= 0.0
    assert float(rolls.max()) < 1.0
    flat = torch.cat([rolls.view(4, -1), rolls.view(4, -1).roll(1, dims=1)])
    assert torch.allclose(flat.mean(1), torch.tensor(0.5), atol=0.01)  # 3.5 sigma of 20,000 rolls is 0.007
    assert torch.allclose(flat.std(1), torch.tensor(12.0**-0.5), atol=0.01)
    correlation = torch.corrcoef(flat) - torch.eye(8)
    assert float(correlation.abs().max()) < 0.03


def test_bf16_rounds_to_a_neighbour_and_is_right_on_average() -> None:
    value = torch.full((100_000,), 1.0 + 2.0**-7 * 0.3)
    rounded = to_bf16(value, dice(piece(value), step=1, salt="m")).float()
    assert set(rounded.tolist()) == {1.0, 1.0 + 2.0**-7}
    assert float(rounded.mean() - value[0]) == pytest.approx(0.0, abs=2.0**-7 * 0.01)
    exact = torch.tensor([0.0, -1.5, 3.0e38, float("inf"), float("nan")])
    assert torch.equal(to_bf16(exact, torch.full((5,), 0.999)).float()[:2], exact[:2])
    assert to_bf16(exact, torch.full((5,), 0.999))[3:].tolist()[0] == float("inf")


@pytest.mark.parametrize("signed", [True, False])
def test_eight_bits_keep_their_stated_bound(signed: bool) -> None:
    octaves = 15.0 if signed else 31.0
    value = spread_values(10 * BLOCK + 17, octaves=octaves)
    value = value if signed else value.abs()
    kept = Block8(piece(value), "m", signed=signed)
    kept.write(value, step=1)
    read = kept.read()
    assert torch.all((read - value).abs() <= (CODE_RATIO - 1) * value.abs() * 1.001)
    assert torch.all(read.sign() == value.sign())
    small = value * 2.0**-20
    kept.write(torch.where(torch.arange(len(value)) % BLOCK == 0, value, small), step=1)
    floor = 2.0**-16 * block_largest(value)
    assert torch.all(
        (kept.read() - small).abs()[1 : BLOCK - 1]
        <= (CODE_RATIO - 1) * small[1 : BLOCK - 1].abs() + floor[1 : BLOCK - 1]
    )


def test_eight_bits_are_right_on_average() -> None:
    value = torch.full((BLOCK * 40,), 0.37)
    value[::BLOCK] = 1.0
    kept = Block8(piece(value), "m", signed=True)
    kept.write(value, step=7)
    assert float(kept.read().mean()) == pytest.approx(float(value.mean()), rel=2e-3)


def test_a_second_moment_is_never_rounded_to_zero() -> None:
    value = torch.full((BLOCK,), 1e-20)
    value[0] = 1.0
    kept = Block8(piece(value), "v", signed=False)
    kept.write(value, step=1)
    assert float(kept.read().min()) == pytest.approx(2.0**-32, rel=1e-4)
    value[5] = 0.0
    kept.write(value, step=1)
    assert float(kept.read()[5]) == 0.0


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_a_compact_moment_still_decays(kind: str) -> None:
    """Rounded to the nearest, it would never move: 0.1 % is less than half a step of either format."""
    kept = store(piece(torch.zeros(BLOCK * 8)), "v", kind=kind, signed=False)
    kept.write(torch.ones(BLOCK * 8), step=0)
    others = torch.arange(BLOCK * 8) % BLOCK != 0  # the first of each block holds the scale where it is
    for step in range(1, 1001):
        kept.write(torch.where(others, kept.read() * 0.999, 1.0), step=step)
    assert float(kept.read()[others].mean()) == pytest.approx(0.999**1000, rel=0.05)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("signed", [True, False])
def test_what_was_read_is_written_back_bit_by_bit(kind: str, signed: bool) -> None:
    value = spread_values(5 * BLOCK + 3, octaves=20.0)
    kept = store(piece(value), "m", kind=kind, signed=signed)
    kept.write(value if signed else value.abs(), step=1)
    before = [tensor.clone() for tensor in kept.tensors()]
    for step in range(2, 12):
        kept.write(kept.read().clone(), step=step)
    assert all(torch.equal(one, other) for one, other in zip(before, kept.tensors(), strict=True))


def test_bytes_per_element() -> None:
    many = piece(torch.zeros(BLOCK * 100))
    each = {kind: store(many, "m", kind=kind, signed=True).tensors() for kind in ("fp32", "bf16", "int8")}
    size = {kind: sum(t.numel() * t.element_size() for t in kept) / (BLOCK * 100) for kind, kept in each.items()}
    assert size == {"fp32": 4.0, "bf16": 2.0, "int8": 1.0 + 4 / BLOCK}


def test_empty_pieces_are_kept_too() -> None:
    empty = piece(torch.zeros(0, 5), shape=(3, 5), start=(3, 0))
    for kept in (Bf16(empty, "m"), Block8(empty, "m", signed=True)):
        kept.write(torch.zeros(0, 5), step=1)
        assert kept.read().shape == (0, 5)
