"""The pick is the least sum of price, power and GPU-hours, and its numbers follow from the bill and the budget."""

from __future__ import annotations

import math

import pytest

from phalanx.errors import UserError
from phalanx.network.fabric.design import DesignRequest, design_fabrics, nominal_ratio
from phalanx.network.fabric.design_verdict import Prices, check_prices, choose_design, show_verdict
from phalanx.network.fabric.failure_budget import failure_budget

FULL = design_fabrics(DesignRequest(gpus=131072, nic_gbps=800))


def test_the_published_fabric_is_the_pick_at_131072() -> None:
    found = choose_design(FULL)
    assert found is not None
    assert (found.pick.design.fabric.planes, found.pick.design.fabric.tiers) == (8, 2)
    totals = [one.economics.total_usd for one in found.options if nominal_ratio(one.design.fabric) == 1]
    assert found.pick.economics.total_usd == min(totals)


def test_its_dollars_by_hand() -> None:
    prices = Prices(gpu_hour_usd=2.0, kwh_usd=0.1, years=5)
    found = choose_design(FULL, prices)
    assert found is not None
    one, costs = found.pick.design, found.pick.economics
    assert one.bill.usd is not None
    assert one.bill.watts is not None
    assert costs.usd == sum(one.bill.usd) / 2
    assert costs.usd_per_gpu == costs.usd / 131072
    assert costs.power_usd_per_year == pytest.approx(one.bill.watts / 1000 * 8766 * 0.1)
    failures = failure_budget(one.fabric)
    assert costs.lost_usd_per_day == pytest.approx(2 * failures.edge.lost_gpu_hours_per_day)
    assert costs.whole_usd_per_day == pytest.approx(2 * failures.edge_whole.lost_gpu_hours_per_day)
    assert costs.conventional_usd_per_day == pytest.approx(2 * failures.conventional.lost_gpu_hours_per_day)
    assert costs.restart_usd_per_day == pytest.approx(2 * failures.restart[0].lost_gpu_hours_per_day)
    total = costs.usd + 5 * costs.power_usd_per_year + 5 * 365.25 * costs.lost_usd_per_day
    assert costs.total_usd == pytest.approx(total)


def test_a_job_that_never_waits_loses_less_and_both_readings_of_a_cable_are_told() -> None:
    calm, busy = (choose_design(FULL, Prices(waits=waits)) for waits in (0.0, 1.0))
    assert calm is not None
    assert busy is not None
    assert calm.pick.economics.lost_gpu_hours_per_day < busy.pick.economics.lost_gpu_hours_per_day / 10
    said = " ".join(show_verdict(calm).split())
    assert "if a failed cable takes all planes of its NIC), " in said
    assert "a step waits for the network 0% of its time" in said


def test_one_plane_pays_for_its_restarts() -> None:
    found = choose_design(FULL)
    assert found is not None
    flat = found.role("one plane")
    assert flat is not None
    # each failure of a NIC's cable restarts the job (10 minutes), and of a T0 after the 6 minutes of waiting for it
    rates = {part.part: part.failures_per_day for part in failure_budget(flat.design.fabric).parts}
    lost_s = 600 * rates["NIC-T0 cables"] + 960 * rates["T0 switches"]
    assert flat.economics.lost_gpu_hours_per_day == pytest.approx(lost_s * 131072 / 3600, rel=0.01)
    dear = choose_design(FULL, Prices(gpu_hour_usd=100.0))
    assert dear is not None
    assert dear.pick.design.fabric.planes > 1


def test_a_slow_step_outweighs_a_cheap_fabric_and_a_harmless_one_does_not() -> None:
    two = next(one for one in FULL if nominal_ratio(one.fabric) == 2)
    full = FULL[0]
    harmless = choose_design(FULL, steps_s={full.fabric: 6.0, two.fabric: 6.001})
    harmful = choose_design(FULL, steps_s={full.fabric: 6.0, two.fabric: 8.0})
    assert harmless is not None
    assert harmful is not None
    assert harmless.pick.design is two
    assert harmful.pick.design is full
    slow = next(one for one in harmful.options if one.design is two)
    assert slow.economics.slower_usd_per_day == pytest.approx(0.25 * 131072 * 24 * 3.25)
    assert "slower steps" in show_verdict(harmful)


def test_nothing_with_a_price_is_no_verdict() -> None:
    assert choose_design(design_fabrics(DesignRequest(gpus=64, nic_gbps=400, switch="96x400G"))) is None


def test_the_page_names_pick_price_and_loss() -> None:
    found = choose_design(FULL)
    assert found is not None
    page = show_verdict(found)
    assert page.startswith("Take 8 planes in 2 tiers of Spectrum-5 512x100G: 6,144 switches, $897M-2.31B")
    assert "86,527 where routing converges in 10.0 s and a lost NIC link" in page.replace("\n", " ")
    assert max(map(len, page.splitlines()[:5])) <= 119


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, 1e9])
def test_prices_that_are_none(bad: float) -> None:
    for prices in (Prices(gpu_hour_usd=bad), Prices(kwh_usd=bad), Prices(years=bad)):
        with pytest.raises(UserError, match="is out of range"):
            check_prices(prices, where="x")


def test_it_says_when_prices_decide() -> None:
    steady = choose_design(design_fabrics(DesignRequest(gpus=1000, nic_gbps=400, switch="Tomahawk 5")))
    torn = choose_design(design_fabrics(DesignRequest(gpus=1000, nic_gbps=400)))
    assert steady is not None
    assert torn is not None
    assert "The choice is the same at the low" in show_verdict(steady).replace("\n", " ")
    # a Quantum-2 is 36 to 50 thousand dollars, a 51.2T box 50 to 250
    assert torn.at_low.switch.box != torn.at_high.switch.box == "Quantum-2"
    assert "Prices decide: it would be" in show_verdict(torn).replace("\n", " ")
