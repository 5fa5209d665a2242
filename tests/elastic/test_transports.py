"""What NCCL cannot use here is said with what it costs; what is as it should be is not a warning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from phalanx.elastic.transports import (
    TransportFacts,
    chosen_interfaces,
    transport_notes,
    transport_warnings,
)

# Two hosts of eight H100 as they should be.
GOOD = TransportFacts(
    host="gpu-04", ranks=8, hosts=2, gpus=8, gpu_name="H100", nvlinks=18, paths=(), pcie_bytes_per_s=63e9,
    planned_link_bytes_per_s=450e9, nvls=True, peer_access=True, infiniband=("mlx5_0",), infiniband_bytes_per_s=400e9,
    interfaces={"lo": 0.0, "eth0": 3.125e9}, planned_nic_bytes_per_s=400e9, algorithm="auto", settings={},
)  # fmt: skip


def told(**changes: Any) -> list[str]:
    return [problem.render() for problem in transport_warnings(replace(GOOD, **changes))]


def test_a_good_host_is_not_spoken_of() -> None:
    assert told() == []
    assert transport_notes(GOOD) == ["no SHARP: sums between hosts are made by GPUs (NCCL_COLLNET_ENABLE is not 1)"]
    assert told(ranks=1, hosts=1, nvlinks=0, infiniband=()) == [], "one rank talks to nobody"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nvlinks": 0, "paths": ("PCIe bridge",)}, ("no NVLink between its 8 × H100", "PCIe bridge", "450 GB/s")),
        ({"infiniband": ()}, ("no InfiniBand", "TCP sockets on eth0 at 3.12 GB/s", "400 GB/s")),
        ({"infiniband_bytes_per_s": 50e9}, ("mlx5_0 together carry 50.0 GB/s", "400 GB/s")),
        ({"peer_access": False}, ("cannot read each other's memory", "host memory", "topo -p2p")),
        ({"settings": {"NCCL_P2P_DISABLE": "1"}}, ("NCCL_P2P_DISABLE=1", "host memory", "unset")),
        ({"settings": {"NCCL_SHM_DISABLE": "1"}}, ("NCCL_SHM_DISABLE=1",)),
        ({"settings": {"NCCL_IB_DISABLE": "1"}}, ("NCCL_IB_DISABLE=1 switches mlx5_0 off", "TCP sockets on eth0")),
        ({"settings": {"NCCL_NVLS_ENABLE": "0"}}, ("NVLS", "summed by the GPUs")),
        ({"settings": {"NCCL_SOCKET_IFNAME": "bond"}}, ("NCCL_SOCKET_IFNAME=bond", "lo, eth0", "would not start")),
        ({"settings": {"NCCL_ALGO": "Ring"}}, ("NCCL_ALGO=Ring is forced", "comm.algorithm")),
        ({"settings": {"NCCL_PROTO": "LL"}}, ("NCCL_PROTO=LL is forced",)),
        ({"settings": {"NCCL_MAX_CTAS": "2"}}, ("NCCL_MAX_CTAS=2",)),
        ({"algorithm": "nvls", "nvls": False, "gpu_name": "A100"}, ("NVLS is asked for", "A100")),
        ({"gpus": 1, "ranks": 4}, ("4 ranks share 1 GPU",)),
    ],
)
def test_each_fallback_is_said_once_with_its_consequence(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    (said,) = told(**changes)
    assert "gpu-04" in said
    for word in words:
        assert word in said


def test_what_the_job_asked_for_or_a_plugin_brings_is_no_fallback() -> None:
    assert told(algorithm="tree", settings={"NCCL_ALGO": "allreduce:tree"}) == []
    assert told(infiniband=(), settings={"NCCL_NET_PLUGIN": "ofi"}) == []
    assert told(gpus=1, ranks=4, hosts=1, settings={"NCCL_MAX_CTAS": "2", "NCCL_NVLS_ENABLE": "0"}) == [
        "gpu-04: 4 ranks share 1 GPU\n  they take turns: what is computed is right, how fast it goes says nothing"
    ]
    assert told(nvlinks=-1) == [], "nobody could be asked"
    old = replace(GOOD, nvls=False, gpu_name="A100", hosts=1)
    assert transport_notes(old) == ["A100 has no NVLS: all-reduces are summed by the GPUs, not by the switch"]


def test_interfaces_as_nccl_reads_them() -> None:
    names = ["lo", "docker0", "eth0", "eth1", "ib0"]
    assert chosen_interfaces("eth1,ib", names) == ["eth1", "ib0"]
    assert chosen_interfaces("=eth", names) == []
    assert chosen_interfaces("=eth0:20000", names) == ["eth0"]
    assert chosen_interfaces("^eth", names) == ["ib0"]
    assert chosen_interfaces("lo", names) == ["lo"]
    assert chosen_interfaces("", ["lo"]) == ["lo"]
