"""A catalogue of one's own is read, and mistakes in it are told with their lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx.errors import UserError
from phalanx.network.fabric.design import DesignRequest, design_fabrics
from phalanx.network.fabric.switch_catalogue import read_catalogue

GOOD = """box,port_gbps,radix,watts,usd_low,usd_high
Leaf 9,400,128,900,30000,40000
Leaf 9,100,512,,,
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "own.csv"
    path.write_text(text)
    return path


def test_rows_become_switches_and_designs(tmp_path: Path) -> None:
    wide, narrow = read_catalogue(written(tmp_path, GOOD))
    assert (wide.kind, narrow.kind) == ("ethernet", "ethernet")
    assert (wide.name, wide.radix, wide.watts, wide.usd) == ("Leaf 9 128x400G", 128, 900, (30000, 40000))
    assert (narrow.watts, narrow.usd) == (0, None)
    found = design_fabrics(
        DesignRequest(gpus=1024, nic_gbps=400, oversubscription=1, rails=1, catalogue=(wide, narrow))
    )
    assert [one.fabric.switch.name for one in found] == ["Leaf 9 128x400G", "Leaf 9 512x100G"]
    assert found[0].bill.usd is not None
    assert len(design_fabrics(DesignRequest(gpus=1024, nic_gbps=400, switch="leaf9", catalogue=(wide, narrow)))) > 2
    with pytest.raises(UserError, match="the catalogue has Leaf 9"):
        design_fabrics(DesignRequest(gpus=1024, nic_gbps=400, switch="Spectrum-5", catalogue=(wide, narrow)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not a table with commas"),
        ("box,port_gbps\nx,100\n", "own.csv:1: the column radix is missing"),
        ("box,port_gbps,radix,pirce\nx,100,64,5\n", 'there is no column "pirce"'),
        ("box,port_gbps,radix\n", "has 0 switches"),
        ("box,port_gbps,radix\nx,100,many\n", "own.csv:2: invalid literal"),
        ("box,port_gbps,radix\nx,100,2\n", "own.csv:2: a radix of 2"),
        ("box,port_gbps,radix\nx,100,64\ny,nan,64\n", "own.csv:3: ports of nan Gb/s"),
        ("box,port_gbps,radix\n,100,64\n", "the box has no name"),
        ("box,port_gbps,radix,watts\nx,100,64,-1\n", "own.csv:2: -1 W"),
        ("box,port_gbps,radix,usd_low,usd_high\nx,100,64,9,5\n", "a price of 9 to 5 dollars"),
        ('box,port_gbps,radix\n"x,100,64\n', "is not CSV"),
        ("box,port_gbps,radix,kind\nx,100,64,token ring\n", 'own.csv:2: "token ring" is no kind of switch'),
        ("box,port_gbps,radix\nx\x1b[2J\u202e,100,64\n", 'own.csv:2: "x\\x1b[2J\\u202e" has characters that cannot'),
        ("box,port_gbps,radix,source\nx,100,64,\x9b\n", "has characters that cannot be printed"),
        (f"box,port_gbps,radix\n{'x' * 121},100,64\n", "the name of the box has 121 characters"),
        ("box,port_gbps,radix\nx,1e30,64\n", "own.csv:2: ports of 1e+30 Gb/s"),
        ("box,port_gbps,radix,watts\nx,100,64,1e9\n", "own.csv:2: 1e+09 W"),
        ("box,port_gbps,radix,usd_low\nx,100,64,1e30\n", "a price of 1e+30"),
    ],
)
def test_mistakes(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        read_catalogue(written(tmp_path, text))
    assert words in str(error.value)


def test_all_wrong_lines_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        read_catalogue(written(tmp_path, "box,port_gbps,radix\nx,100,1\ny,0,64\n"))
    assert len(error.value.problems) == 2


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.sampled_from(["box", "port_gbps", "radix", "\n", ",", "64", "1e9", "inf", "-1", "x", '"', "9" * 30, "\r"]),
        max_size=30,
    )
)
def test_any_file_is_a_catalogue_or_a_user_error(tmp_path: Path, pieces: list[str]) -> None:
    text = "box,port_gbps,radix\n" + "".join(pieces)
    said = "own.csv"
    try:
        assert read_catalogue(written(tmp_path, text))
    except UserError as error:
        said = str(error)
    assert "own.csv" in said


def test_a_box_of_ones_own_can_be_infiniband(tmp_path: Path) -> None:
    (one,) = read_catalogue(written(tmp_path, "box,port_gbps,radix,kind\nx,100,64,InfiniBand\n"))
    assert one.kind == "infiniband"
