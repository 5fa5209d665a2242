from pathlib import Path

import pytest

from phalanx.hardware.discover import discover

CORE = "processor\t: {n}\nmodel name\t: Test CPU 9000\nphysical id\t: {socket}\ncore id\t: {core}\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    """Two sockets of two cores with two threads each, two NUMA nodes, 64 GB."""
    cores = [(socket, core) for _ in range(2) for socket in range(2) for core in range(2)]
    return write(
        tmp_path,
        {
            "proc/cpuinfo": "\n".join(CORE.format(n=n, socket=s, core=c) for n, (s, c) in enumerate(cores)),
            "proc/meminfo": "MemTotal:       62500000 kB\nMemFree: 1 kB\n",
            "sys/devices/system/node/node0/cpulist": "0-3",
            "sys/devices/system/node/node1/cpulist": "4-7",
            "sys/devices/system/node/online": "0-1",
            "sys/class/net/lo/speed": "",
            "sys/class/net/eth0/speed": "100000\n",
            "sys/class/net/eth0/device/numa_node": "1\n",
            "sys/class/net/eth1/speed": "-1\n",
            "sys/class/net/eth1/device/vendor": "0x1af4\n",
            "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
            "sys/class/infiniband/mlx5_0/device/numa_node": "0\n",
        },
    )


def test_sockets_cores_memory_and_cards(two_sockets: Path) -> None:
    machine = discover(root=two_sockets, environ={})
    assert (machine.cpu_model, machine.sockets, machine.cores, machine.numa_nodes) == ("Test CPU 9000", 2, 4, 2)
    assert machine.memory_bytes == 64_000_000_000
    cards = {nic.name: (nic.kind, nic.bytes_per_s, nic.numa_node) for nic in machine.nics}
    assert cards == {
        "eth0": ("ethernet", 12.5e9, 1),
        "eth1": ("ethernet", 0.0, -1),
        "mlx5_0": ("infiniband", 50e9, 0),
    }


def test_cgroup_v2_limits_count(two_sockets: Path) -> None:
    write(
        two_sockets,
        {
            "proc/self/cgroup": "0::/pod/app\n",
            "sys/fs/cgroup/pod/app/memory.max": "max\n",
            "sys/fs/cgroup/pod/memory.max": "8000000000\n",
            "sys/fs/cgroup/pod/app/cpu.max": "150000 100000\n",
        },
    )
    machine = discover(root=two_sockets, environ={})
    assert (machine.usable_cores, machine.memory_bytes) == (1, 8_000_000_000)


def test_cgroup_v1_limits_count(two_sockets: Path) -> None:
    write(
        two_sockets,
        {
            "proc/self/cgroup": "4:memory:/docker/x\n2:cpu,cpuacct:/\n",
            "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": "4000000000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    machine = discover(root=two_sockets, environ={})
    assert (machine.usable_cores, machine.memory_bytes) == (3, 4_000_000_000)


def test_a_machine_without_proc_still_answers(tmp_path: Path) -> None:
    machine = discover(root=tmp_path, environ={})
    assert machine.cores >= 1
    assert machine.memory_bytes > 0
    assert machine.nics == ()


def test_a_gpu_nobody_can_ask_is_a_note(two_sockets: Path) -> None:
    write(
        two_sockets,
        {
            "sys/bus/pci/devices/0000:17:00.0/class": "0x030200\n",
            "sys/bus/pci/devices/0000:17:00.0/vendor": "0x10de\n",
            "sys/bus/pci/devices/0000:18:00.0/class": "0x020000\n",
            "sys/bus/pci/devices/0000:18:00.0/vendor": "0x10de\n",
        },
    )
    machine = discover(root=two_sockets, environ={})
    if not machine.gpus:  # this test may itself run where NVML works
        expected = "1 NVIDIA GPU on PCIe cannot be queried: install the driver and pip install nvidia-ml-py to see them"
        assert expected in machine.notes


def test_this_machine() -> None:
    machine = discover()
    assert 1 <= machine.usable_cores <= machine.cores
    assert machine.memory_bytes > 1e8
