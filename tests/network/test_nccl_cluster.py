"""Clusters as NCCL sees them, and those it does not."""

from __future__ import annotations

import pytest

from phalanx.errors import UserError
from phalanx.hardware.cluster import resolve_cluster
from phalanx.network.nccl_choice import bus_bytes_per_s, choose_pair
from phalanx.network.nccl_cluster import nccl_system


@pytest.mark.parametrize(
    ("spec", "family", "nodes", "per_node", "ring_gb"),
    [
        ("8xH100:16", "hopper", 16, 8, 360.0),
        ("8xA100:4", "ampere", 4, 8, 192.0),
        ("8xB200", "blackwell", 1, 8, 720.0),
        ("72xGB200", "blackwell", 1, 72, 720.0),
        ("8xH800", "hopper", 1, 8, 160.0),
        ("1xH100:64", "hopper", 64, 1, 48.0),
    ],
)
def test_nodes_links_and_nics_are_the_clusters(
    spec: str, family: str, nodes: int, per_node: int, ring_gb: float
) -> None:
    comm = nccl_system(resolve_cluster(spec))
    assert (comm.family, comm.nodes, comm.per_node) == (family, nodes, per_node)
    assert comm.ring.count * comm.ring.inside_gb == pytest.approx(ring_gb)


def test_options_reach_the_model() -> None:
    cluster = resolve_cluster("8xH100:4")
    assert nccl_system(cluster, nvls=False).nvls is None
    assert (nccl_system(cluster, cpu="amd", sharp=True).sharp, nccl_system(cluster, cpu="amd").cpu) == (True, "amd")
    assert [nccl_system(resolve_cluster(spec)).cpu for spec in ("8xB200", "72xGB200", "GH200:64")] == [
        "intel",
        "arm",
        "arm",
    ]
    assert nccl_system(resolve_cluster("72xGB200"), cpu="amd").cpu == "amd"
    plain = nccl_system(resolve_cluster("8xH100"), nvls=False)
    assert bus_bytes_per_s(plain, 2.0**34, choose_pair(plain, 2.0**34).seconds) == pytest.approx(360e9, rel=0.01)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("8xMI300X", "RCCL has its own tables"),
        ("8xH100-PCIe", "this is hopper on PCIe5"),
        ("72xRubin", "this is rubin on NVLink6"),
        ("TPU-v5p:8", "google's devices do not run NCCL"),
    ],
)
def test_refusals_say_why(spec: str, why: str) -> None:
    with pytest.raises(UserError, match=r"NCCL's choice on .* is not modelled") as caught:
        nccl_system(resolve_cluster(spec))
    assert why in str(caught.value)
    assert "--fit" in str(caught.value)
