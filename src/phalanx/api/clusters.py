"""Clusters to run on: this machine, a named cluster, the known accelerators, and measurements of this machine."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.api.results import PublicResult, Tell, teller
from phalanx.errors import Problem, SystemFailure, UserError, mistake
from phalanx.hardware.catalog import accelerators as known_accelerators
from phalanx.hardware.catalog import matmul_flops
from phalanx.hardware.cluster import resolve_cluster
from phalanx.hardware.cluster_text import cluster_page, format_gibibytes, table_of
from phalanx.hardware.discover import discover
from phalanx.hardware.probe import MAX_RANKS, NUMPY_WORKER, MachineProfile, save_profile, usual_path
from phalanx.hardware.probe import probe as measure
from phalanx.hardware.this_machine import machine_cluster
from phalanx.hardware.types import Accelerator, Cluster, Machine
from phalanx.io.codec import json_values
from phalanx.io.path_probes import is_folder
from phalanx.io.tables import text_table
from phalanx.units import format_bytes, format_flops, format_seconds, plural

# Run in a separate process: this one never imports torch.
TORCH_WORKER = "phalanx.train.torch_probe"
LEAST_S, MOST_S = 2.0, 600.0


def cluster(
    spec: str | Path = "local",
    *,
    ranks: int = 0,
    profile: str | Path | None = None,
    hardware: Sequence[str | Path] = (),
) -> Cluster:
    """Return the cluster of a spec, a file or `local`; `hardware` are files with more accelerators.

    `8xH100:16` is 16 fast domains of 8 devices, `H100:64` is 64 devices in domains as large as the device allows,
    `local:4` is 4 GPUs of this machine or 4 processes that share its cores. For `local`, `ranks` is the number of
    processes and `profile` a file of `probe`.

    >>> cluster("8xH100:16").devices
    128
    """
    files = tuple(Path(name) for name in hardware)
    if str(spec).strip() != "local":
        return resolve_cluster(spec, files=files)
    chosen = Path(profile) if profile is not None else None
    return machine_cluster(discover(), environ=os.environ, profile=chosen, ranks=ranks, files=files)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ClusterPage(PublicResult):
    """A cluster as the planner uses it and, for `local`, the machine behind it."""

    machine: Machine | None
    cluster: Cluster | None  # None if this machine makes no valid cluster; `problem` has the reason
    problem: UserError | None = None

    def __str__(self) -> str:
        pages = [table_of("machine", machine_rows(self.machine))] if self.machine is not None else []
        if self.cluster is not None:
            pages.append(cluster_page(self.cluster))
        return "\n\n".join(pages)

    def to_dict(self) -> dict[str, Any]:
        """Return machine and cluster."""
        return {"machine": json_values(self.machine), "cluster": json_values(self.cluster)}

    def to_toml(self) -> str:
        """Return the cluster as a file to edit."""
        from phalanx.hardware.cluster import render_cluster

        if self.cluster is None:
            raise self.problem or mistake("cluster", "there is none")
        return render_cluster(self.cluster)


def describe_cluster(
    spec: str | Path = "local",
    *,
    ranks: int = 0,
    profile: str | Path | None = None,
    hardware: Sequence[str | Path] = (),
) -> ClusterPage:
    """Return the cluster and, for `local`, the machine behind it, as `phalanx cluster` prints them.

    >>> page = describe_cluster("8xH100:4")
    >>> page.cluster
    <Cluster 8xH100-80GB-SXM:4: 32 devices>
    """
    machine = discover() if str(spec).strip() == "local" else None
    try:
        resolved_cluster = cluster(spec, ranks=ranks, profile=profile, hardware=hardware)
    except UserError as error:
        if machine is None:
            raise
        # The machine is still worth showing.
        return ClusterPage(machine=machine, cluster=None, problem=error)
    return ClusterPage(machine=machine, cluster=resolved_cluster)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class AcceleratorList(PublicResult):
    """The accelerators that Phalanx knows."""

    accelerators: tuple[Accelerator, ...]

    def __str__(self) -> str:
        head = ("name", "vendor", "family", "bf16 peak", "best matmul", "memory", "link", "domain", "TDP")
        table = [head, *(_accelerator_row(device) for device in self.accelerators)]
        return "\n".join([*text_table(table), "* no published measurement: a fraction of peak taken from its family"])

    def __repr__(self) -> str:
        return f"<AcceleratorList: {plural(len(self.accelerators), 'accelerator')}>"


def accelerators(*, hardware: Sequence[str | Path] = ()) -> AcceleratorList:
    """Return the accelerators that Phalanx knows, and those in the `hardware` files.

    >>> [device.name for device in accelerators().accelerators if "H100" in device.name][:2]
    ['H100-80GB-SXM', 'H100-96GB-500W']
    """
    known = known_accelerators(files=tuple(Path(name) for name in hardware))
    return AcceleratorList(accelerators=tuple(known))


def machine_rows(machine: Machine) -> list[tuple[str, str]]:
    """Return the facts about a machine, one row each."""
    usable = f"{machine.usable_cores} of {plural(machine.cores, 'core')} usable"
    sockets, nodes = plural(machine.sockets, "socket"), plural(machine.numa_nodes, "NUMA node")
    rows = [
        ("host", machine.hostname),
        ("cpu", f"{machine.cpu_model}, {sockets}, {usable}, {nodes}"),
        ("memory", format_gibibytes(machine.memory_bytes)),
    ]
    for nic in machine.nics:
        speed = f"{format_bytes(nic.bytes_per_s)}/s" if nic.bytes_per_s else "speed unknown"
        rows.append((f"nic {nic.name}", f"{nic.kind}, {speed}{_numa_text(nic.numa_node)}"))
    for gpu in machine.gpus:
        links = f", {gpu.nvlinks} NVLinks {format_bytes(gpu.nvlink_bytes_per_s)}/s" if gpu.nvlinks > 0 else ""
        pcie = f", PCIe {format_bytes(gpu.pcie_bytes_per_s)}/s" if gpu.pcie_bytes_per_s else ""
        rows.append(
            (
                f"gpu {gpu.index}",
                f"{gpu.name}, {format_gibibytes(gpu.memory_bytes)}{links}{pcie}{_numa_text(gpu.numa_node)}",
            )
        )
    rows += [(f"path {path.first}-{path.second}", path.kind) for path in machine.gpu_paths]
    return rows if machine.gpus else [*rows, ("gpu", "none")]


def _accelerator_row(device: Accelerator) -> tuple[str, ...]:
    link = f"{device.link} {format_bytes(device.link_bytes_per_s)}/s" if device.link_bytes_per_s else device.link
    return (
        device.name,
        device.vendor,
        device.family,
        format_flops(device.peak_bf16_flops),
        f"{format_flops(matmul_flops(device))}{'' if device.matmul_bf16_flops else ' *'}",
        format_gibibytes(device.memory_bytes),
        link,
        str(device.domain_devices),
        f"{device.tdp_w:.0f} W" if device.tdp_w else "",
    )


def _numa_text(node: int) -> str:
    return f", NUMA node {node}" if node >= 0 else ""


# ---- probe -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ProbeResult(PublicResult):
    """The measurements of this machine, and the file they are stored in."""

    profile: MachineProfile
    path: Path
    note: str  # which plans use the file

    def __str__(self) -> str:
        profile = self.profile
        unit = "GPU" if profile.device == "cuda" else "core"
        units = plural(profile.ranks, unit)
        lines = [
            f"{profile.device_name}: {units} measured together, {profile.engine}, {profile.seconds:.1f} s",
            f"  matmul, {profile.precision:<10} {format_flops(profile.matmul_flops)} per {unit}, best",
            *(f"    n = {size:<12} {format_flops(rate)}" for size, rate in profile.matmul_by_size),
            f"  memory             {format_bytes(profile.memory_bytes_per_s)}/s per {unit}",
            f"  small operation    {format_seconds(profile.launch_s)}",
        ]
        if profile.all_reduce:
            speed = f"{format_bytes(profile.link_bytes_per_s)}/s"
            lines.append(f"  ring over {profile.backend:<8} {format_seconds(profile.link_latency_s)} per step, {speed}")
            lines += [f"    {format_bytes(size):<16} {format_seconds(elapsed)}" for size, elapsed in profile.all_reduce]
        disk = f"{format_bytes(profile.disk_bytes_per_s)}/s" if profile.disk_bytes_per_s else "not measured"
        return "\n".join([*lines, f"  disk, with fsync   {disk}"])

    def to_dict(self) -> dict[str, Any]:
        """Return the measurements."""
        return dict(json_values(self.profile))


def probe(
    *,
    out: str | Path | None = None,
    seconds: float = 30.0,
    disk: str | Path = ".",
    engine: str = "auto",
    progress: bool | Tell = False,
) -> ProbeResult:
    """Measure this machine and store a profile, which later plans for `local` use.

    `disk` is the folder whose disk is measured, `engine` auto, torch or numpy (auto: torch if it is installed).

    >>> print(probe(seconds=10))  # doctest: +SKIP
    >>> phalanx.plan("job.toml", "local")  # doctest: +SKIP
    """
    tell = teller(progress)
    if not LEAST_S <= seconds <= MOST_S:
        why = "a shorter probe is too noisy, a longer one is no more accurate"
        raise mistake("--seconds", f"{seconds:g} is out of range", why=why, fix=f"use {LEAST_S:g} to {MOST_S:g}")
    if not is_folder(disk):
        raise mistake("--disk", f"{disk} is not a folder", fix="name the folder checkpoints will go to")
    machine = discover()
    for text in machine.notes:
        tell(f"note: {text}")
    usual = usual_path(machine.hostname, os.environ)
    named_profile = os.environ.get("PHALANX_PROFILE", "")
    # The file in which later plans look for a profile of this machine.
    read_later = Path(named_profile) if named_profile else usual
    path = Path(out) if out is not None else read_later
    # Checked before half a minute of measuring.
    if path != usual and not is_folder(path.parent):
        message = f"cannot be written: there is no folder {path.parent}"
        raise SystemFailure(Problem(where=str(path), what=message, fix="make the folder, or name another --out"))
    profile = _measure_machine(machine, engine=engine, seconds=seconds, disk=Path(disk), tell=tell)
    save_profile(profile, path, folders=path == usual)
    note = "plans for the cluster local on this machine now use it"
    if path.absolute() != read_later.absolute():
        note = (
            f"set PHALANX_PROFILE={path} to plan with it for the cluster local; phalanx cluster takes --profile {path}"
        )
    return ProbeResult(profile=profile, path=path, note=note)


def _measure_machine(machine: Machine, *, engine: str, seconds: float, disk: Path, tell: Tell) -> MachineProfile:
    installed = importlib.util.find_spec("torch") is not None

    def measured(*, torch: bool) -> MachineProfile:
        gpu = torch and bool(machine.gpus)
        # At least two ranks on a CPU: a collective needs a partner.
        ranks = len(machine.gpus) if gpu else min(MAX_RANKS, max(2, machine.usable_cores))
        tell(f"probing {plural(ranks, 'GPU' if gpu else 'core')} with {'torch' if torch else 'numpy'}")
        return measure(
            machine,
            worker=TORCH_WORKER if torch else NUMPY_WORKER,
            device="cuda" if gpu else "cpu",
            ranks=ranks,
            seconds=seconds,
            disk_folder=disk,
            environ=os.environ,
            report=lambda text: tell(f"  {text}"),
        )

    if engine == "torch" and not installed:
        raise mistake("--engine torch", "torch is not installed", fix="pip install 'phalanx[train]'")
    if engine == "numpy" or not installed:
        if machine.gpus:
            tell("note: GPUs can only be measured with torch (pip install 'phalanx[train]'); measuring the CPU")
        return measured(torch=False)
    try:
        return measured(torch=True)
    except SystemFailure as error:
        if engine == "torch":
            raise
        tell(f"note: torch does not work here ({error.problems[0].why}); measuring with numpy")
        return measured(torch=False)
