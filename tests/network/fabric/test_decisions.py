"""The numbers of the three decisions at 131,072 GPUs, and that they move with what is chosen."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from phalanx.errors import UserError
from phalanx.network.fabric.decisions import decisions_of, fabric_decisions, harmonic_number, late_step
from phalanx.network.fabric.decisions_picture import decisions_svg
from phalanx.network.fabric.decisions_text import show_decisions
from phalanx.network.fabric.fabric_bill import failure_loss
from phalanx.network.fabric.fabric_file import parse_fabric

FULL = fabric_decisions(131072)


def test_planes() -> None:
    by_planes = {row.planes: row for row in FULL.planes}
    assert by_planes[8].most_hosts[0] == 131072
    assert by_planes[4].most_hosts[0] == 32768
    assert by_planes[1].most_hosts[1] == 65536
    assert (by_planes[8].tiers, by_planes[8].hops, by_planes[8].switches) == (2, 3, 6144)
    assert by_planes[1].tiers == 4
    assert by_planes[8].switches_per_host == 0.046875
    assert (FULL.switch_ratio, FULL.optics_ratio) == ("3/5", "2/3")


def test_loads() -> None:
    one, pairs, paths, packets = FULL.loads
    assert one.max_to_mean == pytest.approx(4.757, rel=0.01)
    assert pairs.max_to_mean == pytest.approx(1.774, rel=0.01)
    assert packets.max_to_mean == pytest.approx(1.044, rel=0.01)
    assert one.idle_share == pytest.approx(0.368, abs=1e-3)
    # one draw of 131,072 connections over 256 paths each found 1.91 on the worst of a million uplinks
    assert paths.worst_of_fabric == pytest.approx(1.906, rel=0.05)


@pytest.mark.parametrize(("paths", "worst"), [(128, 2.375), (2048, 1.332)])
def test_more_paths_are_more_even(paths: int, worst: float) -> None:
    assert fabric_decisions(131072, paths=paths).loads[2].worst_of_fabric == pytest.approx(worst, rel=0.05)


def test_lateness() -> None:
    assert FULL.slowest_to_mean == pytest.approx(12.36, abs=0.005)
    assert [round(row.step, 2) for row in FULL.late] == [0.01, 0.12, 0.73, 1.0]
    assert late_step(1.0 - 1e-12, 2) == pytest.approx(1)
    assert harmonic_number(999) == pytest.approx(harmonic_number(1000) - 1 / 1000, abs=1e-6)


def test_a_slower_recovery_never_costs_less() -> None:
    lost = [row.lost_gpu_hours_per_day for row in FULL.recoveries]
    assert lost == sorted(lost)
    assert [row.restarts for row in FULL.recoveries][-1]
    assert lost[-1] == pytest.approx(FULL.budget.failures_per_day * 600 / 3600 * 131072, rel=0.1)


def test_a_flap_that_outlasts_the_connections_is_a_restart_and_no_share() -> None:
    assert [row.flap_share is None for row in FULL.recoveries] == [row.restarts for row in FULL.recoveries]
    line = next(line for line in show_decisions(FULL).splitlines() if "give up" in line)
    assert line.split("  connections")[0].endswith(" restarts")


def test_a_fabric_has_its_own_row_with_its_own_numbers() -> None:
    fabric = parse_fabric("clos3:6144x400G/2p/64/3:1/8r")
    one = decisions_of(fabric)
    own, lost = one.own, failure_loss(fabric)
    assert own not in one.planes
    assert (own.switches, own.hosts_one_switch_away, own.lost_per_t0_t1_link) == (448, 48, lost.t0_t1_link)
    assert own.switches_per_host == 448 / 6144
    assert own.optics_per_host == pytest.approx(2 * (1 + 2 / 3))  # a third of the links above T0, twice
    assert one.counted_switch_ratio == 448 / one.planes[0].switches
    page = show_decisions(one)
    assert "\n  this " in page
    assert "clos3:6144x400G/2p/64/3:1/8r, as it stands" in page


@pytest.mark.parametrize("text", ["leaf-spine-1024", "mrc-131k", "clos2:100x400G/1p/64/wide"])
def test_its_row_is_what_show_says(text: str) -> None:
    fabric = parse_fabric(text)
    own = decisions_of(fabric).own
    assert (own.switches, own.hosts_one_switch_away, own.lost_per_t0_t1_link) == (
        fabric.switches,
        fabric.hosts_per_t0,
        1 / fabric.t0_up,
    )


def test_what_is_counted_stands_beside_the_formula() -> None:
    assert FULL.counted_switch_ratio == pytest.approx(3 / 7)  # one plane needs four tiers for 131,072
    assert FULL.counted_optics_ratio == pytest.approx(1 / 2)
    some = fabric_decisions(50000)
    mine, flat = some.own, some.planes[0]
    assert (mine.switches_per_host, flat.switches_per_host) == (mine.switches / 50000, flat.switches / 50000)
    assert mine.switches_per_host > mine.full_switches_per_host
    assert some.counted_switch_ratio == mine.switches / flat.switches
    assert f"{mine.switches:,} switches are 0.62" in show_decisions(some)


def test_a_comparison_with_itself_is_left_out() -> None:
    flat = show_decisions(fabric_decisions(60000, planes=1))
    assert "full, per host:" not in flat
    assert "as counted:" not in flat
    one = show_decisions(fabric_decisions(1000, planes=1))
    assert "one plane in 2 tiers has 3/5 of the switches and 2/3 of the optics of one plane in 3 tiers" in one
    same = show_decisions(fabric_decisions(20000, nic_gbps=400, box="Quantum-2"))
    assert "2 planes in 3 tiers have as many switches and optics per host as one plane in 3 tiers" in same


def test_more_hosts_than_the_widest_ports_reach() -> None:
    one = fabric_decisions(3_000_000)
    assert one.planes[0].tiers == 0
    assert one.counted_switch_ratio is None
    assert "one plane of 64 cannot reach 3,000,000" in show_decisions(one)


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_narrow_page(width: int) -> None:
    page = show_decisions(FULL, width=width)
    assert max(map(len, page.splitlines())) <= width
    for word in ("0.046875", "12.5%", "0.39%", f"{FULL.loads[0].worst_of_fabric:.2f}"):
        assert word in page


def test_planes_and_recovery_can_be_chosen() -> None:
    one = fabric_decisions(4096, nic_gbps=400, planes=2, paths=64, recovery_s=5.0, restart_s=90.0)
    assert (one.fabric.planes, one.fabric.port_gbps) == (2, 200)
    assert one.budget.restart[0].seconds_per_event == 90
    assert 5.0 in [row.recovery_s for row in one.recoveries]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"planes": 3}, "use one of 1, 2, 4, 8"),
        ({"paths": 0}, "0 paths per connection"),
        ({"recovery_s": -1.0}, "--recovery-s -1"),
        ({"restart_s": float("nan")}, "--restart-s nan"),
        ({"nic_gbps": 333.0}, "is not a whole number of ports of Spectrum-5"),
        ({"box": "Spektrum-5"}, "did you mean"),
    ],
)
def test_bad_choices(options: dict[str, object], words: str) -> None:
    with pytest.raises(UserError) as error:
        fabric_decisions(4096, **options)  # type: ignore[arg-type]
    assert words in str(error.value)


def test_more_than_four_tiers_can_join() -> None:
    with pytest.raises(UserError, match="join at most 33,554,432"):
        fabric_decisions(10**9, nic_gbps=400, box="Quantum-2")


def test_the_page_holds_the_three() -> None:
    page = show_decisions(FULL)
    for words in ("3/5 of the switches and 2/3 of the optics", "12.4 times the mean", "3.6% to 5.4% of the cluster"):
        assert words in page


@pytest.mark.parametrize("gpus", [2, 1000, 131072, 10**9])
def test_the_picture_is_well_formed_and_inside_its_frame(gpus: int) -> None:
    text = decisions_svg(fabric_decisions(gpus, recovery_s=0.0 if gpus == 2 else 10.0))
    root = ElementTree.fromstring(text)
    width, height = (float(part) for part in root.attrib["viewBox"].split()[2:])
    for element in root.iter():
        for name, limit in (("x", width), ("y", height), ("cx", width), ("cy", height)):
            if name in element.attrib:
                assert 0 <= float(element.attrib[name]) <= limit
    assert "prefers-color-scheme:dark" in text
    assert text.count("polyline") == 4
    assert f"{gpus:,} GPUs" in text
