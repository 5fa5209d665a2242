"""Cluster files with [[site]]: what they describe, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.errors import UserError
from phalanx.hardware.cluster import render_cluster, resolve_cluster
from phalanx.hardware.types import Cluster
from phalanx.io.codec import from_json_values, json_values

GOOD = """\
name = "two"

[[site]]
name = "a"
devices = "8xH100:1"
up_mbit_s = 500
down_mbit_s = 1000
latency_ms = 40

[[site]]
name = "b"
devices = "8xA100:2"
up_mbit_s = 100
down_mbit_s = 80
latency_ms = 60
loss = 0.01
client_only = true
session_h = 4
absence_h = 0.5
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "sites.toml"
    path.write_text(text, encoding="utf-8")
    return path


def complaints(folder: Path, text: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        resolve_cluster(written(folder, text))
    return [f"{one.where.removeprefix(str(folder) + '/')}: {one.what}" for one in caught.value.problems]


def test_sites_are_read_in_bytes_and_seconds(tmp_path: Path) -> None:
    cluster = resolve_cluster(written(tmp_path, GOOD))
    first, second = cluster.sites
    assert (cluster.name, cluster.devices, second.cluster.devices) == ("two", 8, 16)
    assert (first.up_bytes_per_s, first.bytes_per_s, first.loss, first.client_only) == (62.5e6, 62.5e6, 0.0, False)
    assert (second.bytes_per_s, second.latency_s, second.loss, second.client_only) == (10e6, 0.06, 0.01, True)
    assert (second.session_s, second.absence_s, first.session_s) == (14400.0, 1800.0, 0.0)
    assert "2 sites joined by slow links" in str(cluster)


def test_a_cluster_of_sites_survives_json_and_others_do_not_mention_sites(tmp_path: Path) -> None:
    cluster = resolve_cluster(written(tmp_path, GOOD))
    assert from_json_values(Cluster, json_values(cluster), "cluster") == cluster
    assert "sites" not in json_values(resolve_cluster("8xH100:1"))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("up_mbit_s = 500", "up_mbit_s = 0", "sites.toml:6: up_mbit_s = 0 is out of range"),
        ("down_mbit_s = 80", 'down_mbit_s = "fast"', "sites.toml:14: down_mbit_s = 'fast' is not a number"),
        ("latency_ms = 40", "latency_ms = -1", "sites.toml:8: latency_ms = -1 is out of range"),
        ("latency_ms = 40\n", "", "sites.toml:3: latency_ms is missing"),
        ("loss = 0.01", "loss = 1", "sites.toml:16: loss = 1 is out of range"),
        ("client_only = true", "client_only = 1", "sites.toml:17: client_only = 1 is neither true nor false"),
        ("loss = 0.01", 'congestion = "vegas"', "sites.toml:16: congestion = 'vegas' is neither cubic nor bbr"),
        ("session_h = 4\n", "", "sites.toml:18: absence_h without session_h: the site never leaves"),
        ('name = "b"', 'name = "a"', "sites.toml:11: two sites are named 'a'"),
        ("8xA100:2", "8xA1000:2", "sites.toml:12: cluster '8xA1000:2': unknown accelerator 'A1000'"),
        ("8xA100:2", "sites.toml", "sites.toml:12: devices = 'sites.toml' has sites of its own"),
        ("up_mbit_s = 500", "up_mbit = 500", "sites.toml:6: unknown key up_mbit"),
        ('name = "two"', "domains = 4", "sites.toml:1: domains does not belong beside [[site]]"),
        ('name = "two"', "version = 2", "sites.toml:1: version = 2 is not one this Phalanx reads"),
    ],
)
def test_a_wrong_value_is_told_with_its_line(tmp_path: Path, old: str, new: str, told: str) -> None:
    assert told in complaints(tmp_path, GOOD.replace(old, new))


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    text = GOOD.replace("up_mbit_s = 500", "up_mbit_s = 0").replace("loss = 0.01", "loss = 7")
    assert len(complaints(tmp_path, text)) == 2


def test_one_site_or_only_clients_are_no_cluster(tmp_path: Path) -> None:
    alone = GOOD[: GOOD.index("[[site]]", 20)]
    assert complaints(tmp_path, alone) == ["sites.toml:3: has 1 [[site]]"]
    hidden = GOOD.replace("latency_ms = 40", "latency_ms = 40\nclient_only = true")
    assert complaints(tmp_path, hidden) == ["sites.toml:3: every site is client_only"]


def test_a_cluster_of_sites_is_not_written_as_one_cluster(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a cluster of sites"):
        render_cluster(resolve_cluster(written(tmp_path, GOOD)))
