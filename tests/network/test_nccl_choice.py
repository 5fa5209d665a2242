"""NCCL's choices: logged ones, its rules, and where its model crosses over."""

from __future__ import annotations

import pytest

from phalanx.errors import UserError
from phalanx.network import nccl_choice as nccl
from phalanx.network import nccl_tables as tables

MIB, GIB = 2**20, 2**30


def board(family: tables.Family, gpus: int, *, nvls: bool = True) -> nccl.System:
    return nccl.system(nodes=1, per_node=gpus, family=family, nvls=nvls)


def pick(comm: nccl.System, nbytes: float, operation: nccl.Operation = "all-reduce") -> tuple[str, str]:
    best = nccl.choose(comm, nbytes, operation=operation)
    return best.algorithm, best.protocol


def busbw(comm: nccl.System, nbytes: float) -> float:
    return nccl.bus_bytes_per_s(comm, nbytes, nccl.choose(comm, nbytes).seconds) / 1e9


def test_logged_on_eight_h200_ring_ll_up_to_one_mebibyte_then_nvls() -> None:
    h200 = board("hopper", 8)
    assert {pick(h200, 2.0**power) for power in range(10, 21)} == {("Ring", "LL")}
    assert {pick(h200, 2.0**power) for power in range(21, 35)} == {("NVLS", "Simple")}


@pytest.mark.parametrize(
    ("family", "gpus", "logged"),
    [
        ("hopper", 4, "Ring"),
        ("hopper", 7, "NVLS"),
        ("hopper", 8, "NVLS"),
        ("blackwell", 4, "Ring"),
        ("blackwell", 5, "Ring"),
        ("blackwell", 7, "NVLS"),
        ("blackwell", 8, "NVLS"),
    ],
)
def test_logged_at_8_gib_by_number_of_gpus(family: tables.Family, gpus: int, logged: str) -> None:
    assert pick(board(family, gpus), 8 * GIB) == (logged, "Simple")
    assert pick(board(family, gpus, nvls=False), 8 * GIB) == ("Ring", "Simple")


def test_plateaus_follow_from_links_alone() -> None:
    """Measured: 473 to 480 and 838 with sums in the switch, 367 and 682 by rings, 235 on A100."""
    assert busbw(board("hopper", 8), 16 * GIB) == pytest.approx(476, abs=1)
    assert busbw(board("blackwell", 8), 16 * GIB) == pytest.approx(828, abs=1)
    assert busbw(board("hopper", 8, nvls=False), 16 * GIB) == pytest.approx(360, abs=1)
    assert busbw(board("ampere", 8), 16 * GIB) == pytest.approx(240, abs=1)


def test_ampere_switches_do_not_add() -> None:
    assert board("ampere", 8).nvls is None
    assert board("hopper", 2).nvls is None


@pytest.mark.parametrize(("ranks", "mib"), [(16, 32), (32, 64), (64, 2048), (1024, 32768), (16384, 524288)])
def test_where_the_ring_first_beats_the_tree(ranks: int, mib: int) -> None:
    ring = nccl.Channels(count=16, inside_gb=24.0, across_gb=24.0)
    comm = nccl.System(nodes=ranks // 8, per_node=8, family="hopper", ring=ring, nvls=None)
    assert next(2**power for power in range(10, 45) if pick(comm, 2.0**power)[0] == "Ring") == mib * MIB


def test_four_blackwell_nodes_use_the_tree_of_switches_and_its_correction() -> None:
    comm = nccl.system(nodes=4, per_node=8, family="blackwell", nic_gbps=400)
    assert pick(comm, 16 * GIB) == ("NVLSTree", "Simple")
    assert busbw(comm, 16 * GIB) == pytest.approx(383.5, abs=0.1)
    assert nccl.correction(comm, "NVLSTree", "Simple", 256 * MIB) == 0.9
    assert nccl.correction(comm, "NVLSTree", "Simple", 1024 * MIB) == 1.0
    arm = nccl.system(nodes=4, per_node=8, family="blackwell", nic_gbps=400, cpu="arm")
    assert nccl.correction(arm, "NVLSTree", "Simple", 256 * MIB) == 1.0


def test_pat_is_for_gathers_with_one_gpu_per_node() -> None:
    one = nccl.system(nodes=64, per_node=1, family="hopper", nic_gbps=400)
    names = {choice.algorithm for choice in nccl.choices(one, MIB, operation="all-gather")}
    assert names == {"Ring", "PAT"}
    assert nccl.latency(one, "PAT", "Simple", operation="all-gather") == pytest.approx(8 + 6 * 14 / 3.5 + 2.8 * 64)
    eight = nccl.system(nodes=8, per_node=8, family="hopper", nic_gbps=400)
    assert {choice.algorithm for choice in nccl.choices(eight, MIB, operation="all-gather")} == {"Ring"}


def test_sums_in_the_network_bring_collnet_and_nvls_between_nodes() -> None:
    comm = nccl.system(nodes=4, per_node=8, family="hopper", nic_gbps=400, sharp=True)
    names = {choice.algorithm for choice in nccl.choices(comm, GIB)}
    assert names == {"Ring", "Tree", "NVLS", "NVLSTree", "CollnetDirect", "CollnetChain"}


def test_the_cpu_sets_what_ll_carries_between_nodes_and_what_posting_costs() -> None:
    intel, amd = (nccl.system(nodes=4, per_node=8, family="hopper", nic_gbps=400, cpu=cpu) for cpu in ("intel", "amd"))
    transfer = [
        next(one.transfer_s for one in nccl.choices(comm, MIB) if (one.algorithm, one.protocol) == ("Ring", "LL"))
        for comm in (intel, amd)
    ]
    assert transfer[1] / transfer[0] == pytest.approx(20.4 / 19.0)
    assert nccl.latency(intel, "Ring", "Simple", nbytes=0.0) == pytest.approx(8.4 + 56 * 3.4 + 6 * 14)
    assert nccl.latency(amd, "Ring", "Simple", nbytes=0.0) == pytest.approx(8.4 + 56 * 6.0 + 6 * 14)
    assert nccl.latency(amd, "Ring", "Simple") == pytest.approx(1.4 * (8.4 + 56 * 6.0 + 6 * 14))


def test_one_rank_has_nothing_to_do() -> None:
    assert nccl.choose(board("hopper", 1), GIB).seconds == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 0, "per_node": 8, "family": "hopper"}, "NCCL: 0 nodes of 8 GPUs"),
        ({"nodes": 10**12, "per_node": 8, "family": "hopper"}, "NCCL: 1,000,000,000,000 nodes of 8 GPUs"),
        ({"nodes": 2, "per_node": 8, "family": "hopper"}, "NCCL: 2 nodes with NICs of 0 Gb/s"),
        ({"nodes": 1, "per_node": 8, "family": "mi300"}, 'NCCL: there is no family "mi300"'),
    ],
)
def test_refusals(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}\n  use "):
        nccl.system(**options)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="a message of 0 bytes"):
        nccl.choose(board("hopper", 8), 0)


def test_a_tree_by_ll_is_held_to_what_ll_carries() -> None:
    ring = nccl.Channels(count=16, inside_gb=24.0, across_gb=24.0)
    comm = nccl.System(nodes=4, per_node=8, family="hopper", ring=ring, nvls=None)
    by_ll = next(one for one in nccl.choices(comm, 2**30) if (one.algorithm, one.protocol) == ("Tree", "LL"))
    assert by_ll.transfer_s == pytest.approx(2 * 2**30 / 20.4e9)
