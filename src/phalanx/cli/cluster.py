"""`phalanx cluster`: what there is to run on, this machine or a named cluster."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from phalanx.cli.options import add_json
from phalanx.cli.output import note, print_json, say
from phalanx.errors import UserError
from phalanx.hardware.catalog import accelerators, matmul_flops
from phalanx.hardware.cluster import render_cluster, resolve, to_dict
from phalanx.hardware.cluster_defaults import usual_power_w_per_device
from phalanx.hardware.discover import discover
from phalanx.hardware.local import machine_cluster
from phalanx.hardware.types import Accelerator, Cluster, Machine
from phalanx.units import GIB, format_bytes, format_flops, format_money, format_seconds, plural

Rows = list[tuple[str, str]]


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx cluster`."""
    parser.add_argument(
        "spec", nargs="?", default="local", metavar="SPEC", help="8xH100:16, H100:64, a .toml file, or local (default)"
    )
    add_json(parser)
    parser.add_argument("--toml", action="store_true", help="print a cluster file to edit")
    parser.add_argument("--list", action="store_true", help="list the accelerators Phalanx knows")
    parser.add_argument("--ranks", type=int, default=0, metavar="N", help="local: processes that share the cores")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="local: use this profile of phalanx probe")
    parser.add_argument(
        "--hardware", type=Path, action="append", default=[], metavar="FILE", help="more accelerators, .toml or .csv"
    )


def run(args: argparse.Namespace) -> int:
    """Print the machine or the cluster."""
    if args.list:
        return _list(accelerators(files=args.hardware), as_json=args.json)
    if args.spec.strip() != "local":
        _show(None, resolve(args.spec, files=args.hardware), args)
        return 0
    machine = discover()
    for text in machine.notes:
        note(f"note: {text}")
    try:
        cluster = machine_cluster(
            machine, environ=os.environ, profile=args.profile, ranks=args.ranks, files=args.hardware
        )
    except UserError as error:
        if not args.json and not args.toml:  # the machine is still worth seeing
            say(_table("machine", machine_rows(machine)))
        raise error
    _show(machine, cluster, args)
    return 0


def _show(machine: Machine | None, cluster: Cluster, args: argparse.Namespace) -> None:
    if args.json:
        print_json({"machine": machine, "cluster": to_dict(cluster)})
    elif args.toml:
        print(render_cluster(cluster), end="")
    else:
        if machine is not None:
            say(_table("machine", machine_rows(machine)), end="\n\n")
        say(_table(f"cluster {cluster.name}", cluster_rows(cluster)))


def _table(title: str, rows: Rows) -> str:
    width = max(len(label) for label, _ in rows)
    return "\n".join([title, *(f"  {label:<{width}}  {value}" for label, value in rows)])


def machine_rows(machine: Machine) -> Rows:
    """What discovery saw, one line per fact."""
    usable = f"{machine.usable_cores} of {plural(machine.cores, 'core')} usable"
    rows = [
        ("host", machine.hostname),
        ("cpu", f"{machine.cpu_model}, {machine.sockets} socket(s), {usable}, {machine.numa_nodes} NUMA node(s)"),
        ("memory", _gib(machine.memory_bytes)),
    ]
    for nic in machine.nics:
        speed = f"{format_bytes(nic.bytes_per_s)}/s" if nic.bytes_per_s else "speed unknown"
        rows.append((f"nic {nic.name}", f"{nic.kind}, {speed}{_numa(nic.numa_node)}"))
    for gpu in machine.gpus:
        links = f", {gpu.nvlinks} NVLinks {format_bytes(gpu.nvlink_bytes_per_s)}/s" if gpu.nvlinks > 0 else ""
        pcie = f", PCIe {format_bytes(gpu.pcie_bytes_per_s)}/s" if gpu.pcie_bytes_per_s else ""
        rows.append((f"gpu {gpu.index}", f"{gpu.name}, {_gib(gpu.memory_bytes)}{links}{pcie}{_numa(gpu.numa_node)}"))
    rows += [(f"path {path.first}-{path.second}", path.kind) for path in machine.gpu_paths]
    return rows if machine.gpus else [*rows, ("gpu", "none")]


def cluster_rows(cluster: Cluster) -> Rows:
    """The cluster as the planner sees it."""
    device = cluster.accelerator
    return [
        ("devices", f"{cluster.devices:,} x {device.name} ({device.vendor} {device.family})"),
        ("peak", _peaks(device)),
        ("best matmul", _matmul(cluster)),
        ("memory", f"{_gib(device.memory_bytes)} per device at {format_bytes(device.memory_bytes_per_s)}/s"),
        ("fast domain", _tier(cluster.domain_devices, device.link, cluster.link_bytes_per_s, cluster.link_latency_s)),
        ("network", _network(cluster)),
        (
            "hosts",
            f"{cluster.hosts:,} of {plural(cluster.host_devices, 'device')}, {_gib(cluster.host_memory_bytes)} each",
        ),
        ("failures", _failures(cluster)),
        ("price", _price(cluster)),
        ("power", _power(cluster)),
        ("disk", f"{format_bytes(cluster.disk_bytes_per_s)}/s per host" if cluster.disk_bytes_per_s else "not given"),
        ("source", cluster.source),
    ]


def _peaks(device: Accelerator) -> str:
    named = (
        ("bf16", device.peak_bf16_flops),
        ("fp8", device.peak_fp8_flops),
        ("fp4", device.peak_fp4_flops),
        ("fp32", device.peak_fp32_flops),
    )
    return ", ".join(f"{name} {format_flops(flops)}" for name, flops in named if flops)


def _matmul(cluster: Cluster) -> str:
    if cluster.matmul_flops:
        return f"{format_flops(cluster.matmul_flops)} measured here"
    device = cluster.accelerator
    flops = matmul_flops(device)
    kind = "published" if device.matmul_bf16_flops else "assumed from its family"
    return f"bf16 {format_flops(flops)} ({flops / device.peak_bf16_flops:.0%} of peak, {kind})"


def _tier(devices: int, link: str, speed: float, latency_s: float) -> str:
    if devices == 1:
        return "1 device"
    return (
        f"{plural(devices, 'device')} over {link}, {format_bytes(speed)}/s each way, {format_seconds(latency_s)} a step"
    )


def _network(cluster: Cluster) -> str:
    if cluster.domains == 1:
        return "none needed: one domain"
    gbps = cluster.nic_bytes_per_s * 8 / 1e9
    latency = format_seconds(cluster.nic_latency_s)
    return f"{plural(cluster.domains, 'domain')}, {gbps:,.4g} Gb/s per device each way, {latency} a step"


def _failures(cluster: Cluster) -> str:
    per_day = cluster.failures_per_host_day * cluster.hosts
    rate = f"{cluster.failures_per_host_day:.2g} per host and day"
    return f"{rate}: one every {format_seconds(86400 / per_day)}" if per_day else rate


def _price(cluster: Cluster) -> str:
    if cluster.price_usd_per_device_hour is None:
        return "unknown: give [cost] usd_per_device_hour in the job"
    low, middle, high = (format_money(usd) for usd in cluster.price_usd_per_device_hour)
    total = format_money(cluster.price_usd_per_device_hour[1] * cluster.devices)
    return f"{low} to {high} per device-hour, middle {middle}; the cluster {total}/h"


def _power(cluster: Cluster) -> str:
    watts = usual_power_w_per_device(cluster)
    if not watts:
        return "unknown: give power_w_per_device in a cluster file"
    assumed = "its share of the CPU's" if cluster.accelerator.family == "cpu" else "TDP and its share of the server"
    kind = "given" if cluster.power_w_per_device else assumed
    return f"{watts:,.0f} W per device ({kind}), {watts * cluster.devices / 1000:,.4g} kW in all"


def _list(devices: Sequence[Accelerator], *, as_json: bool) -> int:
    if as_json:
        print_json(devices)
        return 0
    head = ("name", "vendor", "family", "bf16 peak", "best matmul", "memory", "link", "domain", "TDP")
    say(_columns([head, *(_list_row(device) for device in devices)]))
    return 0


def _list_row(device: Accelerator) -> tuple[str, ...]:
    link = f"{device.link} {format_bytes(device.link_bytes_per_s)}/s" if device.link_bytes_per_s else device.link
    return (
        device.name,
        device.vendor,
        device.family,
        format_flops(device.peak_bf16_flops),
        f"{format_flops(matmul_flops(device))}{'' if device.matmul_bf16_flops else ' *'}",
        _gib(device.memory_bytes),
        link,
        str(device.domain_devices),
        f"{device.tdp_w:.0f} W" if device.tdp_w else "",
    )


def _columns(rows: Iterable[tuple[str, ...]]) -> str:
    table = list(rows)
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join([*lines, "* no published measurement: a fraction of peak taken from its family"])


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.4g} GiB"


def _numa(node: int) -> str:
    return f", NUMA node {node}" if node >= 0 else ""
