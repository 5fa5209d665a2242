"""Short form, file and name give the same fabric; mistakes are told with the nearest choice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.errors import UserError
from phalanx.network.fabric.parse import parse_fabric


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
    ],
)
def test_a_bad_file(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(content)
    with pytest.raises(UserError) as error:
        parse_fabric(str(path))
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not a fabric"),
        ("mrc-131", "did you mean mrc-131k?"),
        ("clos2:64x800G", "write it as clos2:131072x800G/8p/512"),
        ("clos2:64x800G/1p", "it names no switch"),
        ("clos2:64x800G/1p/64/32", 'two switches: "64" and "32"'),
        ("clos2:1024x800G/3p/Tomahawk 5", "use 1 or 2 or 4 or 8 planes"),
        ("clos2:1024x800G/1p/Quantum-2", "use 2 or 4 planes"),
        ("clos2:" + "9" * 5000 + "x800G/1p/64", "is not a fabric"),
        ("clos2:131072x800G/4p/256", "join at most 32,768"),
        ("clos2:64x0G/1p/64", "carries nothing"),
        ("nowhere.toml", "no such file"),
    ],
)
def test_bad_text(text: str, words: str) -> None:
    with pytest.raises(UserError) as error:
        parse_fabric(text)
    assert words in str(error.value)
