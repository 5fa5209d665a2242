"""Two points of a system give the others."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from phalanx.errors import UserError
from phalanx.network.collective_fit import (
    FILL_ACROSS,
    FILL_INSIDE,
    AlphaBeta,
    Point,
    allowed_error,
    fit_ends,
    fit_points,
    wire_share,
)

MIB = 2**20
# busbw in GB/s by MiB: stas00/ml-engineering network/README.md @744d01e, all of its sizes from 16 MiB on
H200 = {16: 219.89, 32: 275.84, 64: 346.51, 128: 401.93, 256: 436.15, 1024: 463.58, 2048: 469.17, 4096: 473.1}
B200 = {16: 254.96, 32: 325.97, 64: 400.6, 128: 568.38, 256: 646.11, 512: 688.99, 1024: 723.34, 2048: 734.97}
B200 |= {4096: 740.64, 8192: 839.07, 16384: 845.67}
FOUR_NODES = {16: 64.43, 32: 91.19, 64: 156.74, 128: 197.94, 256: 229.09, 512: 326.9, 1024: 361.99, 2048: 372.42}
FOUR_NODES |= {4096: 377.34, 8192: 380.39, 16384: 381.8}
# µs, two nodes of 8 x H100 (create-a3mega-ztan-fork, nccl-tests)
TWO_NODES_US = {16: 977.6, 32: 1059.9, 64: 1261.6, 128: 1652.2, 256: 2360.9, 512: 3817.5, 1024: 6759.0}
TWO_NODES_US |= {2048: 12646.0, 4096: 24361.0, 8192: 47535.0}
# µs, eight nodes of 8 x H100 (NVIDIA/nccl-tests issue 309, gj-aion)
EIGHT_NODES_US = {16: 378.1, 32: 509.6, 64: 718.1, 128: 1159.1, 256: 1955.1, 512: 3517.3, 1024: 7370.5}
EIGHT_NODES_US |= {2048: 13252.0, 4096: 26438.0, 8192: 52733.0}


def squares(fit: AlphaBeta, points: list[Point]) -> float:
    logs = [math.log(fit.seconds(one.nbytes) / one.seconds) for one in points]
    return sum((one - sum(logs) / len(logs)) ** 2 for one in logs)


def measured(rates: dict[int, float], ranks: int) -> list[Point]:
    share = wire_share("all-reduce", ranks)
    return [Point(nbytes=mib * MIB, seconds=share * mib * MIB / (rate * 1e9)) for mib, rate in rates.items()]


@pytest.mark.parametrize(
    ("points", "ranks", "nodes"),
    [
        (measured(H200, 8), 8, 1),
        (measured(B200, 8), 8, 1),
        (measured(FOUR_NODES, 32), 32, 4),
        ([Point(nbytes=mib * MIB, seconds=us * 1e-6) for mib, us in TWO_NODES_US.items()], 16, 2),
        ([Point(nbytes=mib * MIB, seconds=us * 1e-6) for mib, us in EIGHT_NODES_US.items()], 64, 8),
    ],
    ids=["8xH200", "8xB200", "4x8xB200", "2x8xH100", "8x8xH100"],
)
def test_held_out_sizes(points: list[Point], ranks: int, nodes: int) -> None:
    picked = fit_ends(points)
    assert picked is not None
    fit = fit_points(picked, ranks=ranks, nodes=nodes)
    held_out = [one for one in points if one not in picked]
    wrong = {
        one.nbytes // MIB: error
        for one in held_out
        if abs(error := fit.seconds(one.nbytes) / one.seconds - 1) > allowed_error(one.nbytes)
    }
    assert len(held_out) >= 6
    assert wrong == {}


@pytest.mark.parametrize("nodes", [1, 4])
def test_both_points_are_met(nodes: int) -> None:
    points = (Point(nbytes=1e9, seconds=5e-3), Point(nbytes=2e7, seconds=3e-4))
    fit = fit_points(points, ranks=8, nodes=nodes)
    assert [fit.seconds(one.nbytes) for one in points] == pytest.approx([one.seconds for one in points])
    assert fit.bus_bytes_per_s(1e9) == pytest.approx(1.75e9 / 5e-3)


def test_without_filling_it_is_a_line() -> None:
    fit = fit_points((Point(nbytes=1e8, seconds=3e-3), Point(nbytes=2e8, seconds=5e-3)), ranks=2, fill=0.0)
    assert (fit.alpha_s, fit.bytes_per_s) == pytest.approx((1e-3, 5e10))


@pytest.mark.parametrize(("nodes", "fill"), [(1, FILL_INSIDE), (4, FILL_ACROSS)])
def test_the_pipeline_fills_more_inside_a_node(nodes: int, fill: float) -> None:
    points = (Point(nbytes=1e7, seconds=1e-3), Point(nbytes=1e10, seconds=4e-2))
    fit = fit_points(points, ranks=8, nodes=nodes)
    transfer_s = 1.75 * 1e9 / fit.bytes_per_s
    assert fit.seconds(1e9) == pytest.approx(fit.alpha_s + transfer_s + fill * (fit.alpha_s * transfer_s) ** 0.5)


def test_more_bytes_per_second_at_the_larger_size_leaves_no_start_up() -> None:
    fit = fit_points((Point(nbytes=1e8, seconds=1e-3), Point(nbytes=1e9, seconds=2e-2)), ranks=8)
    assert fit.alpha_s == 0.0
    assert fit.seconds(1e9) == pytest.approx(2e-2)


@pytest.mark.parametrize("nodes", [1, 4])
def test_many_points_give_back_what_made_them_and_share_an_error(nodes: int) -> None:
    made = fit_points((Point(nbytes=2e7, seconds=3e-4), Point(nbytes=4e9, seconds=2e-2)), ranks=8, nodes=nodes)
    points = [Point(nbytes=size, seconds=made.seconds(size)) for size in (1e8, 2e7, 4e9, 5e8)]
    again = fit_points(points, ranks=8, nodes=nodes)
    assert (again.alpha_s, again.bytes_per_s) == pytest.approx((made.alpha_s, made.bytes_per_s), rel=1e-3)
    noisy = [Point(nbytes=one.nbytes, seconds=one.seconds * (1.1 if one.nbytes == 5e8 else 1.0)) for one in points]
    fit = fit_points(noisy, ranks=8, nodes=nodes)
    errors = [fit.seconds(one.nbytes) / one.seconds - 1 for one in noisy]
    assert -0.1 < min(errors) < -0.03
    assert max(errors) < 0.05
    assert sum((math.log(1 + one)) for one in errors) == pytest.approx(0.0, abs=1e-9)
    moved = replace(fit, alpha_s=fit.alpha_s * 1.02)
    assert squares(fit, noisy) < squares(moved, noisy)


def test_ends_wait_for_a_third_size_to_judge_by() -> None:
    points = [Point(nbytes=mib * MIB, seconds=mib * 1e-4) for mib in (1, 8, 16, 4096)]
    assert fit_ends(points) is None
    more = fit_ends([*points, Point(nbytes=64 * MIB, seconds=7e-3)])
    assert more is not None
    assert [one.nbytes // MIB for one in more] == [16, 4096]


def test_wire_shares() -> None:
    assert wire_share("reduce-scatter", 4) == wire_share("all-to-all", 4) == 0.75
    assert wire_share("broadcast", 4) == 1.0


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([], "fit: 0 points of 0 sizes"),
        ([(1e6, 1e-3)], "fit: 1 points of 1 sizes"),
        ([(1e6, 1e-3), (1e6, 2e-3)], "fit: 2 points of 1 sizes"),
        ([(1e6, 1e-3), (2e6, 0.0)], "fit: 2e\\+06 bytes in 0 s"),
        ([(1e6, 1e-3), (2e6, 1e-4)], "fit: 2,000,000 bytes took 0.0001 s, 1,000,000 bytes 0.001 s"),
    ],
)
def test_refusals(points: list[tuple[float, float]], message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        fit_points([Point(nbytes=nbytes, seconds=seconds) for nbytes, seconds in points], ranks=8)
    with pytest.raises(UserError, match="a collective of 1 rank"):
        wire_share("all-reduce", 1)
