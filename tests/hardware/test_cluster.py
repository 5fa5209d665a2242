import contextlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import UserError
from phalanx.hardware import cluster_defaults
from phalanx.hardware.catalog import shipped_accelerators
from phalanx.hardware.cluster import render_cluster, resolve_cluster
from phalanx.hardware.types import Cluster
from phalanx.io.codec import from_json_values, json_text, json_values

NOWHERE: dict[str, str] = {}


def at(spec: str) -> tuple[int, int, int, int]:
    cluster = resolve_cluster(spec, environ=NOWHERE)
    return cluster.devices, cluster.domain_devices, cluster.domains, cluster.hosts


def test_specs_mean_what_the_documentation_says() -> None:
    assert at("8xH100:16") == (128, 8, 16, 16)
    assert at("72xGB200:8") == (576, 72, 8, 144)
    assert at("H100:64") == (64, 8, 8, 8)
    assert at("H100:4") == (4, 4, 1, 1)
    assert at("1xA100") == (1, 1, 1, 1)
    assert at("TPUv4:64") == (64, 64, 1, 16)
    assert at("2xH100-NVL:4") == (8, 2, 4, 1)
    assert at(" 8 x H100 : 2 ") == (16, 8, 2, 2)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("8xH100:0", "cluster '8xH100:0': has 0 domains\n  a cluster needs at least one\n  write 8xH100:16"),
        ("0xH100:4", "has 0 devices per domain"),
        ("-8xH100:4", "has -8 devices per domain"),
        ("H100:-1", "has -1 devices"),
        ("H100:0", "has 0 devices"),
        ("", "cluster: the spec is empty\n  it must name what to run on\n"),
        ("16", "is not a cluster"),
        ("8xH100:1.5", "is not a cluster"),
        ("8xH100:99999999", "has 799,999,992 devices"),
        ("64xH100", "NVLink4 joins 8 H100-80GB-SXM\n"),
        ("64xH100", "write 8xH100-80GB-SXM:8, or a cluster file"),
        ("H100:12", "use 8 or 16 devices, or write 6xH100-80GB-SXM:2"),
        ("8xH10:2", "unknown accelerator 'H10'"),
    ],
)
def test_bad_specs_say_the_cure(spec: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve_cluster(spec, environ=NOWHERE)
    assert message in str(caught.value)


@given(st.text(max_size=40))
def test_any_text_is_a_cluster_or_a_user_error(text: str) -> None:
    if text.strip() == "local":
        return
    with contextlib.suppress(UserError):  # any other exception would be a traceback for the user
        assert resolve_cluster(text, environ=NOWHERE).devices >= 1


def test_defaults_follow_their_sources() -> None:
    h100 = resolve_cluster("8xH100:2048", environ=NOWHERE)
    assert h100.failures_per_host_day * h100.hosts * 54 == pytest.approx(419)  # Llama 3
    assert resolve_cluster("8xA100", environ=NOWHERE).failures_per_host_day == pytest.approx(6.5e-3)
    assert resolve_cluster("TPU-v4:64", environ=NOWHERE).failures_per_host_day == pytest.approx(8e-4)
    assert h100.link_latency_s == 3.4e-6
    assert h100.nic_latency_s == 14e-6
    assert resolve_cluster("8xL40S", environ=NOWHERE).link_latency_s == 5.7e-6
    assert h100.price_usd_per_device_hour == (1.29, 3.25, 11.101)
    assert resolve_cluster("72xGB200", environ=NOWHERE).price_usd_per_device_hour is None
    assert cluster_defaults.usual_power_w_per_device(h100) == pytest.approx(856)


@pytest.mark.parametrize("name", [entry.name for entry in shipped_accelerators()])
def test_every_shipped_accelerator_makes_a_whole_cluster_that_survives_json(name: str) -> None:
    cluster = resolve_cluster(f"1x{name}:3", environ=NOWHERE)
    assert min(cluster.link_bytes_per_s, cluster.nic_bytes_per_s, cluster.link_latency_s) > 0
    assert min(cluster.host_memory_bytes, cluster.failures_per_host_day) > 0
    assert from_json_values(Cluster, json.loads(json_text(cluster))) == cluster


def test_all_that_is_wrong_with_a_stored_cluster_is_named() -> None:
    data = json_values(resolve_cluster("8xH100:2", environ=NOWHERE))
    wrong = {**data, "domains": 0, "pu": 1, "link_latency_s": float("nan"), "cpu": {"cores": 0}}
    with pytest.raises(UserError) as caught:
        from_json_values(Cluster, wrong, "cluster")
    assert str(caught.value).splitlines()[::2] == [
        "cluster.pu: is not an entry of a plan",
        "cluster.domains: 0 is not a whole number from 1",
        "cluster.link_latency_s: nan is not a number from 0",
        "cluster.cpu.cores: 0 is not a number above 0",
    ]
    assert "  did you mean pue?" in str(caught.value)


FILE = """\
version = 1
accelerator = "H100"
domains = 4
nic_gbps = 200
usd_per_device_hour = 2.5
failures_per_host_day = 0
pue = 1.2
"""


def test_cluster_file_overrides_the_catalogue(tmp_path: Path) -> None:
    (tmp_path / "blue.toml").write_text(FILE)
    cluster = resolve_cluster("blue.toml", base=tmp_path, environ=NOWHERE)
    assert (cluster.name, cluster.devices, cluster.nic_bytes_per_s) == ("blue", 32, 25e9)
    assert cluster.price_usd_per_device_hour == (2.5, 2.5, 2.5)
    assert cluster.failures_per_host_day == 0
    assert cluster.pue == 1.2
    assert cluster.link_bytes_per_s == 450e9
    (tmp_path / "copy.toml").write_text(render_cluster(cluster))
    assert resolve_cluster("copy.toml", base=tmp_path, environ=NOWHERE).failures_per_host_day == 0


def test_cluster_file_lists_every_mistake_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text(
        FILE.replace("H100", "H10").replace("= 4", "= 0").replace("nic_gbps", "nic_gbp").replace("2.5", "[3, 2, 1]")
    )
    with pytest.raises(UserError) as caught:
        resolve_cluster("bad.toml", base=tmp_path, environ=NOWHERE)
    text = str(caught.value)
    assert "bad.toml:4: unknown key nic_gbp\n  did you mean nic_gbps?" in text
    assert "bad.toml:3: domains = 0 is out of range\n  give a whole number from 1 to 10,000,000" in text
    assert "bad.toml:5: usd_per_device_hour = [3, 2, 1] is neither" in text
    assert "bad.toml:2: unknown accelerator 'H10'" in text


def test_cluster_file_may_define_its_own_device(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(
        'domains = 2\n[accelerator]\nname = "Z9"\npeak_bf16_tflops = 500\nmemory_gib = 64\nmemory_tb_per_s = 2\n'
        'link = "PCIe5"\ndomain_devices = 4\nhost_devices = 4\n'
    )
    cluster = resolve_cluster(str(tmp_path / "own.toml"), environ=NOWHERE)
    assert (cluster.devices, cluster.accelerator.peak_bf16_flops, cluster.link_bytes_per_s) == (8, 500e12, 63e9)


def test_a_written_cluster_file_holds_no_controls(tmp_path: Path) -> None:
    odd = 'blü"\\\x1b[2J\x9b\u202e\U000e0001'
    text = render_cluster(replace(resolve_cluster("8xH100:2", environ=NOWHERE), name=odd))
    assert text.replace("\n", "").isprintable()
    (tmp_path / "odd.toml").write_text(text)
    assert resolve_cluster("odd.toml", base=tmp_path, environ=NOWHERE).name == odd


@pytest.mark.parametrize("spec", ["8xH100:16", "72xGB200:8", "TPUv4:64", "CPU:4", "8xMI300X"])
def test_a_written_cluster_file_reads_back_the_same(tmp_path: Path, spec: str) -> None:
    cluster = resolve_cluster(spec, environ=NOWHERE)
    path = tmp_path / "written.toml"
    path.write_text(render_cluster(cluster))
    back = json_values(resolve_cluster(str(path), environ=NOWHERE))
    for key, value in json_values(cluster).items():
        if key != "source":
            assert back[key] == (pytest.approx(value) if isinstance(value, float | int) else value), key


def test_missing_cluster_file(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        resolve_cluster("none.toml", base=tmp_path, environ=NOWHERE)
    assert str(caught.value) == f"{tmp_path / 'none.toml'}: there is no such file"
