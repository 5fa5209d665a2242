import dataclasses
import json
from pathlib import Path

import pytest

from phalanx.errors import SystemFailure, UserError
from phalanx.hardware.cluster import resolve_cluster
from phalanx.hardware.probe import MachineProfile, load_profile, save_profile, usual_path
from phalanx.hardware.this_machine import machine_cluster
from phalanx.hardware.types import Gpu, Machine, Nic

CPU = Machine(
    hostname="box",
    cpu_model="Test CPU",
    sockets=1,
    cores=8,
    usable_cores=8,
    numa_nodes=1,
    memory_bytes=64_000_000_000,
    nics=(Nic(name="eth0", bytes_per_s=12.5e9, numa_node=0, kind="ethernet"),),
)
GPU = Gpu(
    index=0,
    name="NVIDIA H100 80GB HBM3",
    memory_bytes=85_520_809_984,
    pci_address="",
    numa_node=0,
    pcie_bytes_per_s=63e9,
    nvlinks=18,
    nvlink_bytes_per_s=450e9,
)
PROFILE = MachineProfile(
    hostname="box",
    taken_at="2026-11-15T00:00:00+00:00",
    engine="torch 2.11.0",
    device="cpu",
    device_name="Test CPU",
    ranks=8,
    precision="fp32",
    matmul_flops=150e9,
    matmul_by_size=((64, 90e9), (1024, 150e9)),
    memory_bytes_per_s=12e9,
    launch_s=4e-6,
    backend="gloo",
    link_latency_s=1e-4,
    link_bytes_per_s=1.5e9,
    all_reduce=((1024, 2e-3), (1048576, 4e-3)),
    disk_bytes_per_s=5e8,
    seconds=12.0,
)


def gpus(count: int, **changes: object) -> Machine:
    cards = tuple(dataclasses.replace(GPU, index=index, **changes) for index in range(count))  # type: ignore[arg-type]
    return dataclasses.replace(CPU, gpus=cards)


def environ(home: Path) -> dict[str, str]:
    return {"HOME": str(home)}


def test_one_device_per_core_without_a_profile(tmp_path: Path) -> None:
    cluster = machine_cluster(CPU, environ=environ(tmp_path))
    assert (cluster.devices, cluster.hosts, cluster.accelerator.link) == (8, 1, "loopback")
    assert cluster.accelerator.memory_bytes == 8e9
    assert cluster.nic_bytes_per_s == 12.5e9 / 8
    assert cluster.source == "this machine, box: 8 cores, 8 ranks; not measured: run phalanx probe"


def test_the_stored_profile_is_used_and_the_source_says_so(tmp_path: Path) -> None:
    save_profile(PROFILE, usual_path("box", environ(tmp_path)), folders=True)
    cluster = machine_cluster(CPU, environ=environ(tmp_path), ranks=2)
    assert cluster.matmul_flops == 4 * 150e9  # each of two ranks has four cores
    assert (cluster.launch_s, cluster.link_bytes_per_s, cluster.link_latency_s) == (4e-6, 1.5e9, 1e-4)
    assert cluster.disk_bytes_per_s == 5e8
    assert cluster.accelerator.peak_fp32_flops >= cluster.matmul_flops
    assert cluster.source.endswith("measured by phalanx probe on 2026-11-15 with torch 2.11.0")


def test_the_cost_of_a_numpy_call_is_not_taken_for_the_framework(tmp_path: Path) -> None:
    save_profile(dataclasses.replace(PROFILE, engine="numpy 2.4"), usual_path("box", environ(tmp_path)), folders=True)
    assert machine_cluster(CPU, environ=environ(tmp_path)).launch_s == 0


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 99}', '{"version": 1}', "\0", "[" * 200000])
def test_a_damaged_profile_is_ignored_unless_named(tmp_path: Path, text: str) -> None:
    path = usual_path("box", environ(tmp_path))
    path.parent.mkdir(parents=True)
    path.write_text(text)
    cluster = machine_cluster(CPU, environ=environ(tmp_path))
    assert cluster.matmul_flops == 0
    assert "profile ignored (" in cluster.source
    for call in ({"profile": path}, {}):
        env = environ(tmp_path) if call else {**environ(tmp_path), "PHALANX_PROFILE": str(path)}
        with pytest.raises(UserError) as caught:
            machine_cluster(CPU, environ=env, **call)  # type: ignore[arg-type]
        assert str(path) in str(caught.value)


def test_profile_messages(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    save_profile(PROFILE, path)
    assert load_profile(path) == PROFILE
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "version": 0}))
    with pytest.raises(UserError) as caught:
        load_profile(path)
    assert str(caught.value) == f"{path}: has profile version 0, not 1\n  run phalanx probe again"
    path.write_text(json.dumps({**data, "matmul_flops": -1}))
    with pytest.raises(UserError) as caught:
        load_profile(path)
    assert f"{path}.matmul_flops: -1 is not a number from 0 to 1e+30\n  run phalanx probe again" in str(caught.value)


def test_saving_leaves_nothing_half_written(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.mkdir()
    with pytest.raises(SystemFailure) as caught:
        save_profile(PROFILE, path)
    assert f"{path}: cannot be written: " in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["p.json"]


def test_saving_makes_no_folder_that_nobody_asked_for(tmp_path: Path) -> None:
    with pytest.raises(SystemFailure):
        save_profile(PROFILE, tmp_path / "typo" / "p.json")
    assert list(tmp_path.iterdir()) == []


def test_a_profile_of_another_kind_of_device_is_ignored(tmp_path: Path) -> None:
    save_profile(PROFILE, usual_path("box", environ(tmp_path)), folders=True)
    cluster = machine_cluster(gpus(1), environ=environ(tmp_path))
    assert "profile ignored (it measured cpu, this machine computes on cuda)" in cluster.source


def test_gpus_become_the_devices(tmp_path: Path) -> None:
    cluster = machine_cluster(gpus(8), environ=environ(tmp_path))
    assert (cluster.accelerator.name, cluster.devices, cluster.hosts) == ("H100-80GB-SXM", 8, 1)
    assert cluster.accelerator.memory_bytes == 85_520_809_984
    assert cluster.link_bytes_per_s == 450e9
    without = machine_cluster(gpus(2, nvlinks=0, nvlink_bytes_per_s=0.0), environ=environ(tmp_path))
    assert (without.accelerator.link, without.link_bytes_per_s) == ("PCIe", 63e9)
    unasked = machine_cluster(gpus(2, nvlinks=-1, nvlink_bytes_per_s=0.0), environ=environ(tmp_path))
    assert (unasked.accelerator.link, unasked.link_bytes_per_s) == ("NVLink4", 450e9)


def test_unlike_or_unknown_gpus_are_refused_with_a_cure(tmp_path: Path) -> None:
    other = dataclasses.replace(GPU, index=1, name="NVIDIA L40S")
    with pytest.raises(UserError) as caught:
        machine_cluster(dataclasses.replace(CPU, gpus=(GPU, other)), environ=environ(tmp_path))
    assert "local: has unlike GPUs: NVIDIA H100 80GB HBM3, NVIDIA L40S" in str(caught.value)
    with pytest.raises(UserError) as caught:
        machine_cluster(gpus(1, name="NVIDIA X1"), environ=environ(tmp_path))
    assert "local: unknown accelerator 'NVIDIA X1'" in str(caught.value)


def test_ranks_out_of_range(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        machine_cluster(CPU, environ=environ(tmp_path), ranks=-1)
    assert str(caught.value).startswith("--ranks: -1 is out of range")


def test_ranks_of_this_machine_share_its_cores_and_memory(tmp_path: Path) -> None:
    whole = machine_cluster(CPU, environ=environ(tmp_path))
    half = machine_cluster(CPU, environ=environ(tmp_path), ranks=16)
    assert (half.name, half.devices, half.hosts) == ("local:16", 16, 1)
    assert half.accelerator.peak_fp32_flops == whole.accelerator.peak_fp32_flops / 2
    assert half.accelerator.memory_bytes == whole.accelerator.memory_bytes / 2
    assert half.host_memory_bytes == whole.host_memory_bytes


def test_some_gpus_of_this_machine(tmp_path: Path) -> None:
    assert machine_cluster(gpus(8), environ=environ(tmp_path), ranks=2).devices == 2
    with pytest.raises(UserError) as caught:
        machine_cluster(gpus(2), environ=environ(tmp_path), ranks=4)
    assert str(caught.value) == (
        "local:4: asks for 4 GPUs, but this machine has 2\n"
        "  every rank needs a GPU of its own\n"
        "  write local:2, or local-cpu:4 to run on the processor cores; --ranks-per-gpu 2 lets ranks share a GPU, for "
        "proofs and drills"
    )


def test_ranks_that_share_gpus_have_a_share_of_each(tmp_path: Path) -> None:
    whole = machine_cluster(gpus(2), environ=environ(tmp_path))
    said = {**environ(tmp_path), "PHALANX_RANKS_PER_GPU": "2"}
    for shared in (
        machine_cluster(gpus(2), environ=environ(tmp_path), ranks=4, ranks_per_gpu=2),
        machine_cluster(gpus(2), environ=said, ranks=4),
    ):
        assert (shared.name, shared.devices, shared.hosts) == ("local:4", 4, 1)
        assert shared.accelerator.memory_bytes == whole.accelerator.memory_bytes / 2
        assert shared.accelerator.peak_bf16_flops == whole.accelerator.peak_bf16_flops / 2
        assert shared.host_memory_bytes == whole.host_memory_bytes
    with pytest.raises(UserError, match="asks for 5 GPUs"):
        machine_cluster(gpus(2), environ=said, ranks=5)
    assert machine_cluster(gpus(2), environ=said, ranks=2).accelerator == whole.accelerator


def test_the_spelling_of_ranks_on_this_machine(tmp_path: Path) -> None:
    cluster = resolve_cluster("local-cpu:3", environ=environ(tmp_path))
    assert (cluster.name, cluster.devices, cluster.accelerator.family) == ("local:3", 3, "cpu")
    for text in ("local:0", "local:-1", "local-cpu:99999999", "local:5000"):
        with pytest.raises(UserError):
            resolve_cluster(text, environ=environ(tmp_path))
