import os
from pathlib import Path

import pytest

from phalanx.hardware.meters import Estimate, NoEnergy, NvmlEnergy, Rapl, cpu_energy, gpu_energy
from phalanx.hardware.nvml import GpuMeter


def zone(root: Path, name: str, kind: str, energy_uj: int, *, range_uj: int = 262_143_328_850) -> Path:
    folder = root / "sys/class/powercap" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text(f"{kind}\n")
    (folder / "max_energy_range_uj").write_text(f"{range_uj}\n")
    (folder / "energy_uj").write_text(f"{energy_uj}\n")
    return folder / "energy_uj"


def test_rapl_counts_packages_and_memory_once(tmp_path: Path) -> None:
    files = [
        zone(tmp_path, "intel-rapl:0", "package-0", 1_000_000),
        zone(tmp_path, "intel-rapl:0:0", "core", 500_000),
        zone(tmp_path, "intel-rapl:0:1", "dram", 100_000),
        zone(tmp_path, "intel-rapl:1", "package-1", 2_000_000),
        zone(tmp_path, "intel-rapl:2", "psys", 9_000_000),
        zone(tmp_path, "intel-rapl-mmio:0", "package-0", 1_000_000),
    ]
    rapl = Rapl.of(tmp_path)
    assert rapl is not None
    assert rapl.taken_j(None) == 0.0
    for file in files:
        file.write_text(str(int(file.read_text()) + 10_000_000))
    assert rapl.taken_j(None) == 30.0  # two packages and one memory; cores, psys and the second view are inside them
    assert rapl.taken_j(None) == 0.0


def test_a_counter_that_starts_over_loses_nothing(tmp_path: Path) -> None:
    file = zone(tmp_path, "intel-rapl:0", "package-0", 999_000, range_uj=999_999)
    rapl = Rapl.of(tmp_path)
    assert rapl is not None
    file.write_text("4000\n")
    assert rapl.taken_j(None) == pytest.approx(0.005)


@pytest.mark.parametrize("text", ["", "-5", "many", "9" * 40])
def test_a_file_that_holds_no_number_is_left_out(tmp_path: Path, text: str) -> None:
    file = zone(tmp_path, "intel-rapl:0", "package-0", 1_000)
    other = zone(tmp_path, "intel-rapl:1", "package-1", 1_000)
    rapl = Rapl.of(tmp_path)
    assert rapl is not None
    file.write_text(text)
    other.write_text("2001000")
    assert rapl.taken_j(None) == 2.0


def test_a_host_without_counters_gets_an_estimate(tmp_path: Path) -> None:
    assert cpu_energy(6.25, tmp_path).source == "estimate"
    assert cpu_energy(0.0, tmp_path).source is None
    file = zone(tmp_path, "intel-rapl:0", "package-0", 1_000)
    assert cpu_energy(6.25, tmp_path).source == "rapl"
    if os.geteuid():  # root reads everything
        file.chmod(0)
        assert cpu_energy(6.25, tmp_path).source == "estimate"


def test_an_estimate_is_power_times_activity_times_time() -> None:
    now = [100.0]
    meter = Estimate(50.0, clock=lambda: now[0])
    now[0] += 10
    assert meter.taken_j(0.5) == 250.0
    now[0] += 2
    assert meter.taken_j(None) == 100.0  # of a device that cannot say: as if it was busy
    now[0] -= 5
    assert meter.taken_j(1.0) == 0.0
    assert NoEnergy().taken_j(1.0) is None


class Counter:
    """A GPU with nothing but the energy counter, in mJ."""

    def __init__(self, *values: int | Exception) -> None:
        self.values = list(values)

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        value = self.values.pop(0)
        if isinstance(value, Exception):
            raise value
        return value


def test_the_gpus_counter_in_joules() -> None:
    counter = Counter(0, 7_000_000, 7_250_000, RuntimeError("GPU is lost"), 7_300_000, 10_000)
    meter = gpu_energy(GpuMeter.open("GPU-0", library=counter), 700.0)
    assert isinstance(meter, NvmlEnergy)
    assert meter.taken_j(None) == 250.0
    assert meter.taken_j(None) is None
    assert meter.taken_j(None) == 50.0  # nothing is lost while the driver did not answer
    assert meter.taken_j(None) is None  # the driver was loaded anew


def test_a_gpu_without_a_counter_is_estimated() -> None:
    meter = GpuMeter.open("GPU-0", library=Counter(RuntimeError("Not Supported")))
    assert gpu_energy(meter, 300.0).source == "estimate"
    assert gpu_energy(GpuMeter(None, None), 0.0).source is None
