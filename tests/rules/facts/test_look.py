"""This machine, seen without torch; and how near a GPU is to its network card, from a made-up PCI tree."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import pytest

from phalanx.hardware.probe import MachineProfile, save_profile, usual_path
from phalanx.hardware.types import Gpu, Machine, Nic
from phalanx.rules.facts.host import collective_variables, nic_paths, this_host


def test_this_machine() -> None:
    found = this_host(environ={})
    assert found.source == "this machine"
    assert found.devices >= 1
    assert found.memory_bytes > 0
    assert found.disk_free_bytes > 0
    assert ("torch" in found.packages) == (find_spec("torch") is not None)
    assert found.environment == {}


def test_torch_is_not_imported() -> None:
    code = "import sys; from phalanx.rules.facts.host import this_host; this_host(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_what_the_probe_measured(tmp_path: Path) -> None:
    environ = {"XDG_DATA_HOME": str(tmp_path)}
    host = this_host(environ=environ)
    assert host.link_latency_s is None
    measured = MachineProfile(
        hostname=host.name,
        taken_at="2026-11-15T00:00:00Z",
        engine="numpy",
        device="cpu",
        device_name="x",
        ranks=2,
        precision="fp32",
        matmul_flops=5e10,
        matmul_by_size=(),
        memory_bytes_per_s=1e10,
        launch_s=1e-6,
        backend="tcp",
        link_latency_s=3e-5,
        link_bytes_per_s=0.0,
        all_reduce=(),
        disk_bytes_per_s=0.0,
        seconds=1.0,
    )
    path = usual_path(host.name, environ)
    save_profile(measured, path, folders=True)
    again = this_host(environ=environ)
    assert again.link_latency_s == 3e-5
    assert again.link_bytes_per_s is None, "0 is not measured"
    path.write_text("{")
    assert this_host(environ=environ).link_latency_s is None
    path.write_text(json.dumps({"version": 1, **asdict(measured), "device": "cuda"}))
    assert this_host(environ=environ).link_latency_s is None


def test_variables_of_the_collectives_alone_and_without_secrets() -> None:
    environ = {"NCCL_ALGO": "Ring", "HOME": "/x", "API_TOKEN": "abcdefgh", "NCCL_NET_PLUGIN": "https://u:abcdefgh@h/x"}
    found = collective_variables(environ)
    assert list(found) == ["NCCL_ALGO", "NCCL_NET_PLUGIN"]
    assert "abcdefgh" not in str(found)


def gpu(index: int, address: str, node: int) -> Gpu:
    return Gpu(
        index=index,
        name="H100",
        memory_bytes=1,
        pci_address=address,
        numa_node=node,
        pcie_bytes_per_s=0.0,
        nvlinks=0,
        nvlink_bytes_per_s=0.0,
    )


def machine(gpus: tuple[Gpu, ...], nics: tuple[Nic, ...]) -> Machine:
    return Machine(
        hostname="x",
        cpu_model="x",
        sockets=2,
        cores=2,
        usable_cores=2,
        numa_nodes=2,
        memory_bytes=1,
        gpus=gpus,
        nics=nics,
    )


CARD = Nic(name="mlx5_0", bytes_per_s=5e10, numa_node=0, kind="infiniband")


def tree(root: Path, *, card: str, gpus: dict[str, str]) -> None:
    """A PCI tree: folders under sys/devices, and the links that name them."""
    (root / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    (root / "sys/bus/pci/devices").mkdir(parents=True)
    for place in (card, *gpus.values()):
        (root / "sys/devices" / place).mkdir(parents=True)
    (root / "sys/class/infiniband/mlx5_0/device").symlink_to(root / "sys/devices" / card)
    for address, place in gpus.items():
        (root / "sys/bus/pci/devices" / address).symlink_to(root / "sys/devices" / place)


@pytest.mark.parametrize(
    ("place", "node", "kind"),
    [
        ("pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:00.0/0000:13:00.0", 0, "PIX"),
        ("pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:04.0/0000:14:00.0/0000:15:00.0/0000:16:00.0", 0, "PXB"),
        ("pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:04.0/0000:14:00.0/0000:15:00.0", 0, "PXB"),
        ("pci0000:10/0000:10:03.0/0000:18:00.0", 0, "PHB"),
        ("pci0000:40/0000:40:01.0/0000:41:00.0", 0, "NODE"),
        ("pci0000:80/0000:80:01.0/0000:81:00.0", 1, "SYS"),
    ],
)
def test_how_near_a_card_is(place: str, node: int, kind: str, tmp_path: Path) -> None:
    card = "pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:01.0/0000:19:00.0"
    tree(tmp_path, card=card, gpus={"0000:13:00.0": place})
    [found] = nic_paths(machine((gpu(0, "00000000:13:00.0", node),), (CARD,)), root=tmp_path)
    assert (found.device, found.nic, found.path) == ("GPU 0", "mlx5_0", kind)


def test_what_the_tree_does_not_show_is_not_known(tmp_path: Path) -> None:
    assert nic_paths(machine((), (CARD,)), root=tmp_path) == ()
    virtual = Nic(name="eth0", bytes_per_s=0.0, numa_node=-1, kind="ethernet")
    assert nic_paths(machine((gpu(0, "0000:13:00.0", 0),), (virtual,)), root=tmp_path) == ()
    for address in ("0000:13:00.0", "", "../../etc"):
        assert nic_paths(machine((gpu(0, address, 0),), (CARD,)), root=tmp_path) is None
