"""`.topo` files: as htsim describes its fabrics, there and back, and what is refused with file and line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import UserError
from phalanx.network.fabric.fabric_file import parse_fabric
from phalanx.network.fabric.fabric_types import Fabric
from phalanx.sim.fabric_links import links_of
from phalanx.sim.htsim.topology import Topo, read_topo, write_topo

# As leaf_spine_tiny.topo and fat_tree_1024.topo of Broadcom/csg-htsim (BSD-3) describe them.
LEAF_SPINE = """Nodes 32
Tiers 2
Podsize 32

Tier 0
Downlink_speed_Gbps 100
Radix_Down 8
Radix_Up 2
Downlink_Latency_ns 1000
Switch_Latency_ns 0
Oversubscribed 4

Tier 1
Downlink_speed_Gbps 100
Radix_Down 4
Downlink_Latency_ns 1000
"""
FAT_TREE = """# three tiers
Nodes 1024
Tiers 3
Podsize 64
Tier 0
Oversubscribed 1
Downlink_speed_Gbps 100
Radix_Down 8
Radix_Up 8
Downlink_Latency_ns 1000
Tier 1
Downlink_speed_Gbps 100
Radix_Down 8
Radix_Up 8
Downlink_Latency_ns 1000
Bundle 1
Tier 2
Downlink_speed_Gbps 100
Radix_Down 16
Downlink_Latency_ns 1000
"""


def read(folder: Path, text: str) -> Topo:
    path = folder / "f.topo"
    path.write_text(text, encoding="utf-8")
    return read_topo(path)


def shape(f: Fabric) -> tuple[object, ...]:
    return f.hosts, f.port_gbps, f.tiers, f.t0_down, f.t0_up, f.t0, f.t1, f.t2, f.pods, f.paths, f.hop_s


def test_leaf_spine(tmp_path: Path) -> None:
    found = read(tmp_path, LEAF_SPINE)
    f = found.fabric
    assert (f.hosts, f.nic_gbps, f.planes, f.t0_down, f.t0_up, f.t0, f.t1, f.pods) == (32, 100, 1, 8, 2, 4, 2, 1)
    assert f.oversubscription == 4
    assert f.hop_s == pytest.approx(1e-6)
    assert found.not_mapped == ()


@pytest.mark.parametrize("ratio", [1, 4, 8])
def test_leaf_spine_1024_comes_back_line_by_line(tmp_path: Path, ratio: int) -> None:
    # leaf_spine_1024_oversub.topo and its kin, as public forks of uet-htsim have them
    leaf = f"Tier 0\nDownlink_speed_Gbps 100\nRadix_Down 32\nRadix_Up {32 // ratio}\nDownlink_Latency_ns 1000\n"
    leaf += f"Oversubscribed {ratio}\nSwitch_Latency_ns 0\n"
    spine = "Tier 1\nDownlink_speed_Gbps 100\nRadix_Down 32\nDownlink_Latency_ns 1000\nSwitch_Latency_ns 0\n"
    text = f"Nodes 1024\nTiers 2\nPodsize 1024\n\n{leaf}\n{spine}"
    found = read(tmp_path, text)
    assert (found.fabric.t0, found.fabric.t1, found.not_mapped) == (32, 32 // ratio, ())
    written = write_topo(found.fabric).text
    assert sorted(written.splitlines()[1:]) == sorted(text.splitlines())
    assert read(tmp_path, written).fabric == found.fabric


def test_a_file_name_that_acts_is_spelt_out(tmp_path: Path) -> None:
    path = tmp_path / "a\x1b[2J\u202e.topo"
    path.write_text(LEAF_SPINE)
    assert read_topo(path).fabric.name == "a\\x1b[2J\\u202e"


def test_fat_tree(tmp_path: Path) -> None:
    f = read(tmp_path, FAT_TREE).fabric
    assert (f.t0, f.t1, f.t2, f.pods, f.t1_up, f.hops) == (128, 128, 64, 16, 8, 5)
    assert links_of(f).count == 2 * 3 * 1024


def test_bundles_are_parallel_links(tmp_path: Path) -> None:
    text = LEAF_SPINE.replace("Radix_Up 2", "Radix_Up 8").replace("Oversubscribed 4", "Oversubscribed 1")
    f = read(tmp_path, text.replace("Radix_Down 4", "Radix_Down 16\nBundle 4")).fabric
    assert (f.t0_up, f.t1) == (8, 2)


@pytest.mark.parametrize(
    "text",
    [
        "leaf-spine-1024",
        "clos2:1024x100G/1p/40/4:1/wide",
        "clos2:128x800G/8p/32",
        "clos3:1024x100G/1p/16",
        "clos3:128x100G/1p/16",
        "clos3:250x100G/1p/16",
    ],
)
def test_a_fabric_comes_back_as_one_plane_of_it(text: str, tmp_path: Path) -> None:
    fabric = parse_fabric(text)
    written = write_topo(fabric)
    found = read(tmp_path, written.text)
    plane = replace(fabric, planes=1, nic_gbps=fabric.port_gbps, hosts=fabric.t0 * fabric.t0_down)
    assert shape(found.fabric) == pytest.approx(shape(plane))
    assert links_of(found.fabric).count == links_of(plane).count
    assert any("8 planes" in one for one in written.not_mapped) == (fabric.planes == 8)
    assert any("empty ports" in one for one in written.not_mapped) == (plane.hosts != fabric.hosts)
    assert write_topo(found.fabric).text.partition("\n")[2] == "\n".join(
        line for line in written.text.partition("\n")[2].split("\n") if not line.startswith("#")
    )


def test_latencies_and_queues_that_do_not_map_are_said(tmp_path: Path) -> None:
    text = LEAF_SPINE.replace("Switch_Latency_ns 0", "Switch_Latency_ns 300\nQueue_Down 88")
    found = read(tmp_path, text + "Switch_Latency_ns 500\n")
    # Four links, two passes of a T0, one of a T1.
    assert found.fabric.hop_s == pytest.approx((4 * 1000 + 2 * 300 + 500) / 4 * 1e-9)
    assert "1275 ns" in found.not_mapped[0]
    assert "Queue_Down" in found.not_mapped[1]


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("Tiers 2", "Tiers 4", "f.topo:2: Tiers 4 is out of range"),
        ("Podsize 32", "Podsize 16", "f.topo:3: pods of 16 of 32 nodes"),
        ("Radix_Up 2", "Radix_Up 3", "f.topo:11: 8 ports down and 3 up, but oversubscribed 4"),
        ("Radix_Down 4", "Radix_Down 5", "f.topo:15: tier 1 has 5 ports down for 4 switches below"),
        ("Radix_Down 8", "Radix_Donw 8", "f.topo:7: there is no \"Radix_Donw\"\n  did you mean radix_down?"),
        ("Radix_Up 2", "Radix_Up two", "f.topo:8: Radix_Up \"two\" is not a whole number"),
        ("Radix_Up 2", "Radix_Up", "f.topo:8: \"Radix_Up\" has no number"),
        ("Radix_Up 2", "Radix_Up 2 3", "more than a word and a number"),
        ("Radix_Up 2", "Radix_Up 2\nRadix_Up 2", "f.topo:9: Radix_Up is given twice"),
        ("Radix_Up 2\n", "", "f.topo:5: tier 0 has no radix_up"),
        ("Tier 1\nDownlink_speed_Gbps 100", "Tier 1\nDownlink_speed_Gbps 400", "f.topo:14: links of 400 Gb/s above"),
        ("Tier 1", "Tier 0", "f.topo:13: tier 0 is described twice"),
        ("Tier 1", "Tier 2", "tier 1 is missing"),
        ("Nodes 32\n", "", "Nodes is missing"),
        ("Nodes 32", "Nodes 99999999999999999999", "is not a whole number"),
        ("Nodes 32", "\x1b]0;t\x07 4", "f.topo:1: there is no \"\\x1b]0;t\\x07\""),
        ("Gbps 100", "Gbps 99999999", "f.topo:6: Downlink_speed_Gbps 99,999,999 is out of range\n  use 1 to 102,400"),
        ("Latency_ns 1000", "Latency_ns 9999999999", "f.topo:9: Downlink_Latency_ns 9,999,999,999 is out of range"),
        ("Nodes 32", "Nodes 32 é", "f.topo:1: is not plain text"),
    ],
)  # fmt: skip
def test_mistakes_name_file_and_line(old: str, new: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        read(tmp_path, LEAF_SPINE.replace(old, new, 1))
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("clos2:1024x100G/1p/64/8r", "8 rails"),
        ("clos1:64x100G/1p/64", "1 tiers"),
        ("clos2:64x100G/1p/64/2:1", "42 ports down and 22 up"),
        ("clos2:64x100G/3p/64", "ports of 33.3333 Gb/s"),
    ],
)
def test_fabrics_without_such_a_file_are_refused(text: str, what: str) -> None:
    with pytest.raises(UserError, match=what):
        write_topo(parse_fabric(text))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([*LEAF_SPINE.splitlines(), "Tier 2", "Bundle 0", "x", "Nodes -1", "\x00"]), max_size=25)
)
def test_any_lines_are_a_fabric_or_a_user_error(tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> None:
    said = "f.topo"
    try:
        read(tmp_path_factory.getbasetemp(), "\n".join(lines))
    except UserError as error:
        said = str(error)
    assert "f.topo" in said
