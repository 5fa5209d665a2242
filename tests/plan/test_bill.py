from dataclasses import replace

import pytest

from phalanx.errors import UserError
from phalanx.hardware.cluster import resolve_cluster
from phalanx.job.run_sections import CostSettings
from phalanx.plan.bill import grid_regions, run_bill

HOUR = 3600.0


def charge(spec="8xH100:2", *, hours=10.0, spares=0, **cost):
    cluster = resolve_cluster(spec)
    return run_bill(cluster, cost=CostSettings(**cost), wall_s=hours * HOUR, spares=spares, devices=cluster.devices)


def test_money_is_devices_times_hours_times_price():
    made = charge(usd_per_device_hour=2.0)
    assert made.usd == (320.0, 320.0, 320.0)
    assert made.price_source == "job, cost.usd_per_device_hour"


def test_spare_hosts_are_paid_for():
    assert charge(usd_per_device_hour=2.0, spares=1).usd == (480.0, 480.0, 480.0)


def test_without_a_price_the_table_gives_a_range():
    low, middle, high = charge().usd
    assert low < middle < high
    assert "skypilot" in charge().price_source


def test_no_price_is_no_number():
    made = charge("local")
    assert made.usd is None
    assert "set cost.usd_per_device_hour" in made.price_source


def test_h100_servers_draw_what_mlperf_measured():
    made = charge(pue=1.0)
    assert made.watts_per_device == pytest.approx(856, abs=1)
    assert made.kwh == pytest.approx(16 * 0.856 * 10, rel=0.01)


def test_power_of_the_cluster_wins():
    cluster = replace(resolve_cluster("8xH100:2"), power_w_per_device=1000.0)
    made = run_bill(cluster, cost=CostSettings(pue=1.0), wall_s=HOUR, spares=0, devices=16)
    assert made.kwh == pytest.approx(16.0)
    assert made.power_source == "given for the cluster"


def test_unknown_power_is_no_number():
    cluster = resolve_cluster("8xH100:2")
    cluster = replace(cluster, accelerator=replace(cluster.accelerator, tdp_w=0.0))
    made = run_bill(cluster, cost=CostSettings(), wall_s=HOUR, spares=0, devices=16)
    assert (made.watts_per_device, made.kwh, made.kwh_interval, made.kgco2e) == (None, None, None, None)
    assert made.power_source == "unknown: set power_w_per_device in a cluster file"


def test_a_cpu_does_not_cite_gpu_servers():
    made = charge("CPU-core:2")
    assert made.watts_per_device == pytest.approx(350 / 56)
    assert "H100" not in made.power_source
    assert "Xeon" in made.power_source


def test_the_range_of_money_combines_price_and_time():
    cluster = resolve_cluster("8xH100:2")
    ends = {"cost": CostSettings(), "wall_s": 10 * HOUR, "spares": 0, "devices": 16}
    alone, both = run_bill(cluster, **ends), run_bill(cluster, **ends, wall_interval_s=(9 * HOUR, 12 * HOUR))
    assert both.usd == pytest.approx((0.9 * alone.usd[0], alone.usd[1], 1.2 * alone.usd[2]))
    assert both.kwh_interval == pytest.approx((0.9 * alone.kwh, 1.2 * alone.kwh))


def test_carbon_follows_the_region():
    sweden = charge(region="eu-north-1")
    assert sweden.grid_gco2_per_kwh == 47
    assert sweden.kgco2e == pytest.approx(sweden.kwh * 0.047)
    assert charge(region="us-central1 Iowa").pue == 1.11
    assert charge(region="eu-north-1", grid_gco2_per_kwh=100.0).grid_gco2_per_kwh == 100.0


def test_defaults_are_medians_with_a_source():
    made = charge()
    values = sorted(one.gco2_per_kwh for one in grid_regions().values())
    assert values[0] < made.grid_gco2_per_kwh < values[-1]
    assert made.pue == 1.1
    assert "median of 12 cloud regions" in made.grid_source


def test_unknown_region_names_the_nearest():
    with pytest.raises(UserError) as caught:
        charge(region="us-est-1")
    assert 'job: cost.region = "us-est-1" is not in the grid table' in str(caught.value)
    assert 'did you mean "us-east-1"?' in str(caught.value)
