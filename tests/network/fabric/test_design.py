"""What fits is found, ordered and marked; what does not is refused with choices that then work."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import UserError
from phalanx.network.fabric.design import DesignRequest, design_fabrics, nominal_ratio
from phalanx.network.fabric.fabric_text import show_designs

FULL = DesignRequest(gpus=131072, nic_gbps=800)


def test_the_published_fabric_is_among_them_and_beaten_by_none() -> None:
    found = [one for one in design_fabrics(FULL) if one.fabric.switch.name == "Spectrum-5 512x100G"]
    one = next(one for one in found if one.fabric.oversubscription == 1 and one.fabric.rails == 1)
    assert (one.fabric.switches, one.fabric.tiers, one.fabric.planes) == (6144, 2, 8)
    assert one.pareto
    assert one.cable_failures_per_day == pytest.approx(4.92, abs=0.01)
    assert one.interruptions_per_day == pytest.approx(5.19, abs=0.01)


def test_full_bisection_first_then_by_cost_then_by_hops() -> None:
    keys = [(nominal_ratio(one.fabric), one.usd_middle, one.fabric.hops) for one in design_fabrics(FULL)]
    assert keys == sorted(keys)
    assert {ratio for ratio, _, _ in keys} == {1.0, 2.0, 4.0}


def test_a_starred_design_is_beaten_by_no_other() -> None:
    found = design_fabrics(FULL)

    def goals(index: int) -> tuple[float, ...]:
        one = found[index]
        watts = math.inf if one.bill.watts is None else one.bill.watts
        return one.usd_middle, one.fabric.hops, watts, nominal_ratio(one.fabric), one.loss.nic_link

    for mine, one in enumerate(found):
        beaten = any(
            goals(other) != goals(mine) and all(a <= b for a, b in zip(goals(other), goals(mine), strict=True))
            for other in range(len(found))
        )
        assert one.pareto is not beaten


def test_every_demand_is_kept() -> None:
    found = design_fabrics(DesignRequest(gpus=4096, nic_gbps=400, tiers=3, planes=2, oversubscription=2, rails=4))
    assert found
    for one in found:
        fabric = one.fabric
        assert (fabric.tiers, fabric.planes, fabric.rails, nominal_ratio(fabric)) == (3, 2, 4, 2)


def test_a_small_cluster_needs_one_switch_per_plane() -> None:
    best = design_fabrics(DesignRequest(gpus=64, nic_gbps=800))[0].fabric
    assert (best.tiers, best.switches_per_plane, best.rails, best.oversubscription) == (1, 1, 1, 1)


def test_a_million_gpus() -> None:
    assert {one.fabric.tiers for one in design_fabrics(DesignRequest(gpus=1_000_000, nic_gbps=800))} == {3, 4}


def test_two_tiers_of_tomahawk_5_stop_at_32768() -> None:
    wanted = DesignRequest(gpus=32768, nic_gbps=800, switch="Tomahawk 5", tiers=2, planes=4, oversubscription=1)
    assert design_fabrics(wanted)[0].fabric.switches == 4 * 384
    with pytest.raises(UserError) as error:
        design_fabrics(replace(wanted, gpus=131072))
    assert str(error.value) == (
        "phalanx fabric design: 131,072 GPUs do not fit: 2 tiers of Tomahawk 5 256x200G join at most 32,768\n"
        "  at full bisection it is 2·(256/2)^2 = 32,768\n"
        '  use --tiers 3 (Tomahawk 5 256x200G) or --switch "Tomahawk 6 512x200G" (4 planes, 2 tiers)'
    )


def test_the_nearest_choices_work() -> None:
    wanted = DesignRequest(gpus=131072, nic_gbps=800, switch="Tomahawk 5", tiers=2)
    with pytest.raises(UserError) as error:
        design_fabrics(wanted)
    tiers = re.search(r"--tiers (\d)", str(error.value))
    switch = re.search(r'--switch "([^"]+)"', str(error.value))
    assert tiers is not None
    assert switch is not None
    assert design_fabrics(replace(wanted, tiers=int(tiers[1])))
    assert design_fabrics(replace(wanted, switch=switch[1]))


def test_a_limit_on_logical_ports_is_named() -> None:
    with pytest.raises(UserError, match="512 lanes of 100G but only 320 logical ports"):
        design_fabrics(DesignRequest(gpus=131072, nic_gbps=800, switch="Tomahawk 5", tiers=2, planes=8))


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (DesignRequest(gpus=1024, nic_gbps=800, planes=3), "3 planes make ports of 266.667 Gb/s of a 800 Gb/s NIC"),
        (DesignRequest(gpus=1024, nic_gbps=800, planes=3), "use 1 or 2 or 4 or 8 planes"),
        (DesignRequest(gpus=1024, nic_gbps=333), "use --nic-gbps 400"),
        (DesignRequest(gpus=4096, nic_gbps=1e30), "no NIC has 1e+30 Gb/s"),
        (
            DesignRequest(gpus=4096, nic_gbps=102_400, switch="512x1G"),
            "a NIC of 102400 Gb/s is not a whole number of ports",
        ),
        (DesignRequest(gpus=10**12, nic_gbps=800), "use at most 1,000,000,000"),
        (DesignRequest(gpus=0, nic_gbps=800), "use 2 or more"),
        (DesignRequest(gpus=64, nic_gbps=800, rails=0), "0 rails"),
        (DesignRequest(gpus=5000, nic_gbps=400, switch="Quantum-X800"), "use --nic-gbps 800, or another --switch"),
        (
            DesignRequest(gpus=64, nic_gbps=800, switch="Tomahawk 5", tiers=1, oversubscription=2),
            "one tier has no uplinks",
        ),
    ],
)
def test_bad_requests(wanted: DesignRequest, words: str) -> None:
    with pytest.raises(UserError) as error:
        design_fabrics(wanted)
    assert words in str(error.value)


def test_the_table_merges_rails_that_make_no_difference() -> None:
    page = show_designs(design_fabrics(FULL), top=2)
    lines = [line for line in page.splitlines() if "Spectrum-5 512x100G" in line]
    assert re.search(r"\* +Spectrum-5 512x100G +8 +2 +none/8 +4,096 +2,048 +- +6,144 +262,144 +524,288", lines[0])
    assert "12.5%  0.39%" in lines[0]
    assert "more with --top" in page


def test_bare_ports_are_designed_without_a_price() -> None:
    (one,) = design_fabrics(DesignRequest(gpus=5000, nic_gbps=400, switch="96x400G", oversubscription=1, rails=1))
    assert one.bill.usd is None
    assert one.fabric.switch.name == "96x400G"
    assert "unknown" in show_designs([one], top=1)


@settings(deadline=None, max_examples=60)
@given(
    wanted=st.builds(
        DesignRequest,
        gpus=st.one_of(st.integers(-5, 5000), st.integers(-(10**13), 10**13)),
        nic_gbps=st.one_of(st.sampled_from([100.0, 400.0, 800.0, 1600.0]), st.floats()),
        switch=st.one_of(st.none(), st.sampled_from(["Tomahawk 5", "Quantum-2", "8x100G", "QM9700", "abacus", ""])),
        tiers=st.one_of(st.none(), st.integers(-1, 6)),
        planes=st.one_of(st.none(), st.integers(-1, 40), st.just(10**15)),
        oversubscription=st.one_of(st.none(), st.sampled_from([1.0, 2.0, 3.0]), st.floats()),
        rails=st.one_of(st.none(), st.integers(-1, 20), st.just(10**15)),
    )
)
def test_any_request_has_designs_or_a_user_error(wanted: DesignRequest) -> None:
    said = "phalanx fabric design: it fits\n  so build it"
    try:
        assert {one.fabric.hosts for one in design_fabrics(wanted)} == {wanted.gpus}
    except UserError as error:
        said = str(error)
    assert said.startswith("phalanx fabric design: ")
    assert "\n  " in said  # what to do
