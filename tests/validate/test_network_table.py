"""Reading a table of claims."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.errors import UserError
from phalanx.validate.network_claims import is_network_table, read_claims

HEADER = "source,quantity,value,unit,conditions\n"


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "claims.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_cells_and_lines(tmp_path: Path) -> None:
    text = '\ufeffSource, Quantity,value,unit,conditions,more\nx,y,"131,072",NICs,"a, b",z\nx,y,many,,\n'
    first, second = read_claims(write(tmp_path, text))
    assert (first.line, first.value, first.unit, first.conditions) == (2, 131072.0, "NICs", "a, b")
    assert (second.line, second.value) == (3, None)


@pytest.mark.parametrize(
    ("text", "half"), [("6.1", 0.05), ("85", 0.5), ("0.390", 0.0005), ("8", 0.0), ("4e-08", 0.0), ("1.0", 0.05)]
)
def test_half_of_the_last_digit(tmp_path: Path, text: str, half: float) -> None:
    assert read_claims(write(tmp_path, HEADER + f"x,y,{text},,\n"))[0].rounding == half


def test_same_means_the_row_above(tmp_path: Path) -> None:
    rows = read_claims(write(tmp_path, HEADER + 'x,y,1,,"8 hosts, one plane"\nx,z,2,,same\nx,z,3,,"same, 4 QPs"\n'))
    assert [row.conditions for row in rows] == ["8 hosts, one plane"] * 2 + ["8 hosts, one plane, 4 QPs"]


def test_recognised_by_its_header(tmp_path: Path) -> None:
    assert is_network_table(write(tmp_path, HEADER))
    assert is_network_table(write(tmp_path, "source,quantity,val\n"))
    assert not is_network_table(write(tmp_path, "id,layers,hidden\n"))
    assert not is_network_table(write(tmp_path, b"\xff\xfe\x00quantity"))
    assert not is_network_table(tmp_path / "nowhere.csv")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("source,quantity,val,unit\nx,y,1,m\n", 'lacks the columns value, conditions\n  is "val" meant to be value?'),
        ("source,quantity,unit,conditions\n", "lacks the column value\n  the columns are source, quantity"),
        ("source,quantity,value,unit,conditions,unit\n", "has the column unit twice"),
        (HEADER, "has a header but no rows"),
        ("", "lacks the columns source"),
        (b"\xff\xfe\x00", "holds a NUL byte"),
    ],
)
def test_what_is_no_such_table(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(UserError) as caught:
        read_claims(write(tmp_path, text))
    assert message in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such CSV file"):
        read_claims(tmp_path / "nowhere.csv")
