from pathlib import Path

import pytest

from phalanx.errors import UserError
from phalanx.hardware import catalog
from phalanx.hardware.catalog import ALIASES
from phalanx.units import GIB

NOWHERE: dict[str, str] = {}


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("H100", "H100-80GB-SXM"),
        ("h100-80gb-sxm", "H100-80GB-SXM"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB-SXM"),
        ("NVIDIA H100 PCIe", "H100-80GB-PCIe"),
        ("A100", "A100-80GB-SXM"),
        ("A100-SXM", "A100-80GB-SXM"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB-SXM"),
        ("NVIDIA H200", "H200-141GB-SXM"),
        ("V100", "V100-32GB-SXM"),
        ("Tesla V100-SXM2-16GB", "V100-16GB-SXM"),
        ("GB200", "GB200-NVL72"),
        ("MI300", "MI300X"),
        ("AMD Instinct MI300X", "MI300X"),
        ("TPUv4", "TPU-v4"),
        ("v5p", "TPU-v5p"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
    ],
)
def test_find_knows_the_names_people_and_drivers_use(written: str, name: str) -> None:
    assert catalog.find_accelerator(written, environ=NOWHERE).name == name


def test_every_alias_leads_to_a_shipped_accelerator() -> None:
    names = {entry.name for entry in catalog.shipped_accelerators()}
    assert set(ALIASES.values()) <= names


def test_shipped_figures_carry_units_and_sources() -> None:
    h100 = catalog.find_accelerator("H100", environ=NOWHERE)
    assert (h100.peak_bf16_flops, h100.matmul_bf16_flops) == (989e12, 794.5e12)
    assert h100.memory_bytes == 80 * GIB
    assert (h100.link_bytes_per_s, h100.nic_bytes_per_s) == (450e9, 50e9)
    assert catalog.find_accelerator("V100", environ=NOWHERE).peak_bf16_flops == 125e12
    assert catalog.find_accelerator("GB200", environ=NOWHERE).domain_devices == 72
    assert all(entry.source for entry in catalog.shipped_accelerators())
    assert all(entry.memory_bytes_per_s > 0 for entry in catalog.shipped_accelerators())
    assert {"nvidia", "amd", "google", "intel", "aws", "generic"} <= {
        entry.vendor for entry in catalog.shipped_accelerators()
    }


def test_unknown_accelerator_names_its_neighbours() -> None:
    with pytest.raises(UserError) as caught:
        catalog.find_accelerator("H10", environ=NOWHERE, where="job.toml:7")
    assert str(caught.value).startswith("job.toml:7: unknown accelerator 'H10'\n")
    assert "did you mean H100-80GB-SXM or" in str(caught.value)


def test_matmul_prefers_the_measurement_and_else_says_a_fraction_of_peak() -> None:
    assert catalog.matmul_flops(catalog.find_accelerator("MI300X")) == 668.4e12
    assert catalog.matmul_flops(catalog.find_accelerator("H100-80GB-PCIe")) == pytest.approx(0.80 * 756e12)
    assert catalog.matmul_flops(catalog.find_accelerator("TPU-v5p")) == pytest.approx(0.88 * 459e12)
    assert catalog.matmul_flops(catalog.find_accelerator("A100"), "fp8") == 0
    with pytest.raises(ValueError, match="precision 'bf15' is none of"):
        catalog.matmul_flops(catalog.find_accelerator("A100"), "bf15")


def test_a_part_nobody_measured_takes_its_sibling_scaled_by_power() -> None:
    assert (
        catalog.matmul_flops(catalog.find_accelerator("A100-40GB-SXM")) == 271.2e12
    )  # same die and power as the 80 GB part
    assert catalog.matmul_flops(catalog.find_accelerator("H800"), "fp8") == 1402.6e12
    limited = catalog.matmul_flops(catalog.find_accelerator("H100-96GB-500W"))
    assert limited == pytest.approx(794.5e12 * (500 / 700) ** 0.5)
    assert catalog.matmul_flops(catalog.find_accelerator("GB300")) > catalog.matmul_flops(
        catalog.find_accelerator("GB200")
    )


TOML = """\
[[accelerator]]
name = "Z9"
peak_bf16_tflops = 500
memory_gib = 64
memory_tb_per_s = 2
domain_devices = 4
host_devices = 4
"""


def test_user_file_adds_and_replaces(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(TOML + TOML.replace("Z9", "H100-80GB-SXM").replace("500", "600"))
    environ = {"PHALANX_HARDWARE": str(mine)}
    assert catalog.find_accelerator("z9", environ=environ).link_bytes_per_s == 0
    assert catalog.find_accelerator("H100", environ=environ).peak_bf16_flops == 600e12
    assert catalog.find_accelerator("Z9", files=[mine], environ=NOWHERE).domain_devices == 4
    with pytest.raises(UserError):
        catalog.find_accelerator("Z9", environ=NOWHERE)


def test_user_file_in_the_config_folder_is_found(tmp_path: Path) -> None:
    folder = tmp_path / ".config" / "phalanx"
    folder.mkdir(parents=True)
    (folder / "accelerators.toml").write_text(TOML)
    assert catalog.find_accelerator("Z9", environ={"HOME": str(tmp_path)}).name == "Z9"


def test_bad_user_toml_lists_every_mistake_with_its_line(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(TOML.replace("500", '"fast"').replace("memory_gib = 64", "memory_gb = 64"))
    with pytest.raises(UserError) as caught:
        catalog.find_accelerator("Z9", files=[mine], environ=NOWHERE)
    text = str(caught.value)
    assert f"{mine}:4: unknown key memory_gb\n  did you mean memory_gib?" in text
    assert f"{mine}:3: peak_bf16_tflops = 'fast' is not a number" in text
    assert f"{mine}:1: memory_gib is missing" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n1,2\n", "mine.csv:1: columns missing: name, peak_bf16_tflops, memory_gib"),
        (
            "name,peak_bf16_tflops,memory_gib,memory_tb_per_s,domain_devices,host_devices\nZ,1,-4,1,1,1\n",
            "mine.csv:2: memory_gib = '-4' is out of range",
        ),
        ("name,peak_bf16_tflops,memory_gib\nZ,1\n", "mine.csv:2: not 3 columns as the header has"),
        ('name,peak_bf16_tflops,memory_gib\nZ,"1"x,1\n', "not readable as CSV"),
    ],
)
def test_bad_user_csv_names_file_and_line(tmp_path: Path, content: str, message: str) -> None:
    mine = tmp_path / "mine.csv"
    mine.write_text(content)
    with pytest.raises(UserError) as caught:
        catalog.find_accelerator("Z", files=[mine], environ=NOWHERE)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m.toml", b"\x00\x01", "m.toml:1: holds a NUL byte"),
        ("m.toml", b"\xff\xfe", "byte 0xff is not UTF-8"),
        ("m.toml", b"x = = 1\n", "m.toml:1: is not TOML"),
        ("m.toml", b"x = " + b"[" * 100000, "m.toml"),
        ("m.toml", b"#" * (1 << 21), "is larger than 1 MiB"),
        ("m.toml", b"y = 1\n", "m.toml:1: unknown key y"),
        ("m.txt", b"", "is neither .csv nor .toml"),
    ],
)
def test_hostile_user_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    mine = tmp_path / name
    mine.write_bytes(content)
    with pytest.raises(UserError) as caught:
        catalog.accelerators(files=[mine], environ=NOWHERE)
    assert message in str(caught.value)


def test_missing_user_file_suggests_a_near_name(tmp_path: Path) -> None:
    (tmp_path / "accelerators.toml").write_text(TOML)
    with pytest.raises(UserError) as caught:
        catalog.accelerators(files=[tmp_path / "acelerators.toml"], environ=NOWHERE)
    assert f"did you mean {tmp_path / 'accelerators.toml'}?" in str(caught.value)
