"""Training over slow links as arithmetic: exchanges, utilisation, the smallest H, and what others measured."""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.job.sync_section import CODECS, SyncSettings
from phalanx.network.slow_codecs import encoded_bytes
from phalanx.peers.attempt import SEGMENT_BYTES
from phalanx.plan.loss_penalty import expected_penalty, measured_penalties
from phalanx.plan.slow_exchange import PAYLOAD_SHARE, PIECE_BYTES, PeerLink, connection_rate, exchange_time
from phalanx.plan.slow_modes import SitePace, predict_mode, smallest_inner_steps

MBIT = 1e6 / 8
VALUES = 370_000  # 1.48 MB in fp32: the payload of our measurement


def peers(*mbit_s: float, step_s: float | Sequence[float] = 0.1, **link: float | bool) -> list[SitePace]:
    steps = [step_s] * len(mbit_s) if isinstance(step_s, float) else step_s
    return [
        SitePace(
            name=f"p{index}",
            devices=1,
            step_s=spent,
            tokens_per_step=1000.0,
            link=PeerLink(name=f"p{index}", bytes_per_s=speed * MBIT, **link),  # type: ignore[arg-type]
        )
        for index, (speed, spent) in enumerate(zip(mbit_s, steps, strict=True))
    ]


@pytest.mark.parametrize(
    ("sync", "measured"),
    [
        (SyncSettings(), 0.138),
        (SyncSettings(mode="diloco", inner_steps=20), 0.746),
        (SyncSettings(mode="diloco", inner_steps=20, codec="int8"), 0.893),
    ],
)
def test_utilisation_is_within_five_points_of_what_was_measured(sync: SyncSettings, measured: float) -> None:
    """Two ranks, gloo over a 20 Mbit/s tbf link, 1.48 MB, 0.1 s of compute per step."""
    assert predict_mode(peers(20, 20), VALUES, sync).utilisation == pytest.approx(measured, abs=0.05)


@pytest.mark.parametrize("count", [2, 4, 8, 16])
def test_sparse_updates_of_any_group_take_a_thousandth_of_the_bytes(count: int) -> None:
    """Of fp32 gradients at every step, per step and peer: with more peers each sends fewer values."""
    sites = peers(*[20.0] * count)
    sparse = SyncSettings(mode="diloco", peers=count, inner_steps=20, codec="topk-2bit")
    each_step = predict_mode(sites, 4096.0 * 500, SyncSettings(mode="target-batch", peers=count)).bytes_per_step
    assert each_step >= 1000 * predict_mode(sites, 4096.0 * 500, sparse).bytes_per_step


@settings(max_examples=30)
@given(st.lists(st.floats(1, 100), min_size=3, max_size=4), st.integers(0, 2))
def test_no_division_of_the_vector_is_faster_than_the_chosen_one(rates: list[float], clients: int) -> None:
    links = [
        PeerLink(name=str(index), bytes_per_s=rate, client_only=index < min(clients, len(rates) - 1))
        for index, rate in enumerate(rates)
    ]
    found = exchange_time(links, 1000.0, round_trips=0)
    assert sum(found.shares) == pytest.approx(1.0)
    grid = [part / 6 for part in range(7)]
    for division in itertools.product(grid, repeat=len(rates)):
        hidden = any(link.client_only and part for link, part in zip(links, division, strict=True))
        if abs(sum(division) - 1) > 1e-9 or hidden:
            continue
        moved = [1000.0 * (1 + (len(rates) - 2) * part) for part in division]
        other = max(size / (rate * PAYLOAD_SHARE) for size, rate in zip(moved, rates, strict=True))
        assert found.transfer_s <= other * (1 + 1e-9)


def test_unequal_links_gain_half_over_equal_shares() -> None:
    links = [one.link for one in peers(80, 10, 10, 10)]
    shared, equal = (exchange_time(links, 1e6, round_trips=0, equal_shares=same) for same in (False, True))
    assert equal.transfer_s / shared.transfer_s == pytest.approx(1.5)
    assert shared.shares == (1.0, 0.0, 0.0, 0.0)


def test_loss_limits_a_connection_as_mathis_says_unless_it_is_bbr() -> None:
    """1.22 segments of 1,448 bytes per round trip of 100 ms, over sqrt(0.01)."""
    assert connection_rate(0.1, 0.01) == pytest.approx(1448 / 0.1 * math.sqrt(1.5) / 0.1)
    links = [one.link for one in peers(20, 20, latency_s=0.1)]
    lossy = [replace(one, loss=0.01) for one in links]
    brave = [replace(one, congestion="bbr") for one in lossy]
    clean, slowed, through = (exchange_time(ends, 1e6, round_trips=3) for ends in (links, lossy, brave))
    assert (clean.limited_by, slowed.limited_by) == ("latency", "packet loss")
    assert slowed.transfer_s == pytest.approx(1e6 / connection_rate(0.1, 0.01))
    assert through.transfer_s == clean.transfer_s < slowed.transfer_s
    assert through.latency_s < clean.latency_s  # no slow start after idle times


@pytest.mark.parametrize(
    ("congestion", "step_s", "sync", "measured"),
    [
        ("bbr", 0.105, SyncSettings(mode="target-batch"), 0.111),
        ("bbr", 0.1, SyncSettings(mode="diloco", inner_steps=20), 0.702),
        ("bbr", 0.101, SyncSettings(mode="diloco", inner_steps=20, codec="int8"), 0.854),
        ("cubic", 0.516, SyncSettings(mode="target-batch"), 0.048),
    ],
)
def test_latency_and_loss_are_within_five_points_of_what_was_measured(
    congestion: str, step_s: float, sync: SyncSettings, measured: float
) -> None:
    """100 ms and 1 % loss (benchmarks/2026-11-18-slow-links.md; reno: 2026-11-17-slow-links.md)."""
    values = 354_000
    sites = peers(20, 20, step_s=step_s, latency_s=0.1, loss=0.01, congestion=congestion)  # type: ignore[arg-type]
    assert predict_mode(sites, values, sync).utilisation == pytest.approx(measured, abs=0.05)


def test_the_pieces_are_those_of_the_peers() -> None:
    assert SEGMENT_BYTES == PIECE_BYTES


@pytest.mark.parametrize("codec", CODECS)
def test_the_smallest_h_reaches_the_target_and_one_less_does_not(codec: str) -> None:
    sites, sync = peers(20, 20), SyncSettings(mode="diloco", codec=codec)
    steps = smallest_inner_steps(sites, VALUES, sync)
    assert steps is not None
    assert predict_mode(sites, VALUES, replace(sync, inner_steps=steps)).utilisation >= 0.9
    assert steps == 1 or predict_mode(sites, VALUES, replace(sync, inner_steps=steps - 1)).utilisation < 0.9


def test_no_h_makes_up_for_a_site_of_half_the_speed() -> None:
    sites = peers(20, 20, step_s=[0.1, 0.2])
    assert smallest_inner_steps(sites, VALUES, SyncSettings(mode="diloco")) is None
    uses = predict_mode(sites, VALUES, SyncSettings(mode="diloco", inner_steps=10_000)).sites
    assert [round(use.utilisation, 2) for use in uses] == [0.5, 1.0]


def test_a_batch_dealt_by_pace_keeps_a_fast_site_busy() -> None:
    sites = peers(1e6, 1e6, step_s=[0.1, 0.3])
    found = predict_mode(sites, VALUES, SyncSettings(mode="target-batch"))
    assert [round(use.utilisation, 2) for use in found.sites] == pytest.approx([1.0, 1.0], abs=0.1)
    assert found.step_s < 0.16  # 2 parts at 10 and 3.3 a second; dealt alike it is 0.3 s
    assert predict_mode(sites, VALUES, SyncSettings(mode="every-step")).step_s > 0.3


def test_a_quorum_does_not_wait_for_the_slow_site() -> None:
    sites = peers(20, 20, 20, step_s=[0.1, 0.1, 1.0])
    sync = SyncSettings(mode="quorum", inner_steps=50, quorum=2, grace_s=1.5)
    waiting, partial = (predict_mode(sites, VALUES, replace(sync, quorum=count)) for count in (0, 2))
    assert waiting.step_s > 1.0 > partial.step_s
    # 5 s for 50 steps of the quorum, in which the slow site takes 5 steps and brings them.
    assert [
        round(use.utilisation * partial.step_s * 50 / site.step_s)
        for use, site in zip(partial.sites, sites, strict=True)
    ] == [50, 50, 5]


def test_who_misses_the_grace_is_dropped_or_counted_later() -> None:
    sites = peers(20, 20, 20, step_s=[0.1, 0.1, 9.0])
    sync = SyncSettings(mode="quorum", inner_steps=50, quorum=2, grace_s=1.0)
    dropped, counted = (predict_mode(sites, VALUES, replace(sync, late=late)) for late in ("drop", "count"))
    assert [use.counted for use in dropped.sites] == [True, True, False]
    assert counted.tokens_per_s > dropped.tokens_per_s


def test_delay_hides_the_exchange_up_to_what_the_link_can_carry() -> None:
    sites, sync = peers(20, 20), SyncSettings(mode="diloco", inner_steps=20, codec="fp32")
    plain, delayed = (predict_mode(sites, VALUES, replace(sync, delay_steps=steps)) for steps in (0, 10))
    assert delayed.exposed_s == 0 < plain.exposed_s
    assert (delayed.utilisation, delayed.limited_by) == (1.0, "compute")
    # Ten times the model: 6.5 s of bytes for 2 s of compute, whatever the delay.
    full = predict_mode(sites, 10 * VALUES, replace(sync, delay_steps=19))
    assert full.utilisation < 0.35
    streamed = predict_mode(sites, VALUES, replace(sync, fragments=4, delay_steps=2))
    assert plain.utilisation < streamed.utilisation <= 1.0


def test_bytes_per_step_are_the_codecs_and_fall_with_h() -> None:
    sites = peers(20, 20)
    step = predict_mode(sites, VALUES, SyncSettings()).bytes_per_step
    both = predict_mode(sites, VALUES, SyncSettings(mode="diloco", inner_steps=20, codec="int8")).bytes_per_step
    assert step == encoded_bytes("fp32", VALUES)
    assert step / both == pytest.approx(78.8, rel=0.01)


def test_every_number_of_a_penalty_stands_on_the_page_that_it_names() -> None:
    root = Path(__file__).parents[2]
    for table in tomllib.loads((root / "src/phalanx/plan/loss_penalty.toml").read_text())["table"]:
        page = (root / table["page"]).read_text()
        for nats in [table["synchronous"], table.get("moved", []), *(row["nats"] for row in table["rows"])]:
            assert len(nats) <= len(table["synchronous"])
            assert [f"{one:.4f}" for one in nats if f"{one:.4f}" not in page] == []
    assert max(len(one.percents) for one in measured_penalties().values()) > 1
    assert "seeds" in str(measured_penalties()["updates", 20, "int8", True])


def test_penalties_are_those_of_our_table_or_somebodys_words() -> None:
    warm = expected_penalty(SyncSettings(mode="diloco", inner_steps=20), warm=True)
    cold = expected_penalty(SyncSettings(mode="diloco", inner_steps=50), warm=False)
    raw = expected_penalty(SyncSettings(mode="target-batch", codec="topk-2bit"), warm=False)
    tables = measured_penalties()
    known = [tables["updates", 20, "fp32", True], tables["updates", 50, "fp32", False]]
    known.append(tables["gradients", 1, "topk-2bit", False])
    for found, row in zip((warm, cold, raw), known, strict=True):
        assert found.percent == pytest.approx(sum(row.percents) / len(row.percents))
        assert found.source == str(row)
        assert (found.low, found.high, found.seeds) == (min(row.percents), max(row.percents), len(row.percents))
    assert (raw.percent or 0.0) > 20.0
    # A short run is not promised what a long one reached, and one below the shortest table gets that.
    short, shorter = (
        expected_penalty(SyncSettings(mode="diloco", inner_steps=20), warm=True, steps=20 * one) for one in (30, 3)
    )
    assert warm.percent is not None
    assert short.percent is not None
    assert short.percent > 1.0 > warm.percent
    assert "24 exchanges" in short.source
    assert "400 steps" in shorter.source
    for codec in CODECS:
        for steps in (1, 20, 500):
            for known in (True, False):
                sync = SyncSettings(mode="diloco", inner_steps=steps, codec=codec)
                assert expected_penalty(sync, warm=known).source
