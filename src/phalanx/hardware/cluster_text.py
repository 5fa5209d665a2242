"""A cluster as a page of text: devices, links, failures, price and power, each with its source."""

from __future__ import annotations

from phalanx.hardware.catalog import matmul_flops
from phalanx.hardware.cluster_defaults import usual_power_w_per_device
from phalanx.hardware.types import Accelerator, Cluster, Site
from phalanx.io.tables import text_table
from phalanx.units import GIB, HOUR_S, format_bytes, format_flops, format_money, format_seconds, plural

Rows = list[tuple[str, str]]


def cluster_page(cluster: Cluster) -> str:
    """Return the page that `phalanx cluster` prints."""
    if cluster.sites:
        head = ("site", "devices", "up", "down", "round trip", "loss", "stays", "")
        rows = [head, *(_site_row(site) for site in cluster.sites)]
        title = f"cluster {cluster.name}: {plural(len(cluster.sites), 'site')} joined by slow links"
        pages = {site.cluster.name: table_of(f"{site.name}: {site.cluster.name}", cluster_rows(site.cluster))
                 for site in reversed(cluster.sites)}  # fmt: skip
        return "\n\n".join(["\n".join([title, *text_table(rows, indent=2)]), *reversed(pages.values())])
    return table_of(f"cluster {cluster.name}", cluster_rows(cluster))


def _site_row(site: Site) -> tuple[str, ...]:
    stays = f"{site.session_s / HOUR_S:g} h, away {site.absence_s / HOUR_S:g} h" if site.session_s else "to the end"
    return (
        site.name,
        f"{site.cluster.devices:,} x {site.cluster.accelerator.name}",
        format_bit_rate(site.up_bytes_per_s),
        format_bit_rate(site.down_bytes_per_s),
        format_seconds(site.latency_s),
        f"{site.loss:.2%}" if site.loss else "none",
        stays,
        "accepts no connections" if site.client_only else "",
    )


def format_bit_rate(bytes_per_s: float) -> str:
    """Return a rate in bits per second, the unit in which links are sold.

    >>> format_bit_rate(2.5e6), format_bit_rate(1.25e9)
    ('20 Mbit/s', '10 Gbit/s')
    """
    mbit = bytes_per_s * 8 / 1e6
    return f"{mbit:,.4g} Mbit/s" if mbit < 1000 else f"{mbit / 1000:,.4g} Gbit/s"


def table_of(title: str, rows: Rows) -> str:
    """Return a title and labelled lines."""
    return "\n".join([title, *text_table(rows, indent=2)])


def cluster_rows(cluster: Cluster) -> Rows:
    """Return the rows of a cluster, as the planner sees it."""
    device = cluster.accelerator
    memory = format_gibibytes(cluster.host_memory_bytes)
    hosts = f"{cluster.hosts:,} of {plural(cluster.host_devices, 'device')}, {memory} each"
    per_day = cluster.failures_per_host_day * cluster.hosts
    rate = f"{cluster.failures_per_host_day:.2g} per host and day"
    failures_text = f"{rate}: one every {format_seconds(86400 / per_day)}" if per_day else rate
    return [
        ("devices", f"{cluster.devices:,} x {device.name} ({device.vendor} {device.family})"),
        ("peak", _peak_text(device)),
        ("best matmul", _matmul_text(cluster)),
        (
            "memory",
            f"{format_gibibytes(device.memory_bytes)} per device at {format_bytes(device.memory_bytes_per_s)}/s",
        ),
        ("fast domain", _domain_text(cluster)),
        ("network", _network_text(cluster)),
        ("hosts", hosts),
        ("failures", failures_text),
        ("price", _price_text(cluster)),
        ("power", _power_text(cluster)),
        ("disk", f"{format_bytes(cluster.disk_bytes_per_s)}/s per host" if cluster.disk_bytes_per_s else "not given"),
        ("source", cluster.source),
    ]


def _peak_text(device: Accelerator) -> str:
    rates = (
        ("bf16", device.peak_bf16_flops),
        ("fp8", device.peak_fp8_flops),
        ("fp4", device.peak_fp4_flops),
        ("fp32", device.peak_fp32_flops),
    )
    return ", ".join(f"{name} {format_flops(flops)}" for name, flops in rates if flops)


def _matmul_text(cluster: Cluster) -> str:
    if cluster.matmul_flops:
        return f"{format_flops(cluster.matmul_flops)} measured here"
    device = cluster.accelerator
    flops = matmul_flops(device)
    kind = "published" if device.matmul_bf16_flops else "assumed from its family"
    return f"bf16 {format_flops(flops)} ({flops / device.peak_bf16_flops:.0%} of peak, {kind})"


def _domain_text(cluster: Cluster) -> str:
    if cluster.domain_devices == 1:
        return "1 device"
    speed = f"{format_bytes(cluster.link_bytes_per_s)}/s each way, {format_seconds(cluster.link_latency_s)} a step"
    return f"{plural(cluster.domain_devices, 'device')} over {cluster.accelerator.link}, {speed}"


def _network_text(cluster: Cluster) -> str:
    if cluster.domains == 1:
        return "none needed: one domain"
    gbps = cluster.nic_bytes_per_s * 8 / 1e9
    latency = format_seconds(cluster.nic_latency_s)
    return f"{plural(cluster.domains, 'domain')}, {gbps:,.4g} Gb/s per device each way, {latency} a step"


def _price_text(cluster: Cluster) -> str:
    if cluster.price_usd_per_device_hour is None:
        return "unknown: give [cost] usd_per_device_hour in the job"
    low, middle, high = (format_money(usd) for usd in cluster.price_usd_per_device_hour)
    total = format_money(cluster.price_usd_per_device_hour[1] * cluster.devices)
    return f"{low} to {high} per device-hour, middle {middle}; the cluster {total}/h"


def _power_text(cluster: Cluster) -> str:
    watts = usual_power_w_per_device(cluster)
    if not watts:
        return "unknown: set power_w_per_device in a cluster file"
    assumption = "its share of the CPU's" if cluster.accelerator.family == "cpu" else "TDP and its share of the server"
    kind = "given" if cluster.power_w_per_device else assumption
    return f"{watts:,.0f} W per device ({kind}), {watts * cluster.devices / 1000:,.4g} kW in all"


def format_gibibytes(num_bytes: float) -> str:
    """Return a size in GiB, the unit in which memory is sold."""
    return f"{num_bytes / GIB:,.4g} GiB"
