"""Short form, file and name give the same fabric; mistakes are told with the nearest choice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import UserError
from phalanx.network.fabric.fabric_file import parse_fabric
from phalanx.network.fabric.fabric_text import show_fabric


def test_short_form() -> None:
    fabric = parse_fabric("clos2:131_072x800G/8p/512")
    assert (fabric.hosts, fabric.nic_gbps, fabric.planes, fabric.tiers, fabric.switch.radix) == (131072, 800, 8, 2, 512)
    assert parse_fabric("CLOS2:3072x400g/2p/64/3:1/8r").rails == 8
    assert parse_fabric("clos2:6144x400G/2p/128/3:1").oversubscription == 3


def test_the_name_of_a_fabric_is_its_short_form() -> None:
    for text in ("clos2:131072x800G/8p/512", "clos3:6000x400G/2p/64/2:1/8r", "clos2:1024x100G/1p/64/wide"):
        fabric = parse_fabric(text)
        assert fabric.name == text
        assert parse_fabric(fabric.name) == fabric


def test_a_switch_of_the_catalogue_has_a_price() -> None:
    fabric = parse_fabric("clos2:131072x800G/8p/Spectrum-5")
    assert fabric.switch.name == "Spectrum-5 512x100G"
    assert fabric.switch.usd is not None


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("hosts = 131072\nnic_gbps = 800\nplanes = 8\ntiers = 2\nradix = 512\n")
    assert parse_fabric(str(path)) == replace(parse_fabric("clos2:131072x800G/8p/512"), name="mine")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("hosts = 64\ntiers = 2\nradix = 64\n", "nic_gbps is missing"),
        ("hosts = 64\nnic_gbps = 800\ntiers = 2\n", "either radix or switch"),
        ("hosts = 64\nnic_gbps = 800\ntiers = 2\nradix = 64\nplane = 2\n", "mine.toml:5: there is no key"),
        ('hosts = "many"\nnic_gbps = 800\ntiers = 2\nradix = 64\n', "hosts = many is not a whole number above 0"),
        ("hosts = 64.5\nnic_gbps = 800\ntiers = 2\nradix = 64\n", "not a whole number"),
        ("hosts = " + "9" * 400 + "\nnic_gbps = 800\ntiers = 2\nradix = 64\n", "are not a fabric"),
        ("hosts = true\nnic_gbps = 800\ntiers = 2\nradix = 64\n", "hosts = True is not a whole number"),
        ("hosts = inf\nnic_gbps = 800\ntiers = 2\nradix = 64\n", "not a whole number"),
        ("hosts = 64\nnic_gbps = nan\ntiers = 2\nradix = 64\n", "not a number above 0"),
        ("hosts = 64\nnic_gbps = 800\ntiers = 2\nswitch = 5\n", "switch is no text"),
        ("hosts = 64\nnic_gbps = 400\nplanes = 3\ntiers = 2\nradix = 64\n", "use 2 or 4 planes"),
        ("hosts = 64\nnic_gbps = 400\ntiers = 2\nradix = 64\nusd = 5\n", "mine.toml:5: usd is not a low and a high"),
        ("hosts = 64\nnic_gbps = 400\ntiers = 2\nradix = 64\nusd = [9, 5]\n", "usd is not a low and a high price"),
        ("hosts = 64\nnic_gbps = 400\ntiers = 2\nradix = 64\nwatts = -5\n", "watts = -5 is not a number above 0"),
        ("hosts = 64\nnic_gbps = 400\ntiers = 2\nradix = 64\nwatts = 1e9\n", "at most 1,000,000"),
        ("hosts = 64\nnic_gbps = 400\ntiers = 2\nradix = 64\nusd = [1, 1e12]\n", "usd is not a low and a high price"),
        ("hosts = 64\nnic_gbps = 1e30\ntiers = 2\nradix = 64\n", "no NIC has 1e+30 Gb/s"),
        ("hosts = 64\nnic_gbps = 400\ntiers = 2\nradix = 64\nwide = 1\n", "wide = 1 is neither true nor false"),
        ("hosts = 64\nnic_gbps = 400\ntiers = 2\nradix = 64\nname = 5\n", "mine.toml:5: name is no text"),
        ('hosts = 64\nnic_gbps = 400\ntiers = 2\nradix = 64\nkind = "tin"\n', 'there is no kind "tin" of switch'),
        (f'hosts = 64\nnic_gbps = 400\ntiers = 2\nradix = 64\nname = "{"n" * 121}"\n', "name has 121 characters"),
    ],
)
def test_a_bad_file(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(content)
    with pytest.raises(UserError) as error:
        parse_fabric(str(path))
    assert words in str(error.value)


def test_all_mistakes_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('nic_gbps = 0\ntiers = "two"\nplane = 8\nname = "a\\u001b"\nusd = 3\n')
    with pytest.raises(UserError) as error:
        parse_fabric(str(path))
    said = str(error.value)
    wrong = ("plane", "name", "hosts is missing", "nic_gbps = 0", "tiers = two", "either radix or switch", "usd is not")
    assert len(error.value.problems) == len(wrong)
    assert all(word in said for word in wrong)


@pytest.mark.parametrize("key", ["name", "box"])
@pytest.mark.parametrize("code", ["001b", "009b", "202e", "000a", "fffe"])
def test_a_name_that_acts_is_refused(tmp_path: Path, key: str, code: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f'hosts = 64\nnic_gbps = 400\ntiers = 2\nradix = 64\n{key} = "a\\u{code}"\n')
    with pytest.raises(UserError, match=rf"mine.toml:5: {key} = .* has characters that cannot be printed"):
        parse_fabric(str(path))


def test_a_file_name_that_acts_is_spelt_out(tmp_path: Path) -> None:
    path = tmp_path / "a\x1b[2J\u202e.toml"
    path.write_text("hosts = 64\nnic_gbps = 400\ntiers = 2\nradix = 64\n")
    assert parse_fabric(str(path)).name == "a\\x1b[2J\\u202e"


def test_names_of_every_script_stay(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('hosts = 64\nnic_gbps = 400\ntiers = 2\nradix = 64\nname = "Köln · 漢"\nbox = "Größe"\n')
    assert (parse_fabric(str(path)).name, parse_fabric(str(path)).switch.box) == ("Köln · 漢", "Größe")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not a fabric"),
        ("mrc-131", "did you mean mrc-131k?"),
        ("clos2:64x800G", "write it as clos2:131072x800G/8p/512"),
        ("clos2:64x800G/1p", "it names no switch"),
        ("clos2:64x800G/1p/64/32", 'two switches: "64" and "32"'),
        ("clos2:64x400G/1p/128/1:4", '"1:4" is not a ratio to 1'),
        ("clos2:64x400G/1p/128/1:4", "write 4:1"),
        ("clos2:64x400G/1p/128/0:0", "write 2:1"),
        ("clos2:64x1000000G/1p/64", "use at most 102,400"),
        ("clos2:64x102400G/102400p/64x1G", "102,400 planes"),
        ("clos2:64x102399G/957p/1:2", "is not a ratio"),
        ("clos2:64x400G/1p/\x1b[2J", 'no switch "\\x1b[2J"'),
        ("clos2:1024x800G/3p/Tomahawk 5", "use 1 or 2 or 4 or 8 planes"),
        ("clos2:1024x800G/1p/Quantum-2", "use 2 or 4 planes"),
        ("clos2:" + "9" * 5000 + "x800G/1p/64", "is not a fabric"),
        ("clos2:131072x800G/4p/256", "join at most 32,768"),
        ("clos2:64x0G/1p/64", "carries nothing"),
        ("clos2:64x400G/3p/64", "3 planes make ports of 133.333 Gb/s of a 400 Gb/s NIC"),
        ("clos2:64x400G/3p/64", "use 2 or 4 planes"),
        ("clos2:64x800G/5p/64", "use 4 or 8 planes"),
        ("clos2:64x800G/999999999p/64", "use 80 planes"),
        ("clos2:64x90G/4p/64", "use 3 or 5 planes"),
        ("clos2:64x0.001G/2p/64", "use 1 plane"),
        ("clos2:64x800G/0p/64", "0 planes"),
        ("clos2:64x400G/1p/2", "a switch of 2 ports cannot branch"),
        ("clos3:64x400G/1p/999999986", "no switch has 999,999,986 ports"),  # its half is a prime: minutes of divisors
        ("nowhere.toml", "no such file"),
    ],
)
def test_bad_text(text: str, words: str) -> None:
    with pytest.raises(UserError) as error:
        parse_fabric(text)
    assert words in str(error.value)


@settings(deadline=None, max_examples=150)
@given(
    tiers=st.integers(0, 6),
    hosts=st.one_of(st.integers(0, 300), st.integers(0, 10**13)),
    nic=st.sampled_from(["0", "1", "25", "90", "100", "400", "800", "1600", "0.001", "99999999999999"]),
    planes=st.one_of(st.integers(0, 20), st.integers(0, 10**12)),
    box=st.sampled_from(["0", "1", "3", "4", "5", "63", "64", "512", "999999999", "Tomahawk 5", "512x100G", "abacus"]),
    more=st.sampled_from(["", "/2:1", "/0:1", "/64:1", "/99999:1", "/8r", "/0r", "/7r", "/999999r", "/wide", "/1p"]),
)
def test_any_short_form_is_a_fabric_or_a_user_error(
    tiers: int, hosts: int, nic: str, planes: int, box: str, more: str
) -> None:
    said = "fabric"
    try:
        fabric = parse_fabric(f"clos{tiers}:{hosts}x{nic}G/{planes}p/{box}{more}")
        assert fabric.t0 * fabric.t0_down >= fabric.hosts == hosts
        assert show_fabric(fabric)
    except UserError as error:
        said = str(error)
    assert said.startswith("fabric")


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=60))
def test_any_text_is_a_fabric_or_a_user_error(text: str) -> None:
    said = "a fabric"
    try:
        parse_fabric(text)
    except UserError as error:
        said = str(error)
    assert said
