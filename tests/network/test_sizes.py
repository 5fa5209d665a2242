"""Sizes as people write them."""

from __future__ import annotations

import pytest

from phalanx.errors import UserError
from phalanx.network.sizes import format_size, parse_size, parse_sizes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("64MiB", 2**26), ("64M", 2**26), ("64 mib", 2**26), ("64MB", 64e6), ("1.5G", 1.5 * 2**30), ("8", 8), ("8B", 8)],
)
def test_binary_unless_it_says_mb(text: str, nbytes: float) -> None:
    assert parse_size(text, "--bytes") == nbytes


@pytest.mark.parametrize(
    "text", ["", "0", "many", "-1", "1e9", "64XiB", "9999T", "1GiB..", "..1GiB", "2GiB..1GiB", "1..1"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UserError, match=r"^--bytes: ") as caught:
        parse_sizes(text, "--bytes")
    assert "write it as 64MiB" in str(caught.value)


def test_a_range_has_its_ends_and_the_powers_between() -> None:
    assert parse_sizes("3KiB..16KiB", "") == (3072, 4096, 8192, 16384)
    assert parse_sizes("4KiB..8KiB", "") == (4096, 8192)
    assert parse_sizes("100..120", "") == (100, 120)
    assert len(parse_sizes("1..1024T", "")) == 51


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (1, "1 B"),
        (1023, "1023 B"),
        (2**20, "1 MiB"),
        (1000 * 2**20, "1,000 MiB"),
        (2**50, "1,024 TiB"),
        (1e9, "954 MiB"),
    ],
)
def test_format(nbytes: float, text: str) -> None:
    assert format_size(nbytes) == text
