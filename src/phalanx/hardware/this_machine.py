"""This machine as a Cluster: one device per GPU, or per core without GPUs, with the rates the probe measured."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from phalanx.errors import UserError, mistake
from phalanx.hardware.catalog import find_accelerator
from phalanx.hardware.cluster_defaults import assemble_cluster
from phalanx.hardware.discover import discover
from phalanx.hardware.probe import MachineProfile, load_profile, usual_path
from phalanx.hardware.step_probe import measured_rates
from phalanx.hardware.types import Accelerator, Cluster, Machine
from phalanx.io.limits import MAX_RANKS_PER_GPU, MAX_WORKERS
from phalanx.io.path_probes import path_exists
from phalanx.units import plural


def local_cluster(
    *,
    environ: Mapping[str, str] | None = None,
    profile: Path | None = None,
    ranks: int = 0,
    files: Sequence[Path] = (),
    cpu: bool = False,
    ranks_per_gpu: int = 1,
) -> Cluster:
    """Discover this machine now and return it as a Cluster; with `cpu` as if it had no GPUs."""
    env = os.environ if environ is None else environ
    machine = discover(environ=env)
    if cpu:
        machine = dataclasses.replace(machine, gpus=(), gpu_paths=())
    return machine_cluster(machine, environ=env, profile=profile, ranks=ranks, files=files, ranks_per_gpu=ranks_per_gpu)


def machine_cluster(
    machine: Machine,
    *,
    environ: Mapping[str, str],
    profile: Path | None = None,
    ranks: int = 0,
    files: Sequence[Path] = (),
    ranks_per_gpu: int = 1,
) -> Cluster:
    """Return a machine as a Cluster.

    `ranks` is the number of its GPUs to use, or of processes that share its cores (0: all of them). `ranks_per_gpu`
    ranks may share a GPU: each is then a device with its share of that GPU's memory and speed.
    """
    if not 0 <= ranks <= MAX_WORKERS:
        raise mistake("--ranks", f"{ranks} is out of range", fix=f"use 1 to {MAX_WORKERS}, or 0 for one per core")
    measured, remark = _measured_profile(machine, environ, profile)
    if machine.gpus:
        allowed = allowed_ranks(ranks_per_gpu, environ)
        sharing_ranks = (
            -(-ranks // len(machine.gpus)) if len(machine.gpus) < ranks <= allowed * len(machine.gpus) else 1
        )
        if sharing_ranks > 1:
            cluster = _shared_cluster(_gpu_cluster(machine, environ, files), ranks, sharing_ranks)
        else:
            cluster = _gpu_cluster(_first_gpus(machine, ranks), environ, files)
    else:
        cluster = _cpu_cluster(machine, ranks or machine.usable_cores, environ, files)
    if not machine.gpus:
        rates, taken_at = measured_rates(machine, environ)
        if rates is not None:
            reported = f"steps measured on {taken_at[:10]}"
            remark = reported if measured is None else f"{remark}; {reported}"
        cluster = dataclasses.replace(cluster, cpu=rates)
    source = "; ".join(text for text in (cluster.source, remark) if text)
    name = f"{cluster.name}:{ranks}" if ranks else cluster.name
    cores_per_rank = 1.0 if machine.gpus else machine.usable_cores / cluster.devices
    return _apply_profile(dataclasses.replace(cluster, name=name, source=source), measured, cores_per_rank)


def _first_gpus(machine: Machine, ranks: int) -> Machine:
    """Return the machine with its first `ranks` GPUs (0: all of them)."""
    count = len(machine.gpus)
    if ranks > count:
        raise mistake(
            f"local:{ranks}",
            f"asks for {ranks} GPUs, but this machine has {count}",
            why="every rank needs a GPU of its own",
            fix=f"write local:{count}, or local-cpu:{ranks} to run on the processor cores; "
            f"--ranks-per-gpu {-(-ranks // count)} lets ranks share a GPU, for proofs and drills",
        )
    return dataclasses.replace(machine, gpus=machine.gpus[: ranks or count])


def _shared_cluster(cluster: Cluster, ranks: int, shared: int) -> Cluster:
    """Return `ranks` devices on fewer GPUs, each with its share of a GPU; their traffic is copied within the GPU."""
    gpu = cluster.accelerator
    share = dataclasses.replace(
        gpu,
        peak_bf16_flops=gpu.peak_bf16_flops / shared,
        peak_fp8_flops=gpu.peak_fp8_flops / shared,
        peak_fp4_flops=gpu.peak_fp4_flops / shared,
        peak_fp32_flops=gpu.peak_fp32_flops / shared,
        memory_bytes=gpu.memory_bytes / shared,
        memory_bytes_per_s=gpu.memory_bytes_per_s / shared,
        domain_devices=ranks,
        host_devices=ranks,
        tdp_w=gpu.tdp_w / shared,
    )
    return assemble_cluster(
        name=cluster.name,
        accelerator=share,
        domain_devices=ranks,
        domains=1,
        host_devices=ranks,
        host_memory_bytes=cluster.host_memory_bytes,
        nic_bytes_per_s=cluster.nic_bytes_per_s / shared,
        source=f"{cluster.source}, shared by {ranks} ranks",
    )


def _measured_profile(
    machine: Machine, environ: Mapping[str, str], named: Path | None
) -> tuple[MachineProfile | None, str]:
    """Return the profile for this machine and a remark on it; raises UserError if a named one cannot be read."""
    text = environ.get("PHALANX_PROFILE", "")
    explicit = named or (Path(text) if text else None)
    path = explicit or usual_path(machine.hostname, environ)
    if explicit is None and not path_exists(path):
        return None, "not measured: run phalanx probe"
    try:
        profile = load_profile(path)
    except UserError as error:
        if explicit is not None:
            raise
        return None, f"profile ignored ({error.problems[0].render().splitlines()[0]})"
    device = "cuda" if machine.gpus else "cpu"
    if profile.device != device:
        return None, f"profile ignored (it measured {profile.device}, this machine computes on {device})"
    return profile, f"measured by phalanx probe on {profile.taken_at[:10]} with {profile.engine}"


def _apply_profile(cluster: Cluster, profile: MachineProfile | None, cores_per_rank: float) -> Cluster:
    """Return the cluster with measured rates; they are those of one core, so a rank with two is twice as fast."""
    if profile is None:
        return cluster
    matmul_flops = profile.matmul_flops * cores_per_rank
    return dataclasses.replace(
        cluster,
        accelerator=_measured_device(cluster.accelerator, profile, cores_per_rank),
        matmul_flops=matmul_flops,
        # The cost of a numpy call does not predict the training framework's, so only torch's is used.
        launch_s=profile.launch_s if profile.engine.startswith("torch") else 0.0,
        link_bytes_per_s=profile.link_bytes_per_s or cluster.link_bytes_per_s,
        link_latency_s=profile.link_latency_s or cluster.link_latency_s,
        disk_bytes_per_s=profile.disk_bytes_per_s,
    )


def _measured_device(accelerator: Accelerator, profile: MachineProfile, cores_per_rank: float) -> Accelerator:
    """Return a CPU with its peaks raised to the measured rate, which AVX-512 may lift above the catalogue's AVX2."""
    if profile.device != "cpu":
        return accelerator
    flops = profile.matmul_flops * cores_per_rank
    return dataclasses.replace(
        accelerator,
        peak_bf16_flops=max(accelerator.peak_bf16_flops, flops),
        peak_fp32_flops=max(accelerator.peak_fp32_flops, flops),
        memory_bytes_per_s=profile.memory_bytes_per_s * cores_per_rank or accelerator.memory_bytes_per_s,
    )


def _cpu_cluster(machine: Machine, ranks: int, environ: Mapping[str, str], files: Sequence[Path]) -> Cluster:
    core = find_accelerator("CPU-core", files=files, environ=environ)
    cores_per_rank = machine.usable_cores / ranks
    device = dataclasses.replace(
        core,
        name=machine.cpu_model,
        peak_bf16_flops=core.peak_bf16_flops * cores_per_rank,
        peak_fp32_flops=core.peak_fp32_flops * cores_per_rank,
        memory_bytes=machine.memory_bytes / ranks,
        memory_bytes_per_s=core.memory_bytes_per_s * cores_per_rank,
        domain_devices=ranks,
        host_devices=ranks,
        tdp_w=core.tdp_w * cores_per_rank,
    )
    return assemble_cluster(
        name="local",
        accelerator=device,
        domain_devices=ranks,
        domains=1,
        host_devices=ranks,
        host_memory_bytes=machine.memory_bytes,
        nic_bytes_per_s=_nic_bytes_per_s(machine, ranks),
        source=f"this machine, {machine.hostname}: {plural(machine.usable_cores, 'core')}, {plural(ranks, 'rank')}",
    )


def _gpu_cluster(machine: Machine, environ: Mapping[str, str], files: Sequence[Path]) -> Cluster:
    names = sorted({gpu.name for gpu in machine.gpus})
    if len(names) > 1:
        fix = "choose equal ones with CUDA_VISIBLE_DEVICES"
        raise mistake("local", f"has unlike GPUs: {', '.join(names)}", why="ranks move in lockstep", fix=fix)
    count = len(machine.gpus)
    catalogue_device = find_accelerator(names[0], files=files, environ=environ, where="local")
    memory = min(gpu.memory_bytes for gpu in machine.gpus)
    device = dataclasses.replace(
        _with_links(catalogue_device, machine), memory_bytes=memory or catalogue_device.memory_bytes
    )
    return assemble_cluster(
        name="local",
        accelerator=device,
        domain_devices=count,
        domains=1,
        host_devices=count,
        host_memory_bytes=machine.memory_bytes,
        nic_bytes_per_s=_nic_bytes_per_s(machine, count),
        source=f"this machine, {machine.hostname}: {count} x {names[0]}",
    )


def _with_links(known: Accelerator, machine: Machine) -> Accelerator:
    """Return the device with the links its driver reports, or the catalogue's if the driver could not be queried."""
    if any(gpu.nvlinks < 0 for gpu in machine.gpus):
        return known
    nvlink = min(gpu.nvlink_bytes_per_s for gpu in machine.gpus)
    if nvlink > 0:
        return dataclasses.replace(known, link_bytes_per_s=nvlink)
    pcie = min(gpu.pcie_bytes_per_s for gpu in machine.gpus)
    link = known.link if known.link.startswith("PCIe") else "PCIe"
    return dataclasses.replace(known, link=link, link_bytes_per_s=pcie or known.link_bytes_per_s)


def _nic_bytes_per_s(machine: Machine, devices: int) -> float:
    """Return the network speed per device; an InfiniBand or RoCE card also shows as Ethernet, so one kind counts."""
    fabric = sum(nic.bytes_per_s for nic in machine.nics if nic.kind == "infiniband")
    ethernet = sum(nic.bytes_per_s for nic in machine.nics if nic.kind == "ethernet")
    return max(fabric, ethernet) / devices


# Several ranks may share one GPU only where the job, an option or the environment allows it.
#
# They share its cores and its memory, so nothing becomes faster. It is for proofs and drills on fewer GPUs than ranks.


VARIABLE = "PHALANX_RANKS_PER_GPU"


def allowed_ranks(written: int, environ: Mapping[str, str]) -> int:
    """Return how many ranks may share a GPU: the larger of the job's train.ranks_per_gpu and the environment variable.

    >>> allowed_ranks(1, {}), allowed_ranks(1, {"PHALANX_RANKS_PER_GPU": "4"}), allowed_ranks(8, {})
    (1, 4, 8)
    """
    text = environ.get(VARIABLE, "").strip()
    if not text:
        return written
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MAX_RANKS_PER_GPU):
        raise mistake(
            VARIABLE,
            f"{text[:40]!r} is no number of ranks from 1 to {MAX_RANKS_PER_GPU}",
            fix="export PHALANX_RANKS_PER_GPU=4, or unset it",
        )
    return max(written, int(text))
