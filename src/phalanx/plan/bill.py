"""Cost, energy and carbon of a run."""

from __future__ import annotations

import csv
import functools
import io
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.errors import UserError, mistake, nearest
from phalanx.hardware.catalog import data_text
from phalanx.hardware.cluster_defaults import usual_power_w_per_device
from phalanx.hardware.types import Cluster
from phalanx.job.run_sections import CostSettings
from phalanx.units import HOUR_S


@dataclass(frozen=True, kw_only=True, slots=True)
class Bill:
    """The cost of the whole run, including spare hosts; None means unknown.

    `usd` is (low, middle, high): the lowest price over the low end of the 80 % interval of the run's time, the middle
    of both, the highest price over the high end. `kwh_interval` reflects the interval of the time alone.
    """

    device_hours: float
    usd_per_device_hour: tuple[float, float, float] | None
    usd: tuple[float, float, float] | None
    price_source: str
    watts_per_device: float | None
    power_source: str
    pue: float
    pue_source: str
    kwh: float | None
    kwh_interval: tuple[float, float] | None
    grid_gco2_per_kwh: float
    grid_source: str
    kgco2e: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class GridRegion:
    """One row of the table of grid regions."""

    name: str
    gco2_per_kwh: float
    pue: float  # 0 when the source states none


def run_bill(
    cluster: Cluster,
    *,
    cost: CostSettings,
    wall_s: float,
    spares: int,
    devices: int,
    wall_interval_s: tuple[float, float] | None = None,
    where: str = "job",
) -> Bill:
    """Return the cost of `devices` devices and the spare hosts over `wall_s` seconds and over its interval."""
    low_s, high_s = wall_interval_s or (wall_s, wall_s)
    low_h, hours, high_h = low_s / HOUR_S, wall_s / HOUR_S, high_s / HOUR_S
    price, price_source = _hour_price(cluster, cost)
    rented_devices = devices + spares * cluster.host_devices
    region = _region_named(cost.region, where) if cost.region else None
    pue, pue_source = _pue_with_source(cluster, cost, region)
    grid, grid_source = _grid_carbon(cluster, cost, region)
    watts, power_source = _device_power(cluster)
    kw = devices * watts / 1000 * pue if watts else None
    return Bill(
        device_hours=devices * hours,
        usd_per_device_hour=price,
        usd=(price[0] * rented_devices * low_h, price[1] * rented_devices * hours, price[2] * rented_devices * high_h)
        if price
        else None,
        price_source=price_source,
        watts_per_device=watts,
        power_source=power_source,
        pue=pue,
        pue_source=pue_source,
        kwh=kw * hours if kw else None,
        kwh_interval=(kw * low_h, kw * high_h) if kw else None,
        grid_gco2_per_kwh=grid,
        grid_source=grid_source,
        kgco2e=kw * hours * grid / 1000 if kw else None,
    )


def _device_power(cluster: Cluster) -> tuple[float | None, str]:
    watts = usual_power_w_per_device(cluster)
    if not watts:
        return None, "unknown: set power_w_per_device in a cluster file"
    if cluster.power_w_per_device:
        return watts, "given for the cluster"
    if cluster.accelerator.family == "cpu":
        return watts, "share of a CPU's 350 W over 56 cores, Xeon 8480+ datasheet; without the rest of the server"
    return watts, "TDP × 856/700: H100 servers at the wall, MLPerf training v4.0"


def _hour_price(cluster: Cluster, cost: CostSettings) -> tuple[tuple[float, float, float] | None, str]:
    if cost.usd_per_device_hour is not None:
        price = cost.usd_per_device_hour
        return (price, price, price), "job, cost.usd_per_device_hour"
    if cluster.price_usd_per_device_hour is None:
        return None, f"no price is known for {cluster.accelerator.name}; set cost.usd_per_device_hour"
    return cluster.price_usd_per_device_hour, "cheapest, median and most expensive cloud, skypilot-catalog 2026-08-22"


def _pue_with_source(cluster: Cluster, cost: CostSettings, region: GridRegion | None) -> tuple[float, str]:
    if cost.pue is not None:
        return cost.pue, "job, cost.pue"
    if region is not None and region.pue:
        return region.pue, f"{region.name}, mlco2/impact"
    if cluster.pue:
        return cluster.pue, "given for the cluster"
    usual_pue = statistics.median(region.pue for region in grid_regions().values() if region.pue)
    return usual_pue, "median of the cloud regions in mlco2/impact that state one"


def _grid_carbon(cluster: Cluster, cost: CostSettings, region: GridRegion | None) -> tuple[float, str]:
    if cost.grid_gco2_per_kwh is not None:
        return cost.grid_gco2_per_kwh, "job, cost.grid_gco2_per_kwh"
    if region is not None:
        return region.gco2_per_kwh, f"{region.name}, mlco2/impact"
    if cluster.grid_gco2_per_kwh:
        return cluster.grid_gco2_per_kwh, "given for the cluster"
    usual = statistics.median(region.gco2_per_kwh for region in grid_regions().values())
    return usual, f"median of {len(grid_regions())} cloud regions, mlco2/impact 2019-2021"


@functools.cache
def grid_regions() -> Mapping[str, GridRegion]:
    """Return the grid regions by their short name, such as `us-east-1`."""
    regions = {}
    for row in csv.DictReader(io.StringIO(data_text("price_power.csv"))):
        if row["kind"] == "grid_gco2_per_kwh":
            short = row["item"].split()[0]
            pue = float(row["value_median_or_pue"] or 0.0)
            regions[short] = GridRegion(name=row["item"], gco2_per_kwh=float(row["value_min_or_mean"]), pue=pue)
    return regions


def _region_named(name: str, where: str) -> GridRegion:
    regions = {key.lower(): region for key, region in grid_regions().items()} | {
        region.name.lower(): region for region in grid_regions().values()
    }
    if name.lower() in regions:
        return regions[name.lower()]
    raise _unknown_region(name, where)


def _unknown_region(name: str, where: str) -> UserError:
    suggestion = nearest(name, grid_regions())
    region_names = ", ".join(sorted(grid_regions()))
    return mistake(
        where,
        f'cost.region = "{name}" is not in the grid table',
        why="the carbon footprint of a kWh depends on where it is generated",
        fix=(f'did you mean "{suggestion}"? ' if suggestion else "")
        + f"known: {region_names}; or set cost.grid_gco2_per_kwh",
    )
