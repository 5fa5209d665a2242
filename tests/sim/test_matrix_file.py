"""Traffic from a CSV file, and what is wrong with one."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.errors import UserError
from phalanx.sim.traffic_matrix import read_matrix


def write(folder: Path, text: str) -> Path:
    path = folder / "m.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_columns_in_any_order_with_units_and_comments(tmp_path: Path) -> None:
    text = "\ufeffDst, src ,note,bytes\n# all of rack 1\n\n5,0,a,2M\n9,5,b,1000 # small\n5,0,again,1\r\n"
    made = read_matrix(write(tmp_path, text), 16)
    assert made.source.tolist() == [0, 5, 0]
    assert made.target.tolist() == [5, 9, 5]
    assert made.nbytes.tolist() == [2e6, 1000, 1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "m.csv:1: is empty"),
        ("0,5,2000000\n", "begin with src,dst,bytes"),
        ("src,dst,bytes\n", "there is no flow to simulate"),
        ("src,dst,bytes\n3,3,1\n", "m.csv:2: host 3 sends to itself"),
        ("src,dst,bytes\n\n3,16,1\n", "m.csv:3: there is no host '16'\n  hosts are 0 to 15"),
        ("src,dst,bytes\n-1,3,1\n", "there is no host '-1'"),
        ("src,dst,bytes\n1,3,0\n", "a transfer of 0 bytes"),
        ("src,dst,bytes\n1,3,much\n", "bytes 'much' is no size"),
        ("src,dst,bytes\n1,3\n", "2 columns"),
    ],
)
def test_mistakes_have_a_line(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read_matrix(write(tmp_path, text), 16)
    assert said in str(caught.value)


def test_several_mistakes_at_once_and_no_file(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read_matrix(write(tmp_path, "src,dst,bytes\n" + "1,1,1\n" * 9), 16)
    assert len(caught.value.problems) == 5
    for path in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(UserError, match="cannot be read"):
            read_matrix(path, 16)
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00" * 40)
    with pytest.raises(UserError, match="cannot be read"):
        read_matrix(tmp_path / "b.csv", 16)
