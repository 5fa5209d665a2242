"""A design that was saved is read back as the same fabric; the CSV has a line for each."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.network.fabric.design import DesignRequest, design_fabrics, designs_csv, fabric_toml
from phalanx.network.fabric.fabric_file import parse_fabric
from phalanx.network.fabric.switch_catalogue import switch_of


@pytest.mark.parametrize(("gpus", "nic"), [(131072, 800.0), (1000, 400.0), (64, 400.0), (24576, 1600.0)])
def test_what_is_saved_is_read_back(gpus: int, nic: float, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    for one in design_fabrics(DesignRequest(gpus=gpus, nic_gbps=nic))[::5]:
        path.write_text(fabric_toml(one.fabric))
        assert parse_fabric(str(path)) == replace(one.fabric, name="mine")


def test_a_ratio_that_is_no_half_and_a_switch_of_ones_own(tmp_path: Path) -> None:
    row = {"box": "Leaf 9", "port_gbps": "400", "radix": "128", "watts": "900", "usd_low": "3e4", "usd_high": "4e4"}
    wanted = DesignRequest(gpus=4000, nic_gbps=400, oversubscription=1.7, rails=1, catalogue=(switch_of(row),))
    (one,) = design_fabrics(wanted)
    path = tmp_path / "mine.toml"
    path.write_text(fabric_toml(one.fabric))
    back = parse_fabric(str(path))
    assert (back.t0_down, back.t0_up, back.t0, back.t1) == (
        one.fabric.t0_down,
        one.fabric.t0_up,
        one.fabric.t0,
        one.fabric.t1,
    )
    assert (back.switch.name, back.switch.watts, back.switch.usd) == ("Leaf 9 128x400G", 900, (30000, 40000))


def test_an_infiniband_box_of_ones_own_stays_one(tmp_path: Path) -> None:
    row = {"box": "Q9", "port_gbps": "400", "radix": "128", "kind": "InfiniBand"}
    one = design_fabrics(DesignRequest(gpus=1024, nic_gbps=400, rails=1, catalogue=(switch_of(row),)))[0]
    path = tmp_path / "mine.toml"
    path.write_text(fabric_toml(one.fabric))
    assert parse_fabric(str(path)).switch.kind == one.fabric.switch.kind == "infiniband"


def test_the_csv_has_a_line_per_design_with_exact_numbers() -> None:
    found = design_fabrics(DesignRequest(gpus=131072, nic_gbps=800))
    rows = list(csv.DictReader(io.StringIO(designs_csv(found))))
    assert len(rows) == len(found)
    first = rows[0]
    assert (first["t0"], first["t1"], first["switches"], first["hops"], first["paths"]) == (
        "4096",
        "2048",
        "6144",
        "3",
        "2048",
    )
    assert float(first["lost_t0_t1_link"]) == 1 / 256
    assert any(row["usd_low"] == "" for row in rows) is any(one.bill.usd is None for one in found)
