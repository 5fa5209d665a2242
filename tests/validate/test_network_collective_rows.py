"""Rows of measured bus bandwidths: a fit where there is a series, NCCL's pick and the wires where there is none."""

from __future__ import annotations

import pytest

from phalanx.network.collective_fit import allowed_error
from phalanx.validate.network_claims import Claim, ClaimContext, ClaimOutcome
from phalanx.validate.network_collectives import bus_bandwidth

# Four nodes of 8 x H100, µs (NVIDIA/nccl-tests issue 309, qoofyk): in no table of ours
MEASURED_US = {16: 259.6, 32: 376.0, 64: 579.1, 128: 990.7, 256: 1768.0, 512: 3109.0, 1024: 5808.8, 4096: 22890.0}


def row(quantity: str, conditions: str, value: float | None, source: str = "x") -> Claim:
    return Claim(line=2, source=source, quantity=quantity, value=value, unit="GB/s", conditions=conditions)


def tried(one: Claim, *others: Claim) -> ClaimOutcome:
    found = bus_bandwidth(one, ClaimContext(rows=(one, *others)))
    assert found is not None
    return found


def test_a_series_nobody_looked_at_is_within_what_is_asked() -> None:
    rates = {mib: 62 / 32 * mib * 2**20 / us / 1e3 for mib, us in MEASURED_US.items()}
    rows = [row("all-reduce busbw", f"4x8 H100 {mib}MiB", rate) for mib, rate in rates.items()]
    found = {mib: tried(one, *rows) for mib, one in zip(rates, rows, strict=True)}
    assert [mib for mib, one in found.items() if one.status == "calibrated"] == [16, 4096]
    held_out = {mib: one for mib, one in found.items() if one.status == "reproduced"}
    assert len(held_out) == 6
    for mib, one in held_out.items():
        assert one.within
        assert one.tolerance == allowed_error(mib * 2**20)


@pytest.mark.parametrize(
    ("quantity", "conditions", "ours"),
    [
        ("all-reduce busbw default", "7x H200 8 GiB, algo NVLS", 469.3),
        ("all-gather busbw", "4x8 H100, 3.2T IB", 350.7),
        ("broadcast busbw", "8x H100 8 GiB", 357.8),
        ("reduce busbw", "8x H100 8 GiB", 357.8),
    ],
)
def test_alone_it_is_the_pick_of_nccl_at_the_rate_of_its_wires(quantity: str, conditions: str, ours: float) -> None:
    found = tried(row(quantity, conditions, 300.0))
    assert found.status == "reproduced"
    assert found.ours == pytest.approx(ours, rel=0.01)


def test_what_a_model_computed_is_compared_with_the_model() -> None:
    found = tried(row("all-reduce busbw", "4x8 B200 16 GiB", 383.5, "computed by us from NCCL 2.30.7 model"))
    assert found.ours == pytest.approx(383.5, abs=0.1)


def test_another_choice_than_the_logged_one_is_no_agreement() -> None:
    found = tried(row("all-reduce busbw default", "8x H200 8 GiB, algo Tree", 482.0))
    assert (found.status, found.within) == ("reproduced", False)
    assert "but Tree was logged" in found.note


@pytest.mark.parametrize(
    ("conditions", "reason"),
    [
        ("8x MI300X 4GiB", "not among those of NCCL's model"),
        ("1x H100 4GiB", "not among those of NCCL's model"),
    ],
)
def test_reasons(conditions: str, reason: str) -> None:
    found = tried(row("all-reduce busbw", conditions, 300.0))
    assert (found.status, reason in found.note) == ("not attempted", True)


@pytest.mark.parametrize(("rate", "within"), [(36.0, True), (5.73, False), (300.0, False)])
def test_small_messages_are_held_against_the_range(rate: float, within: bool) -> None:
    found = tried(row("all-reduce busbw", "8x H200 1MiB", rate))
    assert (found.status, found.within) == ("calibrated", within)
    assert "80 % of systems: " in found.note


def test_a_series_in_which_more_bytes_take_no_longer_makes_no_fit() -> None:
    rows = [row("all-reduce busbw", f"4x8 H100 {mib}MiB", rate) for mib, rate in ((16, 1.0), (32, 1e5), (64, 1e6))]
    found = tried(*rows)
    assert found.status == "not attempted"
    assert found.note.startswith("its series makes no fit: 67,108,864 bytes took")
