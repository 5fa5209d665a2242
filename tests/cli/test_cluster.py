import json
from pathlib import Path

import pytest

from phalanx.cli.main import main
from phalanx.hardware.cluster import resolve_cluster
from phalanx.hardware.types import Cluster
from phalanx.io.codec import from_json_values


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PHALANX_PROFILE", "PHALANX_HARDWARE", "XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_a_named_cluster_reads_as_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "8xH100:16"]) == 0
    out = capsys.readouterr().out
    assert "devices      128 x H100-80GB-SXM (nvidia hopper)" in out
    assert "best matmul  bf16 794 TFLOP/s (80% of peak, published)" in out
    assert "fast domain  8 devices over NVLink4, 450 GB/s each way, 3.40 µs a step" in out
    assert "network      16 domains, 400 Gb/s per device each way, 14.0 µs a step" in out
    assert "failures     0.0038 per host and day: one every 16.5 days" in out
    assert "price        $1.29 to $11.10 per device-hour, middle $3.25" in out
    assert "power        856 W per device" in out


def test_json_round_trips(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "72xGB200:8", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["machine"] is None
    assert from_json_values(Cluster, data["cluster"]) == resolve_cluster("72xGB200:8")


def test_this_machine_as_json_and_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["machine"]["usable_cores"] >= 1
    assert data["cluster"]["name"] == "local"
    assert main(["cluster"]) == 0
    assert capsys.readouterr().out.startswith("machine\n  host ")


def test_the_printed_toml_is_a_cluster_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "8xA100:4", "--toml"]) == 0
    (tmp_path / "mine.toml").write_text(capsys.readouterr().out.replace("nic_gbps = 200", "nic_gbps = 100", 1))
    assert main(["cluster", str(tmp_path / "mine.toml")]) == 0
    out = capsys.readouterr().out
    assert "4 domains, 100 Gb/s per device" in out
    assert "cluster 8xA100-80GB-SXM:4" in out


def test_list_shows_the_catalogue_and_added_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.csv"
    mine.write_text("name,peak_bf16_tflops,memory_gib,memory_tb_per_s,domain_devices,host_devices\nZ9,500,64,2,4,4\n")
    assert main(["cluster", "--list", "--hardware", str(mine)]) == 0
    out = capsys.readouterr().out
    assert "GB200-NVL72" in out
    assert "Z9" in out
    assert main(["cluster", "--list", "--json"]) == 0
    assert {"H100-80GB-SXM", "TPU-v5p"} <= {entry["name"] for entry in json.loads(capsys.readouterr().out)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["8xH100:0"], "cluster '8xH100:0': has 0 domains"),
        (["8xH10:1"], "unknown accelerator 'H10'"),
        (["absent.toml"], "absent.toml: there is no such file"),
        (["--profile", "absent.json"], "absent.json: there is no such file"),
        (["--ranks", "-2"], "--ranks: -2 is out of range"),
        (["--hardware", "absent.csv", "--list"], "absent.csv: there is no such file"),
    ],
)
def test_mistakes_are_exit_2_on_stderr(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", *arguments]) == 2
    assert message in capsys.readouterr().err
