"""Rows by their words: what is reproduced, what is calibrated, what is not attempted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.sim.validate import run as validation
from phalanx.sim.validate.outcome import Context, Outcome
from phalanx.sim.validate.run import attempt, card, validate
from phalanx.sim.validate.table import Row
from phalanx.sim.validate.text import text


def row(quantity: str, conditions: str = "", value: float | None = 1.0, unit: str = "", source: str = "x") -> Row:
    return Row(line=2, source=source, quantity=quantity, value=value, unit=unit, conditions=conditions)


def tried(one: Row, *others: Row, simulate: bool = False) -> Outcome:
    return attempt(one, Context(rows=(one, *others), simulate=simulate))


# No row of the shipped table: other sizes than anybody published, worked out by hand.
ARITHMETIC = [
    ("hosts at full bisection", "2 tiers, 2 planes x 400G, 128-port switches", 8192),
    ("hosts, 3 tiers single plane", "128x400G switches", 524288),
    ("max switch hops 4-tier", "four-tier", 7),
    ("hosts under one T0", "96x800G, 3:1", 72),
    ("capacity lost per T0-T1 link, 200G plane", "", 100 / 128),
    ("NIC bandwidth lost per NIC-T0 link", "4 planes", 25),
    ("switches total", "2048 hosts, 1 plane, 64-port", 64 + 32),
    ("NIC-T0 links total", "32768 hosts, 4 planes", 4 * 32768),
    ("T1 switches total", "32768 hosts, 4 planes", 4 * 128),
    ("switches per host", "2 tiers, 8 planes, 512-port switches", 3 * 8 / 512),
    ("optics per host", "3 tiers, 1 plane, 64-port switches", 6),
    ("links idle", "random placement, 2 units per link", 0.13534),
    ("chance that a step is late", "p=1e-6, N=131072", 0.12286),
    ("paths between hosts in different T0", "4 planes x 128 T1", 512),
    ("QPs touched by one T1, 2 EVs of 4 paths", "", 43.75),
    ("E[max]/mean of N exponential delays", "N=3 (harmonic number)", 11 / 6),
    ("max link load / mean", "random placement, 2 units per link, 1 links", 1),
    ("goodput from header overhead", "900 B payload, 100 B headers, 400G", 360),
    ("network interruptions per day", "Llama 3 rate scaled to 16384 GPUs", 35 / 54),
    ("link failures per day 2-tier", "HPN rate, 3,040 links", 0.057),
    ("NCCL over MRC peak", "Cluster C", 50 * 4096 / 4262),
]


@pytest.mark.parametrize(("quantity", "conditions", "expected"), ARITHMETIC)
def test_arithmetic_follows_the_words(quantity: str, conditions: str, expected: float) -> None:
    found = tried(row(quantity, conditions, value=expected))
    assert (found.status, found.within) == ("reproduced", True)
    assert found.ours == pytest.approx(expected, rel=2e-3)
    wrong = tried(row(quantity, conditions, value=2 * expected))
    assert (wrong.ours, wrong.within) == (found.ours, False)
    assert wrong.error == pytest.approx(-0.5, abs=2e-3)


@pytest.mark.parametrize(
    ("quantity", "conditions", "value"),
    [
        ("NET latency PAT Simple", "NCCL 2.30.7, per step", 14),
        ("base latency Ring LL", "", 6.6),
        ("LL max bandwidth", "Hopper, 2 nodes (index 2 covers 3+ nodes)", 45),
        ("per-channel NVLSTree", "Blackwell, >=4 nodes", 80),
        ("NVLS efficiency", "Hopper", 0.85),
        ("NVLink bandwidth per link", "sm100", 40.1),
        ("treeCorrectionFactor LL128", "bytes 32768", 0.7),
        ("p2p latency 2B cross T1", "", 6.55),
        ("path failure bypass (wording)", "any value 10-100 agrees", 12),
    ],
)
def test_what_we_took_from_a_source_is_calibrated(quantity: str, conditions: str, value: float) -> None:
    found = tried(row(quantity, conditions, value))
    assert (found.status, found.within) == ("calibrated", True)


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (row("shoe size"), "no reader for 'shoe size'"),
        (row("hosts at full bisection", "somewhere"), "its conditions do not say enough"),
        (row("hosts at full bisection", "99999999 tiers, 64-port switches"), "its conditions do not say enough"),
        (row("max link load / mean", "999999999999 units per link, 256 links"), "its conditions do not say enough"),
        (row("switches total", "64 hosts, 1 plane, 999999999-port"), "its conditions do not say enough"),
        (row("hosts at full bisection", value=None), "its value is no number"),
        (row("switches total", "9999 hosts, 1 plane, 2-port"), "cannot be computed: a switch of 2 ports cannot branch"),
        (row("switches total", "999999 hosts, 1 plane, 64-port"), "cannot be computed: 999,999 GPUs do not fit"),
        (row("max-min mean rate per NIC", "999999999 hosts"), "999,999,999 hosts are more than this table is run for"),
        (row("all-reduce busbw", "8x MI300X 4 GiB", unit="GB/s"), "its GPUs are not among those of NCCL's model"),
        (row("victim flow PFC only, low"), "DCQCN and PFC are not modelled"),
        (row("tail FCT", "-tm perm_16n_16c_2MB.cm -paths 64"), "needs --simulate"),
        (row("tail FCT", "-tm perm_16n_16c_2MB.cm -receiver_cc_only"), "credits from the receiver are not modelled"),
        (row("tail FCT", "-tm secret.cm"), "who sends what is in a file that is not in the table"),
        (row("tail FCT", "-tm perm_18n_18c_2MB.cm"), "18 hosts are no full fat tree, or more than 4,096"),
        (row("MRC fraction at 1 percent loss", "64 GPUs"), "needs --simulate"),
    ],
)
def test_reasons(one: Row, reason: str) -> None:
    found = tried(one)
    assert found.status == "not attempted"
    assert found.note.startswith(reason)


def test_the_largest_message_of_a_pair() -> None:
    found = tried(row("largest payload still using Ring LL", "8x H200 all-reduce", unit="MiB"))
    assert (found.ours, found.within) == (1.0, True)
    assert "then NVLS Simple" in found.note


def test_a_logged_algorithm_must_be_the_picked_one() -> None:
    default = "all-reduce busbw default"
    assert tried(row(default, "8x H200 8 GiB, algo NVLS", 476, "GB/s")).within is True
    other = tried(row(default, "8x H200 8 GiB, algo Tree", 475.6, "GB/s"))
    assert (other.within, other.note) == (False, "NCCL's model, no fit: NVLS Simple, but Tree was logged")
    assert tried(row("all-reduce busbw NVLS off", "8x H200 8 GiB", 360, "GB/s")).ours == pytest.approx(360, abs=1)
    assert tried(row("NVL72 all-reduce busbw no SHARP", "a slide", 680, "GB/s")).ours == pytest.approx(705, abs=1)


def series(rates: dict[str, float]) -> list[Row]:
    return [row("all-reduce busbw", f"2 nodes x 8 H100 {size} 8x400G", rate, "GB/s") for size, rate in rates.items()]


def test_a_series_is_fitted_on_its_ends_and_judged_between() -> None:
    rows = series({"1MiB": 5.0, "16MiB": 100.0, "256MiB": 300.0, "1GiB": 500.0, "4GiB": 400.0})
    found = [tried(one, *rows) for one in rows]
    assert [one.status for one in found] == ["not attempted", "calibrated", "reproduced", "reproduced", "calibrated"]
    assert found[2].note == "fitted on 16 MiB and 4 GiB"
    # A + W + 0.4 √(A W) over B through both ends by hand, W in 16 MiB: 63 a² + 19.2 a = 192, a = √A = 1.6, B = 420 GB/s
    assert found[2].ours == pytest.approx(16 * 420 / (1.6**2 + 16 + 0.4 * 1.6 * 4))
    assert [one.within for one in found[2:4]] == [True, False]


def test_a_held_out_value_does_not_move_its_own_prediction() -> None:
    before, after = (
        [tried(one, *rows).ours for one in rows]
        for rows in (series({"16MiB": 100.0, "256MiB": rate, "4GiB": 400.0}) for rate in (300.0, 30.0))
    )
    assert before == after


def test_two_sizes_are_no_series() -> None:
    rows = series({"16MiB": 100.0, "4GiB": 400.0})
    assert tried(rows[1], *rows).note.startswith("NCCL's model, no fit")


def test_rows_computed_by_a_model_are_no_series() -> None:
    words = ("16 MiB", "256 MiB", "16 GiB")
    rows = [row("all-reduce busbw", f"4x8 B200 {size}", 9.0, "GB/s", "computed from NCCL") for size in words]
    assert {tried(one, *rows).note for one in rows} == {"NCCL's model, no fit: NVLSTree Simple"}


def test_the_busiest_link_of_a_sprayed_fabric_against_drawing() -> None:
    random = np.random.default_rng(1)
    # 16 T0s with 8 uplinks, both ways: 32 groups of 8 links, each with 8 hosts x 8 entropy values
    drawn = random.multinomial(64, np.full(8, 1 / 8), size=(4000, 32)).max(axis=(1, 2)).mean() / 8
    found = tried(row("worst T0-T1 link load, oblivious spray", "8 EVs per QP over 1 planes, 128-host, 16-port", drawn))
    assert found.ours == pytest.approx(drawn, rel=0.02)


def test_small_fluid_and_packet_runs() -> None:
    mean = tried(row("max-min mean rate per NIC, 1 path per flow", "1024 hosts, 32x32 leaf-spine", 0.52))
    assert (mean.status, mean.within) == ("reproduced", True)
    alone = tried(row("tail FCT", "x -tm y/one.cm -sender_cc_only", 176.2, "us"), simulate=True)
    assert (alone.status, alone.within) == ("reproduced", True)
    assert alone.ours == pytest.approx(176.2, abs=0.5)


def test_counts_by_source_and_the_page() -> None:
    rows = [
        row("NVLS efficiency", "Hopper", 0.85, "ratio", source="nccl"),
        row("hosts under one T0", "512x100G, 1:1", 300, "NICs", source="paper"),
        row("hosts under one T0", "512x100G, 1:1", 256, "NICs", source="paper"),
        row("shoe size", source="paper"),
    ]
    seen: list[tuple[int, int]] = []
    done = validate(rows, progress=lambda at, of: seen.append((at, of)))
    whole = done.total
    assert (whole.rows, whole.reproduced, whole.within, whole.calibrated, whole.not_attempted) == (4, 2, 1, 1, 1)
    assert [one.source for one in done.sources] == ["nccl", "paper"]
    assert done.sources[1].worst_error == pytest.approx(1 - 256 / 300)
    assert seen[-1] == (4, 4)
    page = text(done)
    assert "300 NICs  256  -14.7 %  reproduced, outside ±0.1 %: fabric/sizing" in page
    assert "4 rows: 2 reproduced (1 within their tolerance), 1 calibrated" in page


def test_interrupted_it_keeps_what_was_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row("NVLS efficiency", "Hopper"), row("NVLS efficiency", "Blackwell")]
    real = attempt

    def stops(one: Row, context: Context) -> Outcome:
        if one is rows[1]:
            raise KeyboardInterrupt
        return real(one, context)

    monkeypatch.setattr(validation, "attempt", stops)
    assert [one.note for one in validate(rows).outcomes][1:] == ["interrupted"]
    assert card([]).total.rows == 0


QUANTITIES = [
    *sorted({quantity for quantity, _, _ in ARITHMETIC}),
    "all-reduce busbw default",
    "ring first beats tree",
    "tree LL latency",
    "largest payload still using Ring LL",
    "worst T0-T1 link load, oblivious spray",
    "treeCorrectionFactor LL",
    "per-channel Tree Simple",
    "tail FCT",
    "MRC fraction at 1 percent loss",
]
WORDS = ["8", "0", "1", "512", "10000000", "x", "-", ",", " ", "planes", "hosts", "tiers", "port", "G", "ranks", "B200"]
WORDS += [
    "nodes",
    "per node",
    "GiB",
    "units per link",
    "links",
    "EVs per QP",
    "bytes",
    "Hopper",
    "algo",
    "N=",
    ".",
    "GPUs",
]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(QUANTITIES), st.lists(st.sampled_from(WORDS), max_size=12))
def test_no_words_make_it_fail(quantity: str, words: list[str]) -> None:
    found = tried(row(quantity, "".join(words), unit="GB/s"))
    assert found.status in ("reproduced", "calibrated", "not attempted")
    assert found.note
